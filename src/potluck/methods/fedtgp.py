"""FedTGP (Zhang et al., AAAI 2024): prototypes that the server trains, with a margin between classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.contract import Contract, tensor
from potluck.core.message import Message
from potluck.core.method import Clients
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import OptimizerSettings
from potluck.core.streams import Source, Stream, shuffled_batches
from potluck.core.task import Batch, Task
from potluck.kit.class_means import merge_classes
from potluck.kit.class_vectors import class_vectors
from potluck.kit.prototypes import Prototypes
from potluck.kit.shared_head import joined
from potluck.training.fit import fit

FARTHEST = 1e12  # of a number in a mean: its square is finite, so no upload spoils the generator for good


def _down(method: FedTGP) -> Contract:
    if method.config.server_epochs == 0:
        return class_vectors("prototypes", "d", "mean prototypes of the classes anyone holds")
    return {"prototypes": tensor("C, d", "a trained prototype for every class", optional=True)}


class FedTGP(Prototypes):
    """The server trains one prototype per class to be near its clients' means and far from those of other classes.

    Up: as FedProto, the mean representation P_k[c] of each class held, the classes, their counts. Down: trained
    prototypes P̂ of all C classes, from the second round on. Client: FedProto's loss, CE + λ·dist(z, P̂_y).
    Server: Q[c] is the mean over the holders of c, gap[c] = min_{c'≠c} ‖Q[c] − Q[c']‖ (the least gap for classes
    nobody holds) and δ = min(max_c gap[c], cap). P̂ = W₂·relu(W₁·E[c] + b₁) + b₂ with an embedding E, and SGD on
    CE(−D, c) over all (P_k[c], c), where D_j = ‖P_k[c] − P̂_j‖, plus δ for j = c.

    Deviations: HtFLlib's distance is the root of a difference of squares, which may be negative; here the sum
    of squared differences is clamped at 1e-12. Where only one class was sent no gap is defined, and δ is the cap.
    A mean over no sample is left out. A class nobody holds still gets a prototype, which `prototype` may choose.
    The authors advise many rounds, until the server's loss is near zero.

    With `server_epochs: 0` nothing is trained and Q is sent, as far as classes are held: FedProto with uniform
    weights and the λ given here.
    """

    name = "fedtgp"
    citation = "Zhang et al., AAAI 2024"
    down = _down
    remedy = "lower training.optimizer.lr or method.server_lr, or set training.clip"

    class Config(Prototypes.Config):
        """Options of FedTGP; the defaults are HtFLlib's."""

        weight: float = option(default=10.0, ge=0, description="λ", source="HtFLlib")
        server_epochs: int = option(
            default=100,
            ge=0,
            description="the server's passes over a round's means; 0 sends the plain means",
            source="HtFLlib; 0: ours",
        )
        server_batch: int | None = option(
            default=None,
            ge=1,
            description="means in one step of the server; by default the clients' batch size",
            source="HtFLlib",
        )
        server_lr: float = option(
            default=0.01, gt=0, description="the server's learning rate, plain SGD", source="HtFLlib"
        )
        margin_cap: float = option(
            default=100.0, ge=0, description="the largest margin δ; 0 for none", source="HtFLlib"
        )

        @model_validator(mode="after")
        def _has_no_idle_option(self) -> FedTGP.Config:
            if self.server_epochs == 0:
                self.refuse_set("server_batch", "server_lr", "margin_cap", reason="at server_epochs: 0")
            return self

    def setup(self, population: Population) -> None:
        """The width of a prototype."""
        self.rep_dim = population.width(population.ids[0])

    def server_state(self, task: Task) -> dict[str, Any]:
        """What is sent, and the network that makes it."""
        trained = {"generator": Generator(task.classes, self.rep_dim)} if self.config.server_epochs else {}
        return super().server_state(task) | trained

    def receive(self, client: Client, down: Message) -> None:
        """Install the prototypes of all classes."""
        super().receive(client, down)
        if "prototypes" in down and "classes" not in down:
            client["known"].value.fill_(1.0)
            client["prototypes"].load(down["prototypes"])

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, then the prototypes."""
        replies = clients.ask(self.train)
        means, held = merge_classes(replies, "prototypes", server.task.classes)
        if self.config.server_epochs == 0:
            self.remember(server, means, held)
        elif held.any():
            self.train_prototypes(server, replies, margin(means, held, self.config.margin_cap))

    def train_prototypes(self, server: Server, replies: Replies, delta: Tensor) -> None:
        """SGD on what clients sent, shuffled anew each epoch; then P̂ is what is sent."""
        config, counted = self.config, joined(replies, "counts") > 0
        x = joined(replies, "prototypes")[counted].clamp(-FARTHEST, FARTHEST)
        y = joined(replies, "classes")[counted]
        batch = config.server_batch or server.training.batch_size
        order = shuffled_batches(
            np.arange(len(x)), batch, config.server_epochs, "keep", server.rng.child("prototypes")
        )
        fit(
            server,
            self.separation,
            train=["generator"],
            streams={"prototypes": Stream(Source(x, y), order)},
            optimizer=OptimizerSettings(lr=config.server_lr),
            scalars={"delta": delta},
        )
        with torch.no_grad():
            server["prototypes"].load({"prototypes": server["generator"]()})

    def separation(self, server: Server, batch: Batch, delta: Tensor) -> Tensor:
        """CE(−D, c), with δ added to the distance from the prototype of the own class."""
        squares = (batch.x.unsqueeze(1) - server["generator"]()).square().sum(2)
        distances = squares.clamp_min(1e-12).sqrt()
        own = F.one_hot(batch.y, server.task.classes)
        return F.cross_entropy(-(distances + delta * own), batch.y)


class Generator(nn.Module):
    """Prototypes of all classes: an embedding, a hidden layer, a linear layer, all as wide as a prototype."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, width)

    def forward(self) -> Tensor:
        """P̂, a row per class."""
        prototypes: Tensor = self.last(F.relu(self.middle(self.embedding.weight)))
        return prototypes


def margin(means: Tensor, held: Tensor, cap: float) -> Tensor:
    """δ: the largest of the distances from each class to its nearest other class, at most `cap`.

    >>> means = torch.tensor([[0.0, 0.0], [0.0, 3.0], [4.0, 0.0], [9.0, 9.0]])
    >>> margin(means, torch.tensor([True, True, True, False]), 100.0)  # nearest: 3, 3 and 4
    tensor(4.)
    """
    pairs = held.unsqueeze(0) & held.unsqueeze(1)
    pairs.fill_diagonal_(False)
    distances = (means.unsqueeze(0) - means.unsqueeze(1)).square().sum(2).sqrt()
    nearest = distances.nan_to_num(nan=torch.inf, posinf=torch.inf).where(pairs, torch.inf).amin(1)
    largest = nearest.where(pairs.any(1), 0).amax()
    return torch.where(pairs.any(), largest, cap).clamp_max(cap)
