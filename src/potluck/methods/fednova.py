"""FedNova (Wang et al., NeurIPS 2020): clients that take more steps do not count for more."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, counts, state_of, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, client_step
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import ClientTraining, OptimizerSettings
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.kit.averaging import client_weights
from potluck.kit.shared_weights import move
from potluck.methods.fedavg import FedAvg
from potluck.training.fit import Fit, fit, learning_rate

ROUNDING = 1 + 1e-6  # what a_k may be larger by where it was added up step by step, in single precision
A_STEP = 0.5  # an honest a_k is 0 or at least 1; what is below this is no step


def _up(method: FedNova) -> Contract:
    sent = {
        "model": state_of("model", "Δ_k: how far the weights moved"),
        "normalizer": tensor("", "a_k: what the client's steps add up to", at_least=0, at_most="A"),
    }
    return sent | (
        {"steps": counts("", "τ_k: how many steps these were", most="T")} if method.config.mu else {}
    )


class FedNova(FedAvg):
    """The mean of what clients did per step, times a common number of steps.

    Up: Δ_k = y_k − x and one number a_k; with a proximal term τ_k as well. Down: x.
    Client: τ_k local steps on the task's own loss, with `mu` on L(w) + (μ/2)·‖w − x‖². a_k is how far these steps
    would carry a weight whose gradient is 1 throughout, in units of the learning rate η:

        plain SGD   a_k = τ_k
        momentum ρ  c ← ρ·c + 1, a ← a + c in every step, so a_k = [τ − ρ(1 − ρ^τ)/(1 − ρ)]/(1 − ρ)
        proximal μ  a ← (1 − ημ)·a + 1 in every step

    Server: x ← x + τ_eff·Σ_k p_k·Δ_k/a_k with p_k = n_k/Σ_j n_j over the cohort and τ_eff = Σ_k p_k·a_k, with a
    proximal term Σ_k p_k·τ_k. With `server_momentum` γ: v ← γ·v + that step, x ← x + v.

    With `share: layers` p and τ_eff are over the cohort's clients that have the layer. Where all take equally many
    steps this is FedAvg. Momentum starts anew in every round. A client that did no step is left out of the round.

    Adam has no a_k of its own: a_k = τ_k (ours). Batch-norm statistics take no steps; they are averaged.

    Deviations: where there are both momentum and a proximal term the released code counts one after the other, and
    Nesterov's momentum as the plain one; here a_k is, as said, the way of a constant gradient (ours). Weight decay
    and clipping are not in a_k, as there. Its v is in units of η, which is the same as long as η does not change.
    """

    name = "fednova"
    citation = "Wang et al., NeurIPS 2020"
    card_fields: ClassVar[tuple[str, ...]] = (*FedAvg.card_fields, "parameter_names")
    sends_changes = True
    training: Callable[[ClientId], ClientTraining]

    class Config(FedAvg.Config):
        """Options of FedNova."""

        mu: float = option(
            default=0.0,
            ge=0,
            description="μ of a proximal term as in FedProx; 0: none",
            source="released code",
        )
        server_momentum: float = option(
            default=0.0,
            ge=0,
            lt=1,
            description="γ, the server's momentum (gmf); 0: none",
            source="released code",
        )

    def setup(self, population: Population) -> None:
        """How clients train, which bounds what they can say of their steps."""
        super().setup(population)
        self.training = population.training

    def check(self, population: Population) -> None:
        """As FedAvg; and a proximal term must not overshoot, or a_k would come close to zero."""
        super().check(population)
        for client in population.trainers if self.config.mu else ():
            optimizer = population.training(client).optimizer
            if optimizer.name == "sgd" and optimizer.lr * self.config.mu > 1:
                raise ConfigError(
                    f"{self.name}: method.mu times the learning rate of client {client} is "
                    f"{optimizer.lr * self.config.mu:g}, and above 1 steps jump past the received weights; set "
                    f"method.mu to at most {1 / optimizer.lr:g}, or use fedavg"
                )

    def advice(self, population: Population) -> Iterator[str]:
        """Say that adaptive optimisers have no a_k."""
        yield from super().advice(population)
        name = population.training(population.ids[0]).optimizer.name
        if name != "sgd":
            yield (
                f"{self.name}: the paper has no a_k for {name}, whose steps do not add up gradients; here it is "
                "the number of steps, as for plain SGD"
            )

    def symbols(self, card: Card) -> dict[str, int]:
        """T and A, the most steps that a client can do in a round and what these add up to."""
        training = self.training(card.client)
        most = training.epochs * math.ceil(card.samples / training.batch_size)
        return super().symbols(card) | {
            "T": most,
            "A": math.ceil(ROUNDING * adding_up(training.optimizer, most)),
        }

    def server_state(self, task: Task) -> dict[str, Any]:
        """The weights x and the momentum v."""
        return {"weights": {}, "momentum": {}}

    def fit(self, client: Client) -> Fit:
        """Local training, with the proximal term if there is one."""
        return fit(client, self.loss, prox={"model": self.config.mu} if self.config.mu else None)

    @client_step(up=_up)
    def train(self, client: Client) -> Content:
        """Local steps, then how far they went and what they add up to."""
        before = client["model"].state()
        steps = self.fit(client).steps
        after = client["model"].state()
        pull = learning_rate(client) * self.config.mu
        told = {"normalizer": accumulated(client.training.optimizer, steps, pull)}
        if self.config.mu:
            told["steps"] = float(steps)
        return {
            "model": {name: after[name] - before[name] for name in after},
            **{name: torch.full((), value, device=client.device) for name, value in told.items()},
        }

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, then move by the mean of what clients did per step."""
        self.introduce(server, clients)
        asked = clients.ask(self.train)
        normalizers = _read(asked, "normalizer")
        replies = Replies({k: asked[k] for k in asked if normalizers[k] > A_STEP}, asked.cards, asked.reports)
        per_step = replies.map(lambda client, message: self.per_step(replies.cards[client], message))
        effective = self.effective_steps(replies, _read(replies, "steps") if self.config.mu else normalizers)
        changes = self.mean(per_step, "model", self.config.weights)
        moves = {key: change * effective.get(key, 1.0) for key, change in changes.items()}
        if self.config.server_momentum:
            moves |= self.with_momentum(server, {key: moves[key] for key in effective if key in moves})
        move(server["weights"], moves)

    def per_step(self, card: Card, message: Message) -> Content:
        """Δ_k/a_k; statistics as they are."""
        learned, number = {*card.parameter_names}, message["normalizer"]
        moved = message.group("model").items()
        return {"model": {name: change / number if name in learned else change for name, change in moved}}

    def effective_steps(self, replies: Replies, steps: Mapping[ClientId, float]) -> dict[str, float]:
        """τ_eff of every trained tensor, over the clients that have it."""
        shares = client_weights(replies, self.config.weights)
        total, weight = defaultdict[str, float](float), defaultdict[str, float](float)
        for client, share in shares.items():
            keys = self.keys(replies.cards[client])
            for key in (keys[name] for name in replies.cards[client].parameter_names if name in keys):
                total[key] += share * steps[client]
                weight[key] += share
        return {key: total[key] / weight[key] for key in total if weight[key] > 0}

    def with_momentum(self, server: Server, moves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """v ← γ·v + the step."""
        held, gamma = server["momentum"].tensors(), self.config.server_momentum
        moves = {key: held[key] * gamma + value if key in held else value for key, value in moves.items()}
        server["momentum"].load(moves)
        return moves


@functools.lru_cache(maxsize=4096)
def accumulated(optimizer: OptimizerSettings, steps: int, pull: float = 0.0) -> float:
    """a_k of some steps; `pull` is ημ.

    >>> accumulated(OptimizerSettings(), 3), accumulated(OptimizerSettings(momentum=0.5), 3)
    (3.0, 4.25)
    """
    if optimizer.name != "sgd":
        return float(steps)
    momentum, travelled, rho = 0.0, 0.0, optimizer.momentum
    for _ in range(steps):
        gradient = 1 - pull * travelled
        momentum = rho * momentum + gradient
        travelled += gradient + rho * momentum if optimizer.nesterov else momentum
    return travelled


def adding_up(optimizer: OptimizerSettings, steps: int) -> float:
    """The same in closed form, without a pull: how many steps there can be is what a card says.

    >>> adding_up(OptimizerSettings(momentum=0.5), 3)
    4.25
    """
    rho = optimizer.momentum if optimizer.name == "sgd" else 0.0
    plain = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    return steps + rho * plain if optimizer.nesterov else plain


def _read(replies: Replies, name: str) -> dict[ClientId, float]:
    """One number of every reply, read from the device at once."""
    values = [message[name] for message in replies.values()]
    return dict(zip(replies, torch.stack(values).tolist() if values else (), strict=True))
