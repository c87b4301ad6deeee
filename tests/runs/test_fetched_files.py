"""Weights and tokenizers of a run are known by their content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from helpers import TINY, changed_experiment, stopped_run
from potluck.core.task import Task
from potluck.errors import RunError
from potluck.experiment.schema import Experiment
from potluck.files import read_json, write_json
from potluck.models.zoo.efficientnet import EfficientNetLite
from potluck.runs.api import resume, run
from potluck.runs.comparisons.api import compare
from potluck.runs.fetched_files import fetched_files


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of the smallest network that loads some."""
    network = EfficientNetLite(Task("classification", 10, (3, 32, 32)), "efficientnet-lite0", 8, side=32)
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(network.state_dict(), path)
    return path


def change(path: Path) -> None:
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: value + 1 for name, value in tensors.items()}, path)


def experiment(weights: Path, **changes: Any) -> Experiment:
    own = {
        "data": {"samples": 24},
        "models": [{"name": "efficientnet-lite0", "side": 32, "rep_dim": 8, "weights": str(weights)}],
        "training": {"rounds": 2},
        "evaluate": {"every": 2},
        "keep": "none",
        "checkpoint": {"every": 0},
    }
    return changed_experiment(TINY, own | changes)


def test_other_weights_in_the_same_file_are_refused(weights: Path, tmp_path: Path) -> None:
    folder = stopped_run(experiment(weights), tmp_path / "run", 1)
    before, original = (folder / "metrics.jsonl").read_bytes(), weights.read_bytes()
    change(weights)
    with pytest.raises(RunError, match=r"w\.safetensors is not what it was when .*run was begun"):
        resume(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before
    about = read_json(folder / "environment.json")
    assert about.pop("fetched").keys() == {str(weights)}
    weights.write_bytes(original)
    resume(folder)
    write_json(folder / "environment.json", about)  # as the version before wrote it
    resume(folder, rounds=3)


def test_a_comparison_does_not_mix_runs_with_other_weights(weights: Path, tmp_path: Path) -> None:
    one = experiment(weights, method="local", training={"rounds": 1})
    compare(one, methods=["local"], seeds=[0], out=tmp_path / "all", progress=False)
    change(weights)
    with pytest.raises(RunError, match=r"w\.safetensors is not what it was"):
        compare(one, methods=["local"], seeds=[0, 1], out=tmp_path / "all", progress=False)
    assert not (tmp_path / "all" / "local-seed1").exists()


def test_files_folders_and_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    reference = tmp_path / "cache" / "models--some--one" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("0a1b")
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "vocab.txt").write_text("a\nb\n")
    settings = {
        "models": {"pool": [{"weights": "some/one"}, {"weights": "some/other"}]},
        "data": {"tokenizer": str(folder)},
    }
    first = fetched_files(settings)
    assert first.keys() == {"some/one", str(folder)}
    assert first["some/one"] == "0a1b"
    (folder / "notes.md").write_text("nobody loads it")
    assert fetched_files(settings) == first
    (folder / "vocab.txt").rename(folder / "merges.txt")
    assert fetched_files(settings)[str(folder)] != first[str(folder)]


def test_a_run_without_weights_names_none(tmp_path: Path) -> None:
    run(changed_experiment(TINY, {"training": {"rounds": 1}}), out=tmp_path / "run")
    assert read_json(tmp_path / "run" / "environment.json")["fetched"] == {}
