"""FedAvg (McMahan et al., AISTATS 2017), for one architecture, for groups of them, or layer by layer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, MethodConfig, Tasks, client_step
from potluck.core.options import option
from potluck.core.server import Server
from potluck.core.task import Task
from potluck.kit.shared_weights import SharedWeights
from potluck.training.fit import Fit, fit

WEIGHTS_UP = {"model": state_of("model", "the client's weights after local training")}


class FedAvg(SharedWeights):
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
    stays = ("data", "labels")
    down = {
        "model": state_of(
            "model", "averaged weights of the tensors this client has", optional=True, partial=True
        )
    }

    class Config(MethodConfig):
        """Options of FedAvg."""

        share: Literal["all", "groups", "layers"] = option(
            default="groups",
            description="what is averaged with what: all models, those of one architecture, or layer by layer",
            source="paper for all; groups: FedIN, App. B; layers: InCo Aggregation (ICLR 2024)",
        )
        weights: Literal["samples", "uniform"] = option(
            default="samples",
            description="weights of the average: n_k as published, or all alike",
            source="paper; uniform: InCo Aggregation",
        )

    def server_state(self, task: Task) -> dict[str, Any]:
        """The averaged tensors, under a key that says what is averaged with what."""
        return {"weights": {}}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The newest averages of the tensors this client has."""
        card = server.cards[client]
        return {part: self.share_of(server, "weights", card, part) for part in self.averaged_parts}

    def receive(self, client: Client, down: Message) -> None:
        """Install the averages."""
        for part in self.averaged_parts:
            client[part].load(down.group(part))

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average what came back."""
        self.introduce(server, clients)
        replies = clients.ask(self.train)
        for part in self.averaged_parts:
            server["weights"].load(self.mean(replies, part, self.config.weights))

    @client_step(up=WEIGHTS_UP)
    def train(self, client: Client) -> Content:
        """Local epochs, then the weights."""
        self.fit(client)
        return {"model": client["model"].state()}

    def fit(self, client: Client) -> Fit:
        """Local training; a subclass adds its terms here."""
        return fit(client, self.loss)
