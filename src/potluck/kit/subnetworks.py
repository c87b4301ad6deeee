"""The base of methods whose clients hold sub-networks of one parent, cut by width."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Shapes, shapes_of, state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Declared, Method, MethodConfig, Needs
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.rng import Rng
from potluck.core.server import Server
from potluck.core.state import Part
from potluck.core.task import Task
from potluck.errors import ConfigError, Misfits
from potluck.kit.averaging import Index, average
from potluck.kit.requirements import named, one_per_architecture
from potluck.kit.width_slices import WidthSlices, Window, is_slice, mixes_channels
from potluck.models import build

OTHERS = "use a method for unlike models, such as fedproto, or fedavg with share: groups"


class SubNetworks(Method):
    """Sends every client its slice of the parent θ and averages each entry over the clients that hold it.

    A client's slice is what its model's tensors have room for. The part `parent` of the server's state is the
    whole network. A subclass writes the step `train`, which returns the slice, and may choose another `window` of
    channels than the first ones.
    """

    server_needs: ClassVar[Needs] = "architecture"
    card_fields: ClassVar[tuple[str, ...]] = ("names",)
    models = "one architecture in several widths"
    stays: tuple[str, ...] = ("data", "labels")
    down: ClassVar[Declared] = {
        "model": state_of("model", "the client's slice of the server's newest weights", partial=True)
    }
    train: Any

    class Config(MethodConfig):
        """The parent and its average."""

        parent: Any = option(
            default=None,
            description="the whole network, written like a model; default: the one of the pool with the most "
            "parameters. Name one if no client can hold it",
            source="ours; FedRolex has such a parent",
        )
        weights: Literal["uniform", "samples"] = option(
            default="uniform",
            description="what the average weighs a client by: all alike, or its training samples",
            source="released code of HeteroFL; samples: FjORD",
        )

    def setup(self, population: Population) -> None:
        """Find the parent, and what of it each client holds."""
        parent = self.build_parent(population.task)
        self.slices = WidthSlices(self.shapes_in(parent), parent.channel_blocks)

    def build_parent(self, task: Task) -> Model:
        """A fresh model of the parent's architecture."""
        entry = self.config.parent
        if self.pool is not None:
            return self.pool.build(
                self.pool.largest(task) if entry is None else entry, task, who="the parent"
            )
        if entry is None:
            raise ConfigError(f"{self.name}: name the parent (method.parent): the server knows no model")
        return build(entry, task, who="method.parent")

    def shapes_in(self, model: Model) -> Shapes:
        """The tensors of a model that may cross."""
        return shapes_of(Part(model, self.config.buffers).wire())

    def check(self, population: Population) -> None:
        """Every model must be a slice of the parent, in its tensors and in what it computes."""
        wrong = {
            client: f"{self.name}: {named(population, client)} {reason}; give all clients one architecture in "
            f"widths up to the parent's, or {OTHERS}"
            for client in population.representatives
            if (reason := self.misfit(population.names(client)))
        }
        refuse(population, wrong)
        for client in one_per_architecture(population):
            part = population.build_model(client)
            if self.shapes_in(part) != self.slices.shapes:
                self.require_slice(population, client, part)

    def misfit(self, shapes: Shapes) -> str:
        """Why a model with these tensors is no slice of the parent, empty if it is one."""
        return self.slices.misfit(shapes)

    def require_slice(self, population: Population, client: ClientId, part: Model) -> None:
        """Refuse a model whose channels do not lie where the parent's do."""
        parent, who = self.build_parent(population.task), f"{self.name}: {named(population, client)}"
        kind = self.incomparable(part)
        if kind and parent.channel_blocks is None:
            raise ConfigError(
                f"{who} has a layer across channels ({kind}), so that its slices cannot be compared with the "
                f"parent; let the model say its channel_blocks, or {OTHERS}"
            )
        if not kind and not self.agrees(parent, part, population.task):
            raise ConfigError(
                f"{who} computes something else than the parent with all other channels at zero, as after a "
                "concatenation, a pooling over channels or a flattening; let the model say its channel_blocks, or "
                f"{OTHERS}"
            )

    def incomparable(self, model: Model) -> str:
        """A kind of layer that keeps slices from being compared with the parent, empty where there is none."""
        return mixes_channels(model)

    def agrees(self, parent: Model, part: Model, task: Task) -> bool:
        """Whether a slice computes what the parent computes on these channels alone."""
        return is_slice(parent, part, self.slices, self.window(2, Rng(0, ("check",))), task)

    def advice(self, population: Population) -> Iterator[str]:
        """Say where there is nothing to cut."""
        yield from super().advice(population)
        if all(population.names(client) == self.slices.shapes for client in one_per_architecture(population)):
            yield f"{self.name}: every client holds the whole parent; give some a narrower model (models)"

    def window(self, round_: int, rng: Rng) -> Window | None:
        """Which channels slices hold in a round; `rng` is the server's in that round. None: the first ones."""
        return None

    def server_state(self, task: Task) -> dict[str, Any]:
        """The whole network."""
        return {"parent": self.build_parent(task)}

    def index(self, server: Server, client: ClientId) -> dict[str, Index]:
        """Where a client's entries are in the parent this round."""
        window = self.window(server.round, server.rng)
        return self.slices.index(server.cards[client].names, window, server.device)

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The client's slice."""
        return {"model": self.slices.cut(server["parent"].state(), self.index(server, client))}

    def receive(self, client: Client, down: Message) -> None:
        """Install the slice."""
        client["model"].load(down.group("model"))

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average every entry over those that hold it."""
        replies = clients.ask(self.train)
        server["parent"].load(self.mean(server, replies))

    def mean(self, server: Server, replies: Replies) -> dict[str, Tensor]:
        """The parent's new values; entries that nobody held keep theirs."""
        index = {client: self.index(server, client) for client in replies}
        return mean_of_slices(replies, "model", self.config.weights, server["parent"].wire(), index)


def refuse(population: Population, wrong: Mapping[ClientId, str]) -> None:
    """Refuse clients, each for its reason: all that have enrolled, or the first where none has told of itself."""
    enrolled = {
        client: said for client, said in wrong.items() if population[client].known("names") is not None
    }
    if enrolled:
        raise Misfits(enrolled)
    for sentence in wrong.values():
        raise ConfigError(sentence)


def mean_of_slices(
    replies: Replies,
    group: str,
    weights: Literal["uniform", "samples"],
    base: Mapping[str, Tensor],
    index: Mapping[ClientId, Mapping[str, Index]],
) -> dict[str, Tensor]:
    """The mean of every entry over the clients that hold it; where all hold everything it is the plain mean.

    Clients with one index are averaged first, all tensors at once, so that each slice is put in its place once.
    """
    different = {id(own): own for own in index.values()}.values()
    if all(axis is None for own in different for axes in own.values() for axis in axes):
        return average(replies, group, weights)
    alike: dict[tuple[int, tuple[str, ...]], list[ClientId]] = {}
    for client, reply in replies.items():
        alike.setdefault((id(index[client]), tuple(reply.group(group))), []).append(client)
    means, shares = dict[ClientId, Message](), dict[ClientId, float]()
    for clients in alike.values():
        some = Replies({client: replies[client] for client in clients}, replies.cards)
        means[clients[0]] = Message({group: average(some, group, weights)})
        samples = sum(replies.cards[client].samples for client in clients)
        shares[clients[0]] = samples if weights == "samples" else len(clients)
    return average(Replies(means, replies.cards), group, shares, base=base, index=index)


def without(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """The tensors whose names are not among these."""
    return {name: value for name, value in tensors.items() if name not in names}
