"""SimCLR (Chen et al., ICML 2020) at every client: what public data alone is worth, with nothing on the wire.

    Up:     nothing.
    Down:   nothing.
    Client: private phase, the task's own loss. Public phase, over the 2B views of a batch with u = g(f(x)):
            ℓ_i = −log( exp(s(u_i, u_i⁺)/τ) / Σ_{j≠i} exp(s(u_i, u_j)/τ) ), s the cosine, the mean over all views.
            It trains the representation f and the projector g (linear, ReLU, linear), which nothing else uses.

INFERRED from how FedMuscle could use it: a comparison with SimCLR means supervised and contrastive phases in
turn, without communication. τ = 0.5 for small images (0.1 for ImageNet) is recalled, not confirmed. Deviations:
the paper's views are random resized crops, flips, colour distortion and blur; here they are what the library has,
`augment`, on normalised images. Samples that are not images (texts, vectors, pairs) have no published views: each
number or token is left out with probability `drop`, which is ours. INFERRED: batch norm uses but does not
remember the statistics of public batches; a sample a client lacks is no view of anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.method import Clients, PrivateModelConfig, client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.streams import Stream
from potluck.core.task import Batch, Task
from potluck.data.prepare import AugmentConfig, Normalize
from potluck.errors import ConfigError
from potluck.kit.contrastive import nt_xent
from potluck.kit.public_knowledge import (
    OnPublicData,
    foreign_features,
    public_samples,
    require_public_samples,
)
from potluck.kit.random_views import RandomViews
from potluck.kit.requirements import require_representation
from potluck.training.fit import fit

VIEWS = AugmentConfig.of(["flip", "crop", "erasing"])


class SimCLR(OnPublicData):
    """Local training, then a contrastive pass over public samples, each seen in two views."""

    name = "simclr"
    citation = "Chen et al., ICML 2020, without communication"
    tasks = "any"
    models = "any"
    stays = ("data", "labels", "model", "projector")

    class Config(PrivateModelConfig):
        """Options of SimCLR."""

        tau: float = option(
            default=0.5,
            gt=0,
            description="τ; 0.5 for small images is recalled, not confirmed",
            source="recalled, not confirmed",
        )
        batch: int | None = option(
            default=None,
            ge=2,
            description="B: public samples in a step; by default 32, or all if fewer",
            source="ours",
        )
        passes: int = option(
            default=1, ge=1, description="passes over the public data in a round", source="ours"
        )
        hidden: int | None = option(
            default=None,
            ge=1,
            description="hidden width of the projector; by default that of the representation",
            source="ours",
        )
        width: int = option(
            default=128, ge=1, description="width of u, the projector's output", source="ours"
        )
        augment: AugmentConfig = option(
            default=VIEWS,
            description="what makes a view of an image",
            source="ours; the paper has crops, flips, colours and blur",
        )
        drop: float = option(
            default=0.2,
            ge=0,
            lt=1,
            description="share of numbers or tokens left out of other samples' views",
            source="ours",
        )

    def setup(self, population: Population) -> None:
        """The size of a public batch."""
        super().setup(population)
        self.batch = public_samples(population, self.config.batch, 32)

    def check(self, population: Population) -> None:
        """A batch must fit, there must be a representation to train, and views must differ."""
        require_public_samples(population, "batch", self.config.batch)
        require_representation(population)
        of_images = [len(population.task_of(client).input) == 3 for client in population.first_clients]
        self._refuse_unused("augment", "images", any(of_images))
        self._refuse_unused("drop", "samples other than images", not all(of_images))
        for client, images in zip(population.first_clients, of_images, strict=True):
            if not (self.operations if images else self.config.drop):
                option = "augment" if images else "drop"
                raise ConfigError(
                    f"{self.name}: without method.{option} both views of a sample of client {client} are the same; "
                    "leave it at its default"
                )

    def _refuse_unused(self, option: str, samples: str, any_there: bool) -> None:
        if not any_there and getattr(self.config, option) != type(self.config).model_fields[option].default:
            raise ConfigError(
                f"{self.name}: method.{option} does nothing here, as no client has {samples}; leave it out"
            )

    @property
    def operations(self) -> tuple[Any, ...]:
        """The random operations of a view; images are normalised already."""
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
        """The same batches with every sample changed at random; every stream draws its own changes."""
        prepare = RandomViews(batches.source.prepare, self.operations, self.config.drop)
        return replace(batches, source=replace(batches.source, prepare=prepare), augment=True)

    def contrast(self, client: Client, batch: Batch, second: Batch) -> dict[str, Tensor]:
        """NT-Xent of two views of a batch."""
        one, other = (client["projector"](foreign_features(client, view)) for view in (batch, second))
        return {"contrast": nt_xent(one, other, self.config.tau, client.public.mask[batch.id])}
