"""CreamFL (Yu et al., ICLR 2023): clients of different modalities meet in global representations of public data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, MethodConfig, client_step
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError
from potluck.kit.contrastive import losses
from potluck.kit.public_knowledge import (
    OnPublicData,
    foreign_features,
    mean_where,
    representations,
    rows_of,
    within,
)
from potluck.kit.requirements import require_one_width, require_representation
from potluck.models import build
from potluck.training.fit import fit

Tables = Mapping[str, Tensor]
CHUNK = 1024  # rows of a |P|×|P| matrix at a time


def _received(method: CreamFL) -> Contract:
    return {
        name: tensor("P, d", f"global representations of all public samples, as {name}s", optional=True)
        for name in method.modalities
    }


class CreamFL(OnPublicData):
    """Local training, a contrast with global representations, and a mean that trusts who agrees across modalities.

    z_k is a client's representation of a public sample, of length 1; G^m a global one per modality m, G^o that of
    the other. Up: z_k of all public samples, |P|·d scalars. Down: G, |P|·d scalars per modality.

    Client: the task's own loss; then, over public batches, γ·(ℓ_intra + ℓ_inter) with ℓ_intra = −log( e^{z·G^m_i/τ}
    / (e^{z·G^m_i/τ} + e^{z·p_i/τ}) ), p the client's model as the round found it, and ℓ_inter = −log( e^{z·G^o_i/τ}
    / Σ_j e^{z·G^o_j/τ} ) over all public samples j. Server: s_ik = log softmax_j(z_k,i·G^o_j) at j = i, w_ik =
    softmax_k(s_ik), target_i = Σ_k w_ik·z_k,i over the clients of a modality. With a `server_model`, it learns
    0.3·MSE(z, target) for its modality, and before the clients are asked its own contrastive loss if its task is
    retrieval; G is what it says then. Without one G is the target (INFERRED).

    `regularizer: muscle` puts the Muscle loss in the place of ℓ_intra + ℓ_inter, the batch's rows of all G the
    peers; `aggregation: muscle` puts s_ik = −Muscle(z_k,i; G) in the place of the log softmax, batch by batch.
    FedMuscle's paper says that it replaces both; how is INFERRED.

    Deviations: the released code has 50,000 pairs, d = 256, 10 of 35 clients a round (10 with images, 10 with
    texts, 15 with both), 5 local epochs and 30 rounds. A client with both has two representations there; here it
    has one, of the pair, which is a modality of its own; where several are the other modality the mean over them is
    taken (INFERRED). In a federation of one modality G^o is G^m (INFERRED). The first round has no G without a
    server model: no contrast, equal weights (INFERRED). A sample a client has not got is sent as zeros and counts
    nowhere. INFERRED: batch norm uses but does not remember the statistics of public batches, and the last short
    public batch is left out.
    """

    name = "creamfl"
    citation = "Yu et al., ICLR 2023"
    tasks = "any"
    models = "any, with the same representation width"
    card_fields = ("width",)
    stays = ("data", "labels", "model")
    modalities: tuple[str, ...] = ()

    class Config(MethodConfig):
        """Options of CreamFL."""

        weight: float = Field(default=0.5, ge=0)  # γ
        tau: float = Field(default=0.5, gt=0)
        batch: int | None = Field(default=None, ge=2)  # public samples of a step; default: 32, or all; ours
        passes: int = Field(default=1, ge=1)  # over the public data in a round; ours
        regularizer: Literal["creamfl", "muscle"] = "creamfl"
        aggregation: Literal["creamfl", "muscle"] = "creamfl"
        muscle_tau: float = Field(default=losses.TAU, gt=0)  # τ^(N) of the Muscle loss
        muscle_tau_prev: float = Field(default=losses.TAU_PREV, gt=0)  # τ^(N−1)
        server_model: Any = None  # an architecture for the first client's task
        distil: float = Field(default=0.3, ge=0)  # weight of the server model's MSE

    def check(self, population: Population) -> None:
        """One width, a batch that fits, temperatures in order."""
        super().check(population)
        self.batch = within(population, "batch", self.config.batch, 32)
        require_one_width(population, "a global representation")
        require_representation(population)
        self.width = population.width(population.ids[0])
        self.modalities = tuple(
            sorted({modality(population.task_of(client)) for client in population.first_clients})
        )
        tau, before = self.config.muscle_tau, self.config.muscle_tau_prev
        if before > tau:
            raise ConfigError(
                f"{self.name}: method.muscle_tau_prev is {before} and method.muscle_tau {tau}; the first must not "
                "be larger"
            )

    def server_state(self, task: Task) -> dict[str, Any]:
        """G, nothing until it is known, and the server's model if there is one."""
        if self.config.server_model is None:
            return {"tables": {}}
        model = build(self.config.server_model, task, rep_dim=self.width, who="method.server_model")
        return {"tables": {}, "model": model}

    def round(self, server: Server, clients: Clients) -> None:
        """The server's model learns, clients train and contrast, the server makes targets and learns from them."""
        tables = server["tables"]
        self.teach_itself(server)
        replies = clients.ask(self.train, down=tables.state())
        targets = self.targets(replies, tables.tensors())
        tables.load(self.keep(targets, tables.tensors()))
        self.distil(server, targets)

    @client_step(
        up={"representations": tensor("P, d", "of all public samples, of length 1 or zero where missing")},
        down=_received,
    )
    def train(self, client: Client, down: Message) -> Content:
        """Local epochs, then the contrast, then the representations of all public samples."""
        everything = np.arange(len(client.public))
        before = representations(client, everything, unit=True) if down else None
        fit(client, self.loss)
        if before is not None:
            fit(
                client,
                self.contrast,
                train=["model"],
                streams={"public": client.public.stream(client.round, self.batch, self.config.passes)},
                scalars={"previous": before, **down},
            )
        return {"representations": representations(client, everything, unit=True)}

    def contrast(self, client: Client, batch: Batch, previous: Tensor, **tables: Tensor) -> dict[str, Tensor]:
        """γ·(ℓ_intra + ℓ_inter), or γ times the Muscle loss."""
        z, there = foreign_features(client, batch), client.public.mask[batch.id]
        own, others = own_and_others(tables, modality(client.task))
        with torch.autocast(z.device.type, enabled=False):
            if self.config.regularizer == "muscle":
                peers = [table[batch.id] for table in tables.values()]
                return {"muscle": self.config.weight * self.muscle(z, peers, there)}
            z = F.normalize(z, dim=1)
            terms = {"inter": inter(z, others, rows_of(batch), there, self.config.tau)}
            if own is not None:
                terms["intra"] = intra(z, own[batch.id], previous[batch.id], there, self.config.tau)
        return {name: self.config.weight * value for name, value in terms.items()}

    def muscle(self, z: Tensor, peers: Sequence[Tensor], there: Tensor, each: bool = False) -> Tensor:
        """The Muscle loss of representations with rows of G, its mean or of each sample."""
        return losses.muscle(
            z,
            peers,
            self.config.muscle_tau,
            self.config.muscle_tau_prev,
            weight=there,
            present=[present(peer) for peer in peers],
            reduction="none" if each else "mean",
        )

    def targets(self, replies: Replies, tables: Tables) -> dict[str, Tensor]:
        """A target for every sample and modality of the round's clients."""
        groups: dict[str, list[ClientId]] = {}
        for client in replies:
            groups.setdefault(modality(replies.cards[client].task), []).append(client)
        found = {}
        for name, members in groups.items():
            z = torch.stack([replies[client]["representations"] for client in members])
            found[name] = mix(z, torch.stack([self.agreement(one, name, tables) for one in z]))
        return found

    def agreement(self, z: Tensor, name: str, tables: Tables) -> Tensor:
        """s_ik of one client: how surely each of its representations finds its own sample in G."""
        _, others = own_and_others(tables, name)
        if not others:
            return z.new_zeros(len(z))
        if self.config.aggregation == "creamfl":
            return torch.stack([log_share(z, table) for table in others]).mean(0)
        pieces = np.array_split(np.arange(len(z)), max(len(z) // self.batch, 1))
        found = [
            -self.muscle(
                z[piece], [table[piece] for table in tables.values()], present(z[piece]).float(), True
            )
            for piece in map(torch.from_numpy, pieces)
        ]
        return torch.cat(found)

    def keep(self, targets: Tables, tables: Tables) -> dict[str, Tensor]:
        """A sample that nobody sent this time keeps its global representation."""
        return {
            name: torch.where(present(new)[:, None], new, tables[name]) if name in tables else new
            for name, new in targets.items()
        }

    def teach_itself(self, server: Server) -> None:
        """The server's model on public pairs, whose loss needs no labels; then what it says of all samples."""
        if "model" not in server:
            return
        if server.task.kind == "retrieval":
            batches = server.public.stream(server.round, self.batch, self.config.passes)
            fit(server, self.pair_loss, streams={"public": batches})
        self.publish(server)

    def pair_loss(self, server: Server, batch: Batch) -> Tensor:
        """The task's own loss on pairs that are there."""
        weight = server.public.mask[batch.id].float()
        return server.task.loss(server["model"](batch.x), batch.y, weight)

    def distil(self, server: Server, targets: Tables) -> None:
        """The server's model learns the targets of its modality."""
        name = modality(server.task)
        if "model" not in server or name not in targets:
            return
        batches = server.public.stream(server.round, self.batch, self.config.passes)
        fit(server, self.distil_loss, streams={"public": batches}, scalars={"target": targets[name]})
        self.publish(server)

    def distil_loss(self, server: Server, batch: Batch, target: Tensor) -> Tensor:
        """0.3·MSE(z, target)."""
        z = F.normalize(server["model"].features(batch.x).float(), dim=1)
        wanted = target[batch.id]
        weight: float = self.config.distil
        return weight * mean_where((z - wanted).square().mean(1), present(wanted))

    def publish(self, server: Server) -> None:
        """G of the server's modality is what its model says."""
        z = representations(server, np.arange(len(server.public)), unit=True)
        server["tables"].load({modality(server.task): z})


def modality(task: Task) -> str:
    """What a client sees of a public sample."""
    kinds = {"text-classification": "text", "retrieval": "pair"}
    return kinds.get(task.kind, "image" if len(task.input) == 3 else "vector")


def own_and_others(tables: Tables, name: str) -> tuple[Tensor | None, list[Tensor]]:
    """G of a modality, and those of the others; where there is no other it stands for them."""
    own = tables.get(name)
    others = [table for other, table in sorted(tables.items()) if other != name]
    return own, others or ([own] if own is not None else [])


def present(rows: Tensor) -> Tensor:
    """Which rows say something: a missing sample is all zeros."""
    return rows.abs().sum(1) > 0


def intra(z: Tensor, positive: Tensor, negative: Tensor, there: Tensor, tau: float) -> Tensor:
    """−log( e^{z·g/τ} / (e^{z·g/τ} + e^{z·p/τ}) ), the mean over samples that are there."""
    gap = ((z * negative).sum(1) - (z * positive).sum(1)) / tau
    return mean_where(F.softplus(gap), there & present(positive))


def inter(z: Tensor, tables: Sequence[Tensor], rows: Tensor, there: Tensor, tau: float) -> Tensor:
    """−log( e^{z·G_i/τ} / Σ_j e^{z·G_j/τ} ), the mean over tables and samples that are there."""
    terms = [mean_where(-log_share(z, table, rows, tau), there & present(table[rows])) for table in tables]
    return torch.stack(terms).mean()


def log_share(z: Tensor, table: Tensor, rows: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """log softmax over all samples j of z_i·G_j / τ, at the sample's own place, a few rows at a time."""
    own = torch.arange(len(z), device=z.device) if rows is None else rows
    hidden = ~present(table)
    found = []
    for part, places in zip(torch.split(z, CHUNK), torch.split(own, CHUNK), strict=True):
        logits = part @ table.T / tau
        positive = logits.gather(1, places[:, None]).squeeze(1)
        found.append(positive - logits.masked_fill(hidden, -torch.inf).logsumexp(1))
    return torch.cat(found)


def mix(z: Tensor, agreement: Tensor) -> Tensor:
    """Σ_k softmax_k(s_ik)·z_ki over the clients that have sample i; zero where none has. z: clients × P × d."""
    there = torch.stack([present(one) for one in z])
    weights = agreement.masked_fill(~there, -torch.inf).softmax(0).nan_to_num(0.0)
    return (weights.unsqueeze(2) * z).sum(0)
