"""SimCLR (Chen et al., ICML 2020) at every client: what public data alone is worth, with nothing on the wire."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.method import Clients, MethodConfig, client_step
from potluck.core.model import Model
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.streams import Prepare, Stream
from potluck.core.task import Batch, Task
from potluck.data.prepare import AugmentConfig, Normalize
from potluck.errors import ConfigError
from potluck.kit.public_knowledge import OnPublicData, foreign_features, mean_where, within
from potluck.kit.requirements import require_representation
from potluck.training.fit import fit

VIEWS = AugmentConfig.of(["flip", "crop", "erasing"])


class SimCLR(OnPublicData):
    """Local training, then a contrastive pass over public samples of which each is seen in two views.

    Up: nothing. Down: nothing. Private phase: the task's own loss. Public phase, over the 2B views of a batch, with
    u = g(f(x)) and s the cosine: ℓ_i = −log( exp(s(u_i, u_i⁺)/τ) / Σ_{j≠i} exp(s(u_i, u_j)/τ) ), the mean over all
    views; it trains the representation f and the projector g (linear, ReLU, linear), which is used for nothing
    else.

    That a comparison with SimCLR means this, supervised and contrastive phases in turn and no communication, is
    INFERRED from how FedMuscle could use it; so is τ = 0.5 for small images (0.1 for ImageNet), recalled and not
    confirmed. Deviations: the paper's views are random resized crops, flips, colour distortion and blur; here they
    are what the library has, `augment`, on normalised images. Samples that are no images (texts, vectors, pairs)
    have no published views: each number or token is left out with probability `drop`, which is ours. INFERRED:
    batch norm uses but does not remember the statistics of public batches; a sample a client has not got is no view
    of anything.
    """

    name = "simclr"
    citation = "Chen et al., ICML 2020, without communication"
    tasks = "any"
    models = "any"
    stays = ("data", "labels", "model", "projector")

    class Config(MethodConfig):
        """Options of SimCLR."""

        tau: float = Field(default=0.5, gt=0)
        batch: int | None = Field(
            default=None, ge=2
        )  # public samples of a step, B; default: 32, or all; ours
        passes: int = Field(default=1, ge=1)  # over the public data in a round; ours
        hidden: int | None = Field(
            default=None, ge=1
        )  # of the projector; default: the representation's width
        width: int = Field(default=128, ge=1)  # of u
        augment: AugmentConfig = VIEWS  # of images
        drop: float = Field(default=0.2, ge=0, lt=1)  # of numbers and tokens in other samples

    def check(self, population: Population) -> None:
        """A batch must fit, and there must be something random in a view."""
        super().check(population)
        self.batch = within(population, "batch", self.config.batch, 32)
        require_representation(population)
        for client in population.first_clients:
            images = len(population.task_of(client).input) == 3
            if not (self.operations if images else self.config.drop):
                option = "augment" if images else "drop"
                raise ConfigError(
                    f"{self.name}: without method.{option} both views of a sample of client {client} are the same"
                )

    @property
    def operations(self) -> tuple[Any, ...]:
        """What makes a view of an image; normalising has been done."""
        return tuple(one for one in self.config.augment.operations if not isinstance(one, Normalize))

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model and the projector g."""
        hidden = self.config.hidden or model.rep_dim
        projector = nn.Sequential(
            nn.Linear(model.rep_dim, hidden), nn.ReLU(), nn.Linear(hidden, self.config.width)
        )
        return {"model": model, "projector": projector}

    def round(self, server: Server, clients: Clients) -> None:
        """Everyone trains; nothing crosses."""
        clients.ask(self.train)

    @client_step
    def train(self, client: Client) -> None:
        """Local epochs on private data, then passes over public data."""
        fit(client, self.loss)
        batches = client.public.stream(client.round, self.batch, self.config.passes)
        views = self.views(batches)
        fit(client, self.contrast, train=["model", "projector"], streams={"first": views, "second": views})

    def views(self, batches: Stream) -> Stream:
        """The same batches with every sample changed at random; each stream draws for itself."""
        prepare = Views(batches.source.prepare, self.operations, self.config.drop)
        return replace(batches, source=replace(batches.source, prepare=prepare), augment=True)

    def contrast(self, client: Client, batch: Batch, second: Batch) -> dict[str, Tensor]:
        """NT-Xent of two views of a batch."""
        one, other = (client["projector"](foreign_features(client, view)) for view in (batch, second))
        return {"contrast": nt_xent(one, other, self.config.tau, client.public.mask[batch.id])}


def nt_xent(first: Tensor, second: Tensor, tau: float, there: Tensor | None = None) -> Tensor:
    """The normalised, temperature-scaled cross-entropy of B pairs of views, mean over the 2B views that are there.

    >>> nt_xent(torch.eye(2), torch.eye(2), 0.5)  # log(1 + 2·exp(−2))
    tensor(0.2395)
    """
    with torch.autocast(first.device.type, enabled=False):
        views = F.normalize(torch.cat([first.float(), second.float()]), dim=1)
        pairs = len(first)
        own = torch.eye(2 * pairs, dtype=torch.bool, device=views.device)
        present = (
            views.new_ones(2 * pairs, dtype=torch.bool) if there is None else torch.cat([there, there]) > 0
        )
        similarity = views @ views.T / tau
        positive = torch.cat([similarity.diagonal(pairs), similarity.diagonal(-pairs)])
        # A missing view keeps its positive alone, for a finite loss that has no weight.
        hidden = own | ~(present | own.roll(pairs, 1))
        return mean_where(similarity.masked_fill(hidden, -torch.inf).logsumexp(1) - positive, present)


@dataclass(frozen=True)
class Views:
    """Prepares a sample as its client does, then changes it at random."""

    prepare: Prepare | None
    operations: tuple[Any, ...]
    drop: float

    def __call__(self, raw: Tensor, generator: torch.Generator | None) -> Tensor:
        """A view of every sample."""
        x = raw if self.prepare is None else self.prepare(raw, None)
        if generator is None:
            return x
        if x.ndim != 4:
            left_out = torch.rand(x.shape, device=x.device, generator=generator) < self.drop
            return x.masked_fill(left_out, 0)
        for operation in self.operations:
            x = operation(x, generator)
        return x
