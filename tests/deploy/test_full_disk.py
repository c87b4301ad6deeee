"""A site whose disk is full or broken at any moment: nothing leaves that is not on record, and nothing twice."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from lone_site import RUN, ask, greet, head, joined, make_site, offer, request, same
from test_attempts import contract

from kills import Full, Kill
from potluck.deploy.durable_record import DurableRecord
from potluck.deploy.evaluations import Evaluations
from potluck.deploy.joined_runs import JoinedRuns
from potluck.engine.protocol import Answer, Examination, Failure, Stamp
from potluck.errors import RunError

EVALUATIONS = 2


def examination(site, factor):
    mode = site.at(RUN).federation.method.modes[:1]
    return Examination("0", head(site, factor), Stamp(RUN, 1, 1, 0, 0), mode)


def open_site(home, agreed):
    site = make_site(home, simulated=False, agreement=agreed)
    greet(site, offer("fedre"))
    return site


@pytest.fixture(scope="module")
def agreed(tmp_path_factory):
    """As `join --check` proposes it, with few evaluations."""
    return contract(tmp_path_factory.mktemp("rehearsal"), "fedre", evaluations_per_round=EVALUATIONS)


@pytest.fixture
def start(tmp_path, agreed):
    """A site that has joined, and its folder."""
    return open_site(tmp_path, agreed)


def on_record(home, disk):
    """The answers and the evaluations that a worker would know that starts now, on a copy of the folder."""
    disk.resting, copy = True, home.parent / f"{home.name}-looked-at"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(home, copy)
    folder = copy / "0" / "runs" / RUN
    done = DurableRecord(folder).history.done.values()
    assert len({one.attempt for one in done}) == len(done)  # each drew other noise
    disk.resting = False
    return len(done), Evaluations(folder).number(1, "another") - 1


def play(home, site, disk):
    """Questions of a server while a disk is full at some moment: what was answered is on record each time."""
    answers, measured = {}, {}
    with disk:
        for factor in (1.0, 1.0, 2.0, 1.0):
            reply = ask(site, request(head(site, factor), attempt=len(answers) + 1))
            if isinstance(reply, Answer):
                assert same(answers.setdefault(factor, reply), reply)
                assert on_record(home, disk)[0] == len(answers)
        for factor in (1.0, 2.0, 1.0, 3.0):
            reply = ask(site, examination(site, factor))
            if isinstance(reply, Answer):
                measured[factor] = reply
                assert len(measured) <= on_record(home, disk)[1] <= EVALUATIONS
    return answers


def undisturbed(home, secret, *factors):
    """The answers to these questions, in this order, of a site with this secret whose disk is fine."""
    (home / "0").mkdir(parents=True)
    shutil.copy(secret, home / "0" / "secret")
    site = joined(home, "fedre", simulated=False)
    return [ask(site, request(head(site, factor), attempt=place + 1)) for place, factor in enumerate(factors)]


def operations(home, agreed):
    """How many operations on files the questions of a server lead to."""
    counting = Full(None)
    play(home, open_site(home, agreed), counting)
    return counting.operations


@pytest.mark.parametrize(("lasting", "done"), [(1, False), (1000, False), (1, True), (4, True)])
def test_a_disk_that_is_full_at_any_write_leaves_nothing_uncounted(tmp_path, agreed, lasting, done):
    """`done`: the operation takes place, and is told to have failed; so it is on a disk across a network."""
    every = operations(tmp_path / "all", agreed)
    assert every > 10
    for place in range(1, every + 1):
        home = tmp_path / str(place)
        site = open_site(home, agreed)
        answers = play(home, site, Full(place, lasting, done))
        restarted = open_site(home, agreed)
        for factor, reply in answers.items():
            again = ask(restarted, request(head(restarted, factor), attempt=9, incarnation=1))
            assert same(reply, again), f"operation {place}"
        shutil.rmtree(home)


@pytest.mark.parametrize("done", [False, True])
def test_a_disk_that_is_full_at_any_write_of_joining_keeps_nobody_from_joining(tmp_path, done):
    counting = Full(None)
    with counting:
        greet(make_site(tmp_path / "all", simulated=False), offer("fedre"))
    for place in range(1, counting.operations + 1):
        home = tmp_path / str(place)
        site = make_site(home, simulated=False)
        with Full(place, done=done):
            greet(site, offer("fedre"))
            if site.resident is not None:
                assert len(JoinedRuns(home / "0")) == 1
        assert not isinstance(greet(site, offer("fedre")), Failure)
        first = ask(site, request(head(site)))
        site = joined(home, "fedre", simulated=False)
        assert same(first, ask(site, request(head(site), incarnation=1))), f"operation {place}"
        assert [*JoinedRuns(home / "0")._names] == [RUN]


def test_noise_is_not_used_twice_when_a_disk_was_full(tmp_path, agreed):
    site = open_site(tmp_path, agreed)
    with Full("record.json", 1):
        assert isinstance(ask(site, request(head(site))), Failure)
    first = ask(site, request(head(site)))
    site = open_site(tmp_path, agreed)
    other = ask(site, request(head(site, 2.0), attempt=3))
    wanted = undisturbed(tmp_path / "fine", tmp_path / "0" / "secret", 1.0, 2.0)
    assert [same(*pair) for pair in zip((first, other), wanted, strict=True)] == [True, True]


def test_an_exchange_for_which_there_is_no_room_counts_as_an_attempt(tmp_path, agreed):
    """Else a server could have a site train without end and without a trace."""
    site = open_site(tmp_path, agreed.model_copy(update={"attempts_per_round": 2}))
    for start in range(2):
        with Full(".safetensors", 1):
            assert isinstance(ask(site, request(head(site, 1.0 + start), incarnation=start)), Failure)
    reply = ask(site, request(head(site, 3.0), incarnation=2))
    assert "round 1 was asked for 2 times" in reply.reason
    assert isinstance(ask(site, request(head(site), incarnation=3)), Answer)  # the first again, with room


def test_a_site_does_no_work_while_it_cannot_write(tmp_path, agreed, monkeypatch):
    site, trained = open_site(tmp_path, agreed), []
    ask(site, request(head(site)))
    method = site.resident.performer.method
    train = method.train
    monkeypatch.setattr(method, "train", lambda client: trained.append(1) or train(client))
    with Full("record.json", 1000):
        for start in range(1, 5):
            assert isinstance(ask(site, request(head(site, 1.0 + start), incarnation=start)), Failure)
    assert len(trained) == 1  # after the first it is known
    assert isinstance(ask(site, request(head(site, 2.0), incarnation=5)), Answer)


def test_a_record_that_cannot_be_read_again_answers_nothing(tmp_path, agreed):
    site = open_site(tmp_path, agreed)
    ask(site, request(head(site)))
    manifest = site.resident.record.folder / "record.json"
    with Full("record.json", 2):
        ask(site, request(head(site, 2.0), attempt=2))
    text = manifest.read_bytes()
    manifest.write_bytes(text[:-9] + b"x" + text[-8:])
    assert isinstance(ask(site, request(head(site), attempt=3)), Failure)
    manifest.write_bytes(text)
    assert isinstance(ask(site, request(head(site), attempt=3)), Answer)


def test_a_worker_that_is_killed_at_any_write_goes_on(tmp_path, agreed):
    every = operations(tmp_path / "all", agreed)
    for place in range(1, every + 1):
        home = tmp_path / str(place)
        site, answers = open_site(home, agreed), {}
        with Kill(place):
            for factor in (1.0, 2.0):
                reply = ask(site, request(head(site, factor), attempt=len(answers) + 1))
                answers |= {factor: reply} if isinstance(reply, Answer) else {}
        site = open_site(home, agreed)
        for number, factor in enumerate((1.0, 2.0, 3.0)):
            again = ask(site, request(head(site, factor), incarnation=number + 1))
            assert isinstance(again, Answer)
            assert factor not in answers or same(answers[factor], again), f"operation {place}"
        assert site.resident.record.history.tried == {1: 3}
        shutil.rmtree(home)


def test_names_of_files_are_on_the_disk_before_a_reply_leaves(tmp_path, agreed, monkeypatch):
    """After a power cut a rename that was not synchronised is undone, and the record would know of no reply."""
    site, synced, fsync = open_site(tmp_path, agreed), [], os.fsync

    def noted(handle):
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    ask(site, request(head(site)))
    runs = tmp_path / "0" / "runs"
    assert synced[-1] == runs / RUN
    assert runs in synced  # the folder is new
    synced.clear()
    ask(site, examination(site, 1.0))
    assert synced[-1] == runs
    synced.clear()
    greet(site, offer("fedre", "b2"))
    assert {runs, runs.parent} <= {*synced}


def test_a_file_system_that_synchronises_no_folders_will_do(tmp_path, monkeypatch):
    fsync = os.fsync

    def plain(handle):
        if Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", plain)
    site = joined(tmp_path, "fedre", simulated=False)
    assert isinstance(ask(site, request(head(site))), Answer)


def test_evaluations_that_could_not_be_counted_are_not_answered(tmp_path):
    kept = Evaluations(tmp_path / "a1")
    with Full(".evaluations", 1), pytest.raises(RunError, match="No space left"):
        kept.note(1, "x")
    assert kept.number(1, "x") == 1
    kept.note(1, "x")
    assert kept.number(1, "x") == 0
    assert Evaluations(tmp_path / "a1").number(1, "y") == 2
