"""Observers of one's own: what they are told, and how they end a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import StopAfter
from potluck import Experiment, Observer, StopRun, resume, run
from potluck.engine.evaluation.examined import Examined
from potluck.engine.evaluation.examiner import Examiner
from potluck.runs.loop import Interrupted
from potluck.runs.observers import RoundEnd

MOMENTS = ["before", "after_training", "after_aggregation"]
LOGS = ("metrics.jsonl", "ledger.jsonl")


def experiment(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "name": "seen",
        "data": "digits",
        "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 4, "validation": 0.1},
        "models": ["mlp-small", "conv-small"],
        "method": {"name": "fedmrl", "d1": 16},
        "training": {"rounds": 4, "participation": 0.5, "batch_size": 64},
        "evaluate": {"when": MOMENTS, "modes": "all", "every": 2},
        "engine": {"device": "cpu", "workers": 1},
        "checkpoint": {"every": 0},
    }
    return Experiment.make(**settings | changes)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def logs(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in LOGS]


class Diary(Observer):
    """Keeps everything it is told."""

    def __init__(self) -> None:
        self.moments: list[str] = []
        self.found: list[Examined] = []
        self.ends: list[RoundEnd] = []

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        self.moments.append(f"begin {name} {method} {rounds} {done}")

    def examined(self, found: Examined) -> None:
        self.moments.append(f"{found.when} {found.round}")
        self.found.append(found)

    def round(self, end: RoundEnd) -> None:
        self.moments.append(f"round {end.round}")
        self.ends.append(end)

    def end(self, folder: Path) -> None:
        self.moments.append(f"end {folder.name}")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Diary, Path]:
    diary = Diary()
    return diary, run(experiment(), out=tmp_path_factory.mktemp("told") / "run", observers=[diary]).folder


def test_an_observer_hears_of_every_moment_in_order(told: tuple[Diary, Path]) -> None:
    evaluated = {number: [f"{when} {number}" for when in MOMENTS] for number in (2, 4)}
    rounds = [
        "round 1", *evaluated[2], "round 2", "round 3", *evaluated[4], "round 4"
    ]  # fmt: skip
    assert told[0].moments == ["begin seen fedmrl 4 0", *rounds, "end run"]


def test_the_values_of_each_client_are_those_of_the_log(told: tuple[Diary, Path]) -> None:
    diary, folder = told
    log = lines(folder, "metrics.jsonl")
    assert [line for found in diary.found for line in found.lines] == log
    for found in diary.found:
        for mode in {line["mode"] for line in log}:
            for split in ("test", "validation"):
                logged = {
                    line["client"]: line[split]["accuracy"]
                    for line in log
                    if (line["round"], line["when"], line["mode"]) == (found.round, found.when, mode)
                    and split in line
                }
                assert logged
                assert found.scores(split, mode) == logged
        assert found.scores() == found.scores("test", "mix-large")


def test_a_round_end_tells_what_the_logs_say(told: tuple[Diary, Path]) -> None:
    diary, folder = told
    ledger, timing = lines(folder, "ledger.jsonl"), lines(folder, "timing.jsonl")
    for end in diary.ends:
        assert list(end.ledger) == [line for line in ledger if line["round"] == end.round]
        assert {name: round(value, 6) for name, value in end.timing.items()} == {
            name: value for name, value in timing[end.round - 1].items() if name != "round"
        }
    first, second, third, last = diary.ends
    assert (first.accuracy, first.loss, first.scores) == (None, None, {})
    assert second.scores == second.examined[-1].scores() != {}
    assert second.accuracy == sum(second.scores.values()) / len(second.scores)
    assert second.loss is not None
    assert (third.accuracy, third.loss, third.scores) == (second.accuracy, None, {})
    summary = json.loads((folder / "summary.json").read_text())
    assert {client: round(score, 6) for client, score in last.scores.items()} == (
        summary["accuracy"]["per_client"]
    )


def test_who_drops_out_of_a_round_is_told(tmp_path: Path) -> None:
    diary, hot = Diary(), {"rounds": 2, "per_client": {"1": {"lr": 1e30}}}
    run(experiment(method="fedproto", training=hot), out=tmp_path / "run", observers=[diary])
    assert [set(end.failures) for end in diary.ends] == [{"1"}, {"1"}]
    assert "not finite" in diary.ends[0].failures["1"]


def test_what_a_method_observes_of_clients_is_told(tmp_path: Path) -> None:
    diary = Diary()
    asked = experiment(
        method={"name": "fedmuscle", "batch": 8, "peers": 1},
        models={"pool": ["mlp-small"], "rep_dim": 16},
        public={"data": "digits", "samples": 40},
        training={"rounds": 2},
        evaluate={},
    )
    folder = run(asked, out=tmp_path / "run", observers=[diary]).folder
    observed = [line for end in diary.ends for line in end.observations]
    assert observed == lines(folder, "observations.jsonl") != []


class Enough(Observer):
    """Stops a run once its accuracy is known."""

    def round(self, end: RoundEnd) -> None:
        if end.accuracy is not None:
            raise StopRun


def test_an_observer_ends_a_run_early(tmp_path: Path) -> None:
    diary = Diary()
    ended = run(experiment(), out=tmp_path / "run", observers=[Enough(), diary])
    assert ended.summary["rounds"] == 2
    assert ended.accuracy == pytest.approx(diary.ends[-1].accuracy, abs=1e-5)
    assert diary.moments[-2:] == ["round 2", "end run"]
    assert (ended.folder / "report.html").exists()
    assert resume(ended.folder).summary["rounds"] == 4
    assert logs(ended.folder) == logs(run(experiment(), out=tmp_path / "whole").folder)


def test_a_watcher_is_one_more_observer(tmp_path: Path) -> None:
    heard: list[str] = []

    class Named(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def round(self, end: RoundEnd) -> None:
            heard.append(f"{self.name} {end.round}")

    with pytest.raises(Interrupted):
        run(
            experiment(),
            out=tmp_path / "run",
            watcher=Named("watcher"),
            observers=[Named("first"), StopAfter(1), Named("last")],
        )
    assert heard == ["watcher 1", "first 1"]
    heard.clear()
    resume(tmp_path / "run", watcher=Named("watcher"), observers=[Named("first"), Enough()])
    assert heard == ["watcher 2", "first 2"]


def test_a_round_that_is_taken_back_is_never_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines_of = Examiner.lines

    def stop(self: Examiner, when: Any, round_: int, answers: Any) -> Any:
        if (when, round_) == ("after_aggregation", 2):
            raise KeyboardInterrupt
        return lines_of(self, when, round_, answers)

    before, after = Diary(), Diary()
    monkeypatch.setattr(Examiner, "lines", stop)
    with pytest.raises(Interrupted):
        run(experiment(), out=tmp_path / "run", observers=[before])
    monkeypatch.setattr(Examiner, "lines", lines_of)
    assert before.moments == ["begin seen fedmrl 4 0", "round 1"]
    resume(tmp_path / "run", observers=[after])
    assert [end.round for end in after.ends] == [2, 3, 4]
    assert after.moments[0] == "begin seen fedmrl 4 1"


def test_a_fault_of_an_observer_ends_the_run_and_it_can_be_resumed(tmp_path: Path) -> None:
    class Broken(Observer):
        def examined(self, found: Examined) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(experiment(), out=tmp_path / "run", observers=[Broken()])
    assert not (tmp_path / "run/summary.json").exists()
    resume(tmp_path / "run")
    assert logs(tmp_path / "run") == logs(run(experiment(), out=tmp_path / "whole").folder)
