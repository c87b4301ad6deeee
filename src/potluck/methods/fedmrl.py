"""FedMRL (Yi et al., NeurIPS 2024): Matryoshka fusion of a shared small model and a private one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from potluck.averaging import average
from potluck.client import Client, ClientId
from potluck.errors import ConfigError
from potluck.message import Content, Message, state_of
from potluck.method import Clients, Method, MethodConfig, client_step
from potluck.models import Model, build
from potluck.server import Server
from potluck.task import Batch, Task
from potluck.training import Group, fit

if TYPE_CHECKING:
    from potluck.world import World


class FedMRL(Method):
    """A small shared model works beside each private one; their representations are fused and learned nested.

    Up and down: the small model's parameters θ. Stays home: data, private model ω, projector φ.
    With r_g = G_ex(x) of width d1 and r_f = F_ex(x) of width d2, fused R = P([r_g, r_f]) has width d2 and
    loss = m_g·CE(G_hd(R[:, :d1]), y) + m_f·CE(F_hd(R), y), one backward through everything.
    Server: θ ← Σ_k (n_k / Σ_j n_j) θ_k over the cohort.

    As read (it was not run here), the released code averages copies that share memory, so that the mean is the last
    client's θ, and carries momentum from client to client. Here the mean is the paper's, and every client starts a
    round with a fresh optimiser.
    Which d1 the headline tables use is not stated; 100 is the smallest the paper tries.
    """

    name = "fedmrl"
    citation = "Yi et al., NeurIPS 2024"
    models = "any"
    server_needs = "nothing"
    stays = ("data", "labels", "model", "projector", "representations")
    modes = ("mix-large", "mix-small", "single-large", "single-small")
    down = {"small": state_of("small", "the small model's averaged parameters")}

    class Config(MethodConfig):
        """Options of FedMRL."""

        small: Any = None  # the shared architecture; default: the one of the pool with fewest parameters
        d1: int = Field(default=100, ge=1)  # width of its representation, at most every private one's d2
        weight_small: float = Field(default=1.0, ge=0)  # m_g
        weight_large: float = Field(default=1.0, ge=0)  # m_f
        weights: Literal["samples", "uniform"] = "samples"  # n_k as in the paper
        clip: float | None = Field(default=50.0, gt=0)  # norm per part, from the official code

    def check(self, world: World) -> None:
        """d1 must fit into every private representation; the small model must be known."""
        self.build_small(world.task)
        for client in world.ids:
            if world.width(client) < self.config.d1:
                raise ConfigError(
                    f"fedmrl: d1 is {self.config.d1}, but client {client} ({world.label(client)}) has "
                    f"representation width {world.width(client)}; set method.d1 to at most that"
                )

    def build_small(self, task: Task) -> Model:
        """The shared small model, with representation width d1."""
        if self.config.small is not None:
            return build(self.config.small, task, rep_dim=self.config.d1, who="method.small")
        if self.pool is None:
            raise ConfigError(
                "fedmrl: name the small model (method.small): the server knows no client's model"
            )
        return self.pool.build(self.pool.smallest(task), task, rep_dim=self.config.d1, who="method.small")

    def server_state(self, task: Task) -> dict[str, Any]:
        """The small model."""
        return {"small": self.build_small(task)}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The private model, a working copy of the small one, the private projector."""
        small, d2 = self.build_small(task), model.rep_dim
        return {"model": model, "small": small, "projector": nn.Linear(small.rep_dim + d2, d2)}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """θ."""
        return {"small": server["small"].state()}

    def receive(self, client: Client, down: Message) -> None:
        """Work with the newest θ."""
        client["small"].load(down.group("small"))

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average the small models."""
        replies = clients.ask(self.train)
        server["small"].load(average(replies, "small", weights=self.config.weights))

    @client_step(up={"small": state_of("small", "the small model's parameters after local training")})
    def train(self, client: Client) -> Content:
        """Local epochs on the fused loss, then θ_k."""
        groups = {part: Group(clip=self.config.clip) for part in ("model", "small", "projector")}
        fit(client, self.loss, groups=groups)
        return {"small": client["small"].state()}

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """The two nested losses."""
        fused = self.fuse(client, batch.x)
        small = client["small"].head(fused[:, : self.config.d1])
        large = client["model"].head(fused)
        return {
            "small": self.config.weight_small * client.task.loss(small, batch.y, batch.weight),
            "large": self.config.weight_large * client.task.loss(large, batch.y, batch.weight),
        }

    def fuse(self, client: Client, x: Tensor) -> Tensor:
        """R = P([r_g, r_f]), the small representation first."""
        both = torch.cat([client["small"].features(x), client["model"].features(x)], dim=1)
        fused: Tensor = client["projector"](both)
        return fused

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """`mix-*` use the fused representation, `single-*` one model alone on its own features.

        The headers never see unprojected features in training, so `single-*` may be low.
        """
        part = "small" if mode.endswith("small") else "model"
        if mode.startswith("single"):
            scores: Tensor = client[part](batch.x)
        else:
            fused = self.fuse(client, batch.x)
            scores = client[part].head(fused[:, : self.config.d1] if part == "small" else fused)
        return scores
