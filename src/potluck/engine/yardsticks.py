"""How large a part of a message is, on a scale that clients with unlike models have in common.

Weights are measured against those of a new model of the same architecture, everything else against what most
clients sent under the same name. So a large model does not make its client stand out, and one client alone with its
architecture can still be compared with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from potluck.core.card import ClientId
from potluck.core.contract import Contract
from potluck.engine.norms import NOBODY, Form, Others, SentPart, Tensors

BEYOND_NEW = "times that of a new model"  # what every sentence about weights that are too large for one says
UNKNOWN = 1.0  # for weights whose new model is not known: above the root mean square of any usual model
LEAST = 0.01  # and below that
RUNNING = ("running_mean", "running_var")  # of batch norm: as large as the samples that a site has


class Yardsticks:
    """Root mean squares of new models' weights; `fresh` gives the tensors of a new model like a client's.

    A model that the experiment does not name is measured by the message in which it was `first` sent, whoever sent
    it, within the bounds of usual models: so clients with the same model have the same yardstick.
    """

    def __init__(self, fresh: Callable[[ClientId], Tensors] | None = None) -> None:
        self.fresh = fresh
        self.first: dict[Form, float] = {}
        self._squares: dict[ClientId, dict[str, tuple[float, int]]] = {}  # sum of squares and size, by tensor
        self._known: dict[Form, tuple[float, ...]] = {}

    def times_new(
        self, client: ClientId, part: SentPart, norms: Mapping[str, float], contract: Contract
    ) -> float | None:
        """How many times a part is that of a new model, by the norms of its tensors; None if it is none of a model.

        Running statistics are left out: an honest site's may be thousands of times as large as a new model's.
        """
        new = self._of_new_model(client, part, contract)
        if new is None:
            return None
        counted = [place for place, name in enumerate(part.tensors) if not name.endswith(RUNNING)]
        sent = sum(norms[part.tensors[place]] ** 2 for place in counted)
        known = sum(new[place] for place in counted) if new else 0.0
        usual = (
            known if known > LEAST**2 * part.size else UNKNOWN**2 * part.size
        )  # next to zeros it may be far off
        return math.sqrt(sent / usual)

    def _of_new_model(self, client: ClientId, part: SentPart, contract: Contract) -> tuple[float, ...] | None:
        """The sums of squares of a part's tensors in a new model, of any client that has such a model.

        Empty where no new model is known, None where the part is none of a model.
        """
        field, _, tensor = part.name.partition("/")
        like = contract[field].like if field in contract else None
        if like is None:
            return None
        if part.form not in self._known:
            root, _, path = like.partition("/")
            names = [tensor] if tensor else [name.removeprefix(f"{field}/") for name in part.tensors]
            below = [f"{path}.{name}" if path else name for name in names]
            found = self._found(client, below, part.size) if root == "model" else ()
            if not found:
                return ()
            self._known[part.form] = found
        return self._known[part.form]

    def _found(self, client: ClientId, names: Sequence[str], size: int) -> tuple[float, ...]:
        if client not in self._squares:
            fresh = self.fresh(client) if self.fresh is not None else {}
            self._squares[client] = {
                name: (float(value.detach().double().square().sum()), value.numel())
                for name, value in fresh.items()
            }
        known = self._squares[client]
        found = [known[name] for name in names if name in known]
        if len(found) < len(names) or sum(numbers for _, numbers in found) != size:
            return ()  # another architecture than the experiment names
        return tuple(squares for squares, _ in found)

    def _of_weights(
        self, client: ClientId, part: SentPart, parts: Sequence[tuple[SentPart, float]], contract: Contract
    ) -> float | None:
        """What the root mean square of a part is measured by; None where the part is none of a model."""
        new = self._of_new_model(client, part, contract)
        if new is None:
            return None
        if new:
            return math.sqrt(sum(new) / part.size) or UNKNOWN
        if part.form not in self.first:
            field = part.name.partition("/")[0]  # all of it: a single tensor may begin with zeros
            like = [(one.size, value) for one, value in parts if one.name.partition("/")[0] == field]
            mean_square = sum(size * value**2 for size, value in like) / sum(size for size, _ in like)
            self.first[part.form] = min(max(math.sqrt(mean_square), LEAST), UNKNOWN)
        return self.first[part.form]

    def sizes(
        self,
        sent: Mapping[ClientId, Sequence[tuple[SentPart, float]]],
        contract: Contract,
        others: Others = NOBODY,
        unheard: int = 0,
    ) -> dict[ClientId, float]:
        """How large the message of each client is: its part that is the most times its yardstick.

        What is no weight is measured by the median of what was sent now, and by `others` last. So many clients as
        are `unheard` may have sent more than that: a few that send next to nothing make nobody else large.
        """
        by_name: dict[str, list[float]] = {}
        forms: dict[str, set[Form]] = {}
        for parts in sent.values():
            for part, value in parts:
                forms.setdefault(part.name, set()).add(part.form)
                if 0 < value < math.inf:  # zeros are no measure of anything
                    by_name.setdefault(part.name, []).append(value)
        usual = {
            name: _usual([*values, *(last for form in forms[name] for last in others.get(form, ()))], unheard)
            for name, values in by_name.items()
        }
        found: dict[ClientId, float] = {}
        for client, parts in sent.items():
            for part, value in parts:
                yardstick = self._of_weights(client, part, parts, contract) or usual.get(part.name, UNKNOWN)
                found[client] = max(found.get(client, 0.0), value / yardstick)
        return found


def _usual(values: Sequence[float], unheard: int) -> float:
    """The median, the lower one of two, where so many further values are unknown and may be above all others."""
    return sorted(values)[min((len(values) + unheard - 1) // 2, len(values) - 1)]
