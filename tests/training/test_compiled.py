"""Compiled models: the numbers of plain ones, by a backend of torch.compile that needs no compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from potluck import from_arrays
from potluck.core.model import Model
from potluck.core.rng import Rng
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.engine.settings import COMPILED_FROM, EngineSettings
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.training.compiled import ENTRIES, CompiledModels, is_compiled
from potluck.training.fit import Step, Workspace, run_eagerly, running_with
from potluck.training.plan import Plan


class WithDropout(Model):
    """A small network with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.rep_dim = 8
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 8)
        )
        self.head = nn.Linear(8, 4)

    def features(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


def federation(method: Any, models: Any, side: int = 8) -> Federation:
    draw = Rng(0, ("compiled",)).numpy()
    y = draw.integers(0, 4, 60)
    data = from_arrays(
        (draw.normal(size=(60, 1, side, side)) + y[:, None, None, None]).astype("float32"), y, classes=4
    )
    return Experiment.make(
        data=data,
        partition={"kind": "iid", "clients": 3},
        models=models,
        method=method,
        training={"batch_size": 8},
        engine={"device": "cpu"},
    ).build()


def compiled(workspace: Workspace, step: Step, plan: Plan) -> None:
    """A runner for `fit` with compiled models."""
    holder = step.holder  # type: ignore[attr-defined]
    models = holder.workspaces.setdefault("compiled", CompiledModels(holder, backend="aot_eager"))
    with models.in_use():
        run_eagerly(workspace, step, plan)


def trained(method: Any, models: Any, runner: Callable[..., None]) -> list[Mapping[str, Tensor]]:
    made = federation(method, models)
    rounds = Rounds(made, SerialEngine(made.clients))
    with running_with(runner):
        for number in (1, 2):
            rounds.play(number, made.population.ids)
    records = (rounds.engine.store.peek(client) for client in made.population.ids)  # type: ignore[attr-defined]
    return [record.base for record in records]


@pytest.mark.parametrize(
    ("method", "models"),
    [
        ({"name": "fedmrl", "small": "conv-small", "d1": 8}, ["conv-small", "mlp-small"]),
        ({"name": "fedin", "noise": 0.5}, [{"name": "resnet10", "width": 4}]),
        ({"name": "local"}, [WithDropout()]),
    ],
    ids=["two models", "stem and body, two terms", "batch norm and dropout"],
)
def test_compiled_models_learn_the_same(method: Any, models: Any) -> None:
    plain, fused = (trained(method, models, runner) for runner in (run_eagerly, compiled))
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(dict(other), dict(one))


def test_all_clients_of_an_architecture_share_one_compilation() -> None:
    compilations = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(module)
        return module.forward

    made = federation({"name": "local"}, ["conv-small"])
    for client in made.population.ids:
        live = made.clients.build_client(client)
        x = live.source.take(torch.arange(8)).x
        with CompiledModels(live, backend=backend).in_use():
            live["model"].features(x)
    assert len(compilations) == 1


def test_outside_everything_is_as_it_was() -> None:
    live = federation({"name": "local"}, [WithDropout()]).clients.build_client("0")
    (model,) = live.modules().values()
    with CompiledModels(live, backend="eager").in_use():
        assert is_compiled()
        assert set(ENTRIES) <= vars(model).keys()
    assert not is_compiled()
    assert not set(ENTRIES) & vars(model).keys()


def test_parts_that_are_no_models_stay_as_they_are() -> None:
    live = federation(
        {"name": "fedmrl", "small": "conv-small", "d1": 8}, ["conv-small"]
    ).clients.build_client("0")
    with CompiledModels(live, backend="eager").in_use():
        changed = {name for name, module in live.modules().items() if "forward" in vars(module)}
    assert changed == {name for name, module in live.modules().items() if isinstance(module, Model)}
    assert changed < live.modules().keys()


def test_auto_compiles_for_many_rounds_and_yaml_reads_on_as_true() -> None:
    auto = EngineSettings()
    assert auto.for_rounds(COMPILED_FROM).compile == "on"
    assert auto.for_rounds(COMPILED_FROM - 1).compile == "off"
    assert EngineSettings(compile=True).for_rounds(1).compile == "on"  # type: ignore[arg-type]
    assert EngineSettings(compile=False).for_rounds(10**6).compile == "off"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="compile"):
        EngineSettings(compile="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(("precision", "entries"), [("float32", 0), ("bfloat16", len(ENTRIES))])
def test_kernels_of_our_own_are_not_compiled_away(precision: Any, entries: int) -> None:
    made = federation("local", ["cnn5"], side=16)
    client = made.clients.build_client(made.population.ids[0])
    client.precision = precision
    assert len(CompiledModels(client, backend="eager")._entries) == entries
