"""CoFED (Cao et al., arXiv 2202.08603): clients vote on the classes of public samples and train on what is agreed.

Co-training for any models and any label sets Y_k; classes are known by their names.

    Up:     a vote per public sample, a global class or none, |P| scalars.
    Down:   for each class the client holds, the samples agreed to be of it: Σ_c |P_c| row numbers, |Y_k| counts.
    Client: 1. train locally; 2. vote for the likeliest class of x where p₍₁₎ − p₍₂₎ > `margin` and the client holds
            that class.
    Server: 3. list x under class c where votes for c / clients that hold c > `threshold`.
    Client: 4. leave out samples listed under two or more of its classes; train on private ∪ listed samples with
            cross-entropy, each sample of class c weighted by (smallest count)/(count of c), counted over both.

The official (MATLAB) code says that one round is enough, and retrains from the local model. So does this, in
every round. Deviations: the union is not shuffled as one set. A step takes a full private and a full public
batch, the shorter stream starts over, and public samples without a class have no weight.

INFERRED: Y_k are the classes with a training sample; holders are counted among the round's clients; a likeliest
class that the client does not hold is no vote; batch norm does not remember the statistics of public batches; a
client neither votes on samples it lacks nor learns from them. No adaptation is known for tasks other than one
class per sample; they are refused.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from potluck.core.card import Card
from potluck.core.client import Client
from potluck.core.contract import numbers
from potluck.core.message import Content, Message
from potluck.core.method import Clients, PrivateModelConfig, client_step
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.streams import Stream, shuffled_batches
from potluck.core.task import Batch, Task
from potluck.kit.public_knowledge import (
    OnPublicData,
    foreign_features,
    public_samples,
    public_stream,
    require_public_samples,
    rows_of,
    scores,
)
from potluck.training.fit import fit
from potluck.training.plan import rows_on


class CoFED(OnPublicData):
    """Vote on public samples, count the votes by class, and train on private and agreed samples together."""

    name = "cofed"
    citation = "Cao et al., arXiv 2202.08603"
    tasks = "any"
    models = "any"
    card_fields = ("classes_held",)
    stays = ("data", "labels", "model")

    class Config(PrivateModelConfig):
        """Options of CoFED."""

        margin: float = option(
            default=0.3,
            ge=0,
            lt=1,
            description="least gap between the two largest probabilities for a vote; the official code's 0.3",
            source="official code",
        )
        threshold: float = option(
            default=0.3,
            ge=0,
            lt=1,
            description="share of a class's holders that must agree on a sample; the official code's 0.3",
            source="official code",
        )
        weights: Literal["uniform", "samples"] = option(
            default="uniform",
            description="of the votes: all alike, or by a client's number of training samples",
            source="ours for samples",
        )
        batch: int | None = option(
            default=None,
            ge=1,
            description="public samples in a step; by default 32, or all if fewer",
            source="ours",
        )

    def setup(self, population: Population) -> None:
        """Give classes global numbers by name."""
        super().setup(population)
        self.batch = public_samples(population, self.config.batch, 32)
        names = {client: population.class_names(client) for client in population.ids}
        every = dict.fromkeys(name for client in population.first_clients for name in names[client])
        self.numbers = {name: number for number, name in enumerate(every)}
        self.labels = {client: [self.numbers[name] for name in own] for client, own in names.items()}

    def check(self, population: Population) -> None:
        """A batch must fit."""
        require_public_samples(population, "batch", self.config.batch)

    @classmethod
    def takes(cls, task: Task) -> bool:
        """Votes are for classes: one per sample."""
        return task.single_label

    def symbols(self, card: Card) -> dict[str, int]:
        """G: the number of classes of all clients together."""
        return super().symbols(card) | {"G": len(self.numbers)}

    def round(self, server: Server, clients: Clients) -> None:
        """Clients train and vote, the server counts, clients train again with what was agreed."""
        agreed = self.count(clients.ask(self.vote))
        clients.ask(self.learn, down=lambda client: self.listed(agreed, clients.cards[client]))

    @client_step(
        up={"votes": numbers("P", "a global class per public sample, or G for no vote", below="G+1")}
    )
    def vote(self, client: Client) -> Content:
        """Local epochs, then votes where the model is sure."""
        fit(client, self.loss)
        return {"votes": self.decide(client, scores(client))}

    def decide(self, client: Client, logits: Tensor) -> Tensor:
        """The global number of the likeliest class where it is sure and held, else G for no vote."""
        likely = logits.softmax(1).topk(2, dim=1)
        best = likely.indices[:, 0]
        sure = likely.values[:, 0] - likely.values[:, 1] > self.config.margin
        allowed = sure & (self.held(client)[best] > 0) & client.public.mask
        return client.numbers(self.labels[client.id])[best].masked_fill(~allowed, len(self.numbers))

    def count(self, replies: Replies) -> Tensor:
        """Classes × public samples: whether enough holders of a class voted for it."""
        votes = torch.stack([message["votes"] for message in replies.values()])
        weight = [
            float(replies.cards[client].samples) if self.config.weights == "samples" else 1.0
            for client in replies
        ]
        shares = votes.new_zeros(len(self.numbers), len(replies), dtype=torch.float32)
        for place, client in enumerate(replies):
            shares[self.held_globally(replies.cards[client]), place] = weight[place]
        total = shares.sum(1, keepdim=True)
        found = [shares[label] @ (votes == label).to(shares.dtype) for label in range(len(self.numbers))]
        threshold: float = self.config.threshold
        return torch.stack(found) > threshold * total

    def held_globally(self, card: Card) -> list[int]:
        """The global numbers of the classes a client holds, in the client's order."""
        return [self.labels[card.client][label] for label in card.classes_held]

    def listed(self, agreed: Tensor, card: Card) -> Content:
        """The samples agreed to be of each class the client holds, one class after the other."""
        own = agreed[self.held_globally(card)]
        return {"rows": own.nonzero()[:, 1], "counts": own.sum(1)}

    @client_step(
        down={
            "rows": numbers("L<=P*C_k", "public samples, listed by class", below="P"),
            "counts": numbers("C_k", "how many of them are of each class held", below="P+1"),
        }
    )
    def learn(self, client: Client, down: Message) -> None:
        """Train on private and agreed samples together."""
        if not client.samples:
            return
        labels, known = self.agreed_labels(client, down)
        private, public = self.union(client)
        fit(
            client,
            self.joint_loss,
            streams={"private": private, "public": public},
            steps=max(len(private), len(public)),
            scalars={"labels": labels, "known": known, "balance": self.balance(client, labels, known)},
        )

    def union(self, client: Client) -> tuple[Stream, Stream]:
        """Private and public batches, all full: a single sample left over would count as much as a whole batch."""
        epochs, size = client.training.epochs, client.training.batch_size
        rows, rng = client.rows["train"], client.rng.child("union")
        private = Stream(client.source, shuffled_batches(rows, size, epochs, "wrap", rng), augment=True)
        everything = np.arange(len(client.public))
        return private, public_stream(client, everything, self.batch, epochs, "agreed", "wrap")

    def agreed_labels(self, client: Client, down: Message) -> tuple[Tensor, Tensor]:
        """The class of every public sample, and 1 where it has one: where it is listed once and not missing."""
        held = client.numbers(client.classes_held)
        rows = down["rows"]
        labels = held.new_zeros(len(client.public))
        places = torch.arange(len(rows), device=client.device)  # class by class, as many as each one counts
        classes = held[
            torch.searchsorted(down["counts"].cumsum(0), places, right=True).clamp(max=len(held) - 1)
        ]
        labels.index_copy_(0, rows, classes)
        times = torch.zeros(len(client.public), device=client.device)
        times.index_add_(0, rows, torch.ones(len(rows), device=client.device))
        return labels, ((times == 1) & client.public.mask).float()

    def balance(self, client: Client, labels: Tensor, known: Tensor) -> Tensor:
        """The weight of each class: 1/count, scaled so that the largest is 1."""
        own = client.source.y.index_select(0, rows_on(client.rows["train"], client.device))
        counts = torch.zeros(client.task.classes, device=client.device)
        counts.index_add_(0, own, torch.ones(len(own), device=client.device))
        counts.index_add_(0, labels, known)
        inverse = torch.where(counts > 0, 1 / counts.clamp_min(1), 0.0)
        return inverse / inverse.max()

    def joint_loss(
        self, client: Client, batch: Batch, public: Batch, labels: Tensor, known: Tensor, balance: Tensor
    ) -> Tensor:
        """Weighted cross-entropy over the private and the public batch as one."""
        y, there = labels[public.id], known[rows_of(public)]
        logits = client["model"](batch.x), client["model"].head(foreign_features(client, public))
        weights = balance[batch.y], balance[y] * there
        each = [
            client.task.rules.loss(one, label, "none") * weight
            for one, label, weight in zip(logits, (batch.y, y), weights, strict=True)
        ]
        total: Tensor = (each[0].sum() + each[1].sum()) / (weights[0].sum() + weights[1].sum())
        return total

    def held(self, client: Client) -> Tensor:
        """1 for each class the client holds."""
        held = torch.zeros(client.task.classes, device=client.device)
        return held.index_fill_(0, client.numbers(client.classes_held), 1.0)
