"""The population: facts about clients, and card fields from one table."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.core import card_fields, method
from potluck.core.card_fields import CardField, Own
from potluck.core.method import Clients, Method, client_step
from potluck.core.server import Server
from potluck.deploy.wire import Enrolment, pack_reply, unpack_reply
from potluck.errors import ConfigError, MessageError
from potluck.experiment import Experiment
from potluck.federation.explain import explain
from potluck.federation.federation import Federation
from potluck.models import ModelPool
from potluck.training.fit import fit


class Counting(Method):
    """Local training by clients that say how many parameters they have."""

    card_fields = ("parameters",)

    def round(self, server: Server, clients: Clients) -> None:
        """Train."""
        clients.ask(self.train)

    @client_step
    def train(self, client: Any) -> None:
        """Train."""
        fit(client, self.loss)


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field nobody knew before: one line in the table. The method is registered in these tests alone."""
    monkeypatch.setattr(Counting, "name", "counting")
    monkeypatch.setattr(method, "_registry", {**method._registry, "counting": Counting})
    entry = CardField(
        "how many parameters the model has", lambda own: _size(own), lambda value, task: int(value), "P"
    )
    monkeypatch.setattr(card_fields, "FIELDS", {**card_fields.FIELDS, "parameters": entry})


def _size(own: Own) -> int:
    return sum(value.numel() for value in own.model.parameters())


def federate(**changes: Any) -> Federation:
    settings = {
        "data": {"name": "digits", "samples": 60},
        "partition": {"kind": "iid", "clients": 4},
        "models": ["mlp-small", "conv-small"],
        "method": "local",
        "engine": {"device": "cpu"},
    }
    return Experiment.make(**{**settings, **changes}).build()


@pytest.mark.usefixtures("parameters")
def test_a_new_card_field_costs_one_line() -> None:
    federation = federate(method="counting")
    population = federation.population
    card = population.card("1")
    assert card.parameters == sum(value.numel() for value in population.build_model("1").parameters())
    assert federation.method.symbols(card)["P"] == card.parameters
    assert {"name": "parameters", "meaning": "how many parameters the model has"} in explain(federation)[
        "card"
    ]
    arrived = unpack_reply(pack_reply(Enrolment(card, population.samples("1"))))
    assert isinstance(arrived, Enrolment)
    assert arrived.card == card


def test_an_unknown_field_is_refused_by_name() -> None:
    federation = federate()
    with pytest.raises(ConfigError, match=r"a card has no field 'widht'; .*width"):
        federation.population.fact("widht", "0")
    card = federation.population.card("0")
    with pytest.raises(AttributeError, match="asks for it in card_fields"):
        _ = card.width
    told = Enrolment(type(card)("0", 3, card.task, {"shoe_size": 44}), federation.population.samples("0"))
    with pytest.raises(MessageError, match="no field 'shoe_size'"):
        unpack_reply(pack_reply(told))


def test_a_model_is_looked_at_once_per_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    population = federate().population
    built: list[str] = []
    build = ModelPool.build

    def counted(pool: ModelPool, entry: Any, *args: Any, **options: Any) -> Any:
        built.append(str(entry))
        return build(pool, entry, *args, **options)

    monkeypatch.setattr(ModelPool, "build", counted)
    for client in population.ids:
        assert population.width(client) == population.fact("width", client)
        assert population.names(client)
    assert sorted(built) == ["conv-small", "mlp-small"]


def test_a_cohort_depends_on_seed_and_round_alone() -> None:
    one, other = federate().population, federate(method="fedproto").population
    assert [one.cohort(number, 2) for number in range(1, 9)] == [
        other.cohort(number, 2) for number in range(1, 9)
    ]
    assert len({one.cohort(number, 2) for number in range(1, 9)}) > 1
    assert one.cohort(1) == one.ids
