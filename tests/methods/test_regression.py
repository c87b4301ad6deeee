"""Regression with every method that makes sense for it, and the sentence in which the others refuse it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import potluck
from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.methods.registry import find_method, method_names

TAKEN = {
    "creamfl": {"batch": 20},
    "fedavg": {},
    "fedhenn": {"samples": 20},
    "fedin": {"batch": 4},
    "fedmd": {"samples": 20},
    "fedmrl": {"d1": 16},
    "fedmuscle": {"batch": 20, "peers": 1},
    "fednova": {},
    "fedprox": {},
    "gramian": {"batch": 20, "peers": 1},
    "inclusivefl": {},
    "lg-fedavg": {},
    "local": {},
    "moon": {},
    "pairwise": {"batch": 20, "peers": 1},
    "scaffold": {},
    "simclr": {"batch": 20},
}
ON_IMAGES = {"inco"}  # take numbers, too, but have no layers to share for vectors
REFUSED = sorted(set(method_names()) - set(TAKEN) - ON_IMAGES)


def numbers(outputs: int = 1, rows: int = 90, name: str = "numbers", flat: bool = True) -> Dataset:
    """Linear targets of eight features, far from zero and of unlike scale."""
    draw = Rng(7, (name,)).numpy()
    x = draw.normal(size=(rows, 8)).astype(np.float32)
    y = 50 + 3 * x[:, :outputs] + 0.1 * draw.normal(size=(rows, outputs))
    y = y[:, 0] if outputs == 1 and flat else y
    names = tuple(f"output {number}" for number in range(outputs))
    return Dataset(
        name,
        Task("regression", outputs, (8,)),
        torch.from_numpy(x),
        torch.from_numpy(y.astype(np.float32)),
        rows,
        names,
    )


def settings(method: str, data: Dataset | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "data": data or numbers(),
        "public": {"data": numbers(rows=40, name="public")},
        "partition": {"kind": "iid", "clients": 3},
        "models": ["mlp-small", "mlp-large"],
        "method": {"name": method} | TAKEN.get(method, {}),
        "training": {"rounds": 2, "batch_size": 8, "optimizer": {"name": "adam", "lr": 0.02}},
        "engine": {"device": "cpu"},
    } | changes


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", TAKEN)
def test_methods_that_share_weights_features_or_scores_take_it(method: str, tmp_path: Path) -> None:
    result = potluck.run(**settings(method), out=tmp_path / "run")
    last = [line for line in logged(result.folder) if line["round"] == 2]
    assert last
    for line in last:
        found = line["test"]
        assert list(found) == ["score", "metric", "r2", "mse", "mae", "loss", "samples"]
        assert found["metric"] == "r2"
        assert found["score"] == found["r2"]
        assert found["loss"] == pytest.approx(found["mse"], rel=1e-4)


@pytest.mark.parametrize("method", REFUSED)
def test_methods_of_classes_refuse_it_and_name_those_that_do_not(method: str) -> None:
    with pytest.raises(ConfigError) as error:
        Experiment.make(**settings(method)).build()
    said = str(error.value)
    assert said.startswith(
        f"{method} learns from one class per sample; client 0 has regression with 1 output for"
    )
    alone, _, public = said.rpartition("methods that take it: ")[2].partition("; with public data also ")
    named = [*alone.split(", "), *public.split(", ")]
    assert set(TAKEN) <= set(named)
    assert {"fedmd", "simclr"} <= set(public.split(", "))
    assert "fedmrl" in alone
    assert not set(REFUSED) & set(named)
    assert not find_method(method).takes(numbers().task)


def test_a_task_is_refused_before_public_data_are_asked_for() -> None:
    asked = settings("feddf")
    with pytest.raises(ConfigError, match="feddf learns from one class per sample"):
        Experiment.make(**{key: value for key, value in asked.items() if key != "public"}).build()
    asked = settings("fedmd")
    with pytest.raises(ConfigError, match=r"fedmd needs public data; .* with x of shape \(samples, \d+\)"):
        Experiment.make(**{key: value for key, value in asked.items() if key != "public"}).build()


@pytest.mark.parametrize(("outputs", "flat"), [(1, True), (1, False), (3, False)])
def test_training_alone_learns_a_line(outputs: int, flat: bool, tmp_path: Path) -> None:
    data = numbers(outputs, rows=200, flat=flat)
    training = {"rounds": 4, "epochs": 4, "batch_size": 8, "optimizer": {"name": "adam", "lr": 0.01}}
    result = potluck.run(**settings("local", data, training=training), out=tmp_path / "run")
    first = [line["test"] for line in logged(result.folder) if line["round"] == 1]
    last = [line["test"] for line in logged(result.folder) if line["round"] == 4]
    assert all(now["mse"] < before["mse"] for now, before in zip(last, first, strict=True))


def test_labels_of_a_column_and_of_a_matrix_give_the_same_run(tmp_path: Path) -> None:
    runs = [
        potluck.run(**settings("fedavg", numbers(flat=flat)), out=tmp_path / str(flat))
        for flat in (True, False)
    ]
    flat, column = (logged(run.folder) for run in runs)
    assert flat == column


def test_workers_change_nothing(tmp_path: Path) -> None:
    straight = potluck.run(**settings("fedmrl"), out=tmp_path / "straight")
    shared = potluck.run(
        **settings("fedmrl", engine={"device": "cpu", "workers": 2}), out=tmp_path / "workers"
    )
    assert logged(straight.folder) == logged(shared.folder)
