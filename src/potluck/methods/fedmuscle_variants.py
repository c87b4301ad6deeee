"""FedMuscle's options beyond the paper, and the losses the paper compares with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.message import Message
from potluck.core.method import MethodConfig
from potluck.core.settings import OptimizerSettings
from potluck.core.task import Batch
from potluck.kit.contrastive import MEMORY, Negatives, Temperatures, gramian, pairwise
from potluck.training.modes import evaluating, on_the_batch


class AligningOptimizer(OptimizerSettings):
    """How the representation model is aligned. No source names an optimiser or its values: these are ours."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="adamw", description="the optimiser; ours")
    lr: float = Field(default=1e-3, gt=0, description="learning rate of an alignment step; ours")
    weight_decay: float = Field(default=0.01, ge=0, description="weight decay of an alignment step; ours")


class Variants(MethodConfig):
    """Options that are not the paper's method: its comparisons, choices it leaves open, and additions of ours."""

    loss: Literal["muscle", "pairwise", "gramian"] = Field(
        default="muscle",
        description="the paper's loss, or one it compares with: InfoNCE summed over the peers, or volumes (GRAM)",
    )
    negatives: Negatives = Field(
        default="tuples",
        description="of the Gramian: all tuples of the peers, or anchors of other samples; which the paper uses is "
        "not known",
    )
    bundle: PositiveInt = Field(
        default=1, description="k: public batches in one exchange; 1 as published, more are ours"
    )
    redraw: Literal["batch", "round"] = Field(
        default="batch", description="how often the server draws a client's peers; `batch` is inferred"
    )
    learned: bool = Field(
        default=False, description="train both temperatures too, from their values here; ours"
    )
    normalize: bool = Field(
        default=True,
        description="scale representations to length 1, also when they are sent; inferred. The Gramian always does",
    )
    first: Literal["task", "alignment"] = Field(
        default="task",
        description="the phase that begins a round; `alignment` ends it with the task, so that heads have followed "
        "their representations when they are measured; ours",
    )
    statistics: Literal["private", "public"] = Field(
        default="private",
        description="what batch norm uses while aligning: its statistics of private data, or those of the public "
        "batch, which it forgets; ours",
    )
    memory: int = Field(
        default=MEMORY, ge=1, description="bytes for the B^M tuples of a batch; more are computed in pieces"
    )
    accounting: Literal["exact", "paper"] = Field(
        default="exact", description="`paper`: log the paper's count of scalars beside what crosses"
    )

    @model_validator(mode="after")
    def _fits_the_loss(self) -> Self:
        if self.learned and self.loss == "gramian":
            raise ValueError("learned temperatures are for muscle and pairwise; the gramian has a fixed one")
        self.refuse_idle("negatives", needs="loss", among=("gramian",))
        self.refuse_idle("memory", needs="loss", among=("muscle", "gramian"))
        self.refuse_idle("memory", needs="negatives", among=("tuples",))
        return self


def learned_temperatures(config: Any) -> dict[str, nn.Module]:
    """A module with both temperatures where they are learned; pairwise has one, the other is any smaller value."""
    if not config.learned:
        return {}
    tau_prev = config.tau / 2 if config.loss == "pairwise" else config.tau_prev
    return {"temperatures": Temperatures(None, config.tau, tau_prev)}


def anchors_of(client: Client, batch: Batch, statistics: str) -> Tensor:
    """The client's representations of a public batch, with gradients; dropout rests in both cases."""
    mode = evaluating if statistics == "private" else on_the_batch
    with mode(client["model"].content):
        anchors: Tensor = client["model"].features(batch.x)
    return anchors


def compared_loss(
    config: Any, anchor: Tensor, peers: Sequence[Tensor], tau: float | Tensor, masks: dict[str, Any]
) -> dict[str, Tensor]:
    """The losses the paper compares Muscle with."""
    if config.loss == "pairwise":
        return {"pairwise": pairwise(anchor, peers, tau, normalize=config.normalize, **masks)}
    options = {"negatives": config.negatives, "memory": config.memory}
    return {"gramian": gramian(anchor, peers, config.tau, **options, **masks)}


def published_scalars(direction: str, message: Message, batch: int) -> int:
    """What the paper counts: representations up; S^n and α^n of every batch down, B^M·(d + 1) scalars."""
    if direction == "up":
        return message.scalars
    rows, peers, width = message["peers"].shape
    return int(rows // batch * batch**peers * (width + 1))
