"""Runs that are watched: one snapshot, whoever shows it, and nothing that is wrong with a folder ends the watch."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

import potluck
from potluck.cli.app import app
from potluck.live import status_file
from potluck.live.board import MOST_CLIENTS, Board
from potluck.live.log_tails import Evaluations, LogTail, Means, thinned
from potluck.live.loopback import CONNECTIONS, Page, answering
from potluck.live.page import shown
from potluck.live.prometheus import exposition
from potluck.live.sheets import overview_sheet, status_sheet
from potluck.live.snapshot import Follower, Watch
from potluck.live.status_file import write_status
from potluck.report.render import plain

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = {"name": "trial", "method": {"name": "fedavg"}, "training": {"rounds": 3}}
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def nobody_is_waited_for(monkeypatch):
    """A page that was open a moment ago asks once more; tests do not."""
    monkeypatch.setattr("potluck.live.page.OPEN", 0.0)


def command(*words):
    outcome = CliRunner().invoke(app, [*map(str, words)])
    return outcome.exit_code, " ".join(outcome.output.split())


def measured(round_, client, accuracy, **more):
    test = {"accuracy": accuracy, "loss": 1 - accuracy, "samples": 5}
    return {
        "round": round_,
        "client": client,
        "when": "after_aggregation",
        "mode": "model",
        "test": test,
    } | more


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(folder, rounds=3, clients=("0", "1"), state="running", done=None, evaluated=True):
    """The files of a run that is being played, or has ended."""
    folder.mkdir(parents=True)
    done = rounds if done is None else done
    settings = {"name": "trial", "method": {"name": "fedavg"}, "training": {"rounds": rounds}}
    (folder / "environment.json").write_text(json.dumps({"settings": settings}))
    played = range(1, done + 1)
    if evaluated:
        write_lines(folder / "metrics.jsonl", [measured(r, c, r / 10) for r in played for c in clients])
    crossed = [("up", 8), ("down", 16)]
    ledger = [{"round": r, "direction": way, "bytes": size} for r in played for way, size in crossed]
    write_lines(folder / "ledger.jsonl", ledger)
    write_lines(folder / "timing.jsonl", [{"round": r, "seconds": 2.0} for r in played])
    board = Board("run", name="trial", method="fedavg", state=state, round=done, rounds=rounds)
    board.worked(dict(zip(clients, (0.5, 3.5, 1.0), strict=False)))
    write_status(folder, board.facts())
    return folder


# --- the snapshot ---------------------------------------------------------------------------------------


def test_a_run_is_seen_while_it_goes_on_and_when_it_has_ended(tmp_path):
    class Looks(potluck.Observer):
        seen, ends = [], []

        def begin(self, name, method, rounds, done):
            self.seen.append(follower.look())

        def round(self, end):
            self.ends.append(end)
            self.seen.append(follower.look())

    follower, looks = Follower(tmp_path / "run"), Looks()
    potluck.run(
        name="seen", data="digits", partition={"kind": "iid", "clients": 2}, models=["mlp-small"], method="fedavg",
        training={"rounds": 3}, evaluate={"every": 2}, engine={"device": "cpu", "workers": 1}, progress=False,
        out=tmp_path / "run", observers=[looks],
    )  # fmt: skip
    begun, first, second, last = looks.seen
    assert (begun.state, begun.round, begun.rounds, begun.score, begun.curve.rounds) == (
        "running",
        0,
        3,
        None,
        (),
    )
    assert (first.round, first.score, first.alive) == (1, None, True)
    assert first.flower is None  # it may be installed, but this run has nothing to do with it
    assert second.score == pytest.approx(looks.ends[1].accuracy, abs=1e-6)
    assert second.loss == pytest.approx(looks.ends[1].loss, abs=1e-6)
    assert last.seconds_left is None
    assert second.left(second.round_ended) == second.seconds_left == round(second.seconds_per_round, 3)
    assert second.left(second.round_ended + 1e6) == pytest.approx(0, abs=1e-3)
    assert second.messages["up"] > 10_000
    assert second.memory["process"] > 10_000_000
    ended = follower.look()
    assert (ended.state, ended.round, ended.alive, ended.seconds_left) == ("finished", 3, False, None)
    assert ended.curve.rounds == (2, 3)
    assert all(ended.clients[client].seconds > 0 for client in "01")
    assert ended.clients["1"].score == pytest.approx(looks.ends[2].scores["1"], abs=1e-6)
    assert {*json.loads(json.dumps(ended.to_json()))} >= {"state", "round", "clients", "curve", "messages"}
    shown = plain(status_sheet(ended))
    assert re.search(r"messages: [\d.]+ \wB up, [\d.]+ \wB down, evaluation included", shown)


@pytest.mark.parametrize(("engine", "names"), [("local", False), ("flower-simulation", True)])
def test_a_run_names_flower_only_where_it_runs_on_it(tmp_path, monkeypatch, engine, names):
    monkeypatch.setattr(status_file, "_version", lambda package: "1.41.0")
    settings = {
        "name": "n",
        "method": {"name": "fedavg"},
        "training": {"rounds": 3},
        "engine": {"name": engine},
    }
    (tmp_path / "environment.json").write_text(json.dumps({"settings": settings}))
    write_status(tmp_path, Board(kind="run", name="n", method="fedavg").facts())
    now = Follower(tmp_path).look()
    assert ("flower 1.41.0" in plain(status_sheet(now))) is names
    assert (now.to_json()["flower"] == "1.41.0") is names
    write_status(tmp_path, Board(kind="server", name="n", method="fedavg").facts())
    assert "flower 1.41.0" in plain(status_sheet(Follower(tmp_path).look()))


def test_a_run_that_fails_says_why_and_who(tmp_path):
    with pytest.raises(potluck.PotluckError):
        potluck.run(
            data="digits", partition={"kind": "iid", "clients": 2}, models=["mlp-small"], method="fedavg",
            training={"rounds": 2, "optimizer": {"lr": 1e30}}, engine={"device": "cpu", "workers": 1},
            progress=False, out=tmp_path / "run",
        )  # fmt: skip
    now = Follower(tmp_path / "run").look()
    assert (now.state, now.round) == ("stopped", 0)
    assert "not finite" in now.why
    assert [entry.refusals for entry in now.clients.values()] == [1, 1]
    assert "not finite" in plain(status_sheet(now))


def test_logs_are_followed_as_they_grow_and_are_cut(tmp_path):
    path, found = tmp_path / "metrics.jsonl", [Evaluations()]
    tail = LogTail(path, lambda line: found[0].take(line), lambda: found.__setitem__(0, Evaluations()))
    tail.read()
    write_lines(path, [measured(1, "0", 0.2), measured(1, "1", 0.4)])
    with path.open("a") as log:
        log.write('{"round": 2')
        log.flush()
        tail.read()
        assert found[0].last["after_aggregation", "model"] == (1, {"0": 0.2, "1": 0.4})
        log.write(
            ', "client": "0", "when": "after_aggregation", "mode": "model", "test": {"accuracy": 0.5}}\n'
        )
    tail.read()
    assert [*found[0].rounds["after_aggregation", "model"]] == [1, 2]
    assert not tail.problem
    write_lines(
        path, [measured(1, "0", 0.3), measured(1, "1", 0.5), measured(2, "0", 0.6), measured(3, "0", 0.7)]
    )
    tail.read()
    means = found[0].rounds["after_aggregation", "model"]
    assert [round(mean.score, 3) for mean in means.values()] == [0.4, 0.6, 0.7]
    path.unlink()
    tail.read()
    assert not found[0].rounds


def test_what_is_damaged_is_named_and_the_rest_is_shown(tmp_path):
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2:4] = ['{"round": 1' + "0" * 5000 + "}", "[" * 100_000]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "summary.json").write_text("{")
    now = Follower(run).look()
    assert re.search(r"metrics.jsonl, line 3 is damaged \(ValueError", now.problem)
    assert (now.round, now.score) == (3, 0.3)
    (run / "environment.json").write_text("[]")
    assert Follower(run).look().round == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("environment.json", json.dumps({"settings": SETTINGS, "metrics": one}))
        for one in (5, {"accuracy": 7}, {"accuracy": {}})
    ]
    + [("timing.jsonl", f'{{"round": 1, "seconds": {one}}}') for one in ("NaN", "1e999", "1.7e308", "-1")]
    + [("timing.jsonl", f'{{"round": {one}, "seconds": 1}}') for one in ("-1" + "0" * 400, "1" + "0" * 17)]
    + [("ledger.jsonl", f'{{"direction": "up", "bytes": 1{"0" * 400}}}')]
    + [("metrics.jsonl", json.dumps(measured(10**17, "0", 0.5)))],
)
def test_one_odd_run_takes_nothing_from_the_others(tmp_path, name, said):
    make_run(tmp_path / "fine", state="finished")
    odd = make_run(tmp_path / "odd")
    (odd / name).write_text(said + "\n")
    code, told = command("status", tmp_path)
    assert (code, "damaged" in told) == (0, True)
    assert command("status", odd)[0] == 0
    with shown(0, Watch([tmp_path])) as address:
        state = json.loads(got(f"{address}state.json")[2], parse_constant=pytest.fail)
    assert [run["label"] for run in state["runs"]] == ["fine", "odd"]
    assert name in state["runs"][1]["problem"]


def test_half_a_letter_a_pipe_and_a_copy_are_told_as_they_are(tmp_path):
    run = make_run(tmp_path / "run")
    line = measured(3, "0", 0.5)
    line["test"] |= {"metric": "\ud800", "score": 0.5}
    write_lines(run / "metrics.jsonl", [line])
    assert 'potluck_score{measure="?"} 0.5' in exposition(Follower(run).look()).encode().decode()
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"updated": status["updated"] - 7200}))
    assert "gone: its process has not been heard of for 2 h" in command("status", run)[1]  # its logs are new
    (run / "status.json").write_text(json.dumps(status | {"updated": status["updated"] + 7300}))
    assert Follower(run).look().alive  # it was written now, by a machine whose clock is ahead
    os.utime(run / "status.json", (0, status["updated"] + 7300))  # the clock was set back since
    assert "gone: its last news is 2 h ahead of the clock here" in command("status", run)[1]
    (run / "status.json").unlink()
    os.mkfifo(run / "status.json")
    assert re.search(r"status.json cannot be read: it is no plain file; remove it", command("status", run)[1])


def test_whatever_a_look_raises_is_told_of_that_run_alone(tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    monkeypatch.setattr("potluck.live.snapshot._curve", lambda means: 1 / 0)
    (found,) = Watch([tmp_path]).look()
    assert (found.state, "is damaged" in found.problem) == ("unreadable", True)
    code, said = command("status", tmp_path / "run")
    assert (code, "is damaged" in said) == (2, True)


def test_a_folder_that_may_not_be_entered_is_left_out(tmp_path, monkeypatch):
    make_run(tmp_path / "mine", state="finished")
    (tmp_path / "other").mkdir()
    stat = Path.stat

    def closed(path, **options):
        if path.parent.name == "other":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", closed)
    assert [one.label for one in Watch([tmp_path]).look()] == ["mine"]


def test_a_site_without_test_rows_does_not_turn_the_best_around(tmp_path):
    run = make_run(tmp_path / "run")
    lines = [measured(r, "0", 0) | {"test": {"score": 5.0 - r, "metric": "mse"}} for r in (1, 2, 3)]
    write_lines(run / "metrics.jsonl", [*lines, measured(3, "1", 0) | {"test": None}])
    now = Follower(run).look()
    assert (now.measure.name, now.score, now.best) == ("MSE", 2.0, 2.0)


def test_a_site_tells_the_page_only_what_a_status_has(tmp_path):
    facts = {
        "kind": "site",
        "client": "a",
        "half": "both",
        "started": 1.0,
        "curve": 5,
        "score": 1,
        "loss": "abc",
    }
    write_status(tmp_path, facts)
    told = Follower(tmp_path).look().to_json()
    assert told["client"] == "a"
    assert not {"curve", "score", "loss"} & {*told}


def test_held_out_and_missing_clients_have_no_part_in_the_mean():
    found = Evaluations()
    for line in (
        measured(1, "0", 0.5),
        measured(1, "new", 0.9, held_out=True),
        {"round": 1, "client": "2", "when": "after_aggregation", "missing": "it is away"},
        measured(1, "0", 0.1) | {"when": "before"},
        {"round": 1, "client": "3", "when": "after_aggregation", "mode": "model", "test": None},
    ):
        found.take(line)
    assert found.headline == ("after_aggregation", "model")
    assert found.rounds[found.headline][1].score == 0.5


def test_long_curves_are_thinned_and_many_clients_are_not_all_kept():
    means = [(round_, Means([float(round_ == 777), 1.0])) for round_ in range(10_000)]
    kept = thinned(means, 200)
    assert len(kept) <= 200
    assert {0, 777, 9999} <= {round_ for round_, _ in kept}
    board = Board()
    board.refused("7", "no")
    for cohort in range(30):
        board.worked({str(client): client for client in range(100 * cohort, 100 * cohort + 100)})
    assert len(board.facts()["clients"]) == MOST_CLIENTS
    assert len(board.clients) <= 2 * MOST_CLIENTS
    assert {"7", "2999"} <= {*board.facts()["clients"]}


# --- the terminal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state": "finished"}, "finished; round 3 of 3"),
        ({"state": "stopped", "done": 0}, "stopped; round 0 of 3"),
        ({"state": "finished", "evaluated": False}, "a round takes 2.00 s"),
        ({"state": "finished", "rounds": 1, "clients": ("0",)}, "accuracy 10.00 %; loss 0.9 a round takes"),
    ],
)
def test_a_run_that_is_over_is_shown_and_the_watch_ends(tmp_path, options, words):
    run = make_run(tmp_path / "run", **options)
    code, shown_ = command("watch", run)
    assert code == 0
    assert words in shown_
    code, told = command("watch", run, "--json")
    assert (code, json.loads(told)["state"]) == (0, options["state"])
    assert command("status", run)[0] == 0


def test_several_runs_are_shown_side_by_side(tmp_path):
    make_run(tmp_path / "all" / "sweep" / "fedavg-seed0", state="finished")
    make_run(tmp_path / "all" / "fedavg-seed0" / "run", done=1)
    (tmp_path / "all" / "broken").mkdir()
    (tmp_path / "all" / "broken" / "status.json").write_text('{"kind": "server"}')
    (tmp_path / "all" / "elsewhere").symlink_to(tmp_path / "all" / "sweep")
    found = Watch([tmp_path / "all"]).look()
    assert [(one.label, one.state) for one in found] == [
        ("broken", "unreadable"), ("fedavg-seed0/run", "running"), ("sweep/fedavg-seed0", "finished"),
    ]  # fmt: skip
    sheet = plain(overview_sheet(found, "3 runs"))
    assert "broken: " in sheet
    assert "was not written by this version" in sheet
    assert re.search(r"run +fedavg +running +1/3 +10.00 %", sheet)
    code, told = command("status", tmp_path / "all", "--json")
    assert (code, len(json.loads(told))) == (0, 3)
    twins = [make_run(tmp_path / name / "run", state="finished") for name in "ab"]
    assert [one.label for one in Watch(twins).look()] == ["a/run", "b/run"]


@pytest.mark.parametrize(("name", "waits"), [("none", True), ("empty", True), ("file", False), (".", False)])
def test_where_there_is_nothing_to_watch_one_sentence_says_so(tmp_path, name, waits, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("time.sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    for verb in ("watch", "status"):
        code, said = command(verb, tmp_path / name)
        patient = waits and verb == "watch"
        assert code == (0 if patient else 2)
        assert said.startswith("no run has begun in " if patient else "error: there is no ")


def test_a_folder_that_never_comes_is_waited_for_ten_minutes(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    for options in ((), ("--json",)):
        waits.clear()
        code, said = command("watch", tmp_path / "none", *options)
        assert code == 2
        assert f"no run has begun in {tmp_path / 'none'} yet: waiting 10 minutes for one" in said
        assert f"error: there is no folder {tmp_path / 'none'}: name that of a run" in said
        assert sum(waits) == 600


def test_a_folder_that_comes_while_it_is_waited_for_is_watched(tmp_path, monkeypatch):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 5:
            make_run(tmp_path / "late", state="finished")
        assert len(waits) < 1000

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("potluck.live.snapshot.RESCAN", 0.0)
    code, said = command("watch", tmp_path / "late")
    assert code == 0
    assert "error" not in said


# --- the page -------------------------------------------------------------------------------------------


def got(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
        return answer.status, dict(answer.headers), answer.read().decode()


def test_the_page_is_whole_and_answers_this_machine_alone(tmp_path):
    run = make_run(tmp_path / "run", done=2, clients=(EVIL, "1"))
    with shown(0, Watch([run])) as address:
        _, headers, page = got(address)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert not re.search(r"""(?:src|href)=["'](?!data:)|@import|url\(|innerHTML""", page)
        _, _, text = got(f"{address}state.json")
        state = json.loads(text)
        assert (state["runs"][0]["round"], state["runs"][0]["clients"][EVIL]["score"]) == (2, 0.2)
        assert got(f"{address}state.json?have={state['mark']}")[0] == 204
        write_lines(run / "timing.jsonl", [{"round": r, "seconds": 2.0} for r in (1, 2, 3)])
        assert got(f"{address}state.json?have={state['mark']}")[0] == 200
        assert got(address.replace("127.0.0.1", "localhost"))[0] == 200
        misled = ("", "evil.example", 421), ("state.json", "127.0.0.1.evil:80", 421)
        for path, host, code in (*misled, ("x", None, 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                got(address + path, **({"Host": host} if host else {}))
            assert refused.value.code == code
        port = address.rstrip("/").rpartition(":")[2]
        code, said = command("watch", run, "--page", port)
        assert code == 2
        assert re.search(rf"--page: port {port} of 127.0.0.1 cannot be used: .*; choose another one", said)


def test_slow_callers_and_a_lack_of_threads_take_no_place_for_long(monkeypatch):
    with answering(0, "--page", lambda path, query: Page("text/plain", b"hi")) as port:
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for one in slow:
            one.sendall(b"GET / HTTP/1.1\r\nX: ")
        for _ in range(3):
            assert got(f"http://127.0.0.1:{port}/")[2] == "hi"
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            for _ in range(5):
                with pytest.raises(OSError):
                    got(f"http://127.0.0.1:{port}/")
        assert got(f"http://127.0.0.1:{port}/")[2] == "hi"
        for one in slow:
            one.close()


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_draws_the_page_and_takes_no_name_for_markup(tmp_path):
    runs = [make_run(tmp_path / "a", done=2, clients=(EVIL, "1")), make_run(tmp_path / "b", state="finished")]
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    with shown(0, Watch(runs)) as address:
        words = [BROWSER, *options, "--virtual-time-budget=1500", "--dump-dom", address]
        drawn = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
    assert "1 of 2 running." in drawn
    assert "2 / 3" in drawn
    assert "&lt;img src=x onerror=alert(1)&gt;" in drawn
    assert "<img" not in drawn
    assert drawn.count("<svg") >= 3
