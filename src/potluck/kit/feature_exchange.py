"""Clients exchange features: what enters and leaves the body of their models, in batches, with noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, Shapes, state_of, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Method
from potluck.core.model import Model
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.streams import Stream
from potluck.core.task import Batch, Task
from potluck.core.trial import stem_shape
from potluck.errors import ConfigError
from potluck.kit.averaging import Weights, average
from potluck.kit.requirements import named
from potluck.kit.shared_space import SharedSpace, channel_axis
from potluck.models import names
from potluck.training.collect import collect

NAMES = ("s_in", "s_out")  # before and after the body
AS_THEY_ARE = SharedSpace("none", {})


def blurred(features: Tensor, level: float, per: Literal["batch", "channel"] = "batch") -> Tensor:
    """Add Gaussian noise of `level` standard deviations, of the whole batch or of each channel.

    A channel with one value everywhere (as every channel of a single vector) has no deviation that could hide it;
    it gets the noise of the whole batch. The noise comes from torch's default generator, the only one a captured
    step can use; see `Client.drawing_privately`.
    """
    if not level:
        return features
    values, axes = features.detach().float(), [*range(features.dim())]
    deviation = whole = values.std(axes, correction=0, keepdim=True)
    if per == "channel":
        axes.remove(channel_axis(features))
        own = values.std(axes, correction=0, keepdim=True)
        deviation = torch.where(own > 1e-6 * whole, own, whole)
    return features + level * deviation * torch.randn_like(features)


@dataclass(frozen=True)
class FeatureExchange:
    """One batch of features up from every client, up to `batches` batches of other clients down to it."""

    batch: int  # samples in a batch
    batches: int = 1  # how many a client is sent
    pool: Literal["round", "all"] = "round"  # drawn from the last round's, or from each client's newest batch
    space: SharedSpace = AS_THEY_ARE

    @property
    def averages_maps(self) -> bool:
        """Whether the maps to the shared space are trained and sent."""
        return self.space.kind == "averaged"

    def check(self, population: Population) -> None:
        """Every client needs a stem, a body that learns, and samples; features have one shape unless projected."""
        name, first = population.method_name, population.ids[0]
        self._find_batches(population)
        for client in population.ids:
            who = f"{name}: {named(population, client)}"
            require_stem(population, client)
            if not population.trains_body(client):
                raise ConfigError(
                    f"{who} has a body without parameters to train; choose a model whose body learns"
                )
            if not population.samples(client)["train"]:
                raise ConfigError(
                    f"{who} has no training samples to make features of; give every client some "
                    "(partition.min_size, where the split is drawn)"
                )
            own, other = (f"{population.stem(one)} and {population.width(one)}" for one in (client, first))
            if self.space.kind == "none" and own != other:
                raise ConfigError(
                    f"{who} has features of shape {own}, {named(population, first)} of {other}; "
                    "set method.project to fixed or averaged"
                )

    def _find_batches(self, population: Population) -> None:
        """Refuse `batches` above one that no client could ever be sent."""
        name, others, cohort = population.method_name, len(population.trainers) - 1, population.cohort_size
        if self.batches > max(others, 1):
            raise ConfigError(
                f"{name}: method.batches is {self.batches}, but a client has {others} others; lower it"
            )
        if self.pool == "round" and self.batches > cohort:
            raise ConfigError(
                f"{name}: method.batches is {self.batches}, but with training.participation "
                f"{population.participation:g} a round leaves {cohort}; lower the first, raise the second, or set "
                "method.pool to all"
            )

    def sent(self) -> Contract:
        """What a client sends."""
        return self._fields(str(self.batch), "a batch of the client's own", optional=False)

    def received(self) -> Contract:
        """What a client receives; nothing in the first round."""
        most = self.batch * self.batches
        rows = f"r<={most}" if self.batches > 1 else str(most)
        return self._fields(rows, "from the second round on, other clients'", optional=True)

    def _fields(self, rows: str, whose: str, optional: bool) -> Contract:
        fields = {
            "s_in": tensor(f"{rows}, p", f"{whose} features before the body", optional=optional),
            "s_out": tensor(f"{rows}, q", f"{whose} features after the body", optional=optional),
        }
        if self.averages_maps:
            fields["maps"] = state_of("maps", "maps to the shared space", optional=optional, partial=optional)
        return fields

    def symbols(self, card: Card) -> dict[str, int]:
        """p and q, the numbers in one sample before and after the body."""
        sizes = self.space.sizes(_shapes(card))
        return {"p": sizes["s_in"], "q": sizes["s_out"]}

    def matrices(self, card: Card) -> Shapes:
        """The maps of a client."""
        return self.space.matrices(_shapes(card))

    def server_state(self) -> dict[str, Any]:
        """The pool, by client, and the averaged maps."""
        return {"s_in": {}, "s_out": {}, "maps": {}}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """Room for the features received; the maps where they are trained."""
        own: Shapes = {"s_in": stem_shape(model, task), "s_out": (model.rep_dim,)}
        kept = {name: (size,) for name, size in self.space.sizes(own).items()} if self.averages_maps else own
        rows = self.batch * self.batches
        received = {name: torch.zeros(rows, *shape) for name, shape in kept.items()}
        return {"received": received, **self.space.trained(own)}

    def keep(self, server: Server, replies: Replies, weights: Weights) -> None:
        """Put what came into the pool; average the maps."""
        server["maps"].load(average(replies, "maps", weights))
        for name in NAMES:
            if self.pool == "round":
                server[name].content.clear()
            server[name].load({client: replies[client][name] for client in replies})

    def lend(self, server: Server, client: ClientId) -> Content:
        """Batches of other clients, drawn from the pool, and the averaged maps; nothing before there are any."""
        others = sorted(server["s_in"].tensors().keys() - {client})
        draw = server.rng.child("features", client).numpy()
        chosen = [others[number] for number in draw.permutation(len(others))[: self.batches]]
        held, wanted = server["maps"].tensors(), self.matrices(server.cards[client])
        content: dict[str, Any] = {"maps": {name: held[name] for name in wanted if name in held}}
        for name in NAMES if chosen else ():
            content[name] = torch.cat([server[name][one] for one in chosen])
        return content

    def take(self, client: Client, down: Message) -> Stream | None:
        """The features others sent, as a stream; where fewer batches came than asked for, they repeat.

        They are in the client's own shapes, or as they crossed where the maps are trained: `seen` maps them then.
        """
        if self.averages_maps:
            client["maps"].load(down.group("maps"))
        if "s_in" not in down:
            return None
        received = client["received"]
        found = {name: down[name] for name in NAMES}
        if not self.averages_maps:
            own = {name: tuple(received[name].shape[1:]) for name in NAMES}
            found = self.space.from_wire(down, self.space.maps(client, own), own)
        again = torch.arange(self.batch * self.batches, device=client.device) % len(down["s_in"])
        received.load({name: value.index_select(0, again) for name, value in found.items()})
        return Stream.of(received["s_in"], received["s_out"], self.batch)

    def seen(self, client: Client, received: Batch, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch of others' features in the shapes of the client's own, `like`."""
        rows = {"s_in": received.x, "s_out": received.y}
        if not self.averages_maps:
            return rows
        own = {name: tuple(value.shape[1:]) for name, value in like.items()}
        with torch.autocast(received.x.device.type, enabled=False):
            return self.space.from_wire(rows, client["maps"].tensors(), own)

    def private_noise(self, client: Client) -> AbstractContextManager[None]:
        """Draw the noise on features from a secret of the client, so that nobody can subtract it."""
        return client.drawing_privately("noise")

    def give(self, client: Client, features: Callable[[Tensor], dict[str, Tensor]]) -> Content:
        """The features of a random batch in evaluation mode.

        A client with fewer samples repeats its features, noise included: with fresh noise for every copy their mean
        would have hardly any.
        """
        [rows, *_] = client.batches(epochs=1, batch_size=self.batch).order
        [found] = collect(client, lambda batch: features(batch.x), batch_size=len(rows), rows=rows)
        again = torch.arange(self.batch, device=client.device) % len(rows)
        found = {name: value.float().index_select(0, again) for name, value in found.items()}
        maps = self.space.maps(client, {name: tuple(value.shape[1:]) for name, value in found.items()})
        own_maps = {"maps": client["maps"].state()} if self.averages_maps else {}
        return {**self.space.to_wire(found, maps), **own_maps}


class ExchangesFeatures(Method):
    """A method with a `FeatureExchange`: its checks, symbols and states are added to the method's own."""

    exchange: FeatureExchange

    def check(self, population: Population) -> None:
        """Every client needs a stem and a body that learns, and features that others can read."""
        super().check(population)
        self.exchange.check(population)

    def symbols(self, card: Card) -> dict[str, int]:
        """With p and q, the numbers in one sample before and after the body."""
        return super().symbols(card) | self.exchange.symbols(card)

    def server_state(self, task: Task) -> dict[str, Any]:
        """With the pool of features."""
        return {**super().server_state(task), **self.exchange.server_state()}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """With the features received."""
        return {**super().client_state(task, model), **self.exchange.client_state(task, model)}


def require_stem(population: Population, client: ClientId) -> None:
    """A client's model must say where its stem ends."""
    if not population.stem(client):
        who = f"{population.method_name}: {named(population, client)}"
        raise ConfigError(f"{who} has a model without a stem; {_advice(population.label(client))}")


def _advice(label: str) -> str:
    if label.partition("(")[0] in names():
        return "choose one with stem and body (docs/models.md lists them)"
    return "say where its stem ends: potluck.adapt(model, stem=…, body=…), shown in docs/models.md"


def _shapes(card: Card) -> Shapes:
    return {"s_in": card.stem, "s_out": (card.width,)}
