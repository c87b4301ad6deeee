"""FedMuscle (ICLR 2026, arXiv 2602.01626): models of different tasks learn to represent public data alike.

A client's model is a representation model w, of the same width d everywhere, and a head φ for its own task. In a
round every client trains both for E epochs on its task, then takes T passes over the public data. For each batch
of B samples:

    Up:     Z^n, the client's representations, B·d scalars.
    Down:   the matrices of M other clients, drawn by the server for each client independently, M·B·d scalars. The
            paper sends what follows from them, S^n and α^n, B^M·(d + 1); `accounting: paper` counts that.
    Client: one step on w alone along the mean over i of

        L^n(z_i) = −log[ α_(i…i) exp(Σ_m z_i·z^m_i / τ^(N)) / Σ_j α_j exp(Σ_m z_i·z^m_{j_m} / τ^(N)) ]
        α_j = exp(−γ Σ_{m<m'} z^m_{j_m}·z^{m'}_{j_m'}),    γ = 1/τ^(N−1) − 1/τ^(N),    j over {1…B}^M

    with the Z of all clients from before the step as constants.

Nothing is averaged; there is no global model. Data, labels, model and head stay. A step on one batch and the
representations of the next are one exchange; `bundle: k` exchanges k batches at once, so that peers' matrices are
up to k − 1 of their steps old, and a client's own anchors never are.

A client that lacks a sample in its modality sends zeros for it; such a row is no positive and no negative. A
batch of which a client has nothing makes no step, because weight decay and momentum would move w without a
gradient.

Inferred, not published: rows have length 1; a batch counts by the mean of its anchors; all clients see public
batches in the same order, without a short last one; one optimiser step per batch; peers are drawn anew for every
batch; each phase has its own optimiser. E, T and the number of rounds are unknown; E is `training.epochs`. Ours:
AdamW and its values, new in every round; alignment in evaluation mode, so that batch norm keeps the statistics of
private data and anchors are exactly the rows that were sent; `training.clip` and `training.lr_decay` for both
phases.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, client_step
from potluck.core.model import Model
from potluck.core.population import Population
from potluck.core.public import Public
from potluck.core.server import Server
from potluck.core.streams import Source, Stream
from potluck.core.task import Batch, Task
from potluck.kit.contrastive import TAU, TAU_PREV, information_bounds, muscle, theorem1_value
from potluck.kit.masks import present
from potluck.kit.public_knowledge import (
    OnPublicData,
    available_samples,
    public_of,
    representations,
    require_public_samples,
    rows_of,
)
from potluck.kit.representation_model import representation_model
from potluck.kit.requirements import require_one_width, require_peers
from potluck.methods.fedmuscle_observations import Drawn, Observations, report_bounds, write_bounds
from potluck.methods.fedmuscle_variants import (
    AligningOptimizer,
    Variants,
    anchors_of,
    compared_loss,
    learned_temperatures,
    published_scalars,
)
from potluck.training.fit import fit
from potluck.training.optimizers import fresh_moments

Bundle = list[np.ndarray]  # public batches whose representations cross together


def _sent(method: FedMuscle, optional: bool = False) -> Contract:
    rows = f"r<={method.bundle * method.config.batch}"
    meaning = "the client's representations of public samples; zeros where it lacks one"
    return {"representations": tensor(f"{rows}, d", meaning, optional=optional)}


def _received(method: FedMuscle) -> Contract:
    rows, peers = f"r<={method.bundle * method.config.batch}", f"m<={method.config.peers}"
    meaning = "what m other clients make of the same samples"
    return {"peers": tensor(f"{rows}, {peers}, d", meaning, optional=True)}


class FedMuscle(OnPublicData):
    """Train on the own task; then align the representation model with M peers, batch by public batch."""

    name = "fedmuscle"
    citation = "FedMuscle, ICLR 2026 (arXiv 2602.01626)"
    models = "any, with representations of one width (models.rep_dim gives one)"
    tasks = "any"
    card_fields = ("width",)
    stays = ("data", "labels", "model", "representations")
    remedy = "lower training.optimizer.lr or method.optimizer.lr, or set training.clip"
    bundle: int = 1

    class Config(Variants):
        """Options of FedMuscle."""

        peers: PositiveInt = Field(default=3, description="M: other clients that a client is compared with")
        batch: int = Field(
            default=32,
            ge=2,
            description="B: public samples in a batch; 32 in the paper's example, its cost table fits 20",
        )
        passes: PositiveInt = Field(
            default=1, description="T: passes over the public data in a round; not known"
        )
        tau: float = Field(
            default=TAU, gt=0, description="τ^(N), the temperature of the loss; the paper's 0.2"
        )
        tau_prev: float = Field(
            default=TAU_PREV,
            gt=0,
            description="τ^(N−1), the temperature among the peers; the paper's 0.15. Equal to tau: pairwise",
        )
        optimizer: AligningOptimizer = Field(
            default=AligningOptimizer(), description="the optimiser of the alignment, new in every round"
        )

        @model_validator(mode="after")
        def _gamma_is_not_negative(self) -> FedMuscle.Config:
            if self.loss == "muscle" and self.tau_prev > self.tau:
                raise ValueError(f"tau_prev is {self.tau_prev}, which must not be above tau, {self.tau}")
            if self.loss == "muscle" and self.learned and self.tau_prev == self.tau:
                raise ValueError(
                    f"tau_prev is {self.tau_prev}, which must be below tau where both are learned"
                )
            self.refuse_idle("tau_prev", needs="loss", among=("muscle",))
            return self

    def setup(self, population: Population) -> None:
        """Know who has which public samples; a bundle is at most a round."""
        super().setup(population)
        batches = self.config.passes * (self.public_size // self.config.batch)
        self.bundle = min(self.config.bundle, batches)
        self.has = available_samples(population)

    def check(self, population: Population) -> None:
        """Public data must fill a batch, a cohort must have M peers, and representations one width."""
        require_public_samples(population, "batch", self.config.batch)
        require_peers(population, self.config.peers)
        require_one_width(population, "a representation space for all")

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, what the peers sent for a bundle, and the state of the aligning optimiser."""
        rows, peers = self.bundle * self.config.batch, self.config.peers
        received = {
            "z": torch.zeros(rows, peers, model.rep_dim),
            "present": torch.zeros(rows, peers),
            "bounds": torch.zeros(self.bundle, peers),
        }
        modules = {"model": model, **learned_temperatures(self.config)}
        moments = fresh_moments(self.config.optimizer, modules, self.aligned(model), lifetime="round")
        return {**modules, "peers": received, "moments": moments}

    def aligned(self, model: Model) -> list[str]:
        """What alignment trains: w, and the temperatures where they are learned."""
        return representation_model(model) + (["temperatures"] if self.config.learned else [])

    def bundles(self, public: Public, round_: int) -> list[Bundle]:
        """The public batches of a round, k at a time, the same on every side."""
        order, size = public.order(round_, self.config.batch, self.config.passes), self.bundle
        return [order[start : start + size] for start in range(0, len(order), size)]

    def round(self, server: Server, clients: Clients) -> None:
        """Train; then, bundle by bundle, hand each client what its peers sent, and let it align."""
        replies, seen = clients.ask(self.train), Observations(self.config.loss, "theorem1_value")
        for number, bundle in enumerate(self.bundles(server.public, server.round)):
            there = replies.clients
            drawn = {client: self.draw(server, client, there, number, len(bundle)) for client in there}
            sent = {
                client: torch.split(reply["representations"], self.config.batch)
                for client, reply in replies.items()
            }
            replies = clients.ask(self.align, functools.partial(deal, sent, drawn))
            seen.add(replies.reports, drawn)
        server.report.metrics |= seen.means(replies.clients)

    def draw(
        self, server: Server, client: ClientId, there: Sequence[ClientId], number: int, batches: int
    ) -> list[list[ClientId]]:
        """M of the others without replacement, for each batch of a bundle; fewer where fewer are there."""
        others = [other for other in there if other != client]
        drawn = []
        for batch in range(number * self.bundle, number * self.bundle + batches):
            rng = server.rng.child("peers", client, batch if self.config.redraw == "batch" else 0)
            chosen = rng.numpy().permutation(len(others))[: self.config.peers]
            drawn.append([others[place] for place in sorted(chosen)])
        return drawn

    @client_step(up=_sent)
    def train(self, client: Client) -> Content:
        """E epochs on the whole model, then the Z of the first bundle."""
        if self.config.first == "task":
            fit(client, self.loss)
        return {"representations": self.represent(client, self.bundles(client.public, client.round)[0])}

    @client_step(up=functools.partial(_sent, optional=True), down=_received)
    def align(self, client: Client, down: Message) -> Content:
        """One step on w for each batch of a bundle, then the Z of the next bundle."""
        bundles, number = self.bundles(client.public, client.round), client.count("bundle")
        if "peers" in down:
            self.contrast(client, down["peers"], bundles[number])
        if number + 1 < len(bundles):
            return {"representations": self.represent(client, bundles[number + 1])}
        if self.config.first == "alignment":
            fit(client, self.loss)
        return {}

    def represent(self, client: Client, bundle: Bundle) -> Tensor:
        """Z^n of every batch of a bundle."""
        return representations(client, np.concatenate(bundle), self.config.normalize)

    def contrast(self, client: Client, received: Tensor, bundle: Bundle) -> None:
        """Step on w batch by batch, against what the peers sent for it; missing peers are masked."""
        z, there = client["peers"]["z"], client["peers"]["present"]
        rows, peers, _ = received.shape
        z.zero_()[:rows, :peers].copy_(received)
        there.copy_(present(z))
        places = [place for place, samples in enumerate(bundle) if self.has[client.id][samples].any()]
        if not places:
            return
        rows_at = np.arange(len(z)).reshape(-1, self.config.batch)
        fit(
            client,
            self.alignment,
            train=self.aligned(client["model"].content),
            streams={
                "public": Stream(client.public.source, [bundle[place] for place in places]),
                "peers": Stream(Source(z, there), [*rows_at[places]]),
            },
            optimizer=self.config.optimizer,
            moments=client["moments"].content,
        )
        report_bounds(client, places, peers)

    def alignment(self, client: Client, batch: Batch, peers: Batch) -> dict[str, Tensor]:
        """L^n, with gradients through the client's own anchors alone; beside it what is logged about the batch."""
        config, others = self.config, peers.x.unbind(1)
        anchor = anchors_of(client, batch, config.statistics)
        masks: dict[str, Any] = {"weight": client.public.mask[batch.id].float(), "present": peers.y.unbind(1)}
        tau, tau_prev = client["temperatures"]() if config.learned else (config.tau, config.tau_prev)
        bounds = information_bounds(anchor, others, tau, normalize=config.normalize, **masks)
        write_bounds(client, rows_of(peers)[:1] // config.batch, bounds)
        if config.loss != "muscle":
            return compared_loss(config, anchor, others, tau, masks)
        options = {"memory": config.memory, "normalize": config.normalize}
        loss = muscle(anchor, others, tau, tau_prev, **options, **masks)
        return {"muscle": loss, "theorem1_value": theorem1_value(loss, anchor, others, **masks)}

    def repeats(self, population: Population) -> dict[str, tuple[int, int]]:
        """A client aligns once per bundle, and sends the representations of all but the first on the way."""
        bundles = len(self.bundles(public_of(population), 1))
        return {"align": (bundles - 1, bundles)}

    def as_published(self, direction: str, message: Message) -> int | None:
        """The paper's count of scalars, where it is asked for."""
        if self.config.accounting == "exact" or not message:
            return None
        return published_scalars(direction, message, self.config.batch)


def deal(
    sent: Mapping[ClientId, Sequence[Tensor]], drawn: Mapping[ClientId, Drawn], client: ClientId
) -> Content:
    """The matrices of a client's peers for each batch of a bundle; nothing for a client that is alone."""
    matrices = [
        torch.stack([sent[peer][batch] for peer in peers], 1)
        for batch, peers in enumerate(drawn[client])
        if peers
    ]
    return {"peers": torch.cat(matrices)} if matrices else {}
