"""The direction and range of a metric come with its run: no other run in the process changes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import potluck
from potluck.core.metrics import MetricFacts
from potluck.engine.evaluation.examined import Examined
from potluck.errors import ConfigError

X = np.random.default_rng(0).normal(size=(240, 8)).astype(np.float32)
NUMBERS = potluck.from_arrays(X, X[:, 0] * 3 + X[:, 1], task="regression", name="numbers")
CLASSES = potluck.from_arrays(X, (X[:, 0] > 0).astype(int), name="classes")
SPLIT = {"kind": "iid", "clients": 2, "validation": 0.2}


def run(folder: Path, **changes: Any) -> potluck.RunResult:
    settings: dict[str, Any] = {
        "data": NUMBERS,
        "partition": SPLIT,
        "models": ["mlp-small"],
        "method": "local",
        "training": {"rounds": 3},
        "engine": {"device": "cpu", "workers": 1},
    }
    return potluck.run(**settings | changes, out=folder)


def test_an_own_metric_of_one_run_does_not_turn_round_another_run(tmp_path: Path) -> None:
    def mse(scores: np.ndarray, labels: np.ndarray) -> float:
        return float(((scores.argmax(1) - labels) ** 2).mean())

    judged = {"evaluate": {"judge": "mse"}, "keep": "best"}
    before = run(tmp_path / "before", **judged)
    share = run(tmp_path / "between", data=CLASSES, metrics=[mse], evaluate={"judge": "mse"})
    after = run(tmp_path / "after", **judged)
    assert after.summary["accuracy"] == before.summary["accuracy"]
    assert after.summary["accuracy"]["rounds"]["best_by_validation"] == 3
    assert [one.name for one in (tmp_path / "after" / "models").iterdir()] == ["round-000003"]
    assert share.summary["accuracy"]["metric_facts"]["mse"] == {
        "higher_is_better": True,
        "low": 0.0,
        "high": 1.0,
    }
    assert "%" in str(share)
    assert "%" not in str(after)


def test_an_early_stop_goes_by_the_facts_of_its_own_run(tmp_path: Path) -> None:
    calls = iter(range(1000))

    @potluck.metric(higher_is_better=False, low=0, high=float("inf"))
    def falling(scores: np.ndarray, labels: np.ndarray) -> float:
        return 100.0 - next(calls)

    rule = potluck.EarlyStopping(patience=1, metric="falling")
    result = run(tmp_path / "run", metrics=[falling], observers=[rule])
    assert result.stopped is None
    assert result.summary["rounds"] == 3


def test_an_evaluation_knows_the_facts_of_what_it_measured() -> None:
    part = {"score": 2.0, "metric": "cost", "cost": 2.0, "mse": 1.0}
    own = {"cost": MetricFacts("cost", higher_is_better=False)}
    found = Examined(1, "after_aggregation", ({"client": "0", "mode": "head", "test": part},), own=own)
    assert found.facts() == own["cost"]
    assert not found.facts("mse").higher_is_better
    assert found.facts("mse").high == float("inf")


@pytest.mark.parametrize("judge", ["mse", "loss", None])
def test_clients_judged_by_metrics_of_both_directions_are_refused(tmp_path: Path, judge: str | None) -> None:
    groups = [{"data": data, "partition": SPLIT, "models": ["mlp-small"]} for data in (NUMBERS, CLASSES)]
    settings = {
        "federation": groups,
        "method": "local",
        "training": {"rounds": 1},
        "evaluate": {"judge": judge},
        "engine": {"device": "cpu", "workers": 1},
    }
    if judge != "mse":
        potluck.run(**settings, out=tmp_path / "run")
        return
    sentence = (
        "client 0 would be judged by mse, where lower is better, and client 2 by accuracy, where higher is"
    )
    with pytest.raises(ConfigError, match=sentence):
        potluck.run(**settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
