"""FedRE (CVPR 2026, arXiv 2511.22265): federated representation entanglement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import tensor
from potluck.core.message import Content
from potluck.core.model import Model
from potluck.core.replies import Replies
from potluck.core.task import Task
from potluck.kit.shared_head import SharedHead, representations

Mechanism = Literal["RAP", "VAP", "RSP", "RAR", "VAR", "RSR"]
Distribution = Literal["uniform", "gaussian", "laplace"]


class FedRE(SharedHead):
    """Each client sends one mixture of its representations; the server trains the common head on the mixtures.

    Up: the entangled representation r̃ = Σ_i w_i·r_i (d scalars) and its label ỹ = Σ_i w_i·onehot(y_i) (C scalars),
    w ≥ 0, Σw = 1, over all training samples in evaluation mode. Down: the head ω. Client: CE on the whole model.
    Server: Σ_k CE(ω(r̃_k), ỹ_k) with soft labels; every client is one example, whatever its size.

    `mechanism` says what is mixed and how. RAP (random average prototype), the default, is spelled out in the text
    that was at hand; the other five are INFERRED from their names and the order of their results:

        units               one at random   all, equally   all, with normalised random weights
        representations     RSR             VAR            RAR
        class means         RSP             VAP            RAP

    A class mean with weight w_c is every sample of the class with w_c / n_c. The representation mapping, to one
    width, belongs to the models: `models: {pool: […], rep_dim: 512, adapter: pool}` (or max-pool, or linear).

    ỹ is the weight vector itself: it shows which classes a client holds, and over rounds the server can solve for
    their means. docs/methods/fedre.md measures that and what `fixed`, `noise` and `levels` do about it.

    Paper and released code differ. The code never sends the head back in the heterogeneous setting; here every
    round begins with it, as in the paper. It gives ViT clients a head of two layers; here all heads have one form.
    It leaves out the last short batch when it mixes; here all samples count.
    """

    name = "fedre"
    citation = "FedRE, CVPR 2026 (arXiv 2511.22265)"
    stays = (
        "data",
        "model",
    )  # RSR sends a representation, RSP a class mean, VAR's label the class frequencies
    with_one_class = "; what they send is of that class, unmixed"
    up = {
        "representation": tensor("d", "the entangled representation: one mixture of the client's own"),
        "label": tensor("C", "its label: the weight of each class in the mixture"),
    }

    class Config(SharedHead.Config):
        """Options of FedRE."""

        server_loss: Literal["sum", "mean"] = "sum"  # the paper's objective is a sum over the clients
        mechanism: Mechanism = "RAP"
        weights: Distribution = "uniform"  # of the random weights before they are normalised
        fixed: bool = False  # keep the first round's weights; as published they are drawn anew each round
        noise: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # on r̃, in its deviations; ours
        levels: int | None = Field(default=None, ge=1)  # ỹ in whole multiples of 1/levels; ours

        @model_validator(mode="after")
        def _has_random_weights(self) -> Self:
            self.refuse_idle("weights", needs="mechanism", among=("RAP", "RAR"))
            self.refuse_idle("fixed", needs="mechanism", among=("RAP", "RSP", "RAR", "RSR"))
            return self

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, and the weights where they are kept."""
        return {"model": model} | ({"mixing": {}} if self.config.fixed else {})

    def upload(self, client: Client) -> Content:
        """r̃ and ỹ, of the same weights."""
        z, y = representations(client)
        weights = self.sample_weights(client, y)
        label = weights @ F.one_hot(y, client.task.classes).to(weights.dtype)
        return {"representation": self.disturbed(client, weights @ z), "label": self.coarsened(label)}

    def sample_weights(self, client: Client, y: Tensor) -> Tensor:
        """w: the weight of every sample, its unit's own or its share of its class's."""
        if self.config.mechanism.endswith("R"):
            return self.unit_weights(client, len(y))
        members = (y.unsqueeze(1) == client.numbers(client.classes_held)).float()
        return (members / members.sum(0)) @ self.unit_weights(client, len(client.classes_held))

    def unit_weights(self, client: Client, units: int) -> Tensor:
        """The weights of the units: drawn now, or those of the client's first round."""
        if not self.config.fixed:
            return self.draw_weights(client, units)
        if "weights" not in client["mixing"].tensors():
            client["mixing"].load({"weights": self.draw_weights(client, units)})
        kept: Tensor = client["mixing"]["weights"]
        return kept

    def draw_weights(self, client: Client, units: int) -> Tensor:
        """One-hot (S), equal (V), or random and normalised (A), from the client's own secret."""
        if self.config.mechanism.startswith("V"):
            return torch.full((units,), 1 / units, device=client.device)
        draw = client.draw_private("weights")
        if self.config.mechanism.startswith("RS"):
            chosen = torch.randint(units, (1,), generator=draw, device=client.device)
            return torch.zeros(units, device=client.device).index_fill_(0, chosen, 1.0)
        drawn = DISTRIBUTIONS[self.config.weights](torch.empty(units, device=client.device), draw)
        positive = drawn.abs().clamp_min(torch.finfo(drawn.dtype).tiny)
        return positive / positive.sum()

    def disturbed(self, client: Client, mixed: Tensor) -> Tensor:
        """r̃ with private noise, if any is asked for."""
        if not self.config.noise:
            return mixed
        noise = torch.randn(mixed.shape, generator=client.draw_private("noise"), device=mixed.device)
        disturbed: Tensor = mixed + self.config.noise * mixed.std(correction=0) * noise
        return disturbed

    def coarsened(self, label: Tensor) -> Tensor:
        """ỹ as it is, or in few levels."""
        return label if self.config.levels is None else coarse(label, self.config.levels)

    def examples(self, replies: Replies) -> tuple[Tensor, Tensor]:
        """One example per client."""
        messages = list(replies.values())
        return (
            torch.stack([message["representation"] for message in messages]),
            torch.stack([message["label"] for message in messages]),
        )


# The paper names the distributions; that negative values count by their size is INFERRED. The size of a Laplace
# variable is exponential, so these weights, once normalised, are Dirichlet(1); the uniform ones are not.
DISTRIBUTIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "uniform": lambda place, draw: place.uniform_(generator=draw),
    "gaussian": lambda place, draw: place.normal_(generator=draw),
    "laplace": lambda place, draw: place.exponential_(generator=draw),
}


def coarse(label: Tensor, levels: int) -> Tensor:
    """Weights that add up to one, in whole multiples of 1/levels that still do: largest remainders are rounded up.

    >>> coarse(torch.tensor([0.55, 0.05, 0.4]), 4)
    tensor([0.5000, 0.0000, 0.5000])
    """
    whole = (label * levels).floor()
    remainders = label * levels - whole
    ranks = remainders.argsort(descending=True, stable=True).argsort()
    return (whole + (ranks < levels - whole.sum())) / levels
