"""What each variant is paired with: Local with the same training settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import potluck
from potluck.experiment.schema import Experiment
from potluck.runs.comparisons.plan import changed, read_sweep
from potluck.runs.comparisons.references import alone, references, training_settings, with_locals

FILE = """\
name: rates
data: {name: digits, samples: 120}
partition: {kind: iid, clients: 2}
models: mlp-small
method: fedavg
training: {rounds: 1, batch_size: 32}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rates.yaml"
    path.write_text(FILE)
    return path


def test_every_learning_rate_has_a_local_of_its_own(file: Path) -> None:
    made = read_sweep(file, variants={"training.optimizer.lr": [0.5, 0.01]}).experiments[""]
    assert list(made) == ["local,lr=0.5", "local,lr=0.01", "lr=0.5", "lr=0.01"]
    assert references(made) == {"lr=0.5": "local,lr=0.5", "lr=0.01": "local,lr=0.01"}
    for label, partner in references(made).items():
        assert made[partner].method.name == "local"
        assert made[partner].training == made[label].training


def test_one_local_serves_all_variants_that_train_alike(file: Path) -> None:
    blocks = {
        "fedavg": {"method": "fedavg"},
        "fedprox": {"method": "fedprox", "engine.workers": 1, "checkpoint.every": "1h"},
        "fast": {"training.optimizer.lr": 0.5},
        "alone": {"method": "local", "training.optimizer.lr": 0.5},
    }
    made = read_sweep(file, variants=blocks).experiments[""]
    assert list(made) == ["local", *blocks]
    assert references(made) == {"fedavg": "local", "fedprox": "local", "fast": "alone"}


def test_two_changes_with_one_name_have_two_locals(file: Path) -> None:
    base = Experiment.load(file)
    made = {
        "a": changed(base, [{"training.per_client": {"0": {"lr": 0.5}}}]),
        "b": changed(base, [{"training.per_client": {"1": {"lr": 0.5}}}]),
    }
    found = with_locals(made)
    assert len(found) == 4
    assert len({json.dumps(training_settings(found[one])) for one in references(found).values()}) == 2
    assert with_locals(found) == found


def test_local_is_measured_in_its_own_mode(file: Path) -> None:
    made = read_sweep(file, ["local", "fedproto"], ["evaluate.modes=[head]"]).experiments[""]
    assert made["fedproto"].evaluate.modes == ("head",)
    assert made["local"].evaluate.modes == alone(made["fedproto"]).evaluate.modes == "first"


def test_differences_are_those_to_the_local_of_the_same_settings(file: Path, tmp_path: Path) -> None:
    found = potluck.compare(file, variants={"training.optimizer.lr": [0.5, 0.01]}, out=tmp_path / "all")
    assert isinstance(found, potluck.Comparison)
    frame = found.frame()
    last = frame[frame["moment"] == "after_aggregation"].set_index(["method", "client"])["accuracy"]
    for entry in found.comparison["methods"]:
        if entry["method"].startswith("local"):
            assert entry["difference"] is entry["against"] is None
            continue
        assert entry["against"] == f"local,{entry['method']}"
        mean = float((last[entry["method"]] - last[entry["against"]]).mean())
        assert entry["difference"]["mean"] == pytest.approx(mean, abs=1e-6)
    shown = repr(found)
    assert "Local, lr=0.5" in shown
    assert "Local with the same training settings" in shown
    own = frame[(frame["method"] == "lr=0.5") & (frame["moment"] == "after_training")]
    told = found.summary().set_index(["method", "moment"])["difference"]
    assert own["difference"].mean() == pytest.approx(told["lr=0.5", "after_training"], abs=1e-6)


def test_a_local_is_named_after_what_it_trains_with_other_than_the_experiment(file: Path) -> None:
    variants = {
        "fedproto": {"method": "fedproto"},
        "long": {"training.epochs": 2},
        "large": {"training.batch_size": 64, "training.participation": 0.5},
        "one": {"training.per_client": {"1": {"lr": 0.01}}},
        "same": {"training.batch_size": 32, "training.epochs": 3},
    }
    assert {*read_sweep(file, variants=variants).experiments[""]} - {*variants} == {
        "local",
        "local,epochs=2",
        "local,batch_size=64,participation=0.5",
        "local,per_client.1.lr=0.01",
        "local,epochs=3",
    }


def test_the_settings_that_are_shown_are_those_of_the_experiment_as_written(
    file: Path, tmp_path: Path
) -> None:
    variants = {
        "fedproto": {"method": "fedproto"},
        "slow": {"method": "fedproto", "training.optimizer.lr": 0.001},
    }
    asked: dict[str, Any] = {"variants": variants, "overrides": ["training.optimizer.lr=0.1"]}
    potluck.compare(file, out=tmp_path / "one", **asked)
    potluck.compare(file, out=tmp_path / "sweep", sweep={"partition.clients": [2]}, **asked)
    for folder in (tmp_path / "one", tmp_path / "sweep" / "clients=2"):
        settings = yaml.safe_load((folder / "experiment.yaml").read_text())
        assert settings["method"]["name"] == "fedavg"
        assert settings["training"]["optimizer"]["lr"] == 0.1
        assert "name: fedavg" in (folder / "comparison.html").read_text()
    assert "name: fedavg" in (tmp_path / "sweep" / "sweep.html").read_text()
