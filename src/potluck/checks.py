"""What methods ask of the clients' models, each refused in one sentence that names the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from potluck.client import ClientId
from potluck.errors import ConfigError
from potluck.models import Model

if TYPE_CHECKING:
    from potluck.world import World


def named(world: World, client: ClientId) -> str:
    """A client and its model, for a sentence."""
    return f"client {client} ({world.label(client)})"


def require_width(world: World, client: ClientId, option: str, width: int, spare: int = 0) -> None:
    """The client's representation must be at least this wide, with so many columns to spare."""
    own = world.width(client)
    if own < width + spare:
        raise ConfigError(
            f"{world.method.name}: {option} is {width}, but {named(world, client)} has representation width "
            f"{own}; set method.{option} to at most {own - spare}"
        )


def require_apart(option: str, widths: Sequence[int], taken: Iterable[tuple[int, str]]) -> None:
    """None of the widths may be one that is taken already; how is said with it."""
    for width, how in taken:
        if width in widths:
            raise ConfigError(f"{option} has {width}, which {how}; leave it out")


def require_one_width(world: World, reason: str) -> None:
    """All clients' representations must be equally wide."""
    first = world.ids[0]
    for client in world.ids:
        if world.width(client) != world.width(first):
            raise ConfigError(
                f"{world.method.name}: {reason} needs one representation width, but {named(world, client)} has "
                f"{world.width(client)}, {named(world, first)} has {world.width(first)}; set models.rep_dim"
            )


def require_peers(world: World, peers: int) -> None:
    """Every client of a round must find so many others in it."""
    clients, cohort = len(world.trainers), world.cohort_size
    asked = f"{world.method.name}: method.peers is {peers}"
    if peers > clients - 1:
        raise ConfigError(f"{asked}, but a client has {clients - 1} others; lower it")
    if peers > cohort - 1:
        raise ConfigError(
            f"{asked}, but with training.participation "
            f"{world.participation:g} a round has {cohort} of {clients} clients, {cohort - 1} others for each; "
            "lower the first or raise the second"
        )


def require_representation(world: World) -> None:
    """Every model must have parameters before its head: a representation that can be trained."""
    for client in _one_per_architecture(world):
        names = (name for name, value in world.build_model(client).named_parameters() if value.requires_grad)
        if all(name.startswith("head.") for name in names):
            raise ConfigError(
                f"{world.method.name}: {named(world, client)} has no representation to train, nothing before its "
                "head has parameters; give it a model with layers of its own"
            )


def require_linear_heads(world: World, reason: str, *others: Model) -> None:
    """The header of every client (and of other models) must be one linear layer with a bias on all features."""
    models = {named(world, client): world.build_model(client) for client in _one_per_architecture(world)}
    for who, model in [*models.items(), *(("the shared model", other) for other in others)]:
        head = model.head
        linear = isinstance(head, nn.Linear) and head.in_features == model.rep_dim and head.bias is not None
        if not linear:
            raise ConfigError(
                f"{world.method.name}: {reason} needs linear headers with a bias; that of {who} is none"
            )


def _one_per_architecture(world: World) -> list[ClientId]:
    return list({world.architecture(client): client for client in reversed(world.ids)}.values())
