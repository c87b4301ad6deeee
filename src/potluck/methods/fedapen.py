"""FedAPEN (Qin et al., KDD 2023): personalised ensembles of a private model and a shared one."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.message import Content
from potluck.core.method import client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.settings import OptimizerSettings
from potluck.core.streams import Stream, shuffled_batches
from potluck.core.task import Batch, Task
from potluck.kit.compressed_small import SMALL_UP
from potluck.kit.mutual import MutualSmall, learn_from
from potluck.training.fit import fit

EQUAL = 0.5  # λ before anything is known of it


class FedAPEN(MutualSmall):
    """A client predicts with λ·o_p + (1 − λ)·o_g, scores of its private and of the shared model; λ is its own.

    Up: the shared model's parameters θ_k. Down: their average θ. Stays: data, labels, the private model, λ.

    Each client holds a twentieth of its training rows out, the adaptability set, and trains on the others:

        L_p = CE(o_p, y) + KL(σ(o_g) ‖ σ(o_p)) + CE(λ·o_p + (1 − λ)·sg(o_g), y)
        L_g = CE(o_g, y) + KL(σ(o_p) ‖ σ(o_g)) + CE(λ·sg(o_p) + (1 − λ)·o_g, y)

    where sg stops the gradient, also at the first distribution of a KL, which is summed over classes and averaged
    over samples. λ starts at 0.5. With a new θ it is learned on the adaptability set alone, with both models in
    evaluation mode and without gradient: CE(λ·o_p + (1 − λ)·o_g, y), and λ is clipped to [0, 1] after each step.
    Server: θ ← the mean of all θ_k of the cohort, all alike.

    `variant: equal_training` has λ = 0.5 in L_p and L_g; `learned_adaptive` trains by mutual learning, without the
    third terms. Both learn λ to predict with it.

    Deviations: the released code learns λ right after the average, with the θ of that moment. Here a client learns
    it when it receives that θ, at the beginning of the next round in which it takes part; a client that trains for
    the first time keeps 0.5, and what is measured after a round has the λ of its beginning. λ's learning rate, as
    every other, follows `training.lr_decay`, and `training.clip` bounds its gradient (INFERRED). A client with two
    rows or more holds out one at least, a client with one row none, so that its λ stays at 0.5 (INFERRED).
    """

    name = "fedapen"
    citation = "Qin et al., KDD 2023"
    stays = (*MutualSmall.stays, "mixture")
    modes = ("ensemble", *MutualSmall.modes)

    class Config(MutualSmall.Config):
        """Options of FedAPEN."""

        variant: Literal["fedapen", "equal_training", "learned_adaptive"] = option(
            default="fedapen",
            description="λ in training: the learned one, 0.5 (equal_training), or none (learned_adaptive)",
            source="paper; both others: released code",
        )
        held_out: float = option(
            default=0.05,
            gt=0,
            lt=1,
            description="share of a client's training rows on which λ is learned, and nothing else",
            source="released code (5 %)",
        )
        passes: int = option(
            default=10,
            ge=1,
            description="passes over the held-out rows to learn λ",
            source="released code (10)",
        )
        mixture_lr: float = option(
            default=1e-3, gt=0, description="learning rate of λ, by plain SGD", source="released code (1e-3)"
        )

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """Both models, λ, and whether the client has trained before."""
        return super().client_state(task, model) | {"mixture": Mixture(), "begun": torch.zeros(())}

    @client_step(up=SMALL_UP)
    def train(self, client: Client) -> Content:
        """Learn λ for the new shared model, train both models, send the shared one."""
        held, others = self.divided(client)
        if len(held):
            self.learn_mixture(client, held)
        self.fit(client, {"private": client.batches(rows=others)})
        client["begun"].value.fill_(1.0)
        return self.uploaded(client)

    def divided(self, client: Client) -> tuple[np.ndarray, np.ndarray]:
        """The adaptability set, drawn once from the client's secret, and the other training rows."""
        rows = client.rows["train"]
        count = min(max(1, int(self.config.held_out * len(rows))), len(rows) - 1)
        drawn = client.secret.child("adaptability set").numpy().permutation(rows)
        return np.sort(drawn[:count]), np.sort(drawn[count:])

    def learn_mixture(self, client: Client, held: np.ndarray) -> None:
        """Some passes over the adaptability set; λ stays as it is where the client has not trained yet."""
        rng = client.rng.child("adaptability set")
        order = shuffled_batches(held, client.training.batch_size, self.config.passes, "keep", rng)
        fit(
            client,
            self.mixture_loss,
            train=["mixture"],
            streams={"held_out": Stream(client.source, order)},
            optimizer=OptimizerSettings(lr=self.config.mixture_lr),
            scalars={"begun": client["begun"].value},
        )
        client["mixture"].clip()

    def mixture_loss(self, client: Client, batch: Batch, begun: Tensor) -> dict[str, Tensor]:
        """CE(λ·o_p + (1 − λ)·o_g, y), after λ is clipped where the last step took it out of [0, 1]."""
        client["mixture"].clip()
        with torch.no_grad():
            private, shared = client["model"](batch.x), client["small"](batch.x)
        mixed = client["mixture"](private, shared)
        return {"mixture": begun * client.task.loss(mixed, batch.y, batch.weight)}

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """L_p and L_g, each as its terms."""
        private, shared = client["model"](batch.x), client["small"](batch.x)

        def error(scores: Tensor) -> Tensor:
            return client.task.loss(scores, batch.y, batch.weight)

        terms = {
            "private": error(private) + learn_from(private, shared, batch),
            "shared": error(shared) + learn_from(shared, private, batch),
        }
        if self.config.variant != "learned_adaptive":
            share = EQUAL if self.config.variant == "equal_training" else client["mixture"].share.detach()
            terms["private_in_ensemble"] = error(mix(share, private, shared.detach()))
            terms["shared_in_ensemble"] = error(mix(share, private.detach(), shared))
        return terms

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """λ·o_p + (1 − λ)·o_g, or one of the models alone."""
        if mode != "ensemble":
            return super().predict(client, batch, mode)
        scores: Tensor = client["mixture"](client["model"](batch.x), client["small"](batch.x))
        return scores


def mix(share: Tensor | float, private: Tensor, shared: Tensor) -> Tensor:
    """λ·o_p + (1 − λ)·o_g, of scores and not of probabilities."""
    return share * private + (1 - share) * shared


class Mixture(nn.Module):
    """λ, a client's own share of its private model in the ensemble."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor(EQUAL))

    def forward(self, private: Tensor, shared: Tensor) -> Tensor:
        """The scores of the ensemble."""
        return mix(self.share, private, shared)

    @torch.no_grad()
    def clip(self) -> None:
        """Bring λ back to [0, 1]."""
        self.share.clamp_(0, 1)
