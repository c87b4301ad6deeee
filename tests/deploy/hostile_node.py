"""A node that speaks Flower's fleet API itself and lies there: `python hostile_node.py ADDRESS CLIENT FOLDER`.

It answers orders as an honest site does, until a file `fault` in its folder names what to do with the next reply
that is none to a greeting.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from importlib import import_module
from pathlib import Path

import sites

from potluck.deploy.flower.apps import wrap
from potluck.deploy.flower.pulling import unwrap
from potluck.deploy.site import Site
from potluck.deploy.wire import unpack_order
from potluck.engine.protocol import Request


def of(module, *names):
    """Names of Flower's."""
    found = import_module(f"flwr.{module}")
    return tuple(getattr(found, name) for name in names)


(connection,) = of("supernode.fleet_http_connection", "http_request_response")
(Metadata,) = of("app", "Metadata")
(make_message,) = of("app.message.message", "make_message")
(ObjectTree,) = of("proto.message_pb2", "ObjectTree")
(NotRunning,) = of("supercore.run", "RunNotRunningException")
pull_objects, inflate = of(
    "supercore.inflatable.inflatable_utils", "pull_objects", "inflate_object_from_contents"
)
iterate, nested, tree_of = of(
    "supercore.inflatable.inflatable_object",
    "iterate_object_tree",
    "get_all_nested_objects",
    "get_object_tree",
)


def objects_of(message):
    """The objects of a message and the tree of their numbers."""
    return {number: one.deflate() for number, one in nested(message).items()}, tree_of(message)


def forged(message, change):
    """The same with another body in the array; all numbers above it are made anew, as Flower checks them."""
    objects, tree = objects_of(message)

    def walk(node):
        children = [walk(child) for child in node.children]
        head, _, body = objects.pop(node.object_id).partition(b"\x00")
        kind = head.split(b" ")[0].decode()
        names = dict(zip((c.object_id for c in node.children), (c.object_id for c in children), strict=True))
        for old, new in names.items():
            body = body.replace(old.encode(), new.encode())
        body = change(body) if kind == "Array" else body
        content = f"{kind} {','.join(names.values())} {len(body)}".encode() + b"\x00" + body
        made = ObjectTree(object_id=hashlib.sha256(content).hexdigest(), children=children)
        objects[made.object_id] = content
        return made

    return objects, walk(tree)


def elsewhere(body):
    return json.dumps(json.loads(body) | {"arraychunk_ids": [99]}).encode()


def answer(site, folder, pulled, node, send, pull, push):
    """Answer one order, or lie."""
    message, tree = pulled
    run = message.metadata.run_id
    content = pull_objects([one.object_id for one in iterate(tree)], lambda number: pull(run, number))
    order, token = unwrap(inflate(message.metadata.message_id, content).content)
    fault = folder / "fault"
    lie = fault.read_text() if fault.exists() and isinstance(unpack_order(order), Request) else ""
    asked, now = message.metadata, time.time()
    left = asked.created_at + asked.ttl - now  # Flower takes no reply that would outlive its order
    about = Metadata(run, "", node, 1, asked.message_id, "", now, left, asked.message_type)
    reply = make_message(metadata=about, content=wrap(site.answer(order), token))
    objects, tree = forged(reply, elsewhere) if lie == "array" else objects_of(reply)
    reply.metadata.__dict__["_message_id"] = tree.object_id
    wanted, session = send(reply, tree, 0.1)
    if lie:
        fault.unlink()
    if lie != "never":
        for number in wanted:
            push(run, session, number, objects[number])


def main():
    address, client, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    site = Site(client, sites.builder(client), sites.loader(client), folder / "home", simulated=True)
    site.home.mkdir(exist_ok=True)
    with connection(address, True) as (node, receive, send, _, _, pull, push, _):
        while True:
            pulled = receive()
            if pulled is None:
                time.sleep(0.5)
                continue
            with contextlib.suppress(NotRunning):
                answer(site, folder, pulled, node, send, pull, push)


if __name__ == "__main__":
    main()
