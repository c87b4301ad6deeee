"""The wire contract at the server's side: whatever a client sends, the round goes on with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Method, _registry, client_step
from potluck.core.model import Model
from potluck.core.server import Server
from potluck.core.state import Moments
from potluck.core.task import Batch, Task
from potluck.engine.protocol import Answer, Engine, Outcome, Request
from potluck.testing.bench import Bench
from potluck.testing.contract import ALL
from potluck.testing.faulty_engines import Wrapped
from potluck.training.fit import fit


class Tampering(Wrapped):
    """Changes what one client sends."""

    def __init__(self, inner: Engine, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        super().__init__(inner)
        self.change = change

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = self.inner.run(requests)
        return [
            replace(one, up=Message(self.change(dict(one.up))))
            if isinstance(one, Answer) and one.client == "1"
            else one
            for one in outcomes
        ]


def _set(**tensors: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda up: {name: value for name, value in (up | tensors).items() if value is not None}


PROTOTYPES = torch.zeros(3, 64)
OUTSIDE = "has other numbers than"
TAMPERED = [
    (_set(prototypes=PROTOTYPES * torch.nan), "tensor 'prototypes' is not finite"),
    (_set(prototypes=PROTOTYPES + torch.inf), "tensor 'prototypes' is not finite"),
    (_set(prototypes=torch.zeros(3, 63)), r"tensor 'prototypes' has shape \(3, 63\)"),
    (_set(prototypes=torch.zeros(4, 64)), r"tensor 'prototypes' has shape \(4, 64\)"),
    (_set(prototypes=PROTOTYPES.double()), "tensor 'prototypes' has type torch.float64"),
    (_set(prototypes=None), "tensor 'prototypes' is missing"),
    (_set(diary=torch.zeros(2)), "tensor 'diary' is not declared"),
    (_set(classes=torch.tensor([0, 1, 99])), f"'classes' {OUTSIDE} whole numbers from 0 to 2"),
    (_set(classes=torch.tensor([0, 1, -1])), f"'classes' {OUTSIDE} whole numbers from 0 to 2"),
    (_set(classes=torch.tensor([0, 1, 1])), f"'classes' {OUTSIDE} whole numbers from 0 to 2, each once"),
    (_set(counts=torch.tensor([1.0, -1.0, 1.0])), f"'counts' {OUTSIDE} whole numbers from 0 to"),
    (_set(counts=torch.tensor([1.0, 0.5, 1.0])), f"'counts' {OUTSIDE} whole numbers from 0 to"),
    (_set(counts=torch.full((3,), 1e6)), f"'counts' {OUTSIDE} whole numbers from 0 to"),
    # types no arithmetic is defined for
    (_set(prototypes=PROTOTYPES.to(torch.float8_e4m3fn)), "has type torch.float8_e4m3fn"),
    (_set(diary=torch.zeros(2).to(torch.float8_e5m2)), "tensor 'diary' is not declared"),
    (_set(classes=torch.tensor([True, True, False])), "tensor 'classes' has type torch.bool"),
    (_set(classes=torch.arange(3).to(torch.uint64)), "tensor 'classes' has type torch.uint64"),
    (_set(classes=torch.arange(3).to(torch.complex64)), "tensor 'classes' has type torch.complex64"),
    (_set(prototypes=PROTOTYPES.to_sparse()), "tensor 'prototypes' is no plain tensor"),
    (_set(prototypes=PROTOTYPES.to("meta")), "tensor 'prototypes' is no plain tensor"),
    (_set(prototypes=torch.zeros(0, 64)), r"tensor 'prototypes' has shape \(0, 64\)"),
    (_set(prototypes=torch.zeros(0, 1 << 40)), r"tensor 'prototypes' has shape \(0, 1099511627776\)"),
]


@pytest.mark.parametrize(("change", "sentence"), TAMPERED, ids=[sentence for _, sentence in TAMPERED])
def test_a_broken_message_is_refused_and_named(change: Any, sentence: str) -> None:
    bench = Bench("fedproto")
    played = bench.play([ALL], wrap=lambda engine: Tampering(engine, change))
    assert list(played.cohorts[0].failures) == ["1"]
    assert played.cohorts[0].failures["1"].startswith("client 1, step train: ")
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(played.cohorts[0].failures["1"])
    assert played.client("1") is None, "the refused client is as it was"
    absent = bench.play([("0", "2", "3")])
    assert torch.equal(
        played.rounds.server["prototypes"]["prototypes"], absent.rounds.server["prototypes"]["prototypes"]
    )


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_group_has_the_type_of_its_part(kind: torch.dtype) -> None:
    def change(up: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(kind) for name, value in up.items()}

    played = Bench("fedavg", models=["mlp-small"]).play([ALL], wrap=lambda engine: Tampering(engine, change))
    assert list(played.cohorts[0].failures) == ["1"]
    assert f"has type {kind}, declared torch.float32" in played.cohorts[0].failures["1"]


def test_whatever_an_answer_does_to_its_checks_is_a_failure_of_that_client_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_arithmetic(message: Message, *others: Any) -> None:
        if float(message["counts"].sum()) == 0:
            raise NotImplementedError("no arithmetic for this")

    monkeypatch.setattr("potluck.engine.acceptance.excess", no_arithmetic)
    played = Bench("fedproto").play([ALL], wrap=lambda engine: Tampering(engine, _set(counts=torch.zeros(3))))
    assert list(played.cohorts[0].failures) == ["1"]
    assert "cannot be checked (NotImplementedError: no arithmetic" in played.cohorts[0].failures["1"]


class Careless(Method):
    """Returns live tensors, and keeps an optimiser for the round."""

    stays = ("data",)
    seen: dict[str, Any] = {}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        return {"model": model, "moments": Moments("round")}

    def round(self, server: Server, clients: Clients) -> None:
        clients.ask(self.look, only=clients.ids[:1])
        type(self).seen["replies"] = clients.ask(self.train)

    @client_step
    def look(self, client: Client) -> Content | None:
        return None

    @client_step(up={"model": state_of("model", "the live tensors themselves")})
    def train(self, client: Client) -> Content:
        moved = [name for name, value in client["moments"].content.items() if value.any()]
        type(self).seen.setdefault(client.id, []).append(moved)
        fit(client, self.loss, moments=client["moments"].content)
        return {"model": dict(client["model"].wire())}

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return client.task.loss(client["model"](batch.x), batch.y)


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(Careless, "name", "careless")
    monkeypatch.setattr(Careless, "seen", {})
    monkeypatch.setitem(_registry, "careless", Careless)
    return Bench({"name": "careless"}, models=["mlp-small"])


def test_replies_do_not_share_memory_with_the_client(careless: Bench) -> None:
    careless.play([ALL])
    replies = Careless.seen["replies"]
    name = next(iter(replies["0"]))
    assert not torch.equal(replies["0"][name], replies["1"][name])


def test_moments_of_a_round_are_forgotten_whenever_a_client_enters_it(careless: Bench) -> None:
    careless.play([ALL, ALL])
    assert Careless.seen["0"] == Careless.seen["3"] == [[], []]
