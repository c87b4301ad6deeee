"""What operators see: the status of a server and of a site, their logs, and the endpoint for Prometheus."""

import functools
import io
import json
import re
import socket
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
import sites
from links import FEDMRL, Link, Time, Told, is_evaluation, is_training, serve
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.deploy.flower.serve import starting_board
from potluck.deploy.logs import Log
from potluck.deploy.node_pulse import Pulse, PulseFile
from potluck.deploy.run_notes import LogLines
from potluck.deploy.site_status import OrderNotes, Room, SiteStatus, read_orders
from potluck.errors import ConfigError, RunError
from potluck.live import board as boards
from potluck.live import snapshot
from potluck.live import status_file as statuses
from potluck.live.board import Board
from potluck.live.prometheus import exposed, exposition
from potluck.live.sheets import state_in_words, status_sheet
from potluck.live.snapshot import Follower
from potluck.live.status_file import kept, read_status, write_status
from potluck.report.render import plain


def command(*words):
    outcome = CliRunner().invoke(app, ["status", *map(str, words)])
    return outcome.exit_code, outcome.output


# --- the server -----------------------------------------------------------------------------------------


def test_a_served_run_leaves_its_status(tmp_path):
    """One client answers, one comes late and refuses in a round, one is excluded, and somebody else knocks."""
    link, clock, shown = Link(tmp_path, away=["1"]), Time(), []
    link.sites[7] = link.make("2")
    link.tamper = lambda order, answer: b"nonsense" if is_training(order, "1", 2) else answer
    seen = []

    experiment = sites.federated(
        FEDMRL, training={"rounds": 2, "quorum": 0.5, "batch_size": 16, "optimizer": {"lr": 0.05}}
    )
    board = starting_board(experiment)
    assert board.state == "starting"
    clock.at(3.0, lambda: write_status(tmp_path, board.facts()))
    clock.at(3.0, lambda: shown.append(state_in_words(Follower(tmp_path).look(), time.time())))
    clock.at(3.0, link.away.clear)
    link.lose = lambda order: seen.append(board.facts()) if is_evaluation(order, "0", 1) else None
    before = time.time()
    serve(link, tmp_path / "run", experiment, Told(), clock, exclude=["2"], board=board)
    assert shown == ["waiting for 1 to join"]
    (during,) = seen
    assert (during["state"], during["round"]) == ("running", 0)
    found = read_status(tmp_path / "run")
    assert (found["state"], found["round"], found["rounds"]) == ("finished", 2, 2)
    assert (found["name"], found["method"]) == ("three", "fedmrl")
    assert not Follower(tmp_path / "run").look().alive
    honest, liar, out = (found["clients"][client] for client in "012")
    assert honest["connected"]
    assert before <= honest["since"] <= honest["replied"] <= time.time()
    assert (honest["refusals"], liar["refusals"]) == (0, 1)
    assert liar["refused"].startswith("8 bytes are no message")
    assert out["excluded"]
    assert {*found["strangers"]} == {"node 2", "node 7"}
    assert all("client 2 is excluded" in reason for reason in found["strangers"].values())
    assert found["sent"] > found["received"] > 10_000
    assert found["potluck"] == statuses.__version__


def test_a_server_that_is_stopped_says_so_and_one_that_was_killed_is_gone(tmp_path, monkeypatch):
    link = Link(tmp_path)

    def stop(order):
        if is_training(order, "1", 2):
            raise KeyboardInterrupt

    link.lose = stop
    with pytest.raises(KeyboardInterrupt):
        serve(link, tmp_path / "run", sites.federated(FEDMRL))
    assert read_status(tmp_path / "run")["state"] == "stopped"
    board = Board(state="running", name="three", method="fedmrl")
    board.seen(["0"])
    write_status(tmp_path, board.facts())
    assert Follower(tmp_path).look().alive
    late = Follower(tmp_path).look(now=time.time() + 3600)
    assert not late.alive
    shown = plain(status_sheet(late, time.time() + 3600))
    assert "gone: its process has not been heard of for 60 min" in shown
    assert "unknown" in shown
    assert "full" not in shown
    monkeypatch.setattr(snapshot.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    full = state_in_words(Follower(tmp_path).look(now=time.time() + 3600), time.time() + 3600)
    assert "heard of for 60 min; the disk is full, so it may be there and unable to tell" in full


def test_norms_that_are_refused_after_an_answer_came_are_on_the_board(tmp_path):
    board = Board(clock=lambda: 5.0)
    board.replied("1")
    board.refused("1", "client 1: it is not connected")
    board.dropped("1", "client 1: it is not connected")
    assert board.client("1").refusals == 1
    board.dropped("1", "client 1: the norm\x1b[2J of 'x' is absurd")
    assert (board.client("1").refusals, board.client("1").refused) == (2, "the norm of 'x' is absurd")


def test_a_client_that_fails_alike_in_every_round_is_counted_in_each():
    board, reason = Board(clock=lambda: 5.0), "client 1: what was trained is not finite"
    for round_ in (1, 2):
        board.ended(round_, {"1": reason})
    board.refused("1", reason)  # the engine says it at once, and the end of the round again
    board.ended(3, {"1": reason})
    assert (board.round, board.client("1").refusals) == (3, 3)


def test_a_client_that_comes_back_is_connected_since_then():
    now = iter([1.0, 2.0, 3.0])
    board = Board(clock=lambda: next(now))
    board.seen(["a"])
    board.seen(["a"])
    assert board.client("a").since == 1.0
    board.seen([])
    assert not board.client("a").connected
    board.seen(["a"])
    assert board.client("a").since == 2.0


def test_strangers_do_not_pile_up():
    board = Board()
    for number in range(1000):
        board.stranger(f"node {number}", "who is it")
    assert len(board.strangers) == boards.REMEMBERED


def test_the_status_is_renewed_and_a_full_disk_does_not_matter(tmp_path, monkeypatch):
    board = Board()
    with kept(tmp_path, board.facts, every=0.02):
        first = read_status(tmp_path)["updated"]
        board.round = 3
        end = time.monotonic() + 20
        while read_status(tmp_path)["round"] != 3 and time.monotonic() < end:
            time.sleep(0.02)
        assert read_status(tmp_path)["updated"] > first

        def full(*given):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(statuses, "write_small", full)
        time.sleep(0.1)
    assert read_status(tmp_path)["round"] == 3


def test_a_link_in_place_of_the_status_is_not_followed(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    home = tmp_path / "home"
    home.mkdir()
    (home / ".status.json").symlink_to(theirs)
    (home / "status.json").symlink_to(theirs)
    write_status(home, Board().facts())
    assert theirs.read_text() == "precious"
    assert read_status(home)["kind"] == "server"


def test_a_server_and_a_site_in_one_folder_keep_their_own_status(tmp_path):
    write_status(tmp_path, Board(name="trial").facts())
    site = SiteStatus("north", "127.0.0.1:9", tmp_path, tmp_path / "pulse.json")
    write_status(tmp_path, site.facts())
    assert read_status(tmp_path)["client"] == "north"
    (tmp_path / "site-status.json").unlink()
    assert read_status(tmp_path)["name"] == "trial"


# --- the command ----------------------------------------------------------------------------------------


def test_the_command_shows_a_server(tmp_path):
    board = Board(name="hospitals", method="fedmrl", state="running", round=2, rounds=5)
    board.seen(["north"])
    board.replied("north")
    board.refused("east", "client east: no answer came within 60 s")
    board.client("west").excluded = True
    board.stranger("node 9", "'spy' is none of the experiment's clients")
    board.say("round 2 goes on without client east")
    write_status(tmp_path, board.facts())
    code, shown = command(tmp_path)
    assert code == 0
    for words in (
        "running; round 2 of 5; 1 of 2 clients connected",
        "no answer came within 60 s",
        "excluded",
        "not taken in: node 9: 'spy' is none",
        "ago: round 2 goes on without client east",
        "potluck 0",
    ):
        assert words in shown
    code, shown = command(tmp_path, "--json")
    assert json.loads(shown)["clients"]["east"]["refusals"] == 1


@pytest.mark.parametrize("change", [{"disk_free": "nan"}, {"notices": [["inf", "x"]]}, {"sent": "9" * 400}])
def test_a_number_beyond_measure_is_refused_as_a_text_too(tmp_path, change):
    board = Board(state="running", name="three", method="fedmrl")
    write_status(tmp_path, board.facts())
    path = tmp_path / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match="it has a number beyond all that are measured; remove it"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "there is no run in"),
        ("{", "cannot be read"),
        ("[]", "was not written by potluck"),
        ('{"kind": {}}', "was not written by potluck"),
        ('{"kind": "spy"}', "was not written by potluck"),
        ('{"kind": "server"}', "was not written by this version"),
        ('{"kind": "server", "updated": "x", "clients": 3}', "was not written by this version"),
        ('{"kind": "site", "half": 3}', "was not written by this version"),
        ('{"kind": "server", "updated": 1' + "0" * 400 + "}", "was not written by potluck: it has a number"),
        ('{"kind": "server", "updated": NaN}', "was not written by potluck: it has a number"),
        ('{"kind": "server", "x": ' + "[" * 900 + "]" * 900 + "}", "it is nested too deeply"),
        (" " * ((16 << 20) + 1), "it has more than 16,777,216 bytes"),
    ],
)
def test_what_is_no_status_is_refused_in_a_sentence(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "status.json").write_text(text)
    code, shown = command(tmp_path)
    assert code == 2
    assert sentence in " ".join(shown.split())
    assert "internal error" not in shown


def test_a_socket_in_place_of_the_status_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind("status.json")
        code, shown = command(".")
    assert code == 2
    assert "status.json cannot be read: it is no plain file; remove it" in " ".join(shown.split())


@pytest.mark.parametrize("place", ["clients.a.replied", "clients.a", "pid"])
@pytest.mark.parametrize("value", ["x", {}, True])
def test_a_status_with_one_odd_value_is_shown_or_refused(tmp_path, place, value):
    board = Board(name="n", method="m")
    board.client("a").connected = True
    write_status(tmp_path, board.facts())
    facts = json.loads((tmp_path / "status.json").read_text())
    *path, last = place.split(".")
    functools.reduce(dict.__getitem__, path, facts)[last] = value
    (tmp_path / "status.json").write_text(json.dumps(facts))
    code, shown = command(tmp_path)
    assert code in (0, 2)
    assert "internal error" not in shown


def test_a_folder_that_is_not_there_is_named(tmp_path):
    code, shown = command(tmp_path / "none")
    assert (code, "there is no folder" in shown) == (2, True)


def test_a_foreign_status_cannot_steer_a_terminal(tmp_path):
    facts = Board(name="a\x1b]0;owned\x07b").facts()
    facts["clients"] = {"x\x1b[2J": facts["clients"] or {}}
    write_status(tmp_path, facts)
    assert "\x1b" not in json.dumps(read_status(tmp_path), ensure_ascii=False)


def test_a_status_elsewhere_is_not_shown(tmp_path):
    (tmp_path / "elsewhere.json").write_text('{"kind": "server", "secret": "S3CRET"}')
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "status.json").symlink_to(tmp_path / "elsewhere.json")
    code, shown = command(tmp_path / "home", "--json")
    assert (code, "S3CRET" in shown) == (2, False)
    assert "it is a link, which is not followed" in " ".join(shown.split())


# --- a site ---------------------------------------------------------------------------------------------


def site_with_notes(tmp_path):
    link = Link(tmp_path)
    site = link.sites[1]
    site.home.mkdir()
    site.notes = OrderNotes(site.home)
    site.notes.log = Log(True, io.StringIO())
    return link, site


def test_a_worker_notes_its_orders(tmp_path):
    link, site = site_with_notes(tmp_path)
    serve(link, tmp_path / "run", sites.federated(FEDMRL))
    site.answer(b"nonsense")
    found = read_orders(site.home)
    assert (found["round"], found["order"], found["busy"]) == (2, "evaluate", False)
    assert found["orders"] == {"answered": 5, "refused": 1}  # one welcome, two rounds, two evaluations
    assert found["sent"] > 10_000
    assert found["received"] > 10_000
    assert found["refused"]
    lines = [json.loads(one) for one in site.notes.log.stream.getvalue().splitlines()]
    assert [(one.get("round"), one.get("order")) for one in lines[:3]] == [
        (None, "join"),
        (1, "train"),
        (1, "evaluate"),
    ]
    assert re.fullmatch(r"round 1: answered: train, [\d,]+ bytes, \d+\.\d s", lines[1]["message"])
    assert lines[-1]["message"].startswith("round 2: refused: ")
    assert all(one["time"].startswith("20") for one in lines)


def test_a_server_that_asks_without_end_fills_no_log(tmp_path):
    notes, now = OrderNotes(tmp_path), [0.0]
    notes.log, notes.room = Log(True, io.StringIO()), Room(lambda: now[0])
    for _ in range(1200):
        notes.refused("no")
    lines = notes.log.stream.getvalue().splitlines()
    assert len(lines) == 1001
    assert "1,000 lines were written in this hour" in lines[-1]
    assert read_orders(tmp_path)["orders"]["refused"] == 1200
    now[0] = 3600
    notes.refused("no")
    assert len(notes.log.stream.getvalue().splitlines()) == 1002


def test_a_worker_is_at_work_while_it_does_an_order(tmp_path):
    link, site = site_with_notes(tmp_path)
    seen = []
    load = site.load

    def loading():
        seen.append(read_orders(site.home))
        return load()

    site.load = loading
    link.lose = lambda order: None
    serve(link, tmp_path / "run", sites.federated("local", rounds=1))
    assert (seen[0]["busy"], seen[0]["order"]) == (True, "join")


def test_a_worker_that_starts_again_is_not_at_work(tmp_path):
    OrderNotes(tmp_path).begin("abc", 4, "train")
    assert read_orders(tmp_path)["busy"]
    OrderNotes(tmp_path)
    found = read_orders(tmp_path)
    assert (found["run"], found["round"], found["busy"], found["order"]) == ("abc", 4, False, "")
    (tmp_path / "worker.json").write_text('{"run": 3}')
    assert OrderNotes(tmp_path).facts.run == ""


def test_what_is_not_written_does_not_stop_a_worker(tmp_path):
    link, site = site_with_notes(tmp_path)
    site.notes.home = tmp_path / "none"
    site.notes.log.stream.close()
    serve(link, tmp_path / "run", sites.federated("local", rounds=1))
    assert site.notes.facts.orders["answered"] == 3


def site_status(tmp_path, only=""):
    (tmp_path / "flower").mkdir(exist_ok=True)
    return SiteStatus("north", "fl.example.org:8443", tmp_path, tmp_path / "flower" / "pulse.json", only)


def test_a_site_shows_both_of_its_halves(tmp_path):
    status = site_status(tmp_path)
    facts = status.facts()
    assert facts["state"] == "not connected; waiting for orders"
    pulse = PulseFile(status.pulse)
    pulse.note("activate-node", 200)
    pulse.note("pull-messages", 200)
    notes = OrderNotes(tmp_path)
    notes.begin("abc", 4, "train")
    status.say("the worker ended: signal 9 came; it is started again")
    facts = status.facts()
    assert facts["state"] == "connected; at work: train"
    write_status(tmp_path, facts)
    code, shown = command(tmp_path)
    assert code == 0
    for words in (
        "client north",
        "connected; at work: train",
        "fl.example.org:8443",
        "round",
        "4",
        "signal 9",
    ):
        assert words in shown
    status.ended = True
    write_status(tmp_path, status.facts())
    assert read_status(tmp_path)["state"] == "stopped"
    assert "stopped" in command(tmp_path)[1]


def test_a_site_that_has_ended_shows_no_trouble_of_before(tmp_path):
    """Nothing is called again by a site that was stopped, nor by one that is gone."""
    status = site_status(tmp_path)
    PulseFile(status.pulse).note("pull-messages", 0)
    write_status(tmp_path, status.facts())
    shown = command(tmp_path)[1]
    assert "fl.example.org:8443 does not answer" in shown
    told = json.loads((tmp_path / "site-status.json").read_text())
    (tmp_path / "site-status.json").write_text(json.dumps(told | {"updated": told["updated"] - 60}))
    shown = command(tmp_path)[1]
    assert "gone" in shown
    assert "does not answer" not in shown
    status.ended = True
    write_status(tmp_path, status.facts())
    shown = command(tmp_path)[1]
    assert "stopped" in shown
    assert "does not answer" not in shown
    assert read_status(tmp_path)["trouble"] == ""


def test_a_site_says_that_the_certificate_of_its_server_has_expired(tmp_path):
    node = pytest.importorskip("potluck.deploy.flower.node", exc_type=ImportError)
    httpx = pytest.importorskip("httpx")
    status, why = site_status(tmp_path), "certificate verify failed: certificate has expired (_ssl.c:1006)"

    def refuse(client, request):
        raise httpx.ConnectError(f"[SSL: CERTIFICATE_VERIFY_FAILED] {why}")

    send = node.noting(refuse, PulseFile(status.pulse))
    with pytest.raises(httpx.ConnectError):
        send(None, httpx.Request("POST", f"https://fl.example.org:8443{node.FLEET}activate-node"))
    told = (
        "the certificate of fl.example.org:8443 is not taken: certificate has expired; if the clock of this "
        "machine is right, whoever runs the server has to renew it"
    )
    assert status.facts()["trouble"] == told


@pytest.mark.parametrize(
    ("status_code", "sentence"),
    [
        (0, "fl.example.org:8443 does not answer"),
        (502, "SuperLink behind it is away"),
        (412, "does not know the node's key"),
        (401, "does not believe the node's signature"),
    ],
)
def test_a_site_says_what_is_wrong_with_its_connection(tmp_path, status_code, sentence):
    status = site_status(tmp_path)
    pulse = PulseFile(status.pulse)
    pulse.note("activate-node", status_code)
    assert sentence in status.facts()["trouble"]
    status.pulse.unlink()  # the node is started again
    assert sentence in status.facts()["trouble"]
    pulse.note("activate-node", 200)
    pulse.note("pull-messages", 200)
    assert status.facts()["trouble"] == ""


def test_a_node_that_is_started_again_was_taken_in_before(tmp_path):
    status = site_status(tmp_path)
    PulseFile(status.pulse).note("activate-node", 200)
    since = status.facts()["taken_in"]
    status.pulse.unlink()
    PulseFile(status.pulse).note("activate-node", 0)
    assert since is not None
    assert status.facts()["taken_in"] == since


def test_a_clock_that_is_set_has_nobody_suspected_of_using_the_key(tmp_path, monkeypatch):
    status = site_status(tmp_path)
    status.pulse.with_name("taken-in").touch()
    now = time.time()
    monkeypatch.setattr("potluck.deploy.site_status.time.time", lambda: now + 3600)
    PulseFile(status.pulse).note("activate-node", 412)
    assert "takes this node to be online still" in status.facts()["trouble"]


@pytest.mark.parametrize(("only", "absent"), [("worker", "last call answered"), ("node", "last order")])
def test_each_half_has_its_own_status(tmp_path, only, absent):
    status = site_status(tmp_path, only)
    OrderNotes(tmp_path).begin("abc", 4, "train")
    write_status(tmp_path, status.facts())
    code, shown = command(tmp_path)
    assert code == 0
    assert f"its {only} alone" in shown
    assert absent not in shown


def test_a_silent_node_is_not_connected(tmp_path):
    status = site_status(tmp_path)
    file = PulseFile(status.pulse, clock=lambda: time.time() - 3600)
    file.note("pull-messages", 200)
    assert Pulse.read(status.pulse).pulled is not None
    assert not status.facts()["connected"]


# --- logs -----------------------------------------------------------------------------------------------


def test_a_server_logs_every_round_with_the_time(tmp_path):
    stream = io.StringIO()
    watcher = LogLines(Log(True, stream))
    link = Link(tmp_path)
    link.tamper = lambda order, answer: b"nonsense" if is_training(order, "1", 2) else answer
    experiment = sites.federated(
        FEDMRL, training={"rounds": 2, "quorum": 0.5, "batch_size": 16, "optimizer": {"lr": 0.05}}
    )
    serve(link, tmp_path / "run", experiment, watcher)
    lines = [json.loads(one) for one in stream.getvalue().splitlines()]
    assert all(one["time"][:2] == "20" and one["message"] for one in lines)
    rounds = [one for one in lines if "seconds" in one]
    assert [(one["round"], one.get("without")) for one in rounds] == [(1, None), (2, ["1"])]
    assert "accuracy" in rounds[0]["message"]
    assert lines[-1]["message"].startswith("finished: ")


def test_a_form_of_log_that_there_is_not_is_named():
    outcome = CliRunner().invoke(app, ["join", "--client", "a", "--server", "127.0.0.1:1", "--log", "xml"])
    assert outcome.exit_code == 2
    assert "'xml' is not a form of log; give text or json" in outcome.output


# --- Prometheus -----------------------------------------------------------------------------------------

SAMPLE = re.compile(
    r'[a-z_]+(\{[a-z]+="(\\.|[^"\\])*"(,[a-z]+="(\\.|[^"\\])*")*\})? -?\d+(\.\d+)?(e[+-]?\d+)?'
)


def seen(folder, teller):
    """What somebody sees who looks at a server or a site from inside its process."""
    return Follower(folder, facts=lambda: teller.facts() | statuses.about_here(folder)).look()


def test_the_text_is_that_of_prometheus(tmp_path):
    board = Board(round=2, rounds=5)
    board.seen(['no"rth'])
    board.replied('no"rth')
    board.refused("east", "no answer")
    lines = exposition(seen(tmp_path, board)).splitlines()
    samples = [one for one in lines if not one.startswith("#")]
    assert all(SAMPLE.fullmatch(one) for one in samples), samples
    assert 'potluck_client_connected{client="no\\"rth"} 1' in samples
    assert 'potluck_client_refusals_total{client="east"} 1' in samples
    assert "potluck_round 2" in samples
    declared = [one.split()[2] for one in lines if one.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    assert exposition(seen(tmp_path, site_status(tmp_path)))
    OrderNotes(tmp_path).begin("abc", 4, "train")
    site = seen(tmp_path, site_status(tmp_path))
    samples = [one for one in exposition(site).splitlines() if not one.startswith("#")]
    assert all(SAMPLE.fullmatch(one) for one in samples), samples
    assert 'potluck_orders_total{outcome="answered"} 0' in samples


def test_prometheus_asks_on_this_machine_alone(tmp_path):
    board = Board(round=1)
    with exposed(0, lambda: seen(tmp_path, board)) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "potluck_round 1" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
        led = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics", headers={"Host": f"evil.example:{port}"}
        )
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(led, timeout=10)
        with pytest.raises(ConfigError, match="cannot be used"), exposed(port, lambda: None):
            pass
    with exposed(None, lambda: None) as port:
        assert port is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("orders", "none"),
        ("orders", {"refused": 1e400}),
        ("ordered", "today"),
        ("sent", 10**400),
        ("round", {}),
        ("busy", "yes"),
    ],
)
def test_a_note_of_orders_that_makes_no_sense_stops_no_site(tmp_path, name, value):
    OrderNotes(tmp_path).begin("a run", 3, "train")
    note = tmp_path / "worker.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {name: value}).replace("Infinity", "1e400"))
    assert read_orders(tmp_path) == {}
    assert (
        SiteStatus("a", "server:1", tmp_path, tmp_path / "pulse.json").facts()["state"]
        == "not connected; waiting for orders"
    )
    OrderNotes(tmp_path).begin("a run", 4, "train")
    assert read_orders(tmp_path)["round"] == 4


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"status": 1e400}', '{"pulled": 1e300}', '{"at": 1%s}' % ("0" * 400)]
)
def test_a_pulse_that_makes_no_sense_counts_as_none(tmp_path, text):
    path, whole = tmp_path / "pulse.json", {"at": 5.0, "call": "pull-messages", "status": 401}
    path.write_text(json.dumps(whole))
    assert Pulse.read(path).status == 401
    path.write_text(
        json.dumps(whole | json.loads(text)).replace("Infinity", "1e400") if text[0] == "{" else text
    )
    assert Pulse.read(path) == Pulse()
    assert SiteStatus("a", "server:1", tmp_path, path).facts()["connected"] is False
