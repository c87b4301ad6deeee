"""Clients compare their representations of public batches with those of peers that the server draws for them.

An exchange covers a bundle of one or more public batches. Every client sends its rows of the bundle; the server
draws peers for each client and batch, and sends the client the rows of its peers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, tensor
from potluck.core.message import Content
from potluck.core.public import Public
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.streams import Source, Stream
from potluck.core.task import Batch
from potluck.kit.masks import present
from potluck.kit.public_knowledge import rows_of
from potluck.training.fit import Loss, fit

Bundle = Sequence[np.ndarray]  # the rows of each public batch of one exchange
Drawn = Sequence[Sequence[ClientId]]  # the peers of a client, batch by batch


@dataclass(frozen=True)
class PeerExchange:
    """Which public batches cross, whose rows a client gets, and where it keeps them.

    With several batches in a bundle a client steps on all of them before it hears of its peers again, so that the
    peers' rows are up to `bundle - 1` of their steps old.
    """

    batch: int  # samples in a public batch; a short last one is left out
    passes: int  # passes over the public data in a round
    peers: int  # other clients that a client is compared with
    # The public samples each client has.
    available: Mapping[ClientId, np.ndarray] = field(default_factory=dict)
    bundle: int = 1  # batches in an exchange
    redraw: Literal["batch", "round"] = "batch"  # how often peers are drawn

    def sent(self, optional: bool = False) -> Contract:
        """What a client sends."""
        meaning = "the client's representations of public samples; zeros where it lacks one"
        return {"representations": tensor(f"{self._rows}, d", meaning, optional=optional)}

    def received(self) -> Contract:
        """What a client receives; nothing if it is alone in the round."""
        meaning = "what m other clients make of the same samples"
        return {"peers": tensor(f"{self._rows}, m<={self.peers}, d", meaning, optional=True)}

    @property
    def _rows(self) -> str:
        return f"r<={self.bundle * self.batch}"

    def client_state(self, width: int) -> dict[str, Tensor]:
        """Room for the peers' rows of a bundle, whether a peer has the sample, and what steps note per peer."""
        rows = self.bundle * self.batch
        return {
            "z": torch.zeros(rows, self.peers, width),
            "present": torch.zeros(rows, self.peers),
            "bounds": torch.zeros(self.bundle, self.peers),
        }

    def bundles(self, public: Public, round_: int) -> list[Bundle]:
        """The public batches of a round, `bundle` at a time, the same on every side."""
        order = public.order(round_, self.batch, self.passes)
        return [order[start : start + self.bundle] for start in range(0, len(order), self.bundle)]

    def exchanges(self, samples: int) -> int:
        """How many bundles a round has with so many public samples; nothing is drawn to count them."""
        return -(-self.passes * (samples // self.batch) // self.bundle)

    def draw(
        self, server: Server, clients: Sequence[ClientId], number: int, batches: int
    ) -> dict[ClientId, Drawn]:
        """The peers of every client for each batch of exchange `number`."""
        first = number * self.bundle
        return {
            client: [self._draw(server, client, clients, first + batch) for batch in range(batches)]
            for client in clients
        }

    def _draw(
        self, server: Server, client: ClientId, clients: Sequence[ClientId], batch: int
    ) -> list[ClientId]:
        """Peers from the other clients, without replacement; fewer where there are fewer."""
        others = [other for other in clients if other != client]
        rng = server.rng.child("peers", client, batch if self.redraw == "batch" else 0)
        chosen = rng.numpy().permutation(len(others))[: self.peers]
        return [others[place] for place in sorted(chosen)]

    def deal(self, replies: Replies, drawn: Mapping[ClientId, Drawn]) -> Callable[[ClientId], Content]:
        """What each client gets: the rows of its peers; nothing for a client that is alone."""
        sent = {
            client: torch.split(reply["representations"], self.batch) for client, reply in replies.items()
        }
        return functools.partial(_rows_of_peers, sent, drawn)

    def fit(self, client: Client, received: Tensor, bundle: Bundle, loss: Loss, **options: Any) -> None:
        """One step of `fit` for each batch of the bundle; beside it the peers' rows (x) and their presence (y).

        A batch of which the client has nothing makes no step: weight decay and momentum would move the model
        without a gradient.
        """
        self._keep(client, received)
        has, z = self.available[client.id], client["peers"]["z"]
        places = [place for place, samples in enumerate(bundle) if has[samples].any()]
        if not places:
            return
        rows = np.arange(len(z)).reshape(-1, self.batch)
        streams = {
            "public": Stream(client.public.source, [bundle[place] for place in places]),
            "peers": Stream(Source(z, client["peers"]["present"]), [*rows[places]]),
        }
        fit(client, loss, streams=streams, **options)
        self._report(client, places, peers=received.shape[1])

    def _keep(self, client: Client, received: Tensor) -> None:
        """Store the peers' rows; a missing peer or batch is zero and not present."""
        z = client["peers"]["z"]
        rows, peers, _ = received.shape
        z.zero_()[:rows, :peers].copy_(received)
        client["peers"]["present"].copy_(present(z))

    def note(self, client: Client, peers: Batch, bounds: Tensor) -> None:
        """Inside a step, where nothing can be read: keep a bound for each peer in the client's declared state."""
        client["peers"]["bounds"].index_copy_(0, rows_of(peers)[:1] // self.batch, bounds[None])

    def _report(self, client: Client, places: Sequence[int], peers: int) -> None:
        """Report the bounds that were noted as `bound b m`: batch b of the bundle, m-th peer drawn for it."""
        bounds = client["peers"]["bounds"].clone()
        client.report.metrics |= {
            f"bound {place} {m}": bounds[place, m] for place in places for m in range(peers)
        }


def _rows_of_peers(
    sent: Mapping[ClientId, Sequence[Tensor]], drawn: Mapping[ClientId, Drawn], client: ClientId
) -> Content:
    matrices = [
        torch.stack([sent[peer][batch] for peer in peers], 1)
        for batch, peers in enumerate(drawn[client])
        if peers
    ]
    return {"peers": torch.cat(matrices)} if matrices else {}
