"""FedMRL (Yi et al., NeurIPS 2024): Matryoshka fusion of a shared small model and a private one.

`fedmrl_variants.py` adds the ablations; `method: fedmrl` runs the class there, which is this one unless an option
says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.contract import state_of
from potluck.core.message import Content
from potluck.core.method import client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.task import Batch, Task
from potluck.kit.nested_small import NestedSmall
from potluck.training.fit import Fit, fit
from potluck.training.optimizers import Group


class FedMRL(NestedSmall):
    """A shared small model works beside each private one; their representations are fused and learned nested.

    Up: the small model's parameters θ_k. Down: their average θ. Stays: data, private model ω, projector φ.

    Client: with r_g = G_ex(x) of width d1 and r_f = F_ex(x) of width d2 ≥ d1, the fused representation is
    R = P([r_g, r_f]) of width d2, and

        loss = m_g·CE(G_hd(R[:, :d1]), y) + m_f·CE(F_hd(R), y)

    with one backward pass through everything: θ, ω and φ all learn from both terms.
    Server: θ ← Σ_k (n_k / Σ_j n_j) θ_k over the cohort.

    Deviations: as read (it was not run here), the released code averages copies that share memory, so that the
    mean is the last client's θ, and carries momentum from client to client. Here the mean is the paper's, and every
    client starts a round with a fresh optimiser. The paper does not state which d1 its headline tables use; 100 is
    the smallest it tries. In tasks other than one class per sample CE is the task's own loss (INFERRED).
    """

    name = "fedmrl"
    citation = "Yi et al., NeurIPS 2024"
    tasks = "features"
    stays: tuple[str, ...] = ("data", "labels", "model", "projector", "representations")
    modes: tuple[str, ...] = ("mix-large", "mix-small", "single-large", "single-small")
    sends = "the small model's parameters after local training"
    weights: Mapping[str, Any] = {"small": 1.0, "large": 1.0}  # m_g and m_f; both 1 in the paper

    class Config(NestedSmall.Config):
        """Options of FedMRL; n_k as in the paper is `weights: samples`."""

        lr: dict[Literal["model", "small", "projector"], PositiveFloat] = option(
            default={},
            description="learning rate per part; default: that of the optimiser, as in the paper",
            source="paper has one rate for all parts; others: ours",
        )
        clip: float | None = option(
            default=50.0,
            gt=0,
            description="largest gradient norm of each part, as in the released code; training.clip holds, too",
            source="released code",
        )

    def client_state(self, task: Task, model: Model, d1: int | None = None) -> dict[str, Any]:
        """The private model F, a working copy of the small one G, the private projector P."""
        small = self.build_small(task, d1)
        return {"model": model, "small": small, "projector": self.build_projector(small, model)}

    def build_projector(self, small: Model, model: Model) -> nn.Module:
        """P: one linear layer from d1 + d2 to d2."""
        return nn.Linear(small.rep_dim + model.rep_dim, model.rep_dim)

    @client_step(up=lambda method: {"small": state_of("small", f"{method.sends}{method.architecture}")})
    def train(self, client: Client) -> Content:
        """Local epochs on the fused loss, then θ_k."""
        self.fit(client)
        return {"small": client["small"].state()}

    def fit(self, client: Client, scalars: Mapping[str, Tensor] | None = None) -> Fit:
        """Train all three parts, each with its own clipping."""
        parts = [part for part in ("model", "small", "projector") if client[part].trainable()]
        clip = min(filter(None, (self.config.clip, client.training.clip)), default=None)
        groups = {part: Group(lr=self.config.lr.get(part), clip=clip) for part in parts}
        return fit(client, self.loss, groups=groups, scalars=scalars)

    def loss(self, client: Client, batch: Batch, **scalars: Tensor) -> dict[str, Tensor]:
        """The weighted cross-entropy of each header; `scalars` replace weights by name."""
        fused, weights = self.fuse(client, batch.x), {**self.weights, **scalars}
        return {
            term: weights[term] * client.task.loss(scores, batch.y, batch.weight)
            for term, scores in self.scores(client, fused).items()
        }

    def fuse(self, client: Client, x: Tensor) -> Tensor:
        """R = P([r_g, r_f]), the small representation first."""
        both = torch.cat([client["small"].features(x), client["model"].features(x)], dim=1)
        fused: Tensor = client["projector"](both)
        return fused

    def scores(self, client: Client, fused: Tensor) -> dict[str, Tensor]:
        """The scores that are learned, by the name of their loss term."""
        return {"small": self.small_scores(client, fused), "large": client["model"].head(fused)}

    def small_scores(self, client: Client, fused: Tensor) -> Tensor:
        """G_hd(R[:, :d1])."""
        scores: Tensor = client["small"].head(fused[:, : client["small"].rep_dim])
        return scores

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """`mix-*` use the fused representation, `single-*` one model alone on its own features.

        The headers never see unprojected features in training, so `single-*` may be low.
        """
        if mode == "mix-small":
            return self.small_scores(client, self.fuse(client, batch.x))
        if mode == "mix-large":
            scores: Tensor = client["model"].head(self.fuse(client, batch.x))
        else:
            scores = client["small" if mode == "single-small" else "model"](batch.x)
        return scores
