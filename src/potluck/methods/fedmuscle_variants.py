"""FedMuscle with the losses it is compared with and options beyond the paper: what `method: fedmuscle` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.message import Content, Message
from potluck.core.method import client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.task import Task
from potluck.kit.contrastive import (
    MEMORY,
    Negatives,
    Positive,
    Temperature,
    Temperatures,
    gramian,
    pairwise,
)
from potluck.methods.fedmuscle import FedMuscle
from potluck.training.fit import fit
from potluck.training.modes import on_the_batch


class FedMuscleVariants(FedMuscle):
    """FedMuscle as published by default; each option changes one thing.

    The paper compares with `loss: pairwise` and `loss: gramian`. It leaves open which `negatives` its Gramian has,
    whether α weighs the `positive` tuple too, and how often peers are drawn (`redraw`). The others are ours.
    `bundle: k` exchanges k batches at once, so that peers' matrices are up to k − 1 of their steps old; a client's
    own anchors never are. `accounting: paper` counts what the paper sends down, S^n and α^n, beside what crosses
    here.
    """

    name = FedMuscle.name

    class Config(FedMuscle.Config):
        """Options of FedMuscle with all its variants."""

        loss: Literal["muscle", "pairwise", "gramian"] = option(
            default="muscle",
            description="the paper's loss, or one it compares with: InfoNCE summed over the peers, or volumes "
            "(GRAM)",
            source="paper's comparison",
        )
        negatives: Negatives = option(
            default="tuples",
            description="of the Gramian: all tuples of the peers, or anchors of other samples; which the paper "
            "uses is not known",
            source="not known",
        )
        positive: Positive = option(
            default="weighted",
            description="whether α weighs the positive tuple too, as the derivation by density ratios has it, or "
            "the negatives alone (plain)",
            source="not clear in the text; weighted: inferred from the derivation",
        )
        bundle: PositiveInt = option(
            default=1,
            description="k: public batches in one exchange; 1 as published, more are ours",
            source="ours",
        )
        redraw: Literal["batch", "round"] = option(
            default="batch",
            description="how often the server draws a client's peers; `batch` is inferred",
            source="inferred",
        )
        learned: bool = option(
            default=False,
            description="train both temperatures too, from their values here",
            source="ours",
        )
        normalize: bool = option(
            default=True,
            description="scale representations to length 1, also when they are sent; inferred. The Gramian always "
            "does",
            source="inferred",
        )
        first: Literal["task", "alignment"] = option(
            default="task",
            description="the phase that begins a round; `alignment` ends it with the task, so that heads have "
            "followed their representations when they are measured; ours",
            source="ours",
        )
        statistics: Literal["private", "public"] = option(
            default="private",
            description="what batch norm uses while aligning: its statistics of private data, or those of the "
            "public batch, which it forgets; ours",
            source="ours",
        )
        memory: int = option(
            default=MEMORY,
            ge=1,
            description="bytes for the B^M tuples of a batch; more are computed in pieces",
            source="ours",
        )
        accounting: Literal["exact", "paper"] = option(
            default="exact",
            description="`paper`: log the paper's count of scalars beside what crosses",
            source="paper's count",
        )

        @model_validator(mode="after")
        def _fits_the_loss(self) -> Self:
            if self.learned and self.loss == "gramian":
                raise ValueError(
                    "learned temperatures are for muscle and pairwise; the gramian has a fixed one"
                )
            self.refuse_idle("negatives", needs="loss", among=("gramian",))
            self.refuse_idle("memory", needs="loss", among=("muscle", "gramian"))
            self.refuse_idle("memory", needs="negatives", among=("tuples",))
            if self.has_gamma and self.learned and self.tau_prev == self.tau:
                raise ValueError(
                    f"tau_prev is {self.tau_prev}, which must be below tau where both are learned"
                )
            self.refuse_idle("tau_prev", "positive", needs="loss", among=("muscle",))
            self.refuse_idle("normalize", needs="loss", among=("muscle", "pairwise"))
            if self.peers == 1:
                self.refuse_set("tau_prev", "positive", reason="with one peer; it is for peers above 1")
            if self.tau_prev == self.tau:
                self.refuse_set("positive", reason="where tau_prev is tau, as α is 1 then")
            return self

        @property
        def has_gamma(self) -> bool:
            """The losses it is compared with have one temperature."""
            return self.loss == "muscle" and super().has_gamma

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unit, self.memory = self.config.normalize, self.config.memory
        self.positive = self.config.positive
        self.exchange = replace(self.exchange, bundle=self.config.bundle, redraw=self.config.redraw)
        if self.config.statistics == "public":
            self.mode = on_the_batch  # dropout rests, as it does in evaluation mode

    def setup(self, population: Population) -> None:
        """As published; an exchange has at most all batches of a round."""
        super().setup(population)
        batches = self.config.passes * (self.public_size // self.config.batch)
        self.exchange = replace(self.exchange, bundle=min(self.config.bundle, batches))

    def client_state(self, task: Task, model: Model, **learned: nn.Module) -> dict[str, Any]:
        """As published, and the temperatures where they are learned."""
        if self.config.learned:
            learned = {"temperatures": self.build_temperatures()}
        return super().client_state(task, model, **learned)

    def build_temperatures(self) -> Temperatures:
        """Both temperatures; where only one is of use, the other is any smaller value."""
        tau, tau_prev = self.config.tau, self.config.tau_prev
        fits = self.config.loss == "muscle" and tau_prev < tau
        return Temperatures(None, tau, tau_prev if fits else tau / 2)

    def aligned(self, model: Model) -> list[str]:
        """w, and the temperatures where they are learned."""
        return super().aligned(model) + (["temperatures"] if self.config.learned else [])

    @client_step(up=lambda method: method.exchange.sent())
    def train(self, client: Client) -> Content:
        """As published; with `first: alignment` the task waits."""
        if self.config.first == "task":
            return super().train(client)
        return self.represent(client, self.exchange.bundles(client.public, client.round)[0])

    @client_step(
        up=lambda method: method.exchange.sent(optional=True), down=lambda method: method.exchange.received()
    )
    def align(self, client: Client, down: Message) -> Content:
        """As published; with `first: alignment` the task follows the last step."""
        content = super().align(client, down)
        if self.config.first == "alignment" and not content:
            fit(client, self.loss)
        return content

    def temperatures(self, client: Client) -> tuple[Temperature, Temperature]:
        """As published, or learned."""
        if not self.config.learned:
            return super().temperatures(client)
        tau, tau_prev = client["temperatures"]()
        return tau, tau_prev

    def contrast(
        self, client: Client, anchor: Tensor, others: Sequence[Tensor], masks: Any
    ) -> dict[str, Tensor]:
        """The chosen loss."""
        if self.config.loss == "pairwise":
            return {"pairwise": pairwise(anchor, others, self.tau(client), normalize=self.unit, **masks)}
        if self.config.loss == "gramian":
            options = {"negatives": self.config.negatives, "memory": self.memory}
            return {"gramian": gramian(anchor, others, self.config.tau, **options, **masks)}
        return super().contrast(client, anchor, others, masks)

    def as_published(self, direction: str, message: Message) -> int | None:
        """The paper's count where it is asked for: Z up; S^n and α^n of every batch down, B^M·(d + 1) scalars."""
        if self.config.accounting == "exact" or not message:
            return None
        if direction == "up":
            return message.scalars
        rows, peers, width = message["peers"].shape
        batch = self.config.batch
        return int(rows // batch * batch**peers * (width + 1))
