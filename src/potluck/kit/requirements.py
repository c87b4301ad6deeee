"""Requirements of methods on the clients' models: each is refused in one sentence that names the client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from potluck.core.card import ClientId
from potluck.core.contract import Shapes
from potluck.core.model import Model
from potluck.core.population import Population
from potluck.errors import ConfigError


def named(population: Population, client: ClientId) -> str:
    """A client and its model, for a sentence: `client 3 (cnn1)`."""
    return f"client {client} ({population.label(client)})"


def require_widths(
    population: Population, option: str, widths: Mapping[ClientId, int], spare: int = 0
) -> None:
    """Every client's representation must be as wide as its entry in `widths`, with `spare` columns left over.

    The remedy is one value that fits all clients where they are given one.
    """
    client = next((one for one in widths if population.width(one) < widths[one] + spare), None)
    if client is None:
        return
    one_for_all = len(set(widths.values())) == 1
    method, own = population.method_name, population.width(client)
    least = min(map(population.width, widths)) if one_for_all else own
    raise ConfigError(
        f"{method}: {option} is {widths[client]}, but {named(population, client)} has representation width {own}; "
        f"{_narrower(method, option, least - spare)}"
    )


def _narrower(method: str, option: str, most: int) -> str:
    if most <= 0:
        return "give it a wider one with models.rep_dim"
    return f"set method.{option} to at most {most} (where methods are compared: {method}.{option})"


def one_width_for_all(width: int) -> str:
    """The advice where representations must be equally wide, as it is written in a file and in Python."""
    python = f"models={{'pool': […], 'rep_dim': {width}}}"
    return f"set models.rep_dim to one width for all (models: {{pool: […], rep_dim: {width}}}; in Python {python})"


def require_apart(option: str, widths: Sequence[int], taken: Iterable[tuple[int, str]]) -> None:
    """None of the widths may be taken already; `taken` has widths and the words that say by what."""
    for width, how in taken:
        if width in widths:
            raise ConfigError(f"{option} has {width}, which {how}; leave it out")


def require_one_width(population: Population, reason: str, otherwise: str = "") -> None:
    """All clients' representations must be equally wide; `otherwise` ends the sentence."""
    first = population.ids[0]
    width = population.width(first)
    for client in population.representatives:
        if population.width(client) != width:
            raise ConfigError(
                f"{population.method_name}: {reason} needs one representation width, but "
                f"{named(population, client)} has {population.width(client)}, {named(population, first)} has "
                f"{width}; {one_width_for_all(min(map(population.width, population.representatives)))}{otherwise}"
            )


def require_one_form(
    population: Population, layer: str, shapes: Callable[[ClientId], Shapes], otherwise: str = ""
) -> None:
    """A layer must have tensors of the same names and shapes in all models; `otherwise` ends the sentence."""
    first, *others = population.representatives
    for client in others:
        if shapes(client) != shapes(first):
            raise ConfigError(
                f"{population.method_name}: the {layer} of {named(population, client)} is "
                f"{layer_form(shapes(client))}, that of {named(population, first)} is {layer_form(shapes(first))}; "
                f"{_one_form(population, layer, first, client)}{otherwise}"
            )


def _one_form(population: Population, layer: str, first: ClientId, client: ClientId) -> str:
    if population.width(first) != population.width(client):
        return one_width_for_all(min(map(population.width, population.representatives)))
    return f"choose models whose {layer}s have the same layers"


def layer_form(shapes: Shapes) -> str:
    """The tensors of a layer, in words."""
    tensors = (f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())
    return ", ".join(tensors) or "nothing"


def require_one_label_set(population: Population) -> None:
    """All clients must have the same classes, two at least, so that their scores mean the same."""
    name, first = population.method_name, population.ids[0]
    if population.task.classes < 2:
        raise ConfigError(
            f"{name}: {named(population, first)} has {population.task.counted}, and scores of one class say "
            "nothing; give the task two classes at least, or use local"
        )
    for client in population.first_clients:
        if population.class_names(client) != population.class_names(first):
            raise ConfigError(
                f"{name} needs clients with the same classes; {named(population, client)} has others than "
                f"{named(population, first)}; use a method that takes unlike classes, such as cofed"
            )


def require_peers(population: Population, peers: int) -> None:
    """Every client of a round must find this many others in it."""
    clients, cohort = len(population.trainers), population.cohort_size
    asked = f"{population.method_name}: method.peers is {peers}"
    if clients == 1:
        raise ConfigError(
            f"{population.method_name}: there is one client, and nobody to compare it with; add another"
        )
    if peers > clients - 1:
        raise ConfigError(f"{asked}, but a client has {clients - 1} others; lower it")
    if peers > cohort - 1:
        lower = "lower the first or raise the second" if cohort > 1 else "raise training.participation"
        raise ConfigError(
            f"{asked}, but with training.participation {population.participation:g} a round has {cohort} of "
            f"{clients} clients, {cohort - 1} others for each; {lower}"
        )


def require_representation(population: Population) -> None:
    """Every model must have parameters before its head: a representation that can be trained."""
    for client in one_per_architecture(population):
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
        for client in one_per_architecture(population)
    }
    for who, model in [*models.items(), *(("the shared model", other) for other in others)]:
        head = model.head
        linear = isinstance(head, nn.Linear) and head.in_features == model.rep_dim and head.bias is not None
        if not linear:
            raise ConfigError(
                f"{population.method_name}: {reason} needs linear headers with a bias; that of {who} is none; "
                "choose a model whose last layer is linear, or leave the option out"
            )


def one_per_architecture(population: Population) -> list[ClientId]:
    """The first client of each architecture; where cards tell of models, of each that they tell of."""
    everyone = reversed(population.representatives)
    return list({population.form(client): client for client in everyone}.values())
