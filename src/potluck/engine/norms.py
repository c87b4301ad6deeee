"""Norms of what clients sent, each against those of most clients that sent the like, in the same exchange or last.

A message is refused only where more than half of all stand against it, so that a minority can have nobody refused.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.contract import Contract
from potluck.core.low_rank import FACTORS
from potluck.core.message import Message

Tensors = Mapping[str, Tensor]
LARGEST_RATIO = 100.0  # of `training.max_norm: auto`; honest runs on digits stay below 10
MOST_SHRUNK = 0.5  # of first weights may be next to nothing against those of a new model
MOST_KEPT = 4096  # parts of one client whose norms are remembered, the latest ones
SETTING = "(training.max_norm)"  # what every sentence about a norm that is not taken names
PAIR = 2  # clients: neither is a majority, so what each sent before is the third

MaxNorm = Literal["auto", "none"] | float | None


def largest_ratio(setting: MaxNorm, strangers: bool = False) -> float | None:
    """The bound that `training.max_norm` sets. None: norms are not compared.

    Without a word in the settings they are compared where clients are strangers, and not in a simulation.

    >>> largest_ratio(20.0), largest_ratio(None), largest_ratio("none", strangers=True)
    (20.0, None, None)
    """
    if setting is None:
        setting = "auto" if strangers else "none"
    if isinstance(setting, str):
        return LARGEST_RATIO if setting == "auto" else None
    return setting


Form = tuple[Any, ...]  # what two parts must have in common to be compared


@dataclass(frozen=True)
class SentPart:
    """The tensors of one declared name in a message."""

    name: str
    form: Form
    tensors: tuple[str, ...]
    size: int


def parts_of(message: Message, contract: Contract) -> Iterator[SentPart]:
    """The parts of a message whose norms can be compared: floating point, without a declared range.

    A group is compared with groups of the same names and shapes, which is one architecture; a tensor with those
    whose rows have the same shape, however many rows there are. Where a group may be sent in part, each of its
    tensors is compared by itself, so that nobody gets around it by leaving out some. Where a tensor may come in
    factors, its singular values stand for it: they have its norm, and ranges bound the other factors.
    """
    for name, field in contract.items():
        if field.ranged or not field.dtype.is_floating_point:
            continue
        if field.like is None:
            found = {name: message[name]} if name in message else {}
            form: Form = (name, *(tuple(value.shape[1:]) for value in found.values()))
        else:
            found = {f"{name}/{key}": value for key, value in message.group(name).items()}
            form = (name, *((key, tuple(value.shape)) for key, value in found.items()))
            if field.low_rank:
                yield from _matrices(found)
                continue
            if field.partial:
                for key, value in found.items():
                    if value.numel():
                        yield SentPart(key, (key, tuple(value.shape)), (key,), value.numel())
                continue
        tensors = tuple(key for key, value in found.items() if value.numel())
        if tensors:
            yield SentPart(name, form, tensors, sum(found[key].numel() for key in tensors))


def _matrices(found: Tensors) -> Iterator[SentPart]:
    """Each tensor that came whole or in factors, as a matrix of its first dimension by all others."""
    for key, value in found.items():
        name, _, factor = key.rpartition(":")
        if name and factor == "s":
            rows, columns = len(found[f"{name}:u"]), found[f"{name}:v"].shape[1]
            yield SentPart(name, (name, rows, columns), (key,), rows * columns)
        elif value.numel() and not (name and factor in FACTORS):
            rows = len(value) if value.dim() else 1
            yield SentPart(key, (key, rows, value.numel() // rows), (key,), value.numel())


@dataclass(frozen=True)
class Ratios:
    """How many times a part is what most clients sent, and what half of them sent."""

    most: float
    half: float


Before = Mapping[tuple[ClientId, Form], float]  # what a client last sent
Others = Mapping[Form, Sequence[float]]  # what clients that are not in an exchange sent last
NOBODY: Others = {}


class LastNorms:
    """The norms that were last taken from each client, by a short name for what was sent, to be written down."""

    def __init__(self) -> None:
        self.values: dict[ClientId, dict[str, float]] = {}

    def before(
        self, steps: Sequence[str], sent: Iterable[tuple[ClientId, Form]]
    ) -> dict[tuple[ClientId, Form], float]:
        """What these clients sent before of these parts, where they did."""
        named = {one: _short_name(steps, one[1]) for one in sent}
        return {
            one: self.values[one[0]][name]
            for one, name in named.items()
            if name in self.values.get(one[0], ())
        }

    def of_others(
        self, steps: Sequence[str], sent: Collection[tuple[ClientId, Form]], clients: Collection[ClientId]
    ) -> dict[Form, list[float]]:
        """What the other `clients`, who did not send these parts now, sent last of them."""
        found: dict[Form, list[float]] = {}
        for form in dict.fromkeys(form for _, form in sent):
            name = _short_name(steps, form)
            absent = [client for client in clients if (client, form) not in sent]
            known = [self.values[client][name] for client in absent if name in self.values.get(client, ())]
            found[form] = [value for value in known if value > 0]
        return found

    def note(self, steps: Sequence[str], norms: Mapping[tuple[ClientId, Form], float]) -> None:
        """Remember what was taken."""
        for (client, form), value in norms.items():
            known, name = self.values.setdefault(client, {}), _short_name(steps, form)
            known.pop(name, None)
            if math.isfinite(value):
                known[name] = value
            if len(known) > MOST_KEPT:
                del known[next(iter(known))]


def _short_name(steps: Sequence[str], form: Form) -> str:
    return hashlib.sha256(repr((tuple(steps), form)).encode()).hexdigest()[:16]


def norm_ratios(
    sent: Mapping[ClientId, Sequence[tuple[SentPart, float]]], before: Before, others: Others = NOBODY
) -> dict[tuple[ClientId, Form], Ratios]:
    """The ratios of every part, by client and form.

    Numbers are root mean squares, so that messages with more rows are not longer. `others` who did not send the
    part now count with what they sent last. Where all that leaves two, the third is what each of them had sent
    `before`. What the server sent is none: it may be a liar's work.
    """
    alike: dict[Form, list[float]] = {}
    for parts in sent.values():
        for part, value in parts:
            if value > 0:  # zeros are no measure of anything
                alike.setdefault(part.form, []).append(value)
    found: dict[tuple[ClientId, Form], Ratios] = {}
    for client, parts in sent.items():
        for part, value in parts:
            peers = [*alike.get(part.form, ()), *others.get(part.form, ())]
            own = before.get((client, part.form))
            if len(peers) == PAIR and own is not None:
                peers.append(own)
            if len(peers) >= PAIR:
                most, half = statistics.median_high(peers), statistics.median_low(peers)
                found[client, part.form] = Ratios(_ratio(value, most), _ratio(value, half))
    return found


def _ratio(value: float, middle: float) -> float:
    return value / middle if 0 < middle < math.inf else 0.0


def start_ratio(sent: Tensors, fresh: Tensors) -> float:
    """How many times as large first weights are as those of a fresh model, by their root mean squares.

    Where the fresh model is another one they are compared with 1, which is above that of any usual model.
    """
    alike = {name: value.shape for name, value in sent.items()} == {
        name: value.shape for name, value in fresh.items()
    }
    return _root_mean_square(sent) / ((_root_mean_square(fresh) if alike else 0.0) or 1.0)


def shrunk_share(sent: Tensors, fresh: Tensors, most: float) -> float:
    """The share of first weights in tensors `most` times as small as those of a fresh model, or smaller.

    Tensors that are zero in the fresh model, or that it does not have in this shape, are not counted. A site may
    have reasons for some zeros (biases, a last layer), and for nothing but zeros none.
    """
    alike = [name for name in sent if name in fresh and sent[name].shape == fresh[name].shape]
    sizes = {name: _root_mean_square({name: fresh[name]}) for name in alike}
    counted = {name: sent[name].numel() for name in alike if sizes[name] > 0}
    small = [name for name in counted if _root_mean_square({name: sent[name]}) * most < sizes[name]]
    return sum(counted[name] for name in small) / max(1, sum(counted.values()))


def _root_mean_square(tensors: Tensors) -> float:
    squares = sum(float(value.detach().double().square().sum()) for value in tensors.values())
    return math.sqrt(squares / max(1, sum(value.numel() for value in tensors.values())))
