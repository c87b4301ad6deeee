"""FedMD (Li & Wang, 2019): clients agree on the scores of public samples and learn towards that consensus.

P_t are public samples drawn for the round from the shared seed, so that no id crosses.

    Up:     the logits of P_t before the softmax, |P_t|·C scalars.
    Down:   their mean õ(x) = (1/K)·Σ_k o_k(x), |P_t|·C scalars.
    Client: digest, mean |o_k(x) − õ(x)| over P_t and classes; then revisit, CE on private data.

Deviations: the released code first trains every client on the labels of the public data until it converges, and
then on its own data (25 epochs, stopped early). Public data has no labels here, so what is left of that stage is
`initial`: local training before a client's first logits. With public classes beside the private ones the paper's
output holds both; here it is the task's C. The released code (TensorFlow) digests in batches of 256 for one epoch
(128 in the imbalanced CIFAR runs) and revisits for 4 epochs in batches of 5, over 20 rounds; here revisiting
follows `training`, and digesting uses its optimiser. INFERRED: samples a client lacks do not count; logits are
read in evaluation mode; where a task has labels or numbers instead of classes, its scores are the logits, as
neither the mean nor the distance has a softmax.
"""

from __future__ import annotations

from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, client_step
from potluck.core.options import option
from potluck.core.server import Server
from potluck.core.task import Batch
from potluck.kit.masks import mean_where
from potluck.kit.public_knowledge import by_row, plain_mean, public_stream, scores
from potluck.kit.score_exchange import DrawnSamplesConfig, OnDrawnSamples
from potluck.training.fit import fit


class FedMD(OnDrawnSamples):
    """Distillation towards the mean logits of public samples, a plain average over the cohort."""

    name = "fedmd"
    citation = "Li & Wang, arXiv 1910.03581"
    tasks = "features"
    batch_option = "digest_batch"

    class Config(DrawnSamplesConfig):
        """Options of FedMD."""

        digest_epochs: int = option(
            default=1,
            ge=1,
            description="passes over P_t in a round; the released code's 1",
            source="released code",
        )
        digest_batch: int | None = option(
            default=None,
            ge=1,
            description="public samples in a digest step; by default the released code's 256, or all if fewer",
            source="released code",
        )
        initial: int = option(
            default=1,
            ge=0,
            description="how often a client trains locally before its first logits",
            source="ours",
        )

    def round(self, server: Server, clients: Clients) -> None:
        """Newcomers train; everyone scores P_t, digests the mean and revisits its own data."""
        if self.config.initial:
            self.welcome(server, clients)
        consensus = plain_mean(clients.ask(self.score), "logits")
        clients.ask(self.learn, down={"logits": consensus})
        self.remember(server, clients)

    def prepare(self, client: Client) -> None:
        """Local training before the first logits, `initial` times over the same batches."""
        private = client.batches()
        fit(client, self.loss, streams={"private": private}, steps=self.config.initial * len(private))

    @client_step(up={"logits": tensor("P_t, C", "the client's logits of the round's public samples")})
    def score(self, client: Client) -> Content:
        """The logits of P_t."""
        return {"logits": scores(client, self.rows(client))}

    @client_step(down={"logits": tensor("P_t, C", "the mean logits of the round's public samples")})
    def learn(self, client: Client, down: Message) -> None:
        """Digest, then revisit."""
        rows = self.rows(client)
        public = public_stream(client, rows, self.batch, self.config.digest_epochs, "digest")
        consensus = by_row(client, rows, down["logits"])
        fit(client, self.digest, streams={"public": public}, scalars={"consensus": consensus})
        fit(client, self.loss)

    def digest(self, client: Client, batch: Batch, consensus: Tensor) -> dict[str, Tensor]:
        """The mean absolute difference between own logits and the consensus."""
        gaps = (client["model"](batch.x).float() - consensus[batch.id]).abs().mean(1)
        return {"digest": mean_where(gaps, client.public.mask[batch.id])}
