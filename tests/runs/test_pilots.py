"""An option left open is chosen by short runs, once, and the run says how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import potluck
from helpers import Listener, StopAfter
from potluck.core.open_options import TuneSettings
from potluck.errors import ConfigError, RoundFailed, RunError
from potluck.experiment.schema import Experiment
from potluck.runs import pilots as tuning
from potluck.runs.comparisons.plan import experiments_by_method
from potluck.runs.comparisons.play import compare_experiments
from potluck.runs.loop import Interrupted
from potluck.runs.observers import Observer

FILE = """\
name: open
data: digits
partition: {kind: iid, clients: 2, validation: 0.2}
models: [mlp-small]
method: {name: fedmrl, d1: auto, tune: {candidates: [2, 8], rounds: 1, tolerance: 0.9}}
training: {rounds: 2, batch_size: 256}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "open.yaml"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("reached", "tolerance", "chosen"),
    [
        ([0.5, 0.7, 0.8], 0.0, 3),
        ([0.5, 0.7, 0.8], 0.1, 2),
        ([0.8, 0.7, 0.8], 0.0, 1),
        ([0.1, 0.2, 0.3], 0.5, 1),
    ],
)
def test_the_smallest_within_the_tolerance_is_chosen(
    reached: list[float], tolerance: float, chosen: int
) -> None:
    curve = [{"value": value, "validation": accuracy} for value, accuracy in enumerate(reached, 1)]
    assert tuning.choose(curve, tolerance) == chosen


def test_default_candidates_end_at_the_largest() -> None:
    settings = TuneSettings()
    assert settings.values(500) == (62, 125, 250, 500)
    assert settings.values(3) == (1, 3)
    assert TuneSettings(candidates=(4, 9)).values(500) == (4, 9)


def test_a_run_keeps_the_choice_and_its_curve(file: Path, tmp_path: Path) -> None:
    heard = Listener()
    result = potluck.run(Experiment.load(file), out=tmp_path / "run", watcher=heard)
    choice = json.loads((result.folder / "tuning.json").read_text())
    assert (choice["option"], choice["chosen"], choice["rounds"], choice["tolerance"]) == ("d1", 2, 1, 0.9)
    assert [point["value"] for point in choice["curve"]] == [2, 8]
    narrow, wide = choice["curve"]
    assert 0 <= narrow["validation"] <= 1
    assert narrow["bytes"] < wide["bytes"]
    assert wide["scalars"] - narrow["scalars"] == 2 * 6 * (128 + 1 + 10)
    assert heard.notices[-1] == "d1 = 2 is chosen"
    assert yaml.safe_load((result.folder / "config.yaml").read_text())["method"]["d1"] == 2
    assert not (result.folder / "pilots").exists()
    page = (result.folder / "report.html").read_text()
    assert "How d1 was chosen" in page
    assert "d1 = 8" in page
    assert result.summary["messages"]["up"]["scalars"] * 2 == narrow["scalars"]


def test_the_run_is_the_one_with_that_number_from_the_start(file: Path, tmp_path: Path) -> None:
    chosen = potluck.run(Experiment.load(file), out=tmp_path / "auto")
    fixed = Experiment.load(file, ["method={name: fedmrl, d1: 2}"])
    given = potluck.run(fixed, out=tmp_path / "given")
    for log in ("metrics.jsonl", "ledger.jsonl"):
        assert (chosen.folder / log).read_bytes() == (given.folder / log).read_bytes()
    assert not (given.folder / "tuning.json").exists()


def test_a_resumed_or_repeated_run_does_not_choose_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiments = experiments_by_method(file, ["local", "fedmrl"])
    with pytest.raises(Interrupted):
        compare_experiments(
            experiments,
            [0],
            tmp_path / "all",
            lambda label: StopAfter(1) if label == "fedmrl" else Observer(),
        )

    def never(*args: Any) -> None:
        raise AssertionError("chosen again")

    monkeypatch.setattr(tuning, "tune", never)
    compare_experiments(experiments, [0], tmp_path / "all")
    compare_experiments(experiments, [0], tmp_path / "all")
    other = experiments_by_method(file, ["local", "fedmrl"], ["fedmrl.tune.rounds=3"])
    with pytest.raises(RunError, match=r"method\.tune\.rounds: 1 there, 3 here"):
        compare_experiments(other, [0], tmp_path / "all")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunError("the disk is full")])
def test_what_stops_the_choice_leaves_no_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(experiment: Any, option: Any, play: Any, tell: Any) -> Any:
        play(tuning.with_option(experiment, option.name, option.candidates[0]))
        raise error

    monkeypatch.setattr(tuning, "tune", broken)
    with pytest.raises(type(error)):
        potluck.run(Experiment.load(file), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("partition.validation=0", "auto chooses by validation accuracy, and no client has validation rows"),
        ("method.tune.candidates=[8, 2]", r"method\.tune\.candidates: the widths must grow"),
        ("method.tune.candidates=[8, 2000]", "tune.candidates is 2000, but client 0"),
        ("method.tune.rounds=0", r"method\.tune\.rounds"),
    ],
)
def test_bad_input(file: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Experiment.load(file, [override]).build()


def test_a_pilot_is_measured_at_its_end_with_the_new_common_model(file: Path) -> None:
    experiment = Experiment.load(file, ["evaluate.when=[after_training]", "evaluate.who=sampled"])
    federation = experiment.build()
    option = federation.method.open_option(federation.population)
    assert option is not None
    pilot = tuning._pilot(experiment, option, 2)
    assert pilot.method.d1 == 2  # type: ignore[attr-defined]
    assert (pilot.training.rounds, pilot.evaluate.every) == (1, 1)
    assert (pilot.evaluate.when, pilot.evaluate.who) == (("after_aggregation",), "all")


def test_a_width_that_would_be_tried_as_d1_is_refused_before_the_first_pilot(
    file: Path, tmp_path: Path
) -> None:
    chosen = Experiment.load(file, ["method.widths=[2, 4]"])
    with pytest.raises(ConfigError, match="widths has 2, which auto tries as d1; leave it out"):
        potluck.run(chosen, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    chosen = Experiment.load(file, ["method.widths=[4, 8]", "method.tune.candidates=[]"])
    with pytest.raises(ConfigError, match="widths has 8, which auto tries as d1"):
        chosen.build()


def test_a_pilot_that_fails_points_to_no_folder(file: Path, tmp_path: Path) -> None:
    chosen = Experiment.load(file, ["training.optimizer.lr=1e30", "method.clip=null"])
    with pytest.raises(RoundFailed, match=r"not finite.*\(while d1 was chosen\)") as caught:
        potluck.run(chosen, out=tmp_path / "run")
    assert "resume" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_pilots_are_judged_by_the_way_to_predict_that_is_reported(file: Path) -> None:
    def modes(*overrides: str) -> Any:
        chosen = Experiment.load(file, overrides)
        option = chosen.build().method.open_option(chosen.build().population)
        assert option is not None
        return tuning._pilot(chosen, option, 2).evaluate.modes

    assert modes() == modes("evaluate.modes=all") == "first"
    assert modes("evaluate.modes=[mix-small, mix-large]") == ("mix-small",)
