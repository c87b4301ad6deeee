"""FML (Shen et al., 2020): federated mutual learning of a private model and a shared "meme" model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from potluck.core.client import Client
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.task import Batch
from potluck.kit.mutual import MutualSmall, learn_from


class FML(MutualSmall):
    """The private model and the meme model learn from labels and from each other; only the meme model travels.

    Up: the meme model's parameters θ_k. Down: their average θ. Stays: data, labels, the private model.

    Client: with the scores o_p of the private model and o_g of the meme model on the same batch, both in training
    mode,

        L_private = α·CE(o_p, y) + (1 − α)·KL(σ(o_g) ‖ σ(o_p))
        L_meme    = β·CE(o_g, y) + (1 − β)·KL(σ(o_p) ‖ σ(o_g))

    where the first distribution of a KL is a target without gradient, and KL is summed over classes and averaged
    over samples. Server: θ ← the mean of all θ_k of the cohort, all alike, statistics of batch norm included.

    At α = β = 1 nobody learns from the other: the private models are those of `local`, the meme model is that of
    `fedavg` with `weights: uniform`. The private model is the reported one; mode `small` is the meme model.

    Deviations: none known from the released code. HtFLlib does not detach the targets and averages KL over
    classes, too, which makes it C times smaller; neither is done here.
    """

    name = "fml"
    citation = "Shen et al., arXiv 2006.16765, 2020; FITEE 2023"

    class Config(MutualSmall.Config):
        """Options of FML."""

        alpha: float = option(
            default=0.5,
            ge=0,
            le=1,
            description="α, the share of the labels in the private model's loss; the meme model has the rest",
            source="released code (0.5)",
        )
        beta: float = option(
            default=0.5,
            ge=0,
            le=1,
            description="β, the share of the labels in the meme model's loss; the private model has the rest",
            source="released code (0.5)",
        )

    def advice(self, population: Population) -> Iterator[str]:
        """Say where the private models learn nothing from others."""
        yield from super().advice(population)
        if self.config.alpha == 1:
            yield (
                "fml: at alpha: 1 the private models learn nothing from the shared one, and are those of local; "
                "0.5 is published"
            )

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """L_private and L_meme, each as its two terms."""
        private, meme = client["model"](batch.x), client["small"](batch.x)
        alpha, beta = self.config.alpha, self.config.beta
        return {
            "private": alpha * client.task.loss(private, batch.y, batch.weight),
            "private_from_meme": (1 - alpha) * learn_from(private, meme, batch),
            "meme": beta * client.task.loss(meme, batch.y, batch.weight),
            "meme_from_private": (1 - beta) * learn_from(meme, private, batch),
        }
