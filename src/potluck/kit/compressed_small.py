"""The base of methods whose shared small model may be sent with less than its full rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, state_of, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Declared
from potluck.core.options import option
from potluck.core.server import Server
from potluck.core.state import Part
from potluck.core.task import Task
from potluck.kit.averaging import average
from potluck.kit.low_rank import LowRank, decode, encode
from potluck.kit.shared_small import SharedSmall


def _down(method: CompressedSmall) -> Contract:
    what = f"the small model's averaged parameters{method.architecture}"
    if not method.sends_changes:
        return {"small": state_of("small", what, low_rank=method.config.compress is not None)}
    changes = "1 if these are changes of the parameters that the client was sent before"
    return {
        "small": state_of("small", f"{what}, or their change in the last round", low_rank=True),
        "changes": tensor("", changes, optional=True, at_least=1, at_most="1"),
    }


def _up(method: CompressedSmall) -> Contract:
    changes = "how the small model's parameters changed in local training"
    what = changes if method.sends_changes else "the small model's parameters after local training"
    meaning = f"{what}{method.architecture}"
    return {"small": state_of("small", meaning, low_rank=method.config.compress is not None)}


SMALL_UP: Declared = _up


class CompressedSmall(SharedSmall):
    """Sends the small model θ around as it is, or of low rank with the option `compress`.

    Of updates, a client sends θ_k − θ. The server sends their mean of low rank and adds to θ what it has sent, so
    that a client which adds it to the θ it was sent before has the same θ. Only clients that took part in the last
    round are known to have that one; others are sent the new θ whole. Of weights, θ_k goes up and θ comes down,
    both of low rank. In both cases the first θ is sent whole.

    A subclass puts `kept` into its client state and ends its step with `uploaded`. With `compress` that waits for
    the device, as the ranks decide the shapes of what is sent.
    """

    down: ClassVar[Declared] = _down

    class Config(SharedSmall.Config):
        """The shared model, its average and how it is sent."""

        compress: LowRank | None = option(
            default=None,
            description="send tensors of low rank, with {start, end, rounds, of}; none: send them as they are",
            source="FedKD",
        )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        compress = self.config.compress
        self.sends_changes = compress is not None and compress.of == "updates"

    def server_state(self, task: Task) -> dict[str, Any]:
        """The small model; what is sent of it; and, of updates, which clients have the θ that it changes."""
        state = super().server_state(task)
        if self.config.compress is None:
            return state
        return state | {"sent": {}} | ({"current": {}} if self.sends_changes else {})

    def kept(self, small: nn.Module) -> dict[str, Any]:
        """What a client keeps beside the small model: of updates θ as it was sent."""
        wire = Part(small, self.config.buffers).wire() if self.sends_changes else {}
        received = {name: value.detach().clone() for name, value in wire.items()}
        return {"received": received} if self.sends_changes else {}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """θ, or its last change for a client that has the θ before."""
        sent = server["sent"].tensors() if self.config.compress is not None else {}
        if not sent:
            return super().downlink(server, client)
        if not self.sends_changes:
            return {"small": sent}
        current = server["current"].tensors()
        if client not in current:
            return super().downlink(server, client)
        return {"small": sent, "changes": current[client]}

    def receive(self, client: Client, down: Message) -> None:
        """Install the newest θ."""
        if self.config.compress is None:
            return super().receive(client, down)
        newest = decode(down.group("small"), client["small"].wire())
        if "changes" in down:
            newest = _plus(client["received"].tensors(), newest)
        if self.sends_changes:
            client["received"].load(newest)
        client["small"].load(newest)

    def uploaded(self, client: Client) -> Content:
        """θ_k, or its change since it was received."""
        small, compress = client["small"].state(), self.config.compress
        if compress is None:
            return {"small": small}
        if self.sends_changes:
            received = client["received"].tensors()
            small = {name: value - received[name] for name, value in small.items()}
        return {"small": encode(small, compress.energy(client.round))}

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average the small models or their changes."""
        compress, small = self.config.compress, server["small"]
        if compress is None:
            return super().round(server, clients)
        replies, before = clients.ask(self.train), small.state()
        whole = replies.map(lambda _, up: {"small": decode(up.group("small"), before)})
        mean = average(whole, "small", self.config.weights)
        sent = encode(mean, compress.energy(server.round))
        small.load(_plus(before, decode(sent, before)) if self.sends_changes else mean)
        _replace(server["sent"], sent)
        if self.sends_changes:
            _replace(server["current"], {client: torch.ones((), device=server.device) for client in replies})


def _plus(one: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one[name] + value for name, value in change.items()}


def _replace(part: Part, tensors: Mapping[str, Tensor]) -> None:
    """Put other tensors into a mapping; names and shapes may differ from those before."""
    part.content.clear()
    part.load(tensors)
