"""A metric that fails at run time costs its own value alone, and says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import potluck
from helpers import Listener
from potluck.errors import ConfigError, RunError

SETTINGS: dict[str, Any] = {
    "data": "digits",
    "partition": {"kind": "dirichlet", "alpha": 1.0, "clients": 3, "validation": 0.2},
    "models": ["mlp-small"],
    "method": "local",
    "training": {"rounds": 2},
    "evaluate": {"when": ["after_aggregation"]},
    "engine": {"device": "cpu", "workers": 1},
}


def run(folder: Path, heard: Listener | None = None, **changes: Any) -> potluck.RunResult:
    return potluck.run(**SETTINGS | changes, out=folder, observers=[heard] if heard else [])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def picky(sizes: list[int]) -> Callable[..., float]:
    """A metric that fails for splits of some sizes."""

    def fussy(scores: np.ndarray, labels: np.ndarray) -> float:
        if len(labels) in sizes:
            raise IndexError("no such row")
        return 0.5

    return fussy


@pytest.mark.parametrize("workers", [1, 2])
def test_a_metric_that_fails_for_a_client_is_null_there_and_all_else_stays(
    tmp_path: Path, workers: int
) -> None:
    engine, heard = {"device": "cpu", "workers": workers}, Listener()
    run(tmp_path / "plain", engine=engine)
    plain = lines(tmp_path / "plain")
    sizes = [plain[1]["test"]["samples"], plain[1]["validation"]["samples"]]
    result = run(tmp_path / "run", heard, engine=engine, metrics=[picky(sizes)])
    found = lines(tmp_path / "run")
    assert [line["test"].pop("fussy") for line in found] == [0.5, None, 0.5] * 2
    assert [line["validation"].pop("fussy") for line in found] == [0.5, None, 0.5] * 2
    assert found == plain
    assert heard.notices == [
        "the metric fussy failed for client 1 and is null in the log: IndexError: no such row"
    ]
    assert result.accuracy is not None


def test_a_metric_that_fails_for_every_client_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        run(tmp_path / "run", metrics=[picky([*range(41, 2000)])])
    assert str(error.value) == (
        "the metric fussy fails for every client; for client 0: IndexError: no such row; fix the "
        "metric, or leave it out"
    )


def test_a_value_out_of_the_declared_range_is_said_once(tmp_path: Path) -> None:
    def seven(scores: np.ndarray, labels: np.ndarray) -> float:
        return 7.0

    heard = Listener()
    run(tmp_path / "run", heard, metrics=[seven])
    assert heard.notices == ["the metric seven is 7 for client 0, not from 0 to 1: declare its low and high"]
    heard = Listener()
    run(tmp_path / "wide", heard, metrics=[{"name": seven, "high": 7}])
    assert heard.notices == []


def test_a_judge_that_is_undefined_everywhere_is_not_called_a_lack_of_test_data(tmp_path: Path) -> None:
    def nothing(scores: np.ndarray, labels: np.ndarray) -> None:
        return None

    result = run(tmp_path / "run", metrics=[nothing], evaluate={"judge": "nothing"})
    assert "nothing undefined for every client" in str(result)


def test_moments_and_modes_that_would_measure_nothing_are_refused(tmp_path: Path) -> None:
    for empty in ("when", "modes"):
        with pytest.raises(ConfigError, match=f"evaluate.{empty}: nothing would be measured"):
            run(tmp_path / "run", evaluate={empty: []})


def test_the_name_of_one_mode_or_moment_is_a_list_of_one() -> None:
    experiment = potluck.Experiment.make(**SETTINGS | {"evaluate": {"modes": "head", "when": "before"}})
    assert experiment.evaluate.modes == ("head",)
    assert experiment.evaluate.when == ("before",)
