"""MOON (Li, He, Song, CVPR 2021): representations near the global model's, away from the client's last ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from potluck.core.card import Card
from potluck.core.client import Client
from potluck.core.contract import Contract, Shapes, state_of
from potluck.core.message import Content
from potluck.core.method import Tasks, client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.task import Batch, Task
from potluck.kit.requirements import require_one_width
from potluck.methods.fedavg import FedAvg
from potluck.training.fit import Fit, fit


def _up(method: Moon) -> Contract:
    return {
        part: state_of(part, f"the client's {part} after local training") for part in method.averaged_parts
    }


def _down(method: Moon) -> Contract:
    return {
        part: state_of(part, f"averaged weights of this client's {part}", optional=True, partial=True)
        for part in method.averaged_parts
    }


class Moon(FedAvg):
    """FedAvg whose clients contrast what their model makes of a sample with the global and their previous model.

    Up: the weights, those of the projector g included. Down: their averages.
    Client: with u = g(f(x)), u_g of the model it received and u_p of the one it had after its last round, both
    frozen and in evaluation mode,

        loss = CE + μ·ℓ, ℓ = −log( e^{cos(u,u_g)/τ} / (e^{cos(u,u_g)/τ} + Σ_p e^{cos(u,u_p)/τ}) ),

    where p runs over the last `previous` models. In a client's first round that is the model it started with.
    Server: FedAvg, n_k/Σ_j n_j over the cohort.

    g (two linear layers with a ReLU) is `between` representation and head, as in the released code: scores are
    h(g(f(x))). As h is the head of the client's own model, g is as wide as the representation; models.rep_dim: 256
    gives the code's width. `beside` leaves scores at h(f(x)), with g of `width` for the contrast alone, and `none`
    has no g: the contrast is on f(x). With both, μ = 0 is FedAvg; `between` it is FedAvg of larger models.

    With `share: groups` g is averaged within a group. With `share: layers` there is one g for all clients, unlike
    models included, which therefore need one representation width.

    Deviations: the released code has no previous model in the first round, though it prepares the initial one, and
    a buffer of more than two ends up with copies of one model; here it holds the last ones.
    """

    name = "moon"
    citation = "Li, He, Song, CVPR 2021"
    tasks: ClassVar[Tasks] = "features"
    card_fields: ClassVar[tuple[str, ...]] = (*FedAvg.card_fields, "width")
    down = _down  # type: ignore[assignment]  # depends on the options

    class Config(FedAvg.Config):
        """Options of MOON."""

        mu: float = option(
            default=1.0,
            ge=0,
            description="μ on the contrast; the grid is 0.001, 0.01, 0.1, 1, 5, 10",
            source="released code (1; its example has 5)",
        )
        tau: float = option(
            default=0.5,
            gt=0,
            description="τ of the contrast; the grid is 0.1, 0.5, 1",
            source="released code",
        )
        previous: int = option(
            default=1,
            ge=1,
            description="how many of its previous models a client keeps",
            source="released code",
        )
        projector: Literal["between", "beside", "none"] = option(
            default="between",
            description="g: between representation and head, beside the head for the contrast alone, or none",
            source="released code for between and none; beside: ours",
        )
        width: int = option(
            default=256,
            ge=1,
            description="width of what a projector beside the head gives",
            source="released code",
        )

        @model_validator(mode="after")
        def _width_is_of_use(self) -> Self:
            self.refuse_idle("width", needs="projector", among=("beside",))
            return self

    def setup(self, population: Population) -> None:
        """What is averaged."""
        super().setup(population)
        self.averaged_parts = ("model",) if self.config.projector == "none" else ("model", "projector")

    def check(self, population: Population) -> None:
        """As FedAvg; and one projector for all needs representations of one width."""
        super().check(population)
        if self.config.share == "layers" and "projector" in self.averaged_parts:
            otherwise = ", or method.share to groups, or use fedavg, which needs no projector"
            require_one_width(population, "a projector that all share (share: layers)", otherwise)

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model and g; copies as received and as in previous rounds, and which of these there are."""
        projector = self.build_projector(model.rep_dim)
        frozen = [Frozen(model, projector) for _ in range(self.config.previous)]
        filled = torch.zeros(self.config.previous)
        filled[0] = 1.0
        return {
            "model": model,
            "projector": projector,
            "global": Frozen(model, projector),
            "previous": nn.ModuleList(frozen),
            "filled": filled,
        }

    def build_projector(self, d: int) -> nn.Module:
        """g: linear, ReLU, linear."""
        if self.config.projector == "none":
            return nn.Identity()
        return nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, self.width(d)))

    def width(self, d: int) -> int:
        """The width of u for representations of width d."""
        return int(self.config.width) if self.config.projector == "beside" else d

    def expected(self, card: Card, part: str) -> Shapes | None:
        """The tensors of g follow from the width of the representation."""
        if part != "projector":
            return super().expected(card, part)
        d, out = card.width, self.width(card.width)
        return {"0.weight": (d, d), "0.bias": (d,), "2.weight": (out, d), "2.bias": (out,)}

    @client_step(up=_up)
    def train(self, client: Client) -> Content:
        """Freeze what was received, train against it, and remember the result."""
        _copy(client, "global/")
        self.fit(client)
        self.remember(client)
        return {part: client[part].state() for part in self.averaged_parts}

    def fit(self, client: Client) -> Fit:
        """Local training of model and projector; the frozen models are in evaluation mode."""
        return fit(client, self.loss, train=self.averaged_parts)

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """The task's own loss and the contrast."""
        z = client["model"].features(batch.x)
        u = client["projector"](z)
        scores = client["model"].head(u if self.config.projector == "between" else z)
        with torch.no_grad():
            positive, *negatives = (
                model(batch.x) for model in (client["global"], *client["previous"].content)
            )
        gaps = contrast(u, positive, negatives, client["filled"].value, self.config.tau)
        return {
            "task": client.task.loss(scores, batch.y, batch.weight),
            "contrast": self.config.mu * batch.mean(gaps),
        }

    def remember(self, client: Client) -> None:
        """Move every previous model one place on; the newest is the first."""
        for place in reversed(range(1, self.config.previous)):
            client[f"previous/{place}"].load(client[f"previous/{place - 1}"].tensors())
        _copy(client, "previous/0.")
        filled = client["filled"].value
        client["filled"].load(torch.cat([torch.ones_like(filled[:1]), filled[:-1]]))

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """h(g(f(x))), or h(f(x)) where g is not between."""
        z = client["model"].features(batch.x)
        scores: Tensor = client["model"].head(
            client["projector"](z) if self.config.projector == "between" else z
        )
        return scores


class Frozen(nn.Module):
    """A copy of a model and its projector."""

    def __init__(self, model: Model, projector: nn.Module) -> None:
        super().__init__()
        self.model, self.projector = copy.deepcopy(model), copy.deepcopy(projector)

    def forward(self, x: Tensor) -> Tensor:
        """u."""
        u: Tensor = self.projector(self.model.features(x))
        return u


def contrast(u: Tensor, positive: Tensor, negatives: Sequence[Tensor], filled: Tensor, tau: float) -> Tensor:
    """ℓ of each sample, as cross-entropy over cosines; only the negatives that are `filled` count."""
    with torch.autocast(u.device.type, enabled=False):
        cosines = [F.cosine_similarity(u.float(), other.float(), dim=1) for other in (positive, *negatives)]
        logits = torch.stack(cosines, dim=1) / tau
        there = torch.cat([torch.ones_like(filled[:1]), filled]) > 0
        return logits.masked_fill(~there, -torch.inf).logsumexp(1) - logits[:, 0]


def _copy(client: Client, into: str) -> None:
    """Copy the client's model and projector, statistics included."""
    for part in ("model", "projector"):
        client[f"{into}{part}"].load(client[part].tensors())
