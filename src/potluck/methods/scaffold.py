"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates against client drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Shapes, state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.task import Task
from potluck.kit.shared_weights import move
from potluck.methods.fedavg import FedAvg
from potluck.training.fit import Gradients, fit, learning_rate, plus


class Scaffold(FedAvg):
    """Local steps y ← y − η(∇L(y) + c − c_k); then c_k⁺, and the server moves by the mean change.

    Up: Δy = y − x and Δc = c_k⁺ − c_k. Down: x and c. Both variates start at 0.
    Server: x ← x + η_g·mean Δy over the cohort, c ← c + ΣΔc / K with K all clients that have the tensor.

    `variate: mean` takes c_k⁺ as the mean raw gradient of the round's steps. For plain SGD that is the paper's
    Option II, c_k − c + (x − y)/(τη), up to rounding (without weight decay and clipping); with momentum or Adam it
    remains a gradient, while the literal formula (`variate: option2`) does not. Buffers have no variate; they are
    averaged. c_k itself is no secret: the server could add up what it was sent.
    """

    name = "scaffold"
    citation = "Karimireddy et al., ICML 2020"
    card_fields: ClassVar[tuple[str, ...]] = (*FedAvg.card_fields, "parameter_names")
    sends_changes = True
    down = FedAvg.down | {
        "control": state_of(
            "control", "the server's control variate c, as far as it has one", optional=True, partial=True
        )
    }

    class Config(FedAvg.Config):
        """Options of SCAFFOLD."""

        weights: Literal["samples", "uniform"] = option(
            default="uniform",
            description="weights of the mean over the cohort; the paper's is unweighted",
            source="paper",
        )
        server_lr: float = option(
            default=1.0,
            gt=0,
            description="η_g, the server's step along the mean change",
            source="paper (η_g = 1)",
        )
        variate: Literal["mean", "option2"] = option(
            default="mean",
            description="c_k⁺: the mean gradient of the round's steps, or the paper's Option II",
            source="paper, Option II; mean: ours",
        )

    _counted: tuple[int, Counter[str]] | None = None

    def server_state(self, task: Task) -> dict[str, Any]:
        """The weights x and the variate c."""
        return {"weights": {}, "control": {}}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, its variate c_k, the server's c as received, and the sum of the round's gradients."""
        zeros = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        return {"model": model} | {
            part: {name: value.clone() for name, value in zeros.items()}
            for part in ("own_control", "control", "gradients")
        }

    def expected(self, card: Card, part: str) -> Shapes | None:
        """A variate has the shape of its tensor; buffers have none."""
        if part != "control":
            return super().expected(card, part)
        return {name: card.names[name] for name in card.parameter_names if name in card.names}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """x and c, for the tensors this client has."""
        card = server.cards[client]
        return {
            "model": self.share_of(server, "weights", card),
            "control": self.control_for(server, card),
        }

    def control_for(self, server: Server, card: Card) -> dict[str, Tensor]:
        """c, for the tensors of which this client has a variate itself, whatever others have sent."""
        own = {*card.parameter_names}
        held = self.share_of(server, "control", card)
        return {name: value for name, value in held.items() if name in own}

    def receive(self, client: Client, down: Message) -> None:
        """Install x; keep c for the correction."""
        super().receive(client, down)
        client["control"].load(down.group("control"))

    def round(self, server: Server, clients: Clients) -> None:
        """Train with the correction, then move x and c."""
        self.introduce(server, clients)
        replies = clients.ask(self.train)
        changes = self.mean(replies, "control", "uniform")
        shares = self.reach(replies, clients)
        moves = self.mean(replies, "model", self.config.weights)
        rates = {key: self.config.server_lr if key in changes else 1.0 for key in moves}
        move(server["weights"], moves, rates)
        move(server["control"], changes, shares)

    @client_step(
        up={
            "model": state_of("model", "Δy: how far the weights moved"),
            "control": state_of("control", "Δc: how far the client's variate moved"),
        }
    )
    def train(self, client: Client) -> Content:
        """Corrected local steps, then the changes of weights and variate."""
        before = client["model"].state()
        for total in client["gradients"].tensors().values():
            total.zero_()
        steps = fit(client, self.loss, combine=lambda terms: self.correct(client, terms)).steps
        after = client["model"].state()
        moved = {name: after[name] - before[name] for name in after}
        change = self.control_change(client, moved, steps)
        for name, value in client["own_control"].tensors().items():
            value.add_(change[name])
        return {"model": moved, "control": change}

    def correct(self, client: Client, terms: Mapping[str, Gradients]) -> Gradients:
        """∇L + c − c_k; ∇L is added to the round's sum."""
        gradients = terms["loss"]
        totals, server, own = (
            {
                name: value
                for key, value in client[part].tensors().items()
                if (name := f"model/{key}") in gradients
            }
            for part in ("gradients", "control", "own_control")
        )
        torch._foreach_add_([totals[name] for name in gradients], [*gradients.values()])
        return plus(plus(gradients, server), own, -1.0)

    def control_change(self, client: Client, moved: Mapping[str, Tensor], steps: int) -> dict[str, Tensor]:
        """Δc = c_k⁺ − c_k."""
        own, server = client["own_control"].tensors(), client["control"].tensors()
        if not steps:
            return {name: torch.zeros_like(value) for name, value in own.items()}
        if self.config.variate == "mean":
            return {name: total / steps - own[name] for name, total in client["gradients"].tensors().items()}
        path = steps * learning_rate(client)
        return {name: -server[name] - moved[name] / path for name in own}

    def reach(self, replies: Replies, clients: Clients) -> dict[str, float]:
        """Per tensor, the share of its owners that answered: the mean change times this is ΣΔc / K."""
        owners = self._owners(clients)
        senders = Counter(key for client in replies for key in self.keyed(replies, client, "control"))
        return {key: count / owners[key] for key, count in senders.items()}

    def _owners(self, clients: Clients) -> Counter[str]:
        """How many clients have each tensor; counted once, as cards do not change."""
        if self._counted is None or self._counted[0] != clients.total:
            counts = Counter(key for card in clients.cards.values() for key in self.keys(card).values())
            self._counted = (clients.total, counts)
        return self._counted[1]
