"""What the people at a site see in the terminal of `potluck join`: their own mistakes, and how a run goes."""

import json
import re
import time
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import sites
from links import FEDMRL, Link, Time, Told, serve
from torch import nn
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.core.task import Task
from potluck.deploy import announcements, first_try, site_status, wire
from potluck.deploy.announcements import KEPT, Announcements, Listener
from potluck.deploy.engine import UNLIKE
from potluck.deploy.flower import join as joins
from potluck.deploy.flower import watching, worker
from potluck.deploy.flower.connections import Security
from potluck.deploy.flower.join import Joining
from potluck.deploy.flower.watching import Connection, NodeWatch, Watched
from potluck.deploy.node_pulse import Pulse, PulseFile, clock_time, trouble
from potluck.deploy.progress import QUIET, Progress
from potluck.deploy.site_status import OrderNotes, SiteStatus, read_orders
from potluck.errors import ConfigError, RunError
from potluck.live.status_file import read_status, write_status

KEYS = {0: "SHA256:0", 1: "SHA256:1", 2: "SHA256:2"}


def with_notes(tmp_path, place=1, link=None):
    """A link to sites of which one keeps notes as a worker does, that site, and who listens to it."""
    link = link or Link(tmp_path)
    site = link.sites[place]
    site.home.mkdir(parents=True, exist_ok=True)
    site.notes = OrderNotes(site.home)
    return link, site, Listener(site.home)


def sentences(listener):
    return [sentence for sentence, _ in listener.new()]


def keyed(link, shown):
    """The same link, whose nodes have shown keys."""
    link.keys = lambda: shown
    return link


# --- how a run goes -------------------------------------------------------------------------------------


def test_a_site_hears_when_it_joined_then_a_line_for_every_round_and_the_end(tmp_path):
    link, site, listener = with_notes(tmp_path)
    now = [0.0]
    site.notes.progress.clock = lambda: now[0]
    both = {"when": ["after_training", "after_aggregation"]}  # the lines are as many, whatever is measured
    serve(link, tmp_path / "run", sites.federated(FEDMRL, evaluate=both))
    site.notes.idle()
    told = listener.new()
    assert [sentence for sentence, _ in told[:1]] == [
        "joined the run three: fedmrl, 2 rounds; waiting for its first order"
    ]
    pattern = r"round {} of 2: train, \d+ steps, \d+\.\d s; [\d,]+ bytes sent, [\d,]+ received"
    assert [bool(re.fullmatch(pattern.format(place), told[place][0])) for place in (1, 2)] == [True, True]
    assert len(told) == 3
    facts = told[2][1]
    assert (facts["round"], facts["rounds"], facts["order"]) == (2, 2, "train")
    assert min(facts["sent"], facts["received"], facts["steps"]) > 0
    assert not read_orders(site.home)["over"]
    now[0] = QUIET
    site.notes.idle()
    site.notes.idle()
    (end,) = sentences(listener)
    assert end.startswith("the run three is over: 2 rounds; with evaluations ")
    assert end.endswith(" received; waiting for the next one")
    assert read_orders(site.home)["over"]


def test_a_last_round_that_nobody_measures_is_told_too():
    lines, now = [], [0.0]
    progress = Progress(lambda sentence, **facts: lines.append(sentence), lambda: now[0])
    progress.of(
        {"run": "a1", "experiment": {"name": "x", "training": {"rounds": 1}, "method": {"name": "local"}}}
    )
    progress.begin("a1", 1, "train")
    progress.answered("train", 1, 5, 2.0, 10, 20)
    progress.begin("a1", 1, "train")
    progress.answered("train", 1, 5, 0.0, 10, 20)  # the same question again: its steps were done once
    progress.idle()
    assert lines == []
    now[0] = QUIET
    progress.idle()
    assert lines[0] == "round 1 of 1: train, 5 steps, 2.0 s; 40 bytes sent, 20 received"
    assert lines[1].startswith("the run x is over: 1 round; with evaluations 40 bytes sent, 20 received")
    progress.begin("a1", 1, "train")
    progress.answered("train", 1, 5, 0.0, 10, 20)
    progress.begin("a1", 1, "evaluate")
    assert len(lines) == 2  # not more than one line for a round


def test_an_order_of_another_run_in_between_does_not_hide_how_a_run_goes():
    """Such as one that was on its way when the site was greeted for the next run."""
    lines, now = [], [0.0]
    progress = Progress(lambda sentence, **facts: lines.append(sentence), lambda: now[0])
    progress.of(
        {"run": "a1", "experiment": {"name": "x", "training": {"rounds": 2}, "method": {"name": "local"}}}
    )
    progress.begin("a1", 1, "train")
    progress.answered("train", 1, 5, 2.0, 100, 200)
    progress.begin("b2", 9, "train")
    progress.refused("train", "it has not joined this run yet")
    progress.begin("a1", 2, "train")
    progress.answered("train", 1, 5, 2.0, 10, 20)
    now[0] = QUIET
    progress.idle()
    assert lines[:3] == [
        "round 1 of 2: train, 5 steps, 2.0 s; 200 bytes sent, 100 received",
        "round 9: train was refused: it has not joined this run yet",
        "round 2 of 2: train, 5 steps, 2.0 s; 20 bytes sent, 10 received",
    ]
    assert lines[3].startswith("the run x is over: 2 rounds; with evaluations 220 bytes sent, 110 received; ")


def test_what_a_server_calls_its_run_cannot_steer_a_terminal(tmp_path):
    _link, site, listener = with_notes(tmp_path)
    order = wire.Hello(
        {"run": "a1", "potluck": "\x1b[2J0", "experiment": {}}, "\x1b]0;owned\x07because\nof it"
    )
    site.answer(wire.pack_order(order))
    notes = site.notes
    notes.progress.of(
        {
            "run": "b2",
            "experiment": {
                "name": "\x1b[31mred",
                "training": {"rounds": 1},
                "method": {"name": "a\x07"},
            },
        }
    )
    notes.greeted(wire.unpack_order(wire.pack_order(order)).refused)
    told = sentences(listener)
    assert told[0].startswith("a run was not joined: the server runs potluck 0, this site ")
    assert told[1:] == [
        "joined the run red: a?, 1 round; waiting for its first order",
        "the server has not taken this site in: because of it",
    ]


def test_lines_are_shown_once_and_old_ones_never(tmp_path):
    say = Announcements(tmp_path)
    say("of yesterday")
    listener = Listener(tmp_path)
    assert listener.new() == []
    again = Announcements(tmp_path)  # a worker that was started again
    again("\x1b[2Jhere", round=3, spy=7, run=None)
    assert listener.new() == [("here", {"round": 3})]
    assert listener.new() == []
    for number in range(2 * KEPT):
        again(str(number))
    assert len(listener.new()) == KEPT
    for nonsense in ("", "[]", '{"lines": 3}', '{"lines": [{"number": "x"}]}', '{"lines": [[]]}'):
        (tmp_path / "said.json").write_text(nonsense)
        assert listener.new() == []


def test_no_line_is_lost_when_the_clock_is_set_back_or_a_worker_is_started_again_at_once(
    tmp_path, monkeypatch
):
    Announcements(tmp_path)("of the first worker")
    listener = Listener(tmp_path)
    monkeypatch.setattr(announcements.time, "time", lambda: 3600.0)
    Announcements(tmp_path)("of a second one, which ended at once")
    Announcements(tmp_path)("of a third one")
    assert sentences(listener) == ["of a second one, which ended at once", "of a third one"]


def test_work_takes_as_long_as_it_takes_when_the_clock_is_set_back(tmp_path, monkeypatch):
    notes = OrderNotes(tmp_path)
    listener = Listener(tmp_path)
    notes.begin("a1", 1, "train")
    monkeypatch.setattr(site_status.time, "time", lambda: 3600.0)
    notes.answered(10, 10, 1, 5)
    notes.begin("a1", 2, "train")
    assert sentences(listener) == ["round 1: train, 5 steps, 0.0 s; 10 bytes sent, 10 received"]


# --- what a site refuses --------------------------------------------------------------------------------


def broken(client):
    raise FileNotFoundError(2, "No such file or directory", "data.npz")


def small_head(input, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input)), 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"load": partial(broken, "1")},
            "FileNotFoundError: [Errno 2] No such file or directory: 'data.npz'",
        ),
        ({"model": small_head}, "the head gives 4 scores, the task has 10 classes"),
    ],
    ids=["load", "head"],
)
def test_an_error_at_a_site_is_told_there_once_and_counts_as_trouble(tmp_path, change, reason):
    link, site, listener = with_notes(tmp_path)
    for name, value in change.items():
        setattr(site, name, value)
    with pytest.raises(RunError, match="have not joined: 1"):
        serve(link, tmp_path / "run", sites.federated(FEDMRL))
    (told,) = sentences(listener)
    assert told.startswith("a run was not joined: ")
    assert reason in told
    status = SiteStatus("1", "", site.home, site.home / "pulse.json", "worker")
    write_status(site.home, status.facts())
    refused = read_orders(site.home)["orders"]["refused"]
    assert refused > 1
    shown = " ".join(CliRunner().invoke(app, ["status", str(site.home)]).output.split())
    assert f"trouble {refused} orders were refused here, the last: " in shown
    watched = CliRunner().invoke(app, ["status", str(tmp_path)]).output  # beside others, in one table
    assert f"{refused} orders were refused here" in " ".join(watched.split())


def test_a_refusal_in_a_round_is_told_in_that_round(tmp_path):
    link, site, listener = with_notes(tmp_path)
    serve(link, tmp_path / "run", sites.federated(FEDMRL, rounds=1))
    (order,) = [one for one in link.orders if getattr(one, "steps", None) and one.client == "1"]
    listener.new()
    for _ in range(3):
        site.answer(wire.pack_order(replace(order, steps=("spy",))))
    site.answer(b"nonsense")
    told = sentences(listener)
    assert told[0].startswith("round 1: spy was refused: exchange 1 of round 1 came again")
    assert told[1].startswith("a message of the server was refused: 8 bytes are no message")
    assert len(told) == 2


def test_a_new_run_does_not_begin_in_the_round_of_the_last_one(tmp_path):
    notes = OrderNotes(tmp_path)
    notes.begin("abc", 3, "train")
    notes.begin("abc", None, "join")
    assert read_orders(tmp_path)["round"] == 3
    notes.begin("xyz", None, "join")
    assert read_orders(tmp_path)["round"] is None


# --- who is not taken in --------------------------------------------------------------------------------


def test_a_site_with_the_key_of_another_one_is_told_so(tmp_path):
    link, site, listener = with_notes(tmp_path)
    keyed(link, KEYS | {1: "SHA256:0"})
    known = {str(node): key for node, key in KEYS.items()}
    with pytest.raises(RunError, match="have not joined: 1"):
        serve(link, tmp_path / "run", sites.federated("local"), keys=known)
    assert sentences(listener) == [
        "joined the run three: local, 2 rounds; waiting for its first order",
        "the server has not taken this site in: client 1: the key of its node, SHA256:0, is that of client 0",
    ]
    status = SiteStatus("1", "", site.home, site.home / "pulse.json", "worker")
    assert "is that of client 0" in status.facts()["trouble"]
    keyed(link, KEYS)
    serve(link, tmp_path / "run", sites.federated("local"), keys=known)
    assert "not taken" not in " ".join(sentences(listener))
    assert status.facts()["trouble"] == ""


def test_a_site_that_does_not_fit_hears_nothing_of_other_sites(tmp_path):
    link, _site, listener = with_notes(tmp_path, place=2)
    other = Task("classification", 7, (1, 8, 8))

    def tamper(order, answer):
        reply = wire.unpack_reply(answer)
        if not isinstance(order, wire.Hello) or reply.card.client != "2":
            return answer
        return wire.pack_reply(replace(reply, card=replace(reply.card, task=other)))

    link.tamper = tamper
    training = {"rounds": 2, "start_quorum": 0.6, "quorum": 0.5, "batch_size": 16}
    told = Told()
    serve(link, tmp_path / "run", sites.federated(FEDMRL, training=training), told, Time())
    assert any("client 2 cannot take part: client 2 has another task" in one for one in told.notices)
    assert sentences(listener)[1:] == [f"the server has not taken this site in: {UNLIKE}"]


def test_an_honest_site_is_greeted_as_before(tmp_path):
    link = Link(tmp_path)
    serve(link, tmp_path / "run", sites.federated("local", rounds=1))
    assert {one.refused for one in link.orders if isinstance(one, wire.Hello)} == {""}
    assert b"refused" not in wire.pack_order(wire.Hello({"run": "a1"}))


@pytest.mark.parametrize("refused_for", [10, 100])
@pytest.mark.parametrize("known", [True, False])
def test_the_rightful_site_hears_that_another_one_may_use_its_key(known, refused_for):
    assert "another site uses this key" in trouble(Pulse(status=412), known, refused_for)


# --- the node -------------------------------------------------------------------------------------------


def test_a_key_that_a_starting_server_does_not_know_yet_is_told_only_when_it_lasts(tmp_path, monkeypatch):
    watch, pulse, now = NodeWatch(tmp_path), PulseFile(tmp_path / "pulse.json"), [1000.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: None)
    process = Mock(alive=False, popen=Mock(returncode=3))
    process.name = "the SuperNode"
    node = Watched(lambda: process, process, 0.0, reason=watch.reason, hushed=watch.hushed)
    notices = []
    pulse.note("activate-node", 412)
    for seconds in (0.0, watching.LASTS - 1, watching.LASTS):
        now[0] = 1000.0 + seconds
        node.look(notices.append)
    assert len(notices) == 1
    assert "does not know the node's key" in notices[0]
    pulse.note("activate-node", 200)
    watch.stalled(1.0)
    pulse.path.unlink()
    now[0] += 9000.0  # it was taken in for hours; that it was refused before counts no more
    PulseFile(pulse.path).note("activate-node", 412)
    assert "online still" in watch.reason()
    assert watch.hushed()


def test_a_certificate_that_is_not_taken_is_told_once_and_not_in_flowers_words(tmp_path, monkeypatch):
    watch, pulse = NodeWatch(tmp_path, "fl.example.org:8443"), PulseFile(tmp_path / "pulse.json")
    now = [1000.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: None)
    process = Mock(alive=False, popen=Mock(returncode=3), tail=lambda: "Exit Code: 305 [SSL: …] SSL/TLS")
    process.name = "the SuperNode"
    node = Watched(lambda: process, process, 1000.0, reason=watch.reason, hushed=watch.hushed)
    notices = []
    for why in ("certificate has expired", "certificate has expired", "Hostname mismatch"):
        pulse.note("activate-node", 0, distrusted=why)
        now[0] += watching.PAUSE
        node.look(notices.append)
    now[0] += 2 * watching.LONGEST  # it was well in between
    node.look(notices.append)
    told = "the SuperNode ended: the certificate of fl.example.org:8443 is not taken: "
    assert [one.removeprefix(told).partition(";")[0] for one in notices] == [
        "certificate has expired",
        "Hostname mismatch",
        "Hostname mismatch",
    ]


def test_a_node_whose_key_was_taken_off_the_register_hears_it_at_once_and_is_not_taken_for_online(tmp_path):
    watch, pulse = NodeWatch(tmp_path), PulseFile(tmp_path / "pulse.json")
    pulse.note("activate-node", 200)
    pulse.note("pull-messages", 200)
    assert watch.stalled(1.0) == ""
    pulse.note("pull-messages", 401)
    assert "its key was taken off the register" in watch.reason()
    assert not watch.hushed()
    pulse.path.unlink()  # it is started again
    PulseFile(pulse.path).note("activate-node", 412)
    assert "does not know the node's key" in watch.reason()
    assert watch.hushed()


def test_a_node_whose_clock_was_set_is_still_one_that_the_server_had_taken_in(tmp_path):
    watch, pulse = NodeWatch(tmp_path), PulseFile(tmp_path / "pulse.json", lambda: 1e9 + 3600)
    pulse.note("activate-node", 200)
    pulse.note("pull-messages", 401, formatdate(1e9, usegmt=True))
    assert "the clock of this machine is 3,600 s ahead" in watch.reason()
    assert not watch.hushed()
    PulseFile(pulse.path).note("activate-node", 412)
    assert "online still" in watch.reason()


def test_a_site_hears_that_it_is_connected_that_the_server_has_gone_and_is_back(tmp_path):
    now, notices = [1e9], []
    pulse = PulseFile(tmp_path / "pulse.json", lambda: now[0])
    connection = Connection(tmp_path / "pulse.json", "fl.example.org:8443", lambda: now[0])

    def look(call, status, seconds):
        now[0] += seconds
        pulse.note(call, status)
        connection.look(notices.append)

    connection.look(notices.append)
    look("activate-node", 200, 0.0)
    look("pull-messages", 200, 1.0)
    look("pull-messages", 200, 1.0)
    assert notices == ["connected to fl.example.org:8443"]
    gone = clock_time(now[0])
    look("pull-messages", 0, 5.0)
    look("pull-messages", 0, watching.LASTS)
    look("pull-messages", 0, watching.LASTS)
    pulse.path.unlink()  # the node is started again
    connection.look(notices.append)
    look("pull-messages", 200, 1.0)
    assert notices[1:] == [
        f"fl.example.org:8443 has not answered since {gone}; it is called again until it does",
        "connected to fl.example.org:8443 again",
    ]


def test_a_site_hears_that_the_server_has_a_certificate_that_it_does_not_take(tmp_path):
    now, notices = [1e9], []
    pulse = PulseFile(tmp_path / "pulse.json", lambda: now[0])
    connection = Connection(tmp_path / "pulse.json", "fl.example.org:8443", lambda: now[0])
    pulse.note("pull-messages", 200)
    connection.look(notices.append)
    now[0] += watching.LASTS
    pulse.note("pull-messages", 0, distrusted="certificate has expired")
    connection.look(notices.append)
    sentence = (
        "the certificate of fl.example.org:8443 is not taken: certificate has expired; if the clock of this "
        "machine is right, whoever runs the server has to renew it"
    )
    assert notices[1:] == [f"{sentence}; it is called again"]
    status = SiteStatus("north", "fl.example.org:8443", tmp_path, tmp_path / "pulse.json")
    assert status.facts()["trouble"] == sentence


def test_the_status_of_a_site_says_since_when_its_server_is_gone(tmp_path):
    status = SiteStatus("north", "fl.example.org:8443", tmp_path, tmp_path / "pulse.json")
    pulse = PulseFile(tmp_path / "pulse.json")
    pulse.note("pull-messages", 200)
    assert status.facts()["state"] == "connected; waiting for orders"
    since = clock_time(Pulse.read(pulse.path).pulled)
    pulse.note("pull-messages", 0)
    for _ in range(2):  # also when the node was started again, and has called nobody so far
        facts = status.facts()
        assert facts["state"] == f"not connected since {since}; waiting for orders"
        assert facts["trouble"].startswith(f"fl.example.org:8443 has not answered since {since}")
        pulse.path.unlink(missing_ok=True)


def test_a_day_that_is_not_today_is_named():
    assert re.fullmatch(r"\d\d:\d\d:\d\d", clock_time(time.time()))
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", clock_time(time.time() - 2 * 86400))


# --- potluck join ---------------------------------------------------------------------------------------


def joining(home, log="text", load="load", only="worker"):
    own = home.parent / "own.py"
    own.write_text(
        "def build(input):\n    pass\n\n\ndef load():\n    raise FileNotFoundError(2, 'No such file', 'data.npz')\n"
    )
    return Joining(
        "127.0.0.1:9",
        "north",
        f"{own}:build",
        f"{own}:{load}",
        home,
        Security(),
        only=only,
        socket=home / "s",
        log=log,
    )


def told_by(joining, status, capsys, sentence, **facts):
    joins._notice(joining, status)(sentence, **facts)
    return capsys.readouterr().err.strip()


def test_a_line_has_no_round_of_an_earlier_run_before_it(tmp_path, capsys):
    home = tmp_path / "home"
    home.mkdir()
    notes = OrderNotes(home)
    notes.begin("abc", 3, "train")
    status = SiteStatus("north", "127.0.0.1:9", home, home / "pulse.json")
    assert told_by(joining(home), status, capsys, "here").endswith(" here")
    assert "round" not in told_by(joining(home), status, capsys, "here")
    notes.begin("xyz", 1, "train")
    assert told_by(joining(home), status, capsys, "here").endswith(" round 1: here")
    as_json = json.loads(told_by(joining(home, "json"), status, capsys, "here"))
    assert (as_json["message"], as_json["round"], as_json["client"]) == ("here", 1, "north")
    line = json.loads(told_by(joining(home, "json"), status, capsys, "round 2 of 3: done", round=2, sent=7))
    assert (line["message"], line["round"], line["sent"]) == ("round 2 of 3: done", 2, 7)
    notes.facts.over = True
    notes._keep()
    assert "round" not in told_by(joining(home), status, capsys, "here")


def test_join_ends_in_a_sentence_before_it_takes_part_where_the_data_cannot_be_loaded(tmp_path):
    home, notices = tmp_path / "home", []
    home.mkdir()
    with pytest.raises(ConfigError) as raised:
        joins._take_part(joining(home), lambda sentence, **facts: notices.append(sentence))
    assert str(raised.value).startswith("client north: --data ")
    assert "own.py:load failed: FileNotFoundError: [Errno 2] No such file: 'data.npz'; " in str(raised.value)
    assert notices == [f"client north: logs are in {home}"]
    assert "Traceback" in (home / "worker.log").read_text()


def test_what_a_worker_says_comes_out_of_join(tmp_path, monkeypatch):
    home, notices = tmp_path / "home", []
    home.mkdir()

    def starts(start, stack):
        Announcements(home)("its model does not seem to work", round=None, run="a1")
        return Mock(look=Mock(side_effect=[None, KeyboardInterrupt]))

    monkeypatch.setattr(joins, "_watch", starts)
    monkeypatch.setattr(joins, "takes_calls", lambda path: True)
    monkeypatch.setattr(joins.time, "sleep", lambda seconds: None)
    with pytest.raises(KeyboardInterrupt):
        joins._take_part(joining(home), lambda *told, **facts: notices.append((*told, facts)))
    assert notices[1] == ("its model does not seem to work", {"run": "a1"})
    assert notices[2][0].startswith("client north waits at ")


def test_what_an_earlier_node_was_answered_is_not_told(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    home, seen = tmp_path / "home", []
    (home / "flower").mkdir(parents=True)
    pulse = PulseFile(home / "flower" / "pulse.json")
    pulse.note("pull-messages", 200)
    pulse.note("pull-messages", 0)
    monkeypatch.setattr(joins, "_take_part", lambda *told: seen.append(read_status(home)))
    joins.join(joining(home, only="node"))
    (facts,) = seen
    assert (facts["pulled"], facts["trouble"]) == (None, "")


# --- the first try --------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_built_is_told_before_the_worker_takes_orders(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\n\ndef load():\n    return np.zeros((4, 5), 'float32'), np.array([0, 1, 2, 0])\n"
        "\n\ndef build(input, classes):\n    raise NameError('nm')\n\n\ndef ends():\n    raise SystemExit(0)\n"
        "\n\ndef wide(input, classes, rep_dim):\n    raise NameError('nm')\n"
    )
    monkeypatch.setattr(worker, "work", lambda *told: None)
    monkeypatch.setattr(worker, "_end_with_the_parent", lambda: None)

    def started(model, data, *more):
        home = tmp_path / "h"
        given = [
            "--client",
            "0",
            "--model",
            f"{tmp_path}/own.py:{model}",
            "--data",
            f"{tmp_path}/own.py:{data}",
        ]
        home.mkdir(exist_ok=True)
        listener = Listener(home)
        code = worker.main([*given, "--home", str(home), "--socket", "w", *more])
        return code, sentences(listener)

    assert started("build", "load") == (0, [])  # it was started again: what was tried is not tried again
    code, (told,) = started("build", "load", "--try-first")
    assert code == 0
    assert told.startswith(
        "a run will probably not be joined: client 0: build could not be built (NameError: nm)"
    )
    assert started("wide", "load", "--try-first") == (0, [])  # a width that only a server tells
    capsys.readouterr()
    assert started("build", "ends", "--try-first") == (watching.BAD_INPUT, [])
    assert "own.py:ends failed: SystemExit: 0; mend it" in capsys.readouterr().err


def test_data_and_model_that_work_are_tried_without_a_word(tmp_path):
    _link, site, listener = with_notes(tmp_path)
    site.model = lambda input, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    first_try.try_first(site, "own.py:load")
    assert listener.new() == []
    assert [path.name for path in site.home.iterdir()] == ["worker.json"]
