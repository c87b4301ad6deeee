"""Models of users that cannot be trained, or whose outputs are not those of the task: one sentence before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from potluck import Experiment, from_arrays, run
from potluck.errors import ConfigError, ModelError
from potluck.training.fit import fit
from potluck.training.prefixes import trained_parameters


def net(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def federation(models: list[Any], method: Any, odd: tuple[int, ...] = ()) -> Experiment:
    """Three classes; the labels `odd` are mistakes."""
    x, y = np.linspace(0, 1, 60 * 4, dtype=np.float32).reshape(60, 4), np.arange(60) % 3
    y[: len(odd)] = odd
    data = from_arrays(x, y)
    return Experiment.make(
        data=data,
        public={"data": data},
        partition={"kind": "iid", "clients": 3},
        models=models,
        method=method,
        training={"rounds": 1, "batch_size": 8},
        engine={"device": "cpu"},
    )


@pytest.mark.parametrize("method", ["local", "fedavg", "scaffold", "fedproto", "fedre", "fedmd", "feddf"])
def test_a_frozen_model_is_named_before_anything_runs(method: str) -> None:
    with pytest.raises(ConfigError) as error:
        federation([net(), net().requires_grad_(False)], method).build()
    assert str(error.value).startswith(
        "client 1 (module-1:Sequential): every parameter of its model is frozen, so "
    )


def test_a_frozen_model_may_work_where_the_method_trains_something_else(tmp_path: Path) -> None:
    frozen = net().requires_grad_(False)
    experiment = federation([frozen], {"name": "fedmrl", "d1": 4, "small": {"model": net}})
    run(experiment, out=tmp_path / "run")
    live = experiment.build().clients.build_client("0")
    assert {name.partition("/")[0] for name in trained_parameters(live, None)} == {"small", "projector"}


def test_a_frozen_body_with_a_trained_head_is_enough() -> None:
    probe = net()
    probe[0].requires_grad_(False)
    assert federation([probe], "fedavg").build()


def test_fit_says_so_where_a_method_finds_nothing_to_train() -> None:
    live = federation([net()], "local").build().clients.build_client("0")
    for parameter in live["model"].module.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train: no parameter requires a gradient"):
        fit(live, lambda client, batch: torch.zeros(()))


def test_a_module_with_other_outputs_than_the_task_is_named() -> None:
    with pytest.raises(ModelError) as error:
        federation([net(), net(4)], "local").build()
    assert str(error.value) == (
        "client 1: the head gives 4 scores, the task has 3 classes; change the model's last layer, or give the "
        "model as {model: …, classes: 3} for a new one"
    )
    assert federation([{"model": net(4), "classes": 3}], "local").build()


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ((7,), "; labels 3, 4, 5, 6 of 'arrays' never occur, so if 7 is a mistake, correct it"),
        ((5, 7), "; labels 3, 4, 6 of 'arrays' never occur, so if 5, 7 are mistakes, correct them"),
    ],
)
def test_stray_labels_are_named_where_the_head_has_fewer_outputs(odd: tuple[int, ...], told: str) -> None:
    with pytest.raises(
        ModelError, match=r"^client 0: the head gives 3 scores, the task has 8 classes"
    ) as error:
        federation([net()], "local", odd).build()
    assert str(error.value).endswith(told)
