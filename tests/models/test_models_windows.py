"""Windows of sensors, channels × time: their models, in federations of one modality and of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from potluck import Experiment, from_arrays, run
from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.errors import ConfigError, ModelError
from potluck.models import build, input_kind
from potluck.runs.results.export import exported
from potluck.testing.contract import check_method

WINDOWS = Task("classification", 3, (2, 20))
FEDMUSCLE = {"name": "fedmuscle", "batch": 10, "peers": 1}
NAMES = ("conv1d-small", "gru-small")


def windows(rows: int = 60, name: str = "windows") -> Dataset:
    """Three classes that differ in how fast a channel swings."""
    draw = Rng(3, (name,)).numpy()
    y = np.arange(rows) % 3
    time = np.arange(20) + draw.uniform(0, 9, size=(rows, 1))
    x = np.stack([np.sin(time * (1 + y[:, None]) / 3), draw.normal(size=(rows, 20))], axis=1)
    x = torch.from_numpy(x.astype(np.float32))
    return Dataset(name, WINDOWS, x, torch.from_numpy(y), rows, ("slow", "even", "fast"))


def experiment(method: Any, **changes: Any) -> Experiment:
    settings = {
        "data": windows(),
        "public": {"data": windows(40, "public")},
        "partition": {"kind": "iid", "clients": 2},
        "models": list(NAMES),
        "method": method,
        "training": {"rounds": 2, "batch_size": 8, "optimizer": {"name": "adam", "lr": 0.01}},
        "engine": {"device": "cpu"},
    }
    return Experiment.make(**settings | changes)


def test_two_axes_are_a_window() -> None:
    assert input_kind(WINDOWS) == "window"
    with pytest.raises(ModelError, match=r"conv-small takes images .*models that fit: conv1d-small, gru"):
        build("conv-small", WINDOWS)
    with pytest.raises(ModelError, match="gru-small takes windows of channels × time"):
        build("gru-small", Task("classification", 3, (20,)))


@pytest.mark.parametrize("name", [*NAMES, "mlp-small"])
@pytest.mark.parametrize("shape", [(1, 5), (6, 128)])
def test_they_keep_the_contract_at_any_length_and_width(name: str, shape: tuple[int, int]) -> None:
    model = build(name, Task("regression", 2, shape), rep_dim=24)  # `build` tries it on a batch
    assert (model.rep_dim, model.has_stem) == (24, True)


def test_their_stems_give_the_same_shape() -> None:
    x = torch.zeros(4, *WINDOWS.input)
    assert {tuple(build(name, WINDOWS).stem(x).shape) for name in NAMES} == {(4, 10, 32)}


@pytest.mark.parametrize("name", NAMES)
def test_they_are_exported_for_batches_of_any_size(name: str) -> None:
    model = build(name, WINDOWS).eval()
    program = exported(model, torch.zeros(3, *WINDOWS.input), name).module()
    for x in (torch.rand(size, *WINDOWS.input) for size in (1, 5)):
        torch.testing.assert_close(program(x), model(x))


@pytest.mark.parametrize("method", ["local", {"name": "fedin", "batch": 4}, FEDMUSCLE])
def test_methods_train_them_and_workers_change_nothing(method: Any, tmp_path: Path) -> None:
    one = run(experiment(method), out=tmp_path / "one").folder
    two = run(experiment(method, engine={"device": "cpu", "workers": 2}), out=tmp_path / "two").folder
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()


def test_a_recurrent_network_keeps_the_contract_of_methods() -> None:
    check_method("local", models=[lambda task: _Rows(build("gru-small", Task("classification", 3, (8, 8))))])


class _Rows(torch.nn.Module):
    """Reads an image of the tiny federation as a window: its rows are channels."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.network(x.squeeze(1))
        return scores


def test_clients_with_windows_learn_beside_clients_with_vectors(tmp_path: Path) -> None:
    vectors = from_arrays(windows().x.flatten(1).numpy(), windows().y.numpy(), name="vectors")
    one = {"kind": "iid", "clients": 1}
    mixed = Experiment.make(
        federation=[
            {"data": windows(), "partition": one, "models": "gru-small"},
            {"data": vectors, "partition": one, "models": "mlp-small"},
        ],
        method="local",
        training={"rounds": 1, "batch_size": 8},
        engine={"device": "cpu"},
    )
    folder = run(mixed, out=tmp_path / "run").folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["client"] for line in lines} == {"0", "1"}


def test_public_data_of_another_modality_is_refused() -> None:
    other = from_arrays(np.zeros((30, 40), dtype=np.float32), np.arange(30) % 3, name="flat")
    with pytest.raises(ConfigError) as error:
        experiment(FEDMUSCLE, public={"data": other}).build()
    assert str(error.value) == (
        "fedmuscle: client 0 can read nothing of the public data 'flat', which is not in its modality; choose one "
        "whose samples are numbers of shape 2×20"
    )
