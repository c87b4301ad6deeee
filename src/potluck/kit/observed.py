"""What clients tell of aligning with peers: means over the batches of a round, and a bound for each peer drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.state import Report


class Observed:
    """The reports of a round, batch by batch.

    `report.losses` has means over the batches of an exchange. `report.metrics` has `bound b m` for batch b of the
    exchange and the m-th peer drawn for it; a batch that was left out has none.
    """

    def __init__(self, *terms: str) -> None:
        self.terms = terms
        self.values: dict[ClientId, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self.bounds: dict[ClientId, dict[ClientId, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def note(self, client: ClientId, report: Report, drawn: Sequence[Sequence[ClientId]]) -> None:
        """A client's report of one exchange, and who was drawn for each of its batches."""
        for batch, others in enumerate(drawn):
            if f"bound {batch} 0" not in report.metrics:
                continue
            for name in self.terms:
                if name in report.losses:
                    self.values[client][name].append(report.losses[name])
            for m, other in enumerate(others):
                bound = report.metrics.get(f"bound {batch} {m}")
                if bound is not None:  # a site may leave some out
                    self.bounds[client][other].append(bound)

    def of(self, client: ClientId) -> dict[str, Tensor]:
        """The means over the batches of a round, and only then the largest of the peers' bounds."""
        means = {f"{client}/{name}": torch.stack(seen).mean() for name, seen in self.values[client].items()}
        bounds = [torch.stack(seen).mean() for seen in self.bounds[client].values()]
        return means | ({f"{client}/information_bound": torch.stack(bounds).max()} if bounds else {})
