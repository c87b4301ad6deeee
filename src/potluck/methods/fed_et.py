"""Fed-ET (Cho et al., IJCAI 2022): the clients' small models teach a larger one on the server and share its head.

All models, the server's too, have a head (the paper's representation layer) of one form.

    Up:     the weights, |θ_k| scalars.
    Down:   the mean of the client's architecture, with the server's head, |θ_k| scalars.
    Client: the task's own loss.
    Server: 1. its head ← the mean of the clients' heads.
            2. for each public x, with v_k = Var_c(o_k(x)): ō = Σ_k v_k·o_k / Σ_k v_k,  ŷ = argmax ō.
            3. those who dissent, D(x) = {k: argmax o_k ≠ ŷ}: o_div = Σ_{k∈D} v_k·o_k / Σ_{k∈D} v_k.
            4. minimise CE(o_S(x), ŷ) + λ·KL(σ(o_div) ‖ σ(o_S)); where nobody dissents, the second term is left out.
            5. every architecture ← the mean of its clients; then its head ← the server's.

Public data is on the server alone. There is no official code: the formulas are from a third-party implementation
and agree with the paper as recalled, which is UNVERIFIED; steps, rate, momentum and batch are those of that code.
It takes a uniform target where nobody dissents, a mistake that is not repeated.

INFERRED: means are plain (`weights: samples` weighs by n_k); teachers are read once, in evaluation mode; an
architecture without a client in the round stays as it is, its head too; a client whose logits are not finite is
left out of the round, its weights too; a teacher whose logits are all alike has no say, and a sample of which
nobody has one does not count; batch-norm statistics travel with the weights. By default the server's model is the
largest of the pool; `server` names a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.contract import shapes_of, state_of
from potluck.core.method import Clients
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import OptimizerSettings
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError
from potluck.kit.averaging import average
from potluck.kit.distillation import divergence_of_each, held_back
from potluck.kit.ensembles import ensemble
from potluck.kit.masks import mean_where
from potluck.kit.public_knowledge import rows_of
from potluck.kit.requirements import layer_form, named, require_one_label_set
from potluck.kit.server_models import (
    BY_ARCHITECTURE,
    STATISTICS_TRAVEL,
    ClientModelsOnServer,
    head_names,
    steps_on_public_data,
)
from potluck.kit.shared_head import require_one_head
from potluck.methods.fedavg import FedAvg
from potluck.training.fit import fit


class FedET(ClientModelsOnServer, FedAvg):
    """FedAvg within each architecture; all clients teach the server's larger model, whose head they share."""

    name = "fed-et"
    citation = "Cho et al., IJCAI 2022"
    models = "any, with heads of one form (models.rep_dim); those of one architecture are averaged"
    remedy = "lower training.optimizer.lr or method.lr, or set training.clip"
    usual_batch = 64
    down = {
        "model": state_of(
            "model",
            "the mean of the client's architecture, with the server's head",
            optional=True,
            partial=True,
        )
    }

    class Config(FedAvg.Config):
        """Options of Fed-ET."""

        share: Literal["groups"] = BY_ARCHITECTURE
        buffers: Literal["average"] = STATISTICS_TRAVEL
        weights: Literal["samples", "uniform"] = option(
            default="uniform",
            description="weights of the means of models and heads: all alike, or n_k",
            source="third-party code",
        )
        server: Any = option(
            default=None,
            description="architecture of the server's model; by default the largest of the pool",
            source="paper; the largest: ours",
        )
        diversity: float = option(
            default=0.05,
            ge=0,
            description="λ, weight of the divergence from those who dissent",
            source="third-party code",
        )
        steps: int = option(
            default=128, ge=1, description="the server's steps in a round", source="third-party code"
        )
        batch: int | None = option(
            default=None,
            ge=1,
            description="public samples in a step; by default 64, or all if fewer",
            source="third-party code",
        )
        lr: float = option(
            default=5e-3, gt=0, description="the server's learning rate, SGD", source="third-party code"
        )
        momentum: float = option(
            default=0.9, ge=0, lt=1, description="the server's momentum", source="third-party code"
        )

    def setup(self, population: Population) -> None:
        """The width of all representations."""
        super().setup(population)
        self.width = population.width(population.ids[0])

    def check(self, population: Population) -> None:
        """All heads, the server's too, have one form, and the same two classes at least."""
        super().check(population)
        require_one_label_set(population)
        require_one_head(population, otherwise=", or use feddf, which takes any")
        if self.pool is not None:
            self._check_server(population, population.ids[0])

    def _check_server(self, population: Population, first: ClientId) -> None:
        head = self.server_model(population.task).head.state_dict()
        own, theirs = shapes_of(head), population.head(first)
        if own != theirs:
            raise ConfigError(
                f"{self.name}: the head of method.server is {layer_form(own)}, that of {named(population, first)} "
                f"is {layer_form(theirs)}; name another architecture, or use feddf, which needs none"
            )

    def advice(self, population: Population) -> Iterator[str]:
        """Say where the server's model is smaller than a client's."""
        yield from super().advice(population)
        if self.pool is None:
            return
        largest = self.pool.build(self.pool.largest(population.task), population.task)
        if _size(self.server_model(population.task)) < _size(largest):
            yield f"{self.name}: the server's model is smaller than a client's; name a larger one in method.server"

    def server_model(self, task: Task) -> Model:
        """A fresh model of the server's architecture."""
        assert self.pool is not None
        if self.config.server is None:
            return self.pool.build(self.pool.largest(task), task, who="the server's model")
        return self.pool.build(self.config.server, task, self.width, who="method.server")

    def server_state(self, task: Task) -> dict[str, Any]:
        """The server's own model beside those of the clients."""
        return {**super().server_state(task), "server": self.server_model(task)}

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere; the ensemble teaches the server's model, whose head goes to all."""
        self.introduce(server, clients)
        replies = clients.ask(self.train)
        lessons = ensemble(torch.stack([*self.opinions(server, clients, replies)]))
        replies = replies.among(clients.ids)
        names = head_names(server["server"])
        server["server"].load({names[name]: value for name, value in self.mean_head(server, replies).items()})
        self.transfer(server, lessons)
        head = server["server"].state()
        means = self.mean(replies, "model", self.config.weights)
        for architecture in self.represented(replies):
            own = head_names(server[self.model(architecture)])
            shared = {own[name]: head[place] for name, place in names.items()}
            self.keep(server, architecture, self.weights_of(means, architecture) | shared)

    def mean_head(self, server: Server, replies: Replies) -> dict[str, Tensor]:
        """The mean of the clients' heads, over all architectures."""
        names = {one: head_names(server[self.model(one)]) for one in self.represented(replies)}
        heads = replies.map(
            lambda client, message: {
                "head": {
                    name: message.group("model")[place]
                    for name, place in names[self.architectures[client]].items()
                }
            }
        )
        return average(heads, "head", self.config.weights)

    def transfer(self, server: Server, lessons: dict[str, Tensor]) -> None:
        """Train the server's model on what the ensemble says of public samples."""
        config, (_, rows) = self.config, held_back(server.public, 0.0)
        fit(
            server,
            self.lesson,
            train=["server"],
            streams={"public": steps_on_public_data(server, rows, self.batch, config.steps, "transfer")},
            optimizer=OptimizerSettings(name="sgd", lr=config.lr, momentum=config.momentum),
            scalars=lessons,
        )

    def lesson(
        self, server: Server, batch: Batch, labels: Tensor, known: Tensor, dissent: Tensor, divided: Tensor
    ) -> dict[str, Tensor]:
        """CE with the consensus; λ·KL to those who dissent, where somebody does."""
        rows, logits = rows_of(batch), server["server"](batch.x).float()
        agreed = F.cross_entropy(logits, labels[rows], reduction="none")
        apart = divergence_of_each(logits, dissent[rows]) * divided[rows]
        return {
            "consensus": mean_where(agreed, known[rows]),
            "diversity": self.config.diversity * apart.mean(),
        }


def _size(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
