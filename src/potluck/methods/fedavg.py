"""FedAvg (McMahan et al., AISTATS 2017), for one architecture, for groups of them, or layer by layer."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Method, MethodConfig, Needs, Tasks, client_step
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.kit.averaging import Weights, average
from potluck.kit.requirements import named
from potluck.training.fit import Fit, fit

WEIGHTS_UP = {"model": state_of("model", "the client's weights after local training")}


class FedAvg(Method):
    """Weighted averaging of the clients' weights: θ ← Σ_k (n_k / Σ_j n_j) θ_k over the round's cohort.

    Up: the weights. Down: the averaged weights. Loss: the task's own.

    `share` says what is averaged with what, for clients whose models differ:
    - `all`: every client has the same model (the method as published);
    - `groups`: clients whose tensors have the same names and shapes form a group with a FedAvg of its own;
    - `layers`: every tensor is averaged over the clients that have one of its name and shape ("HeteroAvg", the
      baseline in InCo Aggregation, ICLR 2024). There the mean is unweighted: set `weights: uniform`.

    Clients must start from common weights. If the server holds none for a tensor, the first client of the cohort
    that has it sends its own before anyone trains (purpose `setup` in the ledger).
    """

    name = "fedavg"
    citation = "McMahan et al., AISTATS 2017"
    tasks: ClassVar[Tasks] = "one"
    models = "one architecture, or groups of them (share: groups), or shared layers (share: layers)"
    server_needs: ClassVar[Needs] = "names"
    card_fields: ClassVar[tuple[str, ...]] = ("names",)
    stays = ("data", "labels")
    down = {
        "model": state_of(
            "model", "averaged weights of the tensors this client has", optional=True, partial=True
        )
    }

    class Config(MethodConfig):
        """Options of FedAvg."""

        share: Literal["all", "groups", "layers"] = Field(
            default="groups",
            description="what is averaged with what: all models, those of one architecture, or layer by layer",
        )
        weights: Literal["samples", "uniform"] = Field(
            default="samples", description="weights of the average: n_k as published, or all alike"
        )

    def check(self, population: Population) -> None:
        """With `share: all` every client must have the same model."""
        if self.config.share != "all":
            return
        first, *others = population.ids
        for client in others:
            if population.names(client) != population.names(first):
                raise ConfigError(
                    f"{self.name}: {named(population, client)} has another model than {named(population, first)}; "
                    "set method.share to groups or layers"
                )

    def server_state(self, task: Task) -> dict[str, Any]:
        """The averaged tensors, under a key that says what is averaged with what."""
        return {"weights": {}}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The newest averages of the tensors this client has."""
        return {"model": self.share_of(server, "weights", server.cards[client])}

    def receive(self, client: Client, down: Message) -> None:
        """Install the averages."""
        client["model"].load(down.group("model"))

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average what came back."""
        self.introduce(server, clients)
        replies = clients.ask(self.train)
        server["weights"].load(self.mean(replies, "model", self.config.weights))

    @client_step(up=WEIGHTS_UP)
    def train(self, client: Client) -> Content:
        """Local epochs, then the weights."""
        self.fit(client)
        return {"model": client["model"].state()}

    @client_step(
        up={"model": state_of("model", "initial weights the server has not seen yet")}, purpose="setup"
    )
    def bring(self, client: Client) -> Content:
        """Send the initial weights."""
        return {"model": client["model"].state()}

    def fit(self, client: Client) -> Fit:
        """Local training; a subclass adds its terms here."""
        return fit(client, self.loss)

    def introduce(self, server: Server, clients: Clients) -> None:
        """Fetch initial values for the tensors of this cohort that the server does not hold."""
        while donors := self.donors(server, clients):  # again if one of them failed
            replies = clients.ask(self.bring, only=donors)
            for client in sorted(replies, key=donors.index):
                fresh = self.keyed(replies, client, "model")
                held = server["weights"].tensors()
                server["weights"].load({key: value for key, value in fresh.items() if key not in held})

    def donors(self, server: Server, clients: Clients) -> list[ClientId]:
        """The clients that can send the tensors the server does not hold, the largest model first."""
        known = set(server["weights"].tensors())
        donors = []
        for client in sorted(clients.ids, key=lambda one: -len(clients.cards[one].names)):
            keys = set(self.keys(clients.cards[client]).values())
            if not keys <= known:
                donors.append(client)
                known |= keys
        return donors

    def mean(self, replies: Replies, group: str, weights: Weights) -> dict[str, Tensor]:
        """The mean of a group of tensors, under the server's keys."""
        keyed = replies.map(lambda client, _: {group: self.keyed(replies, client, group)})
        return average(keyed, group, weights)

    def keyed(self, replies: Replies, client: ClientId, group: str) -> dict[str, Tensor]:
        """A client's tensors under the server's keys."""
        keys = self.keys(replies.cards[client])
        return {keys[name]: value for name, value in replies[client].group(group).items()}

    def share_of(self, server: Server, part: str, card: Card) -> dict[str, Tensor]:
        """The server's tensors that this client also has, under the client's names."""
        held = server[part].tensors()
        return {name: held[key].clone() for name, key in self.keys(card).items() if key in held}

    def keys(self, card: Card) -> dict[str, str]:
        """The server's key of each of a client's tensors; tensors with equal keys are averaged together."""
        names = card.names
        if self.config.share == "all":
            return {name: name for name in names}
        if self.config.share == "layers":
            return {name: f"{name}:{'x'.join(map(str, shape))}" for name, shape in names.items()}
        group = hashlib.sha256(repr(sorted(names.items())).encode()).hexdigest()[:12]
        return {name: f"{group}:{name}" for name in names}
