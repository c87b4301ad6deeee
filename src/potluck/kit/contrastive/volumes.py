"""The Gramian loss's volumes, and their sum over all B^M tuples of peers' rows, in pieces that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from potluck.kit.contrastive.tuples import spread

SMALLEST = 1e-6  # squared length below which vectors count as linearly dependent


def volume(
    cosines: Sequence[Tensor], among: Sequence[Sequence[Tensor]], lengths: Sequence[Tensor] | None = None
) -> Tensor:
    """The volume of vectors, from the inner products of the peers with the anchor and among themselves.

    `lengths` are their squared lengths, the anchor's last; 1 by default.

    Symmetric elimination with the anchor last: `added[m]` is the square of what vector m adds to the span of
    those before it. Entries are broadcast, so most of the work is done on small tensors. A zero row has no cosines
    and counts as a unit vector at right angles to all: the volume is that of the others.
    """
    last = len(cosines)
    gram = {(m, k): x for m, row in enumerate(among) for k, x in enumerate([*row, cosines[m]], m + 1)}
    added = [*(lengths or [cosines[0].new_ones([1] * cosines[0].ndim)] * (last + 1))]
    for p in range(last + 1):
        added[p] = added[p].clamp_min(SMALLEST)
        for a in range(p + 1, last + 1):
            ratio = gram[p, a] / added[p]
            added[a] = added[a] - ratio * gram[p, a]
            for b in range(a + 1, last + 1):
                gram[a, b] = gram[a, b] - ratio * gram[p, b]
    squared = added[0]
    for x in added[1:]:
        squared = squared * x
    return squared.sqrt()


@dataclass(frozen=True)
class Span:
    """What anchors and peers add to the volume of the peers that are held at one row.

    All numbers describe the components at right angles to the held rows; without held rows, the vectors themselves.
    """

    cosines: list[Tensor]  # inner products with the anchors, per peer (anchors, B)
    barriers: list[Tensor]  # 0, or −∞ where a row is no candidate, per peer (anchors, B); empty if all are 0
    anchors: Tensor  # squared lengths, (anchors,)
    lengths: list[Tensor]  # squared lengths, per peer (B,)
    among: list[list[Tensor]]  # inner products, per pair of peers (B, B)
    held: Tensor  # squared volume of the held rows, a scalar

    def own(self) -> list[Tensor]:
        """The tensors with a row per anchor."""
        return [self.anchors, *self.cosines, *self.barriers]

    def of(self, anchors: Tensor, *rows: Tensor) -> Span:
        """The same peers with other anchors."""
        count = len(self.cosines)
        return replace(self, anchors=anchors, cosines=[*rows[:count]], barriers=[*rows[count:]])

    def leaves(self) -> tuple[list[Tensor], Span]:
        """Detached anchors and cosines to differentiate by, and the same span made of them."""
        found = [x.detach().requires_grad_() for x in (self.anchors, *self.cosines)]
        return found, self.of(*found, *self.barriers)

    def hold(self, row: int) -> Span:
        """The first peer held at a row: one step of the elimination in `volume`."""
        length, towards = self.lengths[0][row].clamp_min(SMALLEST), self.cosines[0][:, row]
        ties = [tie[row] for tie in self.among[0]]
        return Span(
            [x - towards[:, None] * tie / length for x, tie in zip(self.cosines[1:], ties, strict=True)],
            self.barriers[1:],
            self.anchors - towards.square() / length,
            [x - tie.square() / length for x, tie in zip(self.lengths[1:], ties, strict=True)],
            [
                [x - ties[m][:, None] * ties[k] / length for k, x in enumerate(pairs, m + 1)]
                for m, pairs in enumerate(self.among[1:])
            ],
            self.held * length,
        )

    def log_sum(self, tau: float) -> Tensor:
        """log Σ exp(−V/τ) over all tuples at once, for every anchor."""
        count = len(self.cosines)
        lengths = [spread(x[None], count, m) for m, x in enumerate(self.lengths)]
        volumes = volume(
            [spread(x, count, m) for m, x in enumerate(self.cosines)],
            [
                [spread(x[None], count, m, k) for k, x in enumerate(pairs, m + 1)]
                for m, pairs in enumerate(self.among)
            ],
            [*lengths, spread(self.anchors, count)],
        )
        exponents = volumes * self.held.sqrt() / -tau
        for m, barrier in enumerate(self.barriers):
            exponents = exponents + spread(barrier, count, m)
        return exponents.flatten(1).logsumexp(1)


def log_sum_of_volumes(span: Span, tau: float, room: int) -> Tensor:
    """log Σ exp(−V/τ) for every anchor, at once or in pieces that leave nothing in memory."""
    if span.cosines[0].shape[1] ** len(span.cosines) * len(span.anchors) <= room:
        return span.log_sum(tau)
    value: Tensor = _InPieces.apply(span, tau, room, *span.own())  # type: ignore[no-untyped-call]
    return value


class _InPieces(torch.autograd.Function):
    """log Σ exp(−V/τ) in pieces. Its gradient is computed on the way, so no piece has to be kept or redone."""

    @staticmethod
    def forward(ctx: Any, span: Span, tau: float, room: int, *own: Tensor) -> Tensor:
        value, gradients = _differentiated(span.of(*own), tau, room)
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        missing = len(ctx.needs_input_grad) - 3 - len(ctx.saved_tensors)  # barriers are constants
        return None, None, None, *(_times(x, above) for x in ctx.saved_tensors), *[None] * missing


def _differentiated(span: Span, tau: float, room: int) -> tuple[Tensor, list[Tensor]]:
    """log Σ exp(−V/τ) and its gradient by anchors and cosines, `room` tuples at a time.

    Where a single anchor has too many tuples the first peer is held at one row after the other, and the sums and
    gradients of the rows are merged as they come.
    """
    samples, count = span.cosines[0].shape[1], len(span.cosines)
    if samples**count <= room or count == 1:
        parts = zip(*(torch.split(x, max(room // samples**count, 1)) for x in span.own()), strict=True)
        values, gradients = zip(*(_piece(span.of(*part), tau) for part in parts), strict=True)
        return torch.cat(values), [torch.cat(one) for one in zip(*gradients, strict=True)]
    total = torch.full_like(span.anchors, -math.inf)
    sums = [torch.zeros_like(x) for x in (span.anchors, *span.cosines)]
    for row in range(samples):
        leaves, some = span.leaves()
        with torch.enable_grad():
            held = some.hold(row)
        value, above = _differentiated(held, tau, room)
        own = torch.autograd.grad([held.anchors, *held.cosines], leaves, above)
        value = value + span.barriers[0][:, row] if span.barriers else value
        before, total = total, torch.logaddexp(total, value)
        kept, new = ((x - total).exp().nan_to_num(0.0) for x in (before, value))  # −∞ − −∞: no candidate yet
        sums = [_times(one, kept) + _times(other, new) for one, other in zip(sums, own, strict=True)]
    return total, sums


def _piece(span: Span, tau: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The sum over all tuples of a few anchors, and its gradient."""
    leaves, some = span.leaves()
    with torch.enable_grad():
        value = some.log_sum(tau)
    return value.detach(), torch.autograd.grad(value, leaves, torch.ones_like(value))


def _times(values: Tensor, factor: Tensor) -> Tensor:
    """Multiply every anchor's values by its factor."""
    return values * factor.reshape(-1, *[1] * (values.ndim - 1))
