"""For methods whose server builds the clients' models: cards must tell the tensors of those models."""

from __future__ import annotations

from potluck.core.card import ClientId
from potluck.core.contract import Shapes, shapes_of
from potluck.core.population import Population
from potluck.core.state import BufferPolicy, Part
from potluck.errors import Misfits


def require_built_names(population: Population, buffers: BufferPolicy) -> None:
    """Refuse clients whose cards tell other tensors than the models that the server builds for them.

    Where no card tells any, as in a simulation, there is nothing to compare and nothing is built.
    """
    built: dict[tuple[str, int], Shapes] = {}
    wrong: dict[ClientId, str] = {}
    for client in population.representatives:
        facts = population[client]
        told = facts.known("names")
        if told is None:
            continue
        kind = facts.architecture, facts.group
        if kind not in built:
            built[kind] = shapes_of(Part(facts.build_model(), buffers).wire())
        if dict(told) != dict(built[kind]):
            wrong[client] = (
                f"{population.method_name}: the model of client {client} has other tensors than the architecture "
                "that the experiment names for it, of which the server has one too; name that of the site in models"
            )
    if wrong:
        raise Misfits(wrong)
