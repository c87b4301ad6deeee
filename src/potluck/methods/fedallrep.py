"""FedAllRep (baseline of the FedRE paper, arXiv 2511.22265): every representation is sent."""

from __future__ import annotations

from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import numbers, tensor
from potluck.core.message import Content
from potluck.core.replies import Replies
from potluck.kit.shared_head import SharedHead, joined, representations


class FedAllRep(SharedHead):
    """The server trains one head on the representation of every sample of the round's clients: CE(ω(r_i), y_i).

    Up: all n_k pairs of representation and class, n_k·(d + 1) scalars. Down: the head. Of the methods with a common
    head it sends the most and gives the most away.

    There is no released code; beyond the name everything here is INFERRED. Local training and the head's epoch,
    batch of 32 and rate of 0.01 are FedRE's. The loss is a mean: batches are full here, and a sum would make the
    server's steps 32 times as long.
    """

    name = "fedallrep"
    citation = "baseline of FedRE, CVPR 2026 (arXiv 2511.22265)"
    stays = ("data", "model")
    up = {
        "representations": tensor("n, d", "the representation of every training sample"),
        "classes": numbers("n", "its class", below="C"),
    }

    def upload(self, client: Client) -> Content:
        """The representation and class of every training sample."""
        z, y = representations(client)
        return {"representations": z, "classes": y}

    def examples(self, replies: Replies) -> tuple[Tensor, Tensor]:
        """Every pair that came."""
        return joined(replies, "representations"), joined(replies, "classes")
