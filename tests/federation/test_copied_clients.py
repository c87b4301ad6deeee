"""Further live clients of a kind are copies of the first, unless a model holds more than data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from potluck.core.task import Task
from potluck.engine.rounds import Rounds
from potluck.engine.seats import KindSeats
from potluck.engine.serial import SerialEngine
from potluck.experiment.schema import Experiment
from potluck.federation.builder import ClientBuilder
from potluck.federation.federation import Federation


class Hooked(nn.Module):
    """Its hook calls into the module it was made for: a copy would call into the other one."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 8), nn.Linear(8, classes)
        self.first.register_forward_hook(lambda module, given, made: made + self.head.weight.mean())

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        made: Tensor = self.head(self.first(x.flatten(1)))
        return made


def hooked(task: Task) -> nn.Module:
    return Hooked(task.classes)


def federate(model: Any, method: str = "fedavg") -> Federation:
    return Experiment.make(
        data="digits",
        partition={"kind": "iid", "clients": 3},
        models=[model],
        method=method,
        training={"rounds": 1, "batch_size": 64},
    ).build()


@pytest.mark.parametrize("model", ["conv-small", "resnet10", hooked])
def test_a_copy_is_a_client_of_its_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = federate(model)
    first = place.clients.build_client("0")
    built: list[str] = []
    build = place.clients.build_client
    monkeypatch.setattr(place.clients, "build_client", lambda client: built.append(client) or build(client))
    copied = place.clients.copied_client("1", first)
    assert built == (["1"] if model is hooked else []), "what holds a function is built, the rest is not"
    assert copied.id == "1"
    assert copied.layout == first.layout
    assert not copied.misplaced()
    x = torch.randn(4, *place.population.task.input)
    with torch.no_grad():
        before = first["model"].eval()(x)
        copied.restore({name: torch.full_like(value, 3) for name, value in copied.snapshot().items()})
        assert torch.equal(before, first["model"](x))
        assert not torch.equal(before, copied["model"].eval()(x))


def test_a_client_that_is_built_tells_the_state_it_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The serial engine builds one client of a kind, not a second one for the initial state."""
    built: list[str] = []
    build = ClientBuilder.build_client
    monkeypatch.setattr(
        ClientBuilder, "build_client", lambda self, client: built.append(client) or build(self, client)
    )
    place = federate("mlp-small", "local")
    built.clear()
    engine = SerialEngine(place.clients)
    Rounds(place, engine).play(1, place.population.ids)
    assert built == ["0"]
    seats = KindSeats(place.clients)
    found = [seats.sit(client, None).snapshot() for client in ("0", "1")]
    expected = build(place.clients, "1").snapshot()
    assert all(torch.equal(one[name], expected[name]) for one in found for name in expected)
