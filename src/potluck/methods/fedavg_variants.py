"""FedAvg with uploads of low rank: what `method: fedavg` runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import Contract, state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, client_step
from potluck.core.options import option
from potluck.core.server import Server
from potluck.kit.low_rank import LowRank, decode, encode
from potluck.methods.fedavg import WEIGHTS_UP, FedAvg


def _up(method: FedAvgVariants) -> Contract:
    if method.config.compress is None:
        return WEIGHTS_UP
    what = "how the client's weights changed in" if method.sends_changes else "the client's weights after"
    return {"model": state_of("model", f"{what} local training", low_rank=True)}


class FedAvgVariants(FedAvg):
    """FedAvg as published by default. `compress` is ours: FedKD's messages of low rank, for uploads.

    Of updates, a client sends θ_k − θ with each matrix of low rank, and the server adds its own θ before it takes
    the mean; of weights, it sends θ_k of low rank. The averages come down whole. The upload then waits for the
    device, as the ranks decide its shapes.
    """

    name = FedAvg.name

    class Config(FedAvg.Config):
        """Options of FedAvg."""

        compress: LowRank | None = option(
            default=None,
            description="upload tensors of low rank, with {start, end, rounds, of}; none: as they are",
            source="FedKD; for FedAvg: ours",
        )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        compress = self.config.compress
        self.sends_changes = compress is not None and compress.of == "updates"

    @client_step(up=_up)
    def train(self, client: Client) -> Content:
        """Local epochs, then the weights or their changes."""
        compress = self.config.compress
        if compress is None:
            return super().train(client)
        before = client["model"].state() if self.sends_changes else {}
        self.fit(client)
        after = client["model"].state()
        sent = {name: value - before[name] for name, value in after.items()} if before else after
        return {"model": encode(sent, compress.energy(client.round))}

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, put what came back together, average it."""
        if self.config.compress is None:
            return super().round(server, clients)
        self.introduce(server, clients)
        replies = clients.ask(self.train).map(lambda client, up: {"model": self.whole(server, client, up)})
        server["weights"].load(self.mean(replies, "model", self.config.weights))

    def whole(self, server: Server, client: str, up: Message) -> dict[str, Tensor]:
        """A client's weights, from what it sent and the weights it was sent before."""
        held = self.share_of(server, "weights", server.cards[client])
        sent = decode(up.group("model"), held)
        return {name: held[name] + value for name, value in sent.items()} if self.sends_changes else sent
