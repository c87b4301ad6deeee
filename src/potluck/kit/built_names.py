"""For methods whose server builds the clients' models: clients must have the tensors of those models."""

from __future__ import annotations

from potluck.core.card import ClientId
from potluck.core.contract import Shapes, shapes_of
from potluck.core.model import Models
from potluck.core.population import Population
from potluck.core.state import BufferPolicy, Part
from potluck.errors import Misfits


def require_built_names(population: Population, pool: Models, buffers: BufferPolicy) -> None:
    """Refuse clients with other tensors than the models that the server builds for them.

    In a simulation both are of one architecture, so that there is nothing to compare and nothing is built.
    """
    built: dict[tuple[str, int], Shapes] = {}
    wrong: dict[ClientId, str] = {}
    for client in population.representatives:
        facts, named = population[client], population.architecture(client)
        if facts.known("names") is None and named == facts.architecture:
            continue
        kind = named, facts.group
        if kind not in built:
            model = pool.build(named, facts.task, who="the server's model")
            built[kind] = shapes_of(Part(model, buffers).wire())
        if dict(population.names(client)) != dict(built[kind]):
            wrong[client] = (
                f"{population.method_name}: the model of client {client} has other tensors than the architecture "
                "that the experiment names for it, of which the server has one too; name that of the site in "
                "models, or bring the one that is named"
            )
    if wrong:
        raise Misfits(wrong)
