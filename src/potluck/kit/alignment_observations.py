"""What is logged about alignment with peers, per client and round: the loss, Theorem 1's value, a bound.

Clients report a bound for each peer and batch (`bound b m`, see `PeerExchange`); the server averages over the
round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.state import Report
from potluck.kit.peer_exchange import Drawn

LOGGED = ("muscle", "pairwise", "gramian", "theorem1_value")  # losses of an alignment that are averaged


class Observations:
    """Collects the clients' reports of a round, exchange by exchange.

    A report's losses are means over the batches of an exchange; a batch without a bound was left out of it.
    """

    def __init__(self) -> None:
        self.values: dict[ClientId, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self.bounds: dict[ClientId, dict[ClientId, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def add(self, reports: Mapping[ClientId, Report], drawn: Mapping[ClientId, Drawn]) -> None:
        """Take in the reports of one exchange, given the peers each client was compared with."""
        for client, report in reports.items():
            for batch, peers in enumerate(drawn[client]):
                if f"bound {batch} 0" in report.metrics:
                    self._add_batch(client, report, batch, peers)

    def _add_batch(self, client: ClientId, report: Report, batch: int, peers: Sequence[ClientId]) -> None:
        for name in LOGGED:
            if name in report.losses:
                self.values[client][name].append(report.losses[name])
        for m, peer in enumerate(peers):
            bound = report.metrics.get(f"bound {batch} {m}")
            if bound is not None:  # a site may leave some out
                self.bounds[client][peer].append(bound)

    def means(self, clients: Iterable[ClientId]) -> dict[str, Tensor]:
        """Means over the round as `client/name`; the bound is the largest of the peers' mean bounds."""
        found: dict[str, Tensor] = {}
        for client in clients:
            found |= {
                f"{client}/{name}": torch.stack(seen).mean() for name, seen in self.values[client].items()
            }
            bounds = [torch.stack(seen).mean() for seen in self.bounds[client].values()]
            if bounds:
                found[f"{client}/information_bound"] = torch.stack(bounds).max()
        return found
