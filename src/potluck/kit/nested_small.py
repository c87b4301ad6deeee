"""The base of methods whose shared small model has a width per client, each a slice of the widest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from potluck.core.card import Card, ClientId
from potluck.core.contract import Shapes
from potluck.core.message import Content
from potluck.core.method import Clients
from potluck.core.model import Model
from potluck.core.open_options import OpenOption, TuneSettings, Width, require_validation
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.settings import per_client
from potluck.core.state import Part
from potluck.core.task import Task
from potluck.core.trial import sample_batch
from potluck.errors import ConfigError
from potluck.kit.nested import Nested
from potluck.kit.requirements import require_widths
from potluck.kit.shared_small import SharedSmall


class NestedSmall(SharedSmall):
    """A client with a smaller d1 than others holds the first d1 columns of the small representation.

    Every entry of θ is averaged over the clients that hold it.
    """

    class Config(SharedSmall.Config):
        """The shared model, its width and its average."""

        d1: Width = option(
            default=100,
            description="width of its representation: one for all, dealt out in turn, one per client, or auto",
            source="paper tries 100 to 500; auto and one per client: ours",
        )
        tune: TuneSettings = option(
            default=TuneSettings(), description="how `d1: auto` is chosen", source="ours"
        )

    def setup(self, population: Population) -> None:
        """Find d2, the smallest width of all clients, and cut θ into one slice per d1."""
        self.d2 = min(map(population.width, population.representatives))
        d1 = self.config.tune.values(self.d2)[-1] if self.config.d1 == "auto" else self.config.d1
        widths = per_client(d1, population.ids, "method.d1")
        self.slices = Nested(widths, lambda d1: self.build_small(population.task, d1), self.config.buffers)
        super().setup(population)

    def check(self, population: Population) -> None:
        """Every d1 must fit into its client's representation, and the small model must have nested slices."""
        if self.config.d1 == "auto":
            require_validation(population, "method.d1")
        option = "tune.candidates" if self.config.d1 == "auto" else "d1"
        widths = self.slices.widths
        require_widths(population, option, {client: widths[client] for client in population.ids})
        self.slices.check("method.small")
        for client in {d1: client for client, d1 in widths.items() if d1 < self.slices.widest}.values():
            self._check_slice(population.task, client)

    def _check_slice(self, task: Task, client: ClientId) -> None:
        """A client's slice of the small model must give the first columns of what the whole gives."""
        whole, slice_ = self.build_small(task), self.build_small(task, self.slices.widths[client])
        Part(slice_).load(self.slices.cut(Part(whole, self.config.buffers).wire(), client))
        x = sample_batch(task, whole)
        with torch.no_grad():
            expected, found = whole.eval().features(x), slice_.eval().features(x)
        if not torch.allclose(found, expected[:, : found.shape[1]], rtol=1e-3, atol=1e-5):
            raise ConfigError(
                f"method.small: the representation of width {found.shape[1]} is not the beginning of that of width "
                f"{expected.shape[1]}; choose a model whose last layer before the head is linear, or one d1 for all"
            )

    def d1_values(self) -> list[tuple[int, str]]:
        """Every d1 a client may have, and the words that say why."""
        if self.config.d1 == "auto":
            return [(d1, "auto tries as d1") for d1 in self.config.tune.values(self.d2)]
        return [(d1, f"is d1 of client {client} already") for client, d1 in self.slices.widths.items()]

    def open_option(self, population: Population) -> OpenOption | None:
        """`d1: auto` is chosen by pilot runs."""
        tune = self.config.tune
        return OpenOption("d1", tune.values(self.d2), tune) if self.config.d1 == "auto" else None

    def build_small(self, task: Task, width: int | None = None) -> Model:
        """The small model, its representation d1 wide; default: as wide as any client's."""
        if isinstance(self.config.small, Mapping) and "rep_dim" in self.config.small:
            raise ConfigError("method.small: its width is method.d1; leave rep_dim out")
        return super().build_small(task, self.slices.widest if width is None else width)

    def client_options(self, client: ClientId) -> dict[str, Any]:
        """The client's d1: clients of one architecture may differ in it."""
        return {"d1": self.slices.widths[client]}

    def expected(self, card: Card, part: str) -> Shapes | None:
        """A client's own slice of θ."""
        return self.slices.shapes(card.client) if part == "small" else super().expected(card, part)

    def downlink(self, server: Server, client: ClientId) -> Content:
        """θ, as much of it as the client holds."""
        return {"small": self.slices.cut(server["small"].state(), client)}

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average the small models entry by entry."""
        replies, small = clients.ask(self.train), server["small"]
        small.load(self.slices.average(replies, "small", self.config.weights, small.state()))
