"""The relay under replies that are wrong on the level of Flower itself: Flower's Grid, and a SuperLink made up."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from potluck.engine import frames

apps = pytest.importorskip("potluck.deploy.flower.apps", exc_type=ImportError)
flower = {
    name: pytest.importorskip(f"flwr.{module}")
    for name, module in {
        "app": "app",
        "message": "app.message.message",
        "serde": "common.serde",
        "objects": "proto.message_pb2",
        "runtime": "proto.runtime_pb2",
        "inflatable": "supercore.inflatable.inflatable_object",
        "run": "supercore.run",
        "grid": "superlink.grid.http_grid",
    }.items()
}
Error, Metadata = flower["app"].Error, flower["app"].Metadata
ObjectTree, PullObjectResponse = flower["objects"].ObjectTree, flower["objects"].PullObjectResponse
PullAppMessagesResponse = flower["runtime"].PullAppMessagesResponse
RunNotRunningException = flower["run"].RunNotRunningException

MOST = 1 << 16
WAIT = 4.0


def reply_to(number, content=None, error=None):
    about = Metadata(1, "", 7, 1, f"{number}", "", 0.0, 60.0, "query.order")
    return flower["message"].make_message(metadata=about, content=content, error=error)


class Announced:
    """A reply as the SuperLink has it: what was announced, and what was uploaded of it."""

    def __init__(self, message):
        nested = flower["inflatable"].get_all_nested_objects(message)
        self.objects = {number: one.deflate() for number, one in nested.items()}
        self.kinds = {type(one).__name__: number for number, one in nested.items()}
        self.tree = flower["inflatable"].get_object_tree(message)
        self.proto = flower["serde"].message_to_proto(message)
        self.proto.metadata.message_id = self.number = self.tree.object_id

    def forge(self, kind, change):
        """Change the body of an object; who uploads one can write into it what they like."""
        content = self.objects[self.kinds[kind]]
        head, _, body = content.partition(b"\x00")
        body = change(body)
        words = head.split(b" ")
        self.objects[self.kinds[kind]] = b" ".join([*words[:-1], str(len(body)).encode()]) + b"\x00" + body
        return self


class Superlink:
    """As much of Flower's runtime API as the Grid calls."""

    def __init__(self, replies):
        self.replies, self.letters, self.missing, self.stopped = replies, [], set(), False
        self.announced, self.confirmed, self.calls = {}, [], 0

    def PullMessages(self, request):
        (number,) = request.message_ids
        made = self.replies[int(number)](self.letters[int(number)], number)
        if made is None:
            return PullAppMessagesResponse()
        self.announced |= made.objects  # the same content has the same number
        return PullAppMessagesResponse(messages_list=[made.proto], message_object_trees=[made.tree])

    def PullObject(self, request):
        self.calls += 1
        if self.stopped:
            raise RunNotRunningException
        content = self.announced.get(request.object_id)
        if content is None:
            return PullObjectResponse(object_found=False)
        return PullObjectResponse(object_found=True, object_available=content != b"", object_content=content)

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)
        return flower["objects"].ConfirmMessageReceivedResponse()


def grid_over(superlink, monkeypatch):
    grid = flower["grid"].HttpGrid(token="t", insecure=True)
    grid._client = superlink
    monkeypatch.setattr(type(grid), "run", SimpleNamespace(run_id=1))

    def push(messages):
        superlink.letters = [content for content, *_ in messages]
        return [str(number) for number in range(len(superlink.letters))]

    monkeypatch.setattr(grid, "push_messages", push)
    monkeypatch.setattr(apps, "Message", lambda *args, **options: args)
    return grid


def honest(letter, number, data=None):
    told = f"answer {number}".encode() if data is None else data
    return Announced(reply_to(number, apps.wrap(told, apps.unwrap(letter)[1])))


def unfolding(letter, number):
    """A small reply that claims to hold the same piece many times over."""
    return honest(letter, number, bytes(60_000)).forge("Array", chunks(*[0] * 200_000))


def chunks(*places):
    """An array whose pieces are others than it has."""
    return lambda body: json.dumps(json.loads(body) | {"arraychunk_ids": list(places)}).encode()


def forged(kind, change):
    return lambda letter, number: honest(letter, number).forge(kind, change)


def never_uploaded(letter, number):
    made = honest(letter, number)
    made.objects[made.kinds["ArrayChunk"]] = b""  # announced, and that was it
    return made


def missing(letter, number):
    made = honest(letter, number)
    del made.objects[made.kinds["Array"]]
    return made


def raising(letter, number):
    raise ValueError("Malformed PullMessages")


def other_kind(letter, number):
    made = honest(letter, number)
    record = made.kinds["RecordDict"]
    made.proto.metadata.message_id = record
    made.tree = ObjectTree(object_id=record, children=list(made.tree.children[0].children))
    return made


def many_parts(letter, number):
    made = honest(letter, number)
    made.tree.children.extend(
        ObjectTree(object_id=hashlib.sha256(b"%d" % n).hexdigest()) for n in range(9999)
    )
    return made


def nobody_home(letter, number):
    return Announced(reply_to(number, error=Error(5, "\x1b]0;owned\x07\x1b[2Jgone\r\nfor good\x1b[31m")))


HOSTILE = {
    "its reply cannot be read: IndexError: list index out of range": forged("Array", chunks(99)),
    "its reply cannot be read: TypeError: ": forged("Array", chunks("a")),
    "its reply cannot be read: JSONDecodeError: ": forged("Array", lambda body: b"{"),
    "its reply cannot be read: UnicodeDecodeError: ": forged("Array", lambda body: b"\xff"),
    "its reply cannot be read: DecodeError": forged("ConfigRecord", lambda body: b"\xff\xff"),
    "its reply cannot be read: ObjectPullError": missing,
    "its reply cannot be read: ValueError: Malformed PullMessages": raising,
    "its reply cannot be read: TypeError: Flower": other_kind,
    "its reply comes in 10,00": many_parts,
    "its reply takes far more memory": unfolding,
    "its reply has more than the 65,536 bytes allowed": lambda letter, number: honest(
        letter, number, bytes(3 << 20)
    ),
    "its reply has 70,000 bytes, at most 65,536": lambda letter, number: honest(
        letter, number, bytes(70_000)
    ),
    "Flower reports error 5: for good": nobody_home,
    f"it announced a reply and did not send all of it within {WAIT:g} s": never_uploaded,
    f"no answer within {WAIT:g} s": lambda letter, number: None,
}


def test_no_reply_ends_the_relay_and_none_costs_another_client_its_own(monkeypatch):
    superlink = Superlink([never_uploaded, *HOSTILE.values(), honest])
    grid, number = grid_over(superlink, monkeypatch), len(superlink.replies)
    monkeypatch.setattr(sys.modules[apps.Reply.__module__], "ROOM", 1 << 27)
    threads, start = threading.active_count(), time.monotonic()
    sentences, answers, _ = apps.exchange(grid, range(number), [b""] * number, WAIT, [MOST] * number)
    assert time.monotonic() - start < WAIT + 10
    assert threading.active_count() <= threads
    told = dict(zip(HOSTILE, sentences[1:-1], strict=True))
    assert {said for begun, said in told.items() if not said.startswith(begun)} == set()
    assert all(sentence.isprintable() for sentence in sentences)
    assert (sentences[-1], answers[-1]) == ("", f"answer {number - 1}".encode())
    assert not any(answers[:-1])
    assert len(superlink.confirmed) == number - 4  # deleted, refused or not, but for what never came


def test_a_reply_that_is_still_on_its_way_is_waited_for(monkeypatch):
    content = {}

    def upload():
        while not superlink.calls:
            time.sleep(0.01)
        superlink.announced |= content

    def announce(letter, number):
        made = honest(letter, number, bytes(9))
        content.update(made.objects)
        made.objects = dict.fromkeys(made.objects, b"")
        return made

    superlink = Superlink([announce, honest])
    grid = grid_over(superlink, monkeypatch)
    threading.Thread(target=upload).start()
    assert apps.exchange(grid, [1, 2], [b"", b""], WAIT, [MOST] * 2)[:2] == (
        ["", ""],
        [bytes(9), b"answer 1"],
    )
    assert len(superlink.confirmed) == 2


def test_a_relay_whose_run_was_stopped_ends(monkeypatch):
    superlink = Superlink([honest])
    grid, superlink.stopped = grid_over(superlink, monkeypatch), True
    with pytest.raises(RunNotRunningException):
        apps.exchange(grid, [1], [b""], WAIT, [MOST])


def test_a_relay_ends_with_the_server_also_in_the_middle_of_an_exchange(monkeypatch, tmp_path_factory):
    path = tmp_path_factory.mktemp("s") / "serve"
    superlink = Superlink([lambda letter, number: None])
    grid = grid_over(superlink, monkeypatch)
    with frames.listening(path) as door:
        relay = threading.Thread(target=apps.serve_relay, args=(grid, str(path)))
        relay.start()
        channel, _ = door.accept()
        frames.send(channel, {"ask": "exchange", "to": [1], "timeout": 60, "most": [MOST]}, [b"letter"])
        while not superlink.letters:
            time.sleep(0.01)
        channel.shutdown(socket.SHUT_RDWR)
        channel.close()
        relay.join(5)
        assert not relay.is_alive()


def test_a_relay_that_hangs_in_a_call_is_ended_when_its_server_is_gone(monkeypatch):
    ended = []
    monkeypatch.setattr(apps.os, "_exit", ended.append)
    monkeypatch.setattr(apps, "GRACE", 0.0)
    server, channel = socket.socketpair()
    watch = threading.Thread(target=apps.end_with, args=(channel,), daemon=True)
    watch.start()
    server.send(b"an order")
    watch.join(0.1)
    assert not ended
    server.close()
    watch.join(10)
    assert ended == [1]
    channel.close()


@pytest.mark.parametrize(
    "key", [b"", b"no key", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"]
)
def test_a_node_with_a_strange_key_has_none(key):
    assert apps.key_of(key) == ""
