"""How large a part of a message is, on a scale that clients with unlike models have in common.

Weights are measured against those of a new model of the same architecture, everything else against what most
clients sent under the same name. So a large model does not make its client stand out, and one client alone with its
architecture can still be compared with the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from potluck.core.card import ClientId
from potluck.core.contract import Contract
from potluck.engine.norms import Form, SentPart, Tensors

UNKNOWN = 1.0  # for weights whose new model is not known: above the root mean square of any usual model


class Yardsticks:
    """Root mean squares of new models' weights; `fresh` gives the tensors of a new model like a client's."""

    def __init__(self, fresh: Callable[[ClientId], Tensors] | None = None) -> None:
        self.fresh = fresh
        self._squares: dict[ClientId, dict[str, tuple[float, int]]] = {}  # sum of squares and size, by tensor
        self._known: dict[Form, float] = {}

    def of_weights(self, client: ClientId, part: SentPart, contract: Contract) -> float | None:
        """The root mean square of a part in a new model; None where the part is none of a model."""
        field, _, tensor = part.name.partition("/")
        like = contract[field].like if field in contract else None
        if like is None:
            return None
        if part.form not in self._known:
            root, _, path = like.partition("/")
            names = [tensor] if tensor else [name.removeprefix(f"{field}/") for name in part.tensors]
            below = [f"{path}.{name}" if path else name for name in names]
            self._known[part.form] = self._of_new_model(client, below, part.size) if root == "model" else 0.0
        return self._known[part.form] or UNKNOWN

    def _of_new_model(self, client: ClientId, names: Sequence[str], size: int) -> float:
        if client not in self._squares:
            fresh = self.fresh(client) if self.fresh is not None else {}
            self._squares[client] = {
                name: (float(value.detach().double().square().sum()), value.numel())
                for name, value in fresh.items()
            }
        known = self._squares[client]
        found = [known[name] for name in names if name in known]
        if len(found) < len(names) or sum(numbers for _, numbers in found) != size:
            return 0.0  # another architecture than the experiment names
        return math.sqrt(sum(squares for squares, _ in found) / max(1, size))

    def sizes(
        self, sent: Mapping[ClientId, Sequence[tuple[SentPart, float]]], contract: Contract
    ) -> dict[ClientId, float]:
        """How large the message of each client is: its part that is the most times its yardstick."""
        by_name: dict[str, list[float]] = {}
        for parts in sent.values():
            for part, value in parts:
                if 0 < value < math.inf:  # zeros are no measure of anything
                    by_name.setdefault(part.name, []).append(value)
        usual = {name: statistics.median_low(values) for name, values in by_name.items()}
        found: dict[ClientId, float] = {}
        for client, parts in sent.items():
            for part, value in parts:
                yardstick = self.of_weights(client, part, contract) or usual.get(part.name, UNKNOWN)
                found[client] = max(found.get(client, 0.0), value / yardstick)
        return found
