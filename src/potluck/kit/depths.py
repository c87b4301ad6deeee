"""Models of one family cut at different depths: their stacks of layers, and which layer stands in which's place.

A stack is what numbers its layers: `layers.3.norm1.weight` is in layer 3 of the stack `layers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import NamedTuple

from potluck.core.card import ClientId
from potluck.core.contract import Shapes
from potluck.core.population import Population
from potluck.errors import ConfigError
from potluck.kit.requirements import named

_NUMBERED = re.compile(r"(.+?)\.(0|[1-9][0-9]*)\.(.+)")


class Place(NamedTuple):
    """Where a tensor is: its stack, the number of its layer from 0, its name in the layer."""

    stack: str
    layer: int
    rest: str


def place_of(name: str) -> Place | None:
    """Where a tensor is; None outside of stacks.

    >>> place_of("layer2.0.downsample.1.weight")
    Place(stack='layer2', layer=0, rest='downsample.1.weight')
    """
    match = _NUMBERED.fullmatch(name)
    return Place(match[1], int(match[2]), match[3]) if match else None


def stack_depths(names: Shapes) -> dict[str, int]:
    """How many layers each stack of a model has."""
    depths: dict[str, int] = {}
    for name in names:
        if place := place_of(name):
            depths[place.stack] = max(depths.get(place.stack, 0), place.layer + 1)
    return depths


def last_layers(names: Shapes, deepest: Shapes, every_stack: bool) -> set[str]:
    """The tensors in the last layer of the last stack that is shorter than the deepest model's, or of each."""
    own, most = stack_depths(names), stack_depths(deepest)
    short = {stack: depth - 1 for stack, depth in own.items() if depth < most.get(stack, 0)}
    last = short if every_stack else dict(list(short.items())[-1:])
    return {name for name in names if (place := place_of(name)) and last.get(place.stack) == place.layer}


def in_their_place(last: Collection[str], names: Shapes, larger: Shapes) -> dict[str, list[str]]:
    """For each tensor of a last layer those like it in the layers that a larger model has from there on.

    Only names that are there are looked at: the number of a layer is whatever a card says.
    """
    alike: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in larger:
        if place := place_of(name):
            alike.setdefault((place.stack, place.rest), []).append((place.layer, name))
    found: dict[str, list[str]] = {}
    for name in last:
        place = place_of(name)
        others = sorted(alike.get((place.stack, place.rest), ())) if place else []
        deeper = [other for layer, other in others if place and layer >= place.layer]
        found[name] = [other for other in deeper if larger[other] == names[name]]
    return found


def depths_of(population: Population) -> list[ClientId]:
    """A client of each depth among those that train, from shallow to deep."""
    first = {population.form(client): client for client in reversed(population.trainers)}
    alike = {repr(sorted(population.names(client).items())): client for client in first.values()}
    return sorted(alike.values(), key=lambda client: (len(population.names(client)), client))


def require_nested(population: Population, clients: list[ClientId], private: Callable[[str], bool]) -> None:
    """Each model must have all tensors of the next smaller one, but for those that are private to a depth."""
    for small, large in pairwise(clients):
        larger = population.names(large)
        for name, shape in population.names(small).items():
            if larger.get(name) != shape and not private(name):
                has = f"has shape {larger[name]} there" if name in larger else "is missing there"
                raise ConfigError(
                    f"{population.method_name} needs models of one family cut at different depths; {name} of "
                    f"{named(population, small)}, shape {shape}, {has}: {named(population, large)}; use fedavg, "
                    "or models such as resnet18 and resnet26"
                )
