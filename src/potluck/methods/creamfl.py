"""CreamFL (Yu et al., ICLR 2023): clients of different modalities share global representations of public data.

z_k is client k's representation of a public sample, of length 1. G^m holds the global ones of modality m, G^o
those of the other modality.

    Up:     z_k of all public samples, |P|·d scalars.
    Down:   G, |P|·d scalars per modality.
    Client: the task's own loss; then, over public batches, γ·(ℓ_intra + ℓ_inter):
            ℓ_intra = −log( e^{z·G^m_i/τ} / (e^{z·G^m_i/τ} + e^{z·p_i/τ}) ), p the client's model before the round
            ℓ_inter = −log( e^{z·G^o_i/τ} / Σ_j e^{z·G^o_j/τ} ), over all public samples j
    Server: per modality, target_i = Σ_k w_ik·z_k,i with w_ik = softmax_k(s_ik), s_ik = log softmax_j(z_k,i·G^o_j)
            at j = i: the mean trusts clients whose representations find their sample in the other modality.
            A `server_model` learns 0.3·MSE(z, target) for its modality, and, before the clients are asked, its own
            contrastive loss if its task is retrieval; its representations are then G. Without one G is the target
            (INFERRED).

Deviations: the released code has 50,000 pairs, d = 256, 10 of 35 clients a round (10 with images, 10 with texts,
15 with both), 5 local epochs and 30 rounds. There a client with both modalities has two representations; here it
has one of the pair, which is a modality of its own.

INFERRED: with several other modalities ℓ_inter and s are means over them; with a single modality G^o is G^m; a
first round without a server model has no G, so no contrast and equal weights; a sample a client lacks is sent as
zeros and counts nowhere; batch norm uses but does not remember the statistics of public batches; a short last
public batch is left out.

`methods/creamfl_variants.py` adds the combination with FedMuscle; `method: creamfl` runs the class there, which is
this one unless an option says otherwise.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import Contract, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, PrivateModelConfig, client_step
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.state import Holder
from potluck.core.task import Batch, Task
from potluck.kit.contrastive import inter, intra, log_share
from potluck.kit.masks import mean_where, present
from potluck.kit.modality_tables import (
    Tables,
    clients_by_modality,
    kept_where_missing,
    own_and_others,
    weighted_by_agreement,
)
from potluck.kit.public_knowledge import (
    MODALITIES,
    OnPublicData,
    foreign_features,
    modality,
    public_samples,
    representations,
    require_public_samples,
    rows_of,
)
from potluck.kit.requirements import require_one_width, require_representation
from potluck.models import build
from potluck.training.fit import Loss, fit


def _received(method: CreamFL) -> Contract:
    return {
        name: tensor("P, d", f"global representations of all public samples, as {name}s", optional=True)
        for name in method.modalities
    }


class CreamFL(OnPublicData):
    """Local training, a contrast with global representations, a mean weighted by agreement across modalities."""

    name = "creamfl"
    citation = "Yu et al., ICLR 2023"
    tasks = "any"
    models = "any, with the same representation width"
    card_fields = ("width",)
    stays = ("data", "labels", "model")
    modalities: tuple[str, ...] = ()

    class Config(PrivateModelConfig):
        """Options of CreamFL."""

        weight: float = option(
            default=0.5,
            ge=0,
            description="γ, on the contrast; the released code's 0.5",
            source="released code",
        )
        tau: float = option(
            default=0.5,
            gt=0,
            description="τ of both contrasts; the released code's 0.5",
            source="released code",
        )
        batch: int | None = option(
            default=None,
            ge=2,
            description="public samples in a step; by default 32, or all if fewer",
            source="ours",
        )
        passes: int = option(
            default=1, ge=1, description="passes over the public data in a round", source="ours"
        )
        server_model: Any = option(
            default=None,
            description="architecture of the server's model, for the first client's task; default: none",
            source="paper; none: inferred",
        )
        distil: float = option(
            default=0.3,
            ge=0,
            description="weight of the server model's MSE; the released code's 0.3",
            source="released code",
        )

        @model_validator(mode="after")
        def _server_model_is_of_use(self) -> Self:
            if self.server_model is None:
                self.refuse_set("distil", reason="without server_model; it trains the server's model")
            return self

    def setup(self, population: Population) -> None:
        """The size of a public batch, and which modalities there are or may be."""
        super().setup(population)
        self.batch = public_samples(population, self.config.batch, 32)
        self.width = population.width(population.ids[0])
        known = {modality(population.task_of(client)) for client in population.first_clients}
        self.modalities = MODALITIES if population.others_unknown else tuple(sorted(known))

    def check(self, population: Population) -> None:
        """A batch must fit, and representations have one width and can be trained."""
        require_public_samples(population, "batch", self.config.batch)
        require_one_width(population, "a global representation")
        require_representation(population)

    def server_state(self, task: Task) -> dict[str, Any]:
        """G, empty until it is known, and the server's model if there is one."""
        if self.config.server_model is None:
            return {"tables": {}}
        model = build(self.config.server_model, task, rep_dim=self.width, who="method.server_model")
        return {"tables": {}, "model": model}

    def round(self, server: Server, clients: Clients) -> None:
        """The server's model learns, clients train and contrast, and the server combines what they send."""
        tables = server["tables"]
        if "model" in server:
            self.learn_pairs(server)
        replies = clients.ask(self.train, down=tables.state())
        targets = self.targets(replies, tables.tensors())
        tables.load(kept_where_missing(targets, tables.tensors()))
        if "model" in server and (name := modality(server.task)) in targets:
            self.distil(server, targets[name])

    @client_step(
        up={"representations": tensor("P, d", "of all public samples, of length 1 or zero where missing")},
        down=_received,
    )
    def train(self, client: Client, down: Message) -> Content:
        """Local epochs, then the contrast, then the representations of all public samples."""
        before = representations(client, unit=True) if down else None
        fit(client, self.loss)
        if before is not None:
            self.fit_public(client, self.contrast, previous=before, **down)
        return {"representations": representations(client, unit=True)}

    def fit_public(self, holder: Holder, loss: Loss, **scalars: Tensor) -> None:
        """Train a client's or the server's model on public batches."""
        batches = holder.public.stream(holder.round, self.batch, self.config.passes)
        fit(holder, loss, train=["model"], streams={"public": batches}, scalars=scalars)

    def contrast(self, client: Client, batch: Batch, previous: Tensor, **tables: Tensor) -> dict[str, Tensor]:
        """γ·(ℓ_intra + ℓ_inter)."""
        z = foreign_features(client, batch)
        with torch.autocast(z.device.type, enabled=False):
            terms = self.contrast_terms(client, batch, z, previous[batch.id], tables)
        return {name: self.config.weight * value for name, value in terms.items()}

    def contrast_terms(
        self, client: Client, batch: Batch, z: Tensor, previous: Tensor, tables: Tables
    ) -> dict[str, Tensor]:
        """ℓ_inter and, where the client's modality has a G, ℓ_intra."""
        z, there, tau = F.normalize(z, dim=1), client.public.mask[batch.id], self.config.tau
        own, others = own_and_others(tables, modality(client.task))
        terms = {"inter": inter(z, others, rows_of(batch), there, tau)}
        if own is not None:
            terms["intra"] = intra(z, own[batch.id], previous, there, tau)
        return terms

    def targets(self, replies: Replies, tables: Tables) -> dict[str, Tensor]:
        """target_i of every public sample, for each modality of the round's clients."""
        found = {}
        for name, members in clients_by_modality(replies).items():
            z = torch.stack([replies[client]["representations"] for client in members])
            scores = torch.stack([self.agreement(one, name, tables) for one in z])
            found[name] = weighted_by_agreement(z, scores)
        return found

    def agreement(self, z: Tensor, name: str, tables: Tables) -> Tensor:
        """s_ik of one client: how surely each of its representations finds its own sample in G^o."""
        if not tables:
            return z.new_zeros(len(z))
        _, others = own_and_others(tables, name)
        return torch.stack([log_share(z, table) for table in others]).mean(0)

    def learn_pairs(self, server: Server) -> None:
        """Train the server's model on public pairs, whose loss needs no labels; its representations are G."""
        if server.task.kind == "retrieval":
            self.fit_public(server, self.pair_loss)
        self.publish(server)

    def pair_loss(self, server: Server, batch: Batch) -> Tensor:
        """The task's own loss on the pairs that are there."""
        weight = server.public.mask[batch.id].float()
        return server.task.loss(server["model"](batch.x), batch.y, weight)

    def distil(self, server: Server, target: Tensor) -> None:
        """Train the server's model towards the targets of its modality."""
        self.fit_public(server, self.distil_loss, target=target)
        self.publish(server)

    def distil_loss(self, server: Server, batch: Batch, target: Tensor) -> Tensor:
        """0.3·MSE(z, target) over the samples that have a target."""
        z = F.normalize(server["model"].features(batch.x).float(), dim=1)
        gaps = (z - target[batch.id]).square().mean(1)
        weight: float = self.config.distil
        return weight * mean_where(gaps, present(target[batch.id]))

    def publish(self, server: Server) -> None:
        """Make the representations of the server's model the G of its modality."""
        server["tables"].load({modality(server.task): representations(server, unit=True)})
