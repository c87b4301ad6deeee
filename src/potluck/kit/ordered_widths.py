"""The base of methods whose clients train their slice of a parent and all narrower ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Shapes, state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Declared
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.state import Part
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError
from potluck.kit.averaging import Index, take_slice
from potluck.kit.ordered_dropout import OrderedDropout, WidthStatistics
from potluck.kit.requirements import named
from potluck.kit.static_norm import MEAN, VARIANCE, norms_in, statistics_among
from potluck.kit.subnetworks import SubNetworks, mean_of_slices, refuse, without
from potluck.kit.width_slices import WidthSlices, same_scores

STATISTICS = state_of(
    "statistics", "batch norm's running statistics at its own width and all narrower ones", optional=True
)


class OrderedWidths(SubNetworks):
    """Sub-networks by width in a chain, each inside the next: those of the pool and of the option `widths`.

    A client's model can compute at its own width and all narrower ones (`scores`). Batch norm's running
    statistics are kept per width, in the part `statistics`, and averaged like weights; with one width alone they
    are the model's.
    """

    down: ClassVar[Declared] = {
        "model": state_of("model", "the client's slice of the server's newest weights", partial=True),
        "statistics": STATISTICS,
    }

    class Config(SubNetworks.Config):
        """The widths beside those of the pool."""

        widths: tuple[Any, ...] = option(
            default=(),
            description="further widths to draw from, written like models; those of the pool are among them",
            source="ours; FjORD has p = 0.2, 0.4, 0.6, 0.8 and 1",
        )

    def setup(self, population: Population) -> None:
        """Find the parent and all widths, from narrow to wide."""
        super().setup(population)
        task, pool, whole = population.task, self.pool, self.slices.shapes
        told = [] if pool is None else [pool.signature(key, task) for key in pool.keys]
        known = [{name: one[name] for name in whole if name in one} for one in told]
        known += [whole, *map(dict, self.further(task))]
        fitting = [shapes for shapes in known if not self.slices.misfit(shapes)]
        different = [shapes for place, shapes in enumerate(fitting) if shapes not in fitting[:place]]
        self.widths = sorted(different, key=_numbers)

    def further(self, task: Task) -> list[Shapes]:
        """The tensors of the widths that the options add."""
        if self.config.widths and self.pool is None:
            raise ConfigError(
                f"{self.name}: method.widths needs named models, and the server knows none; leave it out"
            )
        return [
            self.shapes_in(self.pool.build(entry, task, who="method.widths"))
            for entry in self.config.widths
            if self.pool is not None
        ]

    def check(self, population: Population) -> None:
        """As for all sub-networks; widths must be nested, and every client must have one of them."""
        super().check(population)
        for shapes in self.further(population.task):
            if reason := self.slices.misfit(shapes):
                raise ConfigError(
                    f"{self.name}: a model of method.widths {reason}; name narrower versions of the parent"
                )
        for narrow, wide in itertools.pairwise(self.widths):
            if WidthSlices(wide, self.slices.blocks).misfit(narrow):
                raise ConfigError(
                    f"{self.name}: of two widths ({_numbers(narrow):,} and {_numbers(wide):,} numbers) neither is "
                    "inside the other; let every layer of the wider model be at least as wide"
                )
        strange = {
            client: f"{self.name}: {named(population, client)} has a width that is neither in models nor in "
            "method.widths; name it there"
            for client in population.representatives
            if dict(population.names(client)) not in self.widths
        }
        refuse(population, strange)

    def incomparable(self, model: Model) -> str:
        """A masked parent can be compared with a slice whatever its layers are."""
        return ""

    def agrees(self, parent: Model, part: Model, task: Task) -> bool:
        """Whether the masked parent computes what a slice computes."""
        own = dict(self.shapes_in(part))
        index = self.slices.index(own, None, torch.device("cpu"))
        Part(part, self.config.buffers).load(self.slices.cut(Part(parent, self.config.buffers).wire(), index))
        dropout = OrderedDropout(parent, self.widths, self.slices.blocks)
        with dropout.at(torch.tensor([self.widths.index(own)])):
            return same_scores(parent, part, task)

    # --- state ---

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The slice, and its running statistics per width."""
        if len(self.widths) == 1:
            return {"model": model}
        widths = self.widths[: self.widths.index(dict(self.shapes_in(model))) + 1]
        norms = norms_in(model).values()
        statistics = WidthStatistics(len(widths), norms) if norms else None
        dropout = OrderedDropout(model, widths, self.slices.blocks, statistics)
        model.ordered_dropout = dropout  # type: ignore[assignment]
        return {"model": model} | ({} if statistics is None else {"statistics": statistics})

    def server_state(self, task: Task) -> dict[str, Any]:
        """The whole network, and its running statistics at every width."""
        state = super().server_state(task)
        if not self.per_width:
            return state
        return state | {"statistics": WidthStatistics(len(self.widths), norms_in(state["parent"]).values())}

    @property
    def per_width(self) -> list[str]:
        """The model's tensors that are kept per width instead: the statistics of batch norm."""
        return statistics_among([*self.slices.shapes]) if len(self.widths) > 1 else []

    def expected(self, card: Card, part: str) -> Shapes | None:
        """Statistics have a row per width that the client trains."""
        if part != "statistics":
            return super().expected(card, part)
        rows = self.widths.index(dict(card.names)) + 1
        sizes = [card.names[name][0] for name in self.per_width if name.endswith(MEAN)]
        return {
            f"{place}.{kind}": (rows, size) for place, size in enumerate(sizes) for kind in (MEAN, VARIANCE)
        }

    # --- messages ---

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The client's slice of the weights, and of the statistics."""
        index = self.index(server, client)
        content = {"model": self.slices.cut(without(server["parent"].state(), self.per_width), index)}
        if "statistics" not in server:
            return content
        rows, held = self.rows(server, client), server["statistics"].state()
        return {**content, "statistics": {name: take_slice(held[name], rows[name]) for name in rows}}

    def rows(self, server: Server, client: ClientId) -> dict[str, Index]:
        """Where a client's statistics are in the server's."""
        whole = server["statistics"].wire()
        return {
            name: tuple(
                None if own == full else slice(own)
                for own, full in zip(shape, whole[name].shape, strict=True)
            )
            for name, shape in (self.expected(server.cards[client], "statistics") or {}).items()
        }

    def receive(self, client: Client, down: Message) -> None:
        """Install the slice; batch norm is evaluated with the statistics of the client's own width."""
        super().receive(client, down)
        if "statistics" in client:
            client["statistics"].load(down.group("statistics"))
            self.settle(client)

    def settle(self, client: Client) -> None:
        """Give the model the statistics of its own width."""
        names = [*norms_in(client["model"].content)]
        client["model"].load(client["statistics"].at_the_widest(names))

    def held(self, client: Client) -> Content:
        """What a client sends after training: its slice, and the statistics."""
        content: dict[str, Mapping[str, Tensor]] = {"model": without(client["model"].state(), self.per_width)}
        if "statistics" in client:
            self.settle(client)
            content["statistics"] = client["statistics"].state()
        return content

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average every entry over those that hold it, statistics too."""
        replies = clients.ask(self.train)
        server["parent"].load(self.mean(server, replies))
        if "statistics" in server:
            kept, rows = server["statistics"], {client: self.rows(server, client) for client in replies}
            kept.load(mean_of_slices(replies, "statistics", self.config.weights, kept.wire(), rows))

    # --- training ---

    def widths_of(self, client: Client) -> int:
        """At how many widths a client's model can compute."""
        dropout = getattr(client["model"].module, "ordered_dropout", None)
        return 1 if dropout is None else len(dropout.widths)

    def scores(self, client: Client, batch: Batch, width: Tensor) -> Tensor:
        """The scores at the width of this number, from 0 for the narrowest; a tensor of shape (1,)."""
        with client["model"].ordered_dropout.at(width):
            scores: Tensor = client["model"](batch.x)
        return scores


def _numbers(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())
