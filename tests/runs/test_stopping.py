"""Runs that end early: when they no longer get better, and when time is up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from helpers import StopAfter
from potluck import EarlyStopping, Experiment, PotluckError, StopRun, TimeLimit, resume, run
from potluck.engine.evaluation.examined import Examined
from potluck.runs.loop import Interrupted
from potluck.runs.observers import RoundEnd


def experiment(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "data": "digits",
        "partition": {"kind": "iid", "clients": 2, "validation": 0.1},
        "models": ["mlp-small"],
        "method": "fedavg",
        "training": {"rounds": 5, "batch_size": 256},
        "engine": {"device": "cpu", "workers": 1},
    }
    return Experiment.make(**settings | changes)


def found(round_: int, *values: float, metric: str = "accuracy", when: Any = "after_aggregation") -> Examined:
    lines = tuple(
        {"round": round_, "client": str(client), "when": when, "mode": "head", "validation": {metric: value}}
        for client, value in enumerate(values)
    )
    return Examined(round_, when, lines)


def stopped_after(rule: EarlyStopping, *values: float, metric: str = "accuracy") -> tuple[int, str]:
    """The round in which a rule ends a run of these means, and the reason; 0 if it does not."""
    rule.begin("name", "method", len(values), 0)
    for round_, value in enumerate(values, start=1):
        seen = found(round_, value - 0.1, value + 0.1, metric=metric)
        rule.examined(seen)
        try:
            rule.round(RoundEnd(round_, len(values), None, None, 1.0, examined=[seen]))
        except StopRun as stop:
            return round_, str(stop)
    return 0, ""


def test_patience_counts_evaluations_without_a_better_mean() -> None:
    values = (0.5, 0.6, 0.6, 0.55, 0.7, 0.7, 0.7, 0.7)
    assert stopped_after(EarlyStopping(3), *values) == (
        8, "validation score was not better than in round 5 for 3 evaluations"
    )  # fmt: skip
    assert stopped_after(EarlyStopping(2), *values)[0] == 4
    assert stopped_after(EarlyStopping(4), *values)[0] == 0
    assert stopped_after(EarlyStopping(2, min_delta=0.2), *values)[0] == 3


def test_the_direction_is_that_of_the_metric() -> None:
    falling = (3.0, 2.0, 1.0, 1.0)
    assert stopped_after(EarlyStopping(1, metric="loss"), *falling, metric="loss")[0] == 4
    assert stopped_after(EarlyStopping(1, metric="r2"), *falling, metric="r2")[0] == 2


def test_held_out_clients_have_no_say() -> None:
    rule = EarlyStopping(1)
    for round_, value in enumerate((0.1, 0.9), start=1):
        seen = found(round_, 0.5, value)
        seen.lines[1]["held_out"] = True
        rule.examined(seen)
    assert (rule.best, rule.waited) == (0.5, 1)


def test_a_rule_starts_anew_with_every_run() -> None:
    rule = EarlyStopping(2)
    assert stopped_after(rule, 0.5, 0.5, 0.5)[0] == 3
    assert stopped_after(rule, 0.1, 0.1, 0.1)[0] == 3


STEP = 1.0  # no accuracy gets better by this much: the first evaluation stays the best


def test_a_run_that_is_stopped_says_so_and_can_play_the_rest(tmp_path: Path) -> None:
    ended = run(experiment(), out=tmp_path / "run", observers=[EarlyStopping(2, min_delta=STEP)])
    assert ended.summary["rounds"] == 3
    assert ended.stopped == "validation score was not better than in round 1 for 2 evaluations"
    assert ended.stopped in (ended.folder / "report.html").read_text()
    rest = resume(ended.folder)
    assert (rest.summary["rounds"], rest.stopped) == (5, None)
    assert "was stopped before" not in (ended.folder / "report.html").read_text()


def test_a_resumed_run_stops_where_the_whole_one_does(tmp_path: Path) -> None:
    whole = run(experiment(), out=tmp_path / "whole", observers=[EarlyStopping(3, min_delta=STEP)])
    with pytest.raises(Interrupted):
        run(
            experiment(),
            out=tmp_path / "cut",
            observers=[EarlyStopping(3, min_delta=STEP), StopAfter(2)],
        )
    cut = resume(tmp_path / "cut", observers=[EarlyStopping(3, min_delta=STEP)])
    assert (cut.summary["rounds"], cut.stopped) == (whole.summary["rounds"], whole.stopped)
    assert cut.summary["rounds"] == 4
    again = resume(tmp_path / "cut", observers=[EarlyStopping(3, min_delta=STEP)])
    assert (again.summary["rounds"], again.stopped) == (4, whole.stopped)


def test_a_stop_in_the_last_round_is_none(tmp_path: Path) -> None:
    short = experiment(training={"rounds": 2, "batch_size": 256})
    ended = run(short, out=tmp_path / "run", observers=[EarlyStopping(1, min_delta=STEP)])
    assert (ended.summary["rounds"], ended.stopped) == (2, None)


@pytest.mark.parametrize(
    ("rule", "changes", "sentence"),
    [
        ({}, {"partition": {"kind": "iid", "clients": 2}}, "no client has validation samples"),
        ({"metric": "acuracy"}, {}, "no client measures 'acuracy'; did you mean 'accuracy'?"),
        ({"mode": "heads"}, {}, "'heads' is not evaluated"),
        ({"moment": "before"}, {}, "add before to evaluate.when, or watch after_aggregation"),
    ],
)
def test_what_cannot_be_watched_is_named_before_the_folder_is_made(
    tmp_path: Path, rule: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(PotluckError) as caught:
        run(experiment(**changes), out=tmp_path / "run", observers=[EarlyStopping(2, **rule)])
    assert sentence in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_wrong_rules_are_refused_at_once() -> None:
    for wrong in ({"patience": 0}, {"min_delta": -1}, {"split": "valid"}, {"moment": "after"}):
        with pytest.raises(PotluckError, match="EarlyStopping"):
            EarlyStopping(**wrong)  # type: ignore[arg-type]
    for limit in ("2 hours", "", 0, -5, "h"):
        with pytest.raises(PotluckError, match="is not a duration"):
            TimeLimit(limit)


def test_a_time_limit_leaves_out_the_round_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, now = TimeLimit("1m"), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limit.begin("name", "method", 10, 0)
    for round_ in (1, 2):
        now += 20
        limit.round(RoundEnd(round_, 10, None, None, 20.0))
    now += 20
    with pytest.raises(StopRun, match="the time limit of 1m leaves no room for another round"):
        limit.round(RoundEnd(3, 10, None, None, 20.0))


def test_a_run_that_is_out_of_time_plays_one_round(tmp_path: Path) -> None:
    ended = run(experiment(), out=tmp_path / "run", observers=[TimeLimit(1e-9)])
    assert ended.summary["rounds"] == 1
    assert ended.stopped is not None
    assert "time limit" in ended.stopped
