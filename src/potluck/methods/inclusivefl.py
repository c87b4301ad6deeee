"""InclusiveFL (Liu et al., KDD 2022): models of several depths, a copy of each on the server, share layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Size, Tensor

from potluck.core.card import Card
from potluck.core.contract import Shapes
from potluck.core.method import Clients
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.task import Task
from potluck.kit.averaging import average
from potluck.kit.depths import depths_of, in_their_place, last_layers, require_nested
from potluck.kit.shared_weights import group_of
from potluck.methods.fedavg import FedAvg


class InclusiveFL(FedAvg):
    """FedAvg among clients of one depth, layer-wise averaging over depths, and momentum distillation.

    Up: the weights. Down: the server's copy M_i of the client's depth. Sizes 1 … G, from shallow to deep, have
    L_1 < … < L_G layers of one stack and start from the deepest model's weights. The server, each round:

    1. Δ_i = mean of the clients' changes of size i; M_i ← M_i + Δ_i.
    2. A layer becomes the mean over the sizes that have it, weighted by the samples of each size's clients in the
       round. Heads, poolers and the last layer of every smaller size stay within their size.
    3. That last layer learns from the layers that the next size has in its place: from the round after,

            Δ_i^(L_i) ← β·ḡ + (1 − β)·Δ_i^(L_i),  ḡ = 1/(L_{i+1} − L_i + 1)·Σ_{j = L_i … L_{i+1}} Δ_{i+1}^(j),

        for parameters. ḡ stays as it was where the next size is not in a round.

    The released code sends gradients of one step and moves each M_i by AdamW; here weights go up after local
    epochs, and the change Δ takes the gradient's place (our inference, not published). There the blend only
    happens while the momentum is still 0, and of the sum over j only the last layer survives; here it is the
    formula, which we recall from the paper and could not verify. In a network of several stacks, as the stages of
    a ResNet, the last layer is that of the last stack which is shorter than the deepest model's, or of each such
    stack (`local_last: stacks`), and ḡ is over the layers that have a tensor of that name and shape (ours).
    """

    name = "inclusivefl"
    citation = "Liu et al., KDD 2022"
    models = "one stack of layers, or stages, cut at different depths (resnet, vit with `layers`)"
    card_fields = (*FedAvg.card_fields, "parameter_names")

    class Config(FedAvg.Config):
        """Options of InclusiveFL."""

        share: Literal["groups"] = option(
            default="groups",
            description="a copy on the server for every depth; not to be changed",
            source="paper",
        )
        weights: Literal["samples", "uniform"] = option(
            default="uniform",
            description="weights of the mean within a size; over sizes it is always by samples",
            source="released code",
        )
        beta: float = option(
            default=0.2,
            ge=0,
            le=1,
            description="β, the share of the deeper layers' change",
            source="released code",
        )
        local_last: Literal["end", "stacks", "none"] = option(
            default="end",
            description="the last layer of a smaller size stays within it, and learns from deeper ones: that of "
            "the last stack which is shorter than the deepest model's, or of each such stack",
            source="paper; local_one in the released code; stacks: ours",
        )
        local_head: bool = option(
            default=True,
            description="whether heads stay within their size",
            source="paper; local_cls in the released code",
        )
        local_pooler: bool = option(
            default=True,
            description="whether modules named pooler stay within their size",
            source="released code",
        )

        @model_validator(mode="after")
        def _has_no_idle_option(self) -> InclusiveFL.Config:
            self.refuse_idle("beta", needs="local_last", among=["end", "stacks"])
            return self

    sizes: Sequence[Card] = ()  # a card of each size, from shallow to deep
    shared: Mapping[str, str] = {}  # the server's key of what is averaged over sizes → its name
    lessons: Mapping[str, Sequence[str]] = {}  # the key of a parameter in a last layer → what it learns from

    def setup(self, population: Population) -> None:
        """Find the sizes, what they share, and what their last layers learn from."""
        self.sizes = [population.card(client) for client in depths_of(population)]
        keys = [self.keys(card) for card in self.sizes]
        last = [self.last(card.names, self.sizes[-1].names) for card in self.sizes]
        common = [
            (name, key)
            for own, lasting in zip(keys, last, strict=True)
            for name, key in own.items()
            if not self.private(name) and name not in lasting
        ]
        holders = Counter(name for name, _ in common)
        self.shared = {key: name for name, key in common if holders[name] > 1}
        self.lessons = {
            keys[number][name]: [keys[number + 1][one] for one in teachers]
            for number, (card, larger) in enumerate(pairwise(self.sizes))
            for name, teachers in in_their_place(
                sorted(last[number].intersection(card.parameter_names)), card.names, larger.names
            ).items()
            if self.config.beta
        }

    def last(self, names: Shapes, deepest: Shapes) -> set[str]:
        """The tensors of a size's last layers that stay within it."""
        if self.config.local_last == "none":
            return set()
        return last_layers(names, deepest, every_stack=self.config.local_last == "stacks")

    def private(self, name: str) -> bool:
        """Whether a tensor belongs to a head or pooler that stays within its size."""
        pooler = self.config.local_pooler and "pooler" in name.split(".")
        return pooler or (self.config.local_head and name.startswith("head."))

    def check(self, population: Population) -> None:
        """Every size must hold the smaller ones."""
        require_nested(population, [card.client for card in self.sizes], self.private)

    def advice(self, population: Population) -> Iterator[str]:
        """Say where there is nothing to bring together."""
        if len(self.sizes) == 1 and len(population.trainers) > 1:
            yield f"{self.name}: all clients have models of one depth, so this is fedavg; give some deeper ones"

    def server_state(self, task: Task) -> dict[str, Any]:
        """A copy of the model for every size, and ḡ for the last layers."""
        return super().server_state(task) | {"momentum": {}}

    def introduce(self, server: Server, clients: Clients) -> None:
        """Fetch what the server lacks; a size it has not seen yet starts from what it holds of larger ones."""
        known = set(server["weights"].tensors())
        super().introduce(server, clients)
        held = server["weights"].tensors()
        if held.keys() <= known:
            return
        places = [(key, name) for card in reversed(self.sizes) for name, key in self.keys(card).items()]
        first: dict[tuple[str, Size], Tensor] = {}
        for key, name in sorted(places, key=lambda place: place[0] not in known):
            if key in held:
                first.setdefault((name, held[key].shape), held[key])
        fresh = {key: name for key, name in places if key in held and key not in known}
        server["weights"].load({key: first[name, held[key].shape].clone() for key, name in fresh.items()})

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average within sizes, distil, average over sizes."""
        self.introduce(server, clients)
        replies = clients.ask(self.train)
        before = server["weights"].tensors()
        means = self.mean(replies, "model", self.config.weights)
        changes = {key: mean - before[key] for key, mean in means.items()}
        after = means | self.distilled(before, changes, server["momentum"].tensors())
        over_sizes = self.over_sizes(replies)
        after |= {
            key: over_sizes[name] for key, name in self.shared.items() if name in over_sizes and key in before
        }
        server["weights"].load(after)
        server["momentum"].load(self.momentum(changes))

    def distilled(
        self, before: Mapping[str, Tensor], changes: Mapping[str, Tensor], momentum: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The last layers of smaller sizes after β·ḡ + (1 − β)·Δ."""
        taught = [key for key in self.lessons if key in changes and key in momentum]
        return {key: before[key] + changes[key].lerp(momentum[key], self.config.beta) for key in taught}

    def momentum(self, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """ḡ of each last layer whose next size took part."""
        heard = {key: [changes[one] for one in keys if one in changes] for key, keys in self.lessons.items()}
        return {key: torch.stack(several).mean(0) for key, several in heard.items() if several}

    def over_sizes(self, replies: Replies) -> dict[str, Tensor]:
        """The mean of what sizes share, by name: a size weighs as many samples as its clients have."""
        cards = replies.cards
        size = {client: group_of(cards[client]) for client in replies}
        clients, samples = Counter(size.values()), Counter[str]()
        for client in replies:
            samples[size[client]] += cards[client].samples
        alike = {client: samples[size[client]] / clients[size[client]] for client in replies}
        sent = replies.map(lambda client, _: {"model": self._common(self.keyed(replies, client, "model"))})
        return average(sent, "model", "samples" if self.config.weights == "samples" else alike)

    def _common(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a client has in common with other sizes, by name."""
        return {self.shared[key]: value for key, value in tensors.items() if key in self.shared}
