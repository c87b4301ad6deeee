"""FedMuscle (ICLR 2026, arXiv 2602.01626): models of different tasks meet in how they represent public data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, MethodConfig, client_step
from potluck.core.model import Model
from potluck.core.population import Population
from potluck.core.public import Public
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import OptimizerSettings
from potluck.core.streams import Source, Stream
from potluck.core.task import Batch, Task
from potluck.kit.contrastive.losses import (
    MEMORY,
    TAU,
    TAU_PREV,
    Negatives,
    Temperatures,
    gramian,
    information_bounds,
    muscle,
    pairwise,
    theorem1_value,
)
from potluck.kit.observed import Observed
from potluck.kit.public_knowledge import OnPublicData, public_of, readable, representations, rows_of
from potluck.kit.representations import representation_model
from potluck.kit.requirements import require_one_width, require_peers
from potluck.models import ModelPool
from potluck.training.fit import fit
from potluck.training.modes import evaluating, on_the_batch
from potluck.training.optimizers import fresh_moments

Bundle = list[np.ndarray]  # public batches whose representations cross together


def _sent(method: FedMuscle, optional: bool = False) -> Contract:
    rows = f"r<={method.bundle * method.config.batch}"
    meaning = "the client's representations of public samples; zeros where it lacks one"
    return {"representations": tensor(f"{rows}, d", meaning, optional=optional)}


def _received(method: FedMuscle) -> Contract:
    rows, others = f"r<={method.bundle * method.config.batch}", f"m<={method.config.peers}"
    meaning = "what m other clients make of the same samples"
    return {"peers": tensor(f"{rows}, {others}, d", meaning, optional=True)}


class AligningOptimizer(OptimizerSettings):
    """How the representation model is aligned. No source gives an optimiser or its values: AdamW is ours."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)


class FedMuscle(OnPublicData):
    """E epochs on the client's own task, then T passes over public data with the Muscle loss.

    A model is a representation model w, of one width d everywhere, and a head φ of its own task. For every batch of
    B public samples client n sends Z^n, its B×d representations. The server draws M of the others for each client,
    independently. The client takes one step on w alone along the mean over i of

        L^n(z_i) = −log[ α_(i…i) exp(Σ_m z_i·z^m_i / τ^(N)) / Σ_j α_j exp(Σ_m z_i·z^m_{j_m} / τ^(N)) ]
        α_j = exp(−γ Σ_{m<m'} z^m_{j_m}·z^{m'}_{j_m'}),    γ = 1/τ^(N−1) − 1/τ^(N),    j over {1…B}^M

    with everyone's Z of before the step as constants. Nothing is averaged; there is no global model.
    Up: B·d scalars a batch. Down: the M matrices, M·B·d, from which follow S^n and α^n, which the paper sends
    (B^M·(d + 1)); `accounting: paper` counts those beside what crosses. Stays: data, labels, model, head.

    Aligning on a batch and representing the next are one exchange. `bundle: k` exchanges k batches at once: within
    a bundle the others' matrices are up to k − 1 of their steps old; the client's own anchors never are.

    A client that lacks a sample in its modality sends zeros for it; such a row is no positive and no negative. A
    batch of which it has nothing makes no step: decay and momentum would move w without a gradient.

    Inferred, not published: rows have length 1; a batch counts by the mean of its anchors; the order of public
    batches is shared, a short last one left out; one optimiser step a batch; the others are drawn anew for every
    batch (`redraw`); each phase has its own optimiser. Ours: AdamW and its values, new in every round; aligning in
    evaluation mode, so that batch norm keeps and uses the statistics of the private data, dropout rests and anchors
    are the very rows that were sent (`statistics: public` takes the public batch's and forgets them);
    `training.clip` and `training.lr_decay` for both phases; learned temperatures; `first: alignment`, which ends a
    round with the task, so that heads have followed their representations when they are measured.
    """

    name = "fedmuscle"
    citation = "FedMuscle, ICLR 2026 (arXiv 2602.01626)"
    models = "any, with representations of one width (models.rep_dim gives one)"
    tasks = "any"
    card_fields = ("width",)
    stays = ("data", "labels", "model", "representations")
    remedy = "lower training.optimizer.lr or method.optimizer.lr, or set training.clip"

    class Config(MethodConfig):
        """Options of FedMuscle. E, T and the number of rounds are not known either; E is `training.epochs`."""

        loss: Literal["muscle", "pairwise", "gramian"] = "muscle"
        negatives: Negatives = "tuples"  # of the Gramian; which one the paper compares with is not known
        peers: PositiveInt = 3  # M: others a client is compared with
        batch: int = Field(default=32, ge=2)  # B; 32 in the paper's example, its cost table fits 20
        passes: PositiveInt = 1  # T, over the public data in a round
        bundle: PositiveInt = 1  # k: public batches in one exchange
        redraw: Literal["batch", "round"] = "batch"  # how often the server draws a client's peers
        tau: float = Field(default=TAU, gt=0)  # τ^(N)
        tau_prev: float = Field(default=TAU_PREV, gt=0)  # τ^(N−1), of the peers; equal to tau: Pairwise
        learned: bool = False  # both temperatures are trained too, from these values
        normalize: bool = True  # rows of length 1; the Gramian always takes them so
        optimizer: AligningOptimizer = AligningOptimizer()
        first: Literal["task", "alignment"] = "task"  # which phase begins a round
        # batch norm aligns with the client's, or the batch's
        statistics: Literal["private", "public"] = "private"
        memory: int = Field(default=MEMORY, ge=1)  # bytes for the B^M tuples; more are computed in pieces
        accounting: Literal["exact", "paper"] = "exact"  # paper: its count of scalars beside what crosses

        @model_validator(mode="after")
        def _options_fit(self) -> FedMuscle.Config:
            if self.loss == "muscle" and self.tau_prev > self.tau:
                raise ValueError(f"tau_prev is {self.tau_prev}, which must not be above tau, {self.tau}")
            if self.loss == "muscle" and self.learned and self.tau_prev == self.tau:
                raise ValueError(
                    f"tau_prev is {self.tau_prev}, which must be below tau where both are learned"
                )
            if self.learned and self.loss == "gramian":
                raise ValueError(
                    "learned temperatures are for muscle and pairwise; the gramian has a fixed one"
                )
            self.refuse_idle("negatives", needs="loss", among=("gramian",))
            self.refuse_idle("tau_prev", needs="loss", among=("muscle",))
            self.refuse_idle("memory", needs="loss", among=("muscle", "gramian"))
            self.refuse_idle("memory", needs="negatives", among=("tuples",))
            return self

    def __init__(self, config: MethodConfig | None = None, pool: ModelPool | None = None) -> None:
        super().__init__(config, pool)
        self.bundle: int = self.config.bundle

    def check(self, population: Population) -> None:
        """One width, enough peers, and public data that fills a batch."""
        super().check(population)
        public, config = public_of(population), self.config
        public.check_batch(config.batch, "method.batch")
        require_peers(population, config.peers)
        require_one_width(population, "a representation space for all")
        self.bundle = min(config.bundle, len(public.order(1, config.batch, config.passes)))
        self.has = readable(population)

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, room for what others make of a bundle, the aligning optimiser, learned temperatures."""
        config, rows = self.config, self.bundle * self.config.batch
        peers = {
            "z": torch.zeros(rows, config.peers, model.rep_dim),
            "present": torch.zeros(rows, config.peers),
            "bounds": torch.zeros(self.bundle, config.peers),
        }
        modules: dict[str, nn.Module] = {"model": model}
        if config.learned:
            unused = config.loss == "pairwise"
            modules["temperatures"] = Temperatures(
                None, config.tau, config.tau / 2 if unused else config.tau_prev
            )
        moments = fresh_moments(config.optimizer, modules, self.aligned(model), lifetime="round")
        return {**modules, "peers": peers, "moments": moments}

    def aligned(self, model: Model) -> list[str]:
        """What alignment trains: w, and the temperatures where they are learned."""
        return representation_model(model) + (["temperatures"] if self.config.learned else [])

    def bundles(self, public: Public, round_: int) -> list[Bundle]:
        """The public batches of a round, k at a time, the same on every side."""
        order, size = public.order(round_, self.config.batch, self.config.passes), self.bundle
        return [order[start : start + size] for start in range(0, len(order), size)]

    def round(self, server: Server, clients: Clients) -> None:
        """Train; then, bundle after bundle, deal out what the others sent and align."""
        replies, told = clients.ask(self.train), Observed(self.config.loss, "theorem1_value")
        for number, bundle in enumerate(self.bundles(server.public, server.round)):
            there = replies.clients
            replies = clients.ask(self.align, functools.partial(self.deal, server, replies, number))
            for client, report in replies.reports.items():
                told.note(client, report, self.drawn(server, client, there, number, len(bundle)))
        for client in replies:
            server.report.metrics |= told.of(client)

    @client_step(up=_sent)
    def train(self, client: Client) -> Content:
        """E epochs on the whole model, then the first bundle's Z."""
        if self.config.first == "task":
            fit(client, self.loss)
        return {"representations": self.represent(client, self.bundles(client.public, client.round)[0])}

    @client_step(up=functools.partial(_sent, optional=True), down=_received)
    def align(self, client: Client, down: Message) -> Content:
        """One step on w for each batch of a bundle, then the next bundle's Z."""
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

    def deal(self, server: Server, replies: Replies, number: int, client: ClientId) -> Content:
        """The matrices of M others for each batch of a bundle, or of as many as answered."""
        batch = self.config.batch
        sent = {other: torch.split(reply["representations"], batch) for other, reply in replies.items()}
        drawn = self.drawn(server, client, replies.clients, number, len(sent[client]))
        dealt = [[sent[other][place] for other in others] for place, others in enumerate(drawn) if others]
        return {"peers": torch.cat([torch.stack(rows, 1) for rows in dealt])} if dealt else {}

    def drawn(
        self, server: Server, client: ClientId, there: Sequence[ClientId], number: int, batches: int
    ) -> list[list[ClientId]]:
        """A client's peers for each batch of a bundle."""
        first = number * self.bundle
        return [self.draw(server, client, there, first + place) for place in range(batches)]

    def draw(self, server: Server, client: ClientId, there: Sequence[ClientId], batch: int) -> list[ClientId]:
        """M of the others without replacement, independently for each client and batch (or round)."""
        others = [other for other in there if other != client]
        rng = server.rng.child("peers", client, batch if self.config.redraw == "batch" else 0)
        chosen = rng.numpy().permutation(len(others))[: self.config.peers]
        return [others[place] for place in sorted(chosen)]

    def contrast(self, client: Client, received: Tensor, bundle: Bundle) -> None:
        """The steps on w: batch after batch, with what the others made of it; peers that are missing are masked."""
        peers, (rows, others, _) = client["peers"], received.shape
        z, present = peers["z"], peers["present"]
        z.zero_()[:rows, :others].copy_(received)
        present.copy_(z.ne(0).any(2))
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
                "peers": Stream(Source(z, present), [*rows_at[places]]),
            },
            optimizer=self.config.optimizer,
            moments=client["moments"].content,
        )
        bounds = peers["bounds"].clone()
        client.report.metrics |= {
            f"bound {place} {m}": bounds[place, m] for place in places for m in range(others)
        }

    def alignment(self, client: Client, batch: Batch, peers: Batch) -> dict[str, Tensor]:
        """L^n, with gradients through the anchors alone; beside it what is observed of the batch."""
        config, model = self.config, client["model"]
        alone = evaluating if config.statistics == "private" else on_the_batch
        with alone(model.content):
            anchor = model.features(batch.x)
        others = peers.x.unbind(1)
        masks: dict[str, Any] = {"weight": client.public.mask[batch.id].float(), "present": peers.y.unbind(1)}
        tau, tau_prev = client["temperatures"]() if config.learned else (config.tau, config.tau_prev)
        bounds = information_bounds(anchor, others, tau, normalize=config.normalize, **masks)
        client["peers"]["bounds"].index_copy_(0, rows_of(peers)[:1] // config.batch, bounds[None])
        if config.loss == "gramian":
            own = {"negatives": config.negatives, "memory": config.memory}
            return {"gramian": gramian(anchor, others, config.tau, **own, **masks)}
        if config.loss == "pairwise":
            return {"pairwise": pairwise(anchor, others, tau, normalize=config.normalize, **masks)}
        own = {"memory": config.memory, "normalize": config.normalize}
        loss = muscle(anchor, others, tau, tau_prev, **own, **masks)
        return {"muscle": loss, "theorem1_value": theorem1_value(loss, anchor, others, **masks)}

    def repeats(self, population: Population) -> dict[str, tuple[int, int]]:
        """Every bundle but the first is represented, and every bundle aligned on, in a step of its own."""
        bundles = len(self.bundles(public_of(population), 1))
        return {"align": (bundles - 1, bundles)}

    def as_published(self, direction: str, message: Message) -> int | None:
        """S^n and α^n of every batch come down: B^M·(d + 1) scalars."""
        if self.config.accounting == "exact" or not message:
            return None
        if direction == "up":
            return message.scalars
        rows, others, width = message["peers"].shape
        return int(rows // self.config.batch * self.config.batch**others * (width + 1))
