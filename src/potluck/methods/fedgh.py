"""FedGH (Yi et al., ACM MM 2023): a global header trained on the clients' class means."""

from __future__ import annotations

from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import numbers, tensor
from potluck.core.message import Content
from potluck.core.replies import Replies
from potluck.kit.class_means import ClassStats
from potluck.kit.shared_head import SharedHead, joined, representations


class FedGH(SharedHead):
    """The server trains one head on every client's class means ("prototypes"): CE(ω(P_k[c]), c).

    Up: the mean representation of each class held, and which class it is: C_k·(d + 1) scalars; no counts, so that
    the mean of a class with one sample looks like any other. Down: the head.
    Client: CE on the whole model, then one pass in evaluation mode over all its training data.

    Deviations: the official script steps a client's optimiser in the server's loop, so that the head is never
    trained; here, as in HtFLlib, it is. The script takes means of batch means; here they are means
    over samples. HtFLlib's server takes the clients' batch size (`server_batch`), the script one pair at a time.
    """

    name = "fedgh"
    citation = "Yi et al., ACM MM 2023"
    stays = ("data", "model")
    up = {
        "prototypes": tensor("C_k<=C, d", "mean representation of each class held"),
        "classes": numbers("C_k", "which classes these are", below="C", distinct=True),
    }

    def upload(self, client: Client) -> Content:
        """The class means."""
        z, y = representations(client)
        stats = ClassStats(client.task.classes, z.shape[1], client.device)
        stats.add(z, y)
        return {
            "prototypes": stats.means(client.classes_held),
            "classes": client.numbers(client.classes_held),
        }

    def examples(self, replies: Replies) -> tuple[Tensor, Tensor]:
        """Every pair of a mean and its class, whatever the number of samples behind it."""
        return joined(replies, "prototypes"), joined(replies, "classes")
