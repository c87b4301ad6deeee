"""FedRE (CVPR 2026, arXiv 2511.22265): federated representation entanglement.

Each client sends one mixture of its representations; the server trains the common head ω on the mixtures.

    Up:     r̃ = Σ_c w_c·p_c, a mixture of the means p_c of the classes held (d scalars), and its label
            ỹ = Σ_c w_c·onehot(c) (C scalars), w ≥ 0, Σw = 1, drawn at random in every round.
    Down:   the head ω.
    Client: cross-entropy on the whole model, which begins the round with ω.
    Server: Σ_k CE(ω(r̃_k), ỹ_k) with soft labels; every client is one example, whatever its size.

That is the mechanism RAP, the paper's default; `fedre_variants` has the others. The mapping of representations to
one width belongs to the models: `models: {pool: […], rep_dim: 512, adapter: pool}` (or max-pool, or linear).

ỹ is the vector of weights itself: it shows which classes a client holds, and over rounds the server can solve for
their means. The notes on FedRE's page measure that, and what `fixed`, `noise` and `levels` do about it.

Paper and released code differ. The code never sends the head back in the heterogeneous setting; here every round
begins with it, as in the paper. It gives ViT clients a head of two layers; here all heads have one form. It
leaves out the last short batch when it mixes; here all samples count.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import tensor
from potluck.core.message import Content
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.replies import Replies
from potluck.core.task import Task
from potluck.kit.shared_head import SharedHead, representations
from potluck.methods.fedre_variants import Variants, coarsened, disturbed, draw_weights


class FedRE(SharedHead):
    """Send one random mixture of class means and its soft label; train the common head on the mixtures."""

    name = "fedre"
    citation = "FedRE, CVPR 2026 (arXiv 2511.22265)"
    # RSR sends a representation, RSP a class mean, and VAR's label the class frequencies: none of them stays.
    stays = ("data", "model")
    with_one_class = "; what they send is of that class, unmixed"
    up = {
        "representation": tensor("d", "the entangled representation: one mixture of the client's own"),
        "label": tensor("C", "its label: the weight of each class in the mixture", at_least=0, at_most="1"),
    }

    class Config(Variants):
        """Options of FedRE."""

        server_loss: Literal["sum", "mean"] = option(
            default="sum",
            description="over a batch of uploads; the paper's objective is a sum over the clients",
            source="paper's objective and released code",
        )

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, and the weights where they are kept."""
        return {"model": model} | ({"mixing": {}} if self.config.fixed else {})

    def upload(self, client: Client) -> Content:
        """r̃ and ỹ, with the same weights."""
        z, y = representations(client)
        weights = self.sample_weights(client, y)
        label = weights @ F.one_hot(y, client.task.classes).to(weights.dtype)
        return {
            "representation": disturbed(client, weights @ z, self.config.noise),
            "label": coarsened(label, self.config.levels),
        }

    def sample_weights(self, client: Client, y: Tensor) -> Tensor:
        """The weight of every sample: w_c / n_c in a mixture of class means, or a weight of its own."""
        if self.config.mechanism.endswith("R"):
            return self.unit_weights(client, len(y))
        members = (y.unsqueeze(1) == client.numbers(client.classes_held)).float()
        return (members / members.sum(0)) @ self.unit_weights(client, len(client.classes_held))

    def unit_weights(self, client: Client, units: int) -> Tensor:
        """w over the classes (or samples): drawn now, or kept from the client's first round."""
        mechanism, distribution = self.config.mechanism, self.config.weights
        if not self.config.fixed:
            return draw_weights(client, units, mechanism, distribution)
        if "weights" not in client["mixing"].tensors():
            client["mixing"].load({"weights": draw_weights(client, units, mechanism, distribution)})
        kept: Tensor = client["mixing"]["weights"]
        return kept

    def examples(self, replies: Replies) -> tuple[Tensor, Tensor]:
        """One example per client."""
        messages = list(replies.values())
        return (
            torch.stack([message["representation"] for message in messages]),
            torch.stack([message["label"] for message in messages]),
        )
