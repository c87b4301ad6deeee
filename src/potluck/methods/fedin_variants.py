"""FedIN with its ablations, other readings of the paper and projections: what `method: fedin` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import PositiveInt, field_validator, model_validator
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, Shapes
from potluck.core.message import Content, Message
from potluck.core.method import Method
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.streams import Stream
from potluck.core.task import Batch, Task
from potluck.kit.averaging import Weights
from potluck.kit.feature_exchange import FeatureExchange, require_stem
from potluck.kit.shared_space import Kind, SharedSpace
from potluck.methods.fedin import FedIN, local_gradients
from potluck.training.fit import Gradients, fit, plus

OF_FEATURES = (  # options that only matter where features are exchanged
    "batch",
    "batches",
    "pool",
    "strength",
    "alleviate",
    "schedule",
    "noise_when",
    "project",
)


class FedINVariants(FedIN):
    """FedIN as published by default; each option changes one thing.

    The body's step (`alleviate`), with a = ⟨G_local, G_local⟩ and b = ⟨G_local, G_IN⟩:
    - `simplified` (Eq. 13): G_IN + (λ/2)·G_local;
    - `exact` (Eq. 12): Z = G_IN − min(0, b/a)·G_local. Taken literally (`combine: replace`) the label gradient is
      gone where b ≥ 0; `add` (INFERRED) takes G_local + Z;
    - `none`: G_IN + G_local, our reading of the ablation "w/o Opt".

    "w/o IN" is `intermediate: false`; what `noise` does to a client's own training stays (INFERRED), so that two
    runs differ in L_IN alone. "w/o Prox" is `mu: 0`. `schedule: alternate` (INFERRED) trains on L_local,
    then the body alone for as many steps, without the proximal term. `noise_when: upload` trains without noise and
    sends the features of a noisy pass. With several `batches` each step takes the next (INFERRED).

    Ours: `project`, maps to a shared space for features of different shapes; `averaged` maps learn from L_IN, too.
    """

    name = FedIN.name

    class Config(FedIN.Config):
        """Options of FedIN with all its variants."""

        intermediate: bool = option(
            default=True,
            description='false: "w/o IN"; no features are sent or learned from, noise in training stays',
            source="paper, Table 4b",
        )
        alleviate: Literal["simplified", "exact", "none"] = option(
            default="simplified",
            description="the body's step; simplified: Eq. 13, exact: Eq. 12, none: the sum",
            source="paper, Eqs. 12 and 13; none: Table 4b, inferred",
        )
        scope: Literal["tensor", "whole"] = option(
            default="tensor",
            description="what a and b of `exact` are summed over; tensor is inferred",
            source="inferred",
        )
        combine: Literal["add", "replace"] = option(
            default="add",
            description="whether `exact` is added to the label gradient (inferred) or replaces it",
            source="inferred; replace: paper, Eq. 12",
        )
        schedule: Literal["joint", "alternate"] = option(
            default="joint",
            description="both losses in the same steps, or one after the other",
            source="inferred",
        )
        noise_when: Literal["training", "upload"] = option(
            default="training",
            description="noise in training too, as published, or only on what is sent",
            source="paper, §4.3; upload: ours",
        )
        noise_per: Literal["batch", "channel"] = option(
            default="batch",
            description="what has one standard deviation; batch is inferred",
            source="inferred; channel: ours",
        )
        batches: PositiveInt = option(
            default=1,
            description="batches a client is sent; our reading of the paper's `sample number`",
            source="paper, Fig. 6, read as batches",
        )
        pool: Literal["round", "all"] = option(
            default="round",
            description="batches are drawn from the last round's, or from everyone's newest",
            source="ours",
        )
        project: Kind = option(
            default="none",
            description="maps to a shared space for features of different shapes; private is a control",
            source="ours",
        )
        project_in: tuple[PositiveInt, PositiveInt, PositiveInt] = option(
            default=(64, 8, 8),
            description="channels, height and width of s_in in the shared space; for windows and texts "
            "height × width is the time",
            source="ours",
        )
        project_out: PositiveInt = option(
            default=512, description="width of s_out in the shared space", source="ours"
        )
        project_seed: int = option(
            default=0,
            description="seed of the maps, known to everyone; averaged maps start from it",
            source="ours",
        )

        @field_validator("project_in", mode="before")
        @classmethod
        def _three_numbers(cls, value: Any) -> Any:
            if not isinstance(value, list | tuple) or len(value) != 3:
                raise ValueError(
                    "give channels, height and width, such as [64, 8, 8], for windows [64, 1, 24]"
                )
            return value

        @model_validator(mode="after")
        def _of_use(self) -> Self:
            self.refuse_idle("project_seed", needs="project", among=("fixed", "averaged"))
            self.refuse_idle(
                "project_in", "project_out", needs="project", among=("fixed", "averaged", "private")
            )
            self.refuse_idle("strength", needs="alleviate", among=("simplified",))
            self.refuse_idle("scope", "combine", needs="alleviate", among=("exact",))
            self.refuse_idle(*OF_FEATURES, needs="intermediate", among=(True,))
            if not self.noise:
                self.refuse_set("noise_when", "noise_per", reason="at noise: 0; it is for noise above 0")
            return self

        def space(self) -> SharedSpace:
            """What features look like on the wire."""
            shapes = {"s_in": self.project_in, "s_out": (self.project_out, 1, 1)}
            return SharedSpace(self.project, shapes, self.project_seed)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noise_per = self.config.noise_per
        if self.config.noise_when == "upload":
            self.training_noise = 0.0

    def build_exchange(self) -> FeatureExchange:
        """Through the shared space, or not at all."""
        config = self.config
        if not config.intermediate:
            return NoExchange(config.batch, noisy=config.noise > 0)
        return FeatureExchange(config.batch, config.batches, config.pool, config.space())

    def expected(self, card: Card, part: str) -> Shapes | None:
        """Maps have a column for each of the client's channels."""
        return self.exchange.matrices(card) if part == "maps" else super().expected(card, part)

    def learn(self, client: Client, received: Stream | None) -> None:
        """As published, or the body alone in steps of its own."""
        if received is None or self.config.schedule == "joint":
            return super().learn(client, received)
        super().learn(client, None)
        streams = {"private": client.batches(), "received": received}
        fit(client, self.loss, streams=streams, combine=self.steer_body)

    def loss(
        self, client: Client, batch: Batch, received: Batch | None = None
    ) -> Tensor | Mapping[str, Tensor]:
        """As published; where nothing needs features the task's own loss."""
        if self.config.intermediate or self.config.noise:
            return super().loss(client, batch, received)
        return Method.loss(self, client, batch)

    def local_terms(self, client: Client, batch: Batch, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As published, and what keeps averaged maps from losing anything."""
        terms = super().local_terms(client, batch, own)
        if self.exchange.averages_maps:
            terms["maps"] = self.exchange.space.loss(own, client["maps"].tensors())
        return terms

    def steer_body(self, terms: Mapping[str, Gradients]) -> Gradients:
        """Only what L_IN reaches moves."""
        return self.alleviate(local_gradients(terms), terms["features"])

    def alleviate(self, local: Gradients, features: Gradients) -> Gradients:
        """The chosen step for the body; maps follow the plain sum."""
        body = {name: value for name, value in features.items() if not name.startswith("maps/")}
        maps = {name: value + local[name] for name, value in features.items() if name not in body}
        return {**self.body_step(local, body), **maps}

    def body_step(self, local: Gradients, features: Gradients) -> Gradients:
        """Eq. 13, Eq. 12, or the sum."""
        if self.config.alleviate == "exact":
            return exact_step(local, features, self.config.scope, self.config.combine)
        if self.config.alleviate == "none":
            return plus(features, {name: local[name] for name in features}, 1.0)
        return super().alleviate(local, features)


def exact_step(
    local: Gradients,
    features: Gradients,
    scope: Literal["tensor", "whole"],
    combine: Literal["add", "replace"],
) -> Gradients:
    """Eq. 12: G_IN without what works against G_local, and G_local itself unless it is replaced."""
    a = {name: local[name].square().sum() for name in features}
    b = {name: (local[name] * value).sum() for name, value in features.items()}
    if scope == "whole":
        a, b = (dict.fromkeys(sums, torch.stack([*sums.values()]).sum()) for sums in (a, b))
    kept = 1.0 if combine == "add" else 0.0
    factors = {name: kept - b[name].clamp_max(0) / a[name].clamp_min(1e-30) for name in features}
    return {name: value + factors[name] * local[name] for name, value in features.items()}


@dataclass(frozen=True)
class NoExchange(FeatureExchange):
    """The ablation "w/o IN": no features are sent or learned from."""

    noisy: bool = False  # whether training adds noise to a client's own features

    def check(self, population: Population) -> None:
        """Any model will do, unless there is noise on its features."""
        for client in population.ids if self.noisy else ():
            require_stem(population, client)

    def sent(self) -> Contract:
        """Nothing."""
        return {}

    def received(self) -> Contract:
        """Nothing."""
        return {}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """No room for features."""
        return {}

    def keep(self, server: Server, replies: Replies, weights: Weights) -> None:
        """Nothing came."""

    def lend(self, server: Server, client: ClientId) -> Content:
        """Nothing."""
        return {}

    def take(self, client: Client, down: Message) -> Stream | None:
        """Nothing."""
        return None

    def private_noise(self, client: Client) -> AbstractContextManager[None]:
        """As with features; without noise what is random in training stays as in FedProx."""
        return super().private_noise(client) if self.noisy else nullcontext()

    def give(self, client: Client, features: Callable[[Tensor], dict[str, Tensor]]) -> Content:
        """Nothing."""
        return {}
