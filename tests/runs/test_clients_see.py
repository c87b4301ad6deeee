"""Trained models predict on what their clients see, here and in another process: shifts, standardised columns."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import potluck
from own_nets import Other
from potluck.core.rng import Rng
from potluck.data import Split
from potluck.errors import ConfigError, DataError

TRAINING = {"rounds": 2, "batch_size": 32, "optimizer": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("shift", "values"), [("rotation", [0, 90, 180]), ("blur", [0.0, 1.0, 2.0]), ("noise", [0.3])]
)
def test_a_client_with_a_feature_shift(tmp_path: Path, shift: str, values: list[float]) -> None:
    partition = {"kind": "feature_shift", "shift": shift, "values": values, "clients": 3}
    asked = potluck.Experiment.make(
        data={"name": "digits", "samples": 300},
        partition=partition,
        models=["mlp-small"],
        method="local",
        training=TRAINING,
    )
    result = potluck.run(asked, out=tmp_path / "run")
    data, split = asked.load_data(), Split.load(tmp_path / "run" / "split.json")
    assert isinstance(data, potluck.Dataset)
    for found in (result, potluck.open(tmp_path / "run")):
        assert isinstance(found, potluck.RunResult)
        for client, accuracy in result.summary["accuracy"]["per_client"].items():
            rows = split[client].test
            scores = found.clients[client].predict(data.x[rows])
            right = scores.argmax(1) == data.y[rows]
            torch.testing.assert_close(found.clients[client].predict(data.x[rows[3:5]]), scores[3:5])
            assert round(right.double().mean().item(), 6) == accuracy


def test_a_client_that_standardises_its_columns(tmp_path: Path) -> None:
    draw = Rng(3).numpy()
    frames = {name: _hospital(draw, offset) for name, offset in (("north", 0.0), ("south", 50.0))}
    data = potluck.from_frame(frames, target="stay", task="regression")
    training = {"rounds": 3, "batch_size": 8, "optimizer": {"lr": 0.02}}
    asked = potluck.Experiment.make(data=data, models=["mlp-small"], method="local", training=training)
    result = potluck.run(asked, out=tmp_path / "run")
    split = Split.load(tmp_path / "run" / "split.json")
    for found in (result, potluck.open(tmp_path / "run")):
        assert isinstance(found, potluck.RunResult)
        for client in frames:
            rows = split[client].test
            predicted = found.clients[client].predict(data.x[rows]).flatten()
            error = (predicted - data.y[rows].flatten()).square().mean().item()
            assert found.clients[client].scores["mse"] == pytest.approx(error, rel=1e-4)


def _hospital(draw: np.random.Generator, offset: float) -> pd.DataFrame:
    age, weight = draw.normal(offset, 1 + offset, 60), draw.normal(0, 1, 60)
    stay = (age - offset) / (1 + offset) + 0.1 * weight
    return pd.DataFrame({"age": age, "weight": weight, "stay": stay})


class AnswersLogits(nn.Module):
    """Answers as the classifiers of Hugging Face's transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.classifier(self.encoder(x)))


def test_a_module_that_answers_with_logits_keeps_its_names(tmp_path: Path) -> None:
    result = potluck.run(
        data={"name": "digits", "samples": 200},
        partition={"kind": "iid", "clients": 2},
        models=[AnswersLogits, Other],
        method={"name": "fedmrl", "d1": 8},
        training=TRAINING,
        out=tmp_path / "run",
    )
    names = (
        set(result.clients["0"].state_dict(mode="large")) if "large" in result.clients["0"].modes else set()
    )
    fused = set(result.clients["0"].state_dict())
    assert {"model.encoder.1.weight", "model.classifier.weight"} <= fused
    assert not [name for name in names | fused if "trunk" in name]
    local = potluck.run(
        data={"name": "digits", "samples": 200},
        partition={"kind": "iid", "clients": 2},
        models=[AnswersLogits],
        method="local",
        training=TRAINING,
        out=tmp_path / "local",
    )
    state = local.clients["1"].state_dict()
    assert set(state) == set(AnswersLogits().state_dict())
    own = AnswersLogits()
    own.load_state_dict(state)
    x = torch.ones(3, 1, 8, 8)
    seen, scores = local.clients["1"].prepare(x), local.clients["1"].predict(x)
    assert torch.equal(own(seen).logits, scores)
    module = local.clients["1"].model()
    assert isinstance(module, AnswersLogits)
    module.load_state_dict(state)
    assert torch.equal(module(seen), scores)
    torch.testing.assert_close(local.clients["1"].export().module()(seen), scores)


def test_ids_that_a_client_does_not_know_are_refused(tmp_path: Path) -> None:
    draw = Rng(0).numpy()
    data = potluck.from_arrays(draw.integers(0, 30, (80, 6)), draw.integers(0, 2, 80), vocabulary=30)
    result = potluck.run(
        data=data, partition={"kind": "iid", "clients": 2}, models=["text-mean"], method="local",
        training={"rounds": 1}, out=tmp_path / "run",
    )  # fmt: skip
    client = result.clients["0"]
    known = client.task.vocabulary or 0
    for wrong in (known, -1):
        with pytest.raises(DataError, match=f"client 0 knows the token ids 0 to {known - 1}, not {wrong}"):
            client.predict(np.full((2, *client.task.input), wrong))


def test_a_comparison_is_opened_as_one(tmp_path: Path) -> None:
    found = potluck.compare(
        data={"name": "digits", "samples": 200},
        partition={"kind": "iid", "clients": 2},
        models=["mlp-small"],
        method="fedavg",
        training={"rounds": 1},
        out=tmp_path / "both",
    )
    again = potluck.open(tmp_path / "both")
    assert isinstance(again, potluck.Comparison)
    assert again.frame().equals(found.frame())
    assert json.loads((tmp_path / "both" / "comparison.json").read_text())["methods"]
    with pytest.raises(
        ConfigError, match="'Net', which is neither a client nor a class of any of these runs"
    ):
        potluck.open(tmp_path / "both", models={"Net": Other})
