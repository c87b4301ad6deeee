"""Requirements of methods on the clients' models: each is refused in one sentence that names the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from potluck.core.card import ClientId
from potluck.core.model import Model
from potluck.core.population import Population
from potluck.errors import ConfigError


def named(population: Population, client: ClientId) -> str:
    """A client and its model, for a sentence: `client 3 (cnn1)`."""
    return f"client {client} ({population.label(client)})"


def require_width(population: Population, client: ClientId, option: str, width: int, spare: int = 0) -> None:
    """The client's representation must be at least this wide, with `spare` columns left over."""
    own = population.width(client)
    if own < width + spare:
        raise ConfigError(
            f"{population.method_name}: {option} is {width}, but {named(population, client)} has representation "
            f"width {own}; set method.{option} to at most {own - spare}"
        )


def require_apart(option: str, widths: Sequence[int], taken: Iterable[tuple[int, str]]) -> None:
    """None of the widths may be taken already; `taken` has widths and the words that say by what."""
    for width, how in taken:
        if width in widths:
            raise ConfigError(f"{option} has {width}, which {how}; leave it out")


def require_one_width(population: Population, reason: str) -> None:
    """All clients' representations must be equally wide."""
    first = population.ids[0]
    width = population.width(first)
    for client in population.ids:
        if population.width(client) != width:
            raise ConfigError(
                f"{population.method_name}: {reason} needs one representation width, but "
                f"{named(population, client)} has {population.width(client)}, {named(population, first)} has "
                f"{width}; set models.rep_dim"
            )


def require_peers(population: Population, peers: int) -> None:
    """Every client of a round must find this many others in it."""
    clients, cohort = len(population.trainers), population.cohort_size
    asked = f"{population.method_name}: method.peers is {peers}"
    if peers > clients - 1:
        raise ConfigError(f"{asked}, but a client has {clients - 1} others; lower it")
    if peers > cohort - 1:
        raise ConfigError(
            f"{asked}, but with training.participation {population.participation:g} a round has {cohort} of "
            f"{clients} clients, {cohort - 1} others for each; lower the first or raise the second"
        )


def require_representation(population: Population) -> None:
    """Every model must have parameters before its head: a representation that can be trained."""
    for client in _one_per_architecture(population):
        parameters = population.build_model(client).named_parameters()
        trained = (name for name, value in parameters if value.requires_grad)
        if all(name.startswith("head.") for name in trained):
            raise ConfigError(
                f"{population.method_name}: {named(population, client)} has no representation to train, nothing "
                "before its head has parameters that are trained; give it a model with layers of its own"
            )


def require_linear_heads(population: Population, reason: str, *others: Model) -> None:
    """The header of every client, and of the other models, must be one linear layer with a bias on all features."""
    models = {
        named(population, client): population.build_model(client)
        for client in _one_per_architecture(population)
    }
    for who, model in [*models.items(), *(("the shared model", other) for other in others)]:
        head = model.head
        linear = isinstance(head, nn.Linear) and head.in_features == model.rep_dim and head.bias is not None
        if not linear:
            raise ConfigError(
                f"{population.method_name}: {reason} needs linear headers with a bias; that of {who} is none"
            )


def _one_per_architecture(population: Population) -> list[ClientId]:
    return list({population.architecture(client): client for client in reversed(population.ids)}.values())
