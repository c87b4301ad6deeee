"""The Muscle loss's sum over all B^M tuples of peers' rows, in pieces that fit into memory.

`scores[m]` (anchors × B) is what an anchor gains from row j of peer m, and `ties[m]` holds, for every later peer k,
what rows of m and k gain from each other (B×B). The exponent of a tuple is the sum of both over its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NEVER = -1e30  # the exponent of what does not count; −∞ has no gradient where a whole row does not
COPIES = 5  # numbers alive per tuple in the backward pass of a piece, measured (benchmarks/muscle.py)


def tuples_within(memory: int, numbers: int, like: Tensor) -> int:
    """How many tuples fit into so many bytes, where each takes `numbers` numbers in each of its copies."""
    return max(memory // (COPIES * numbers * like.element_size()), 1)


def positive_exponent(scores: Sequence[Tensor], ties: Sequence[Sequence[Tensor]]) -> Tensor:
    """The exponent of the tuple (i, …, i) for every anchor i."""
    return torch.stack(diagonals([*scores, *(tie for row in ties for tie in row)])).sum(0)


def log_partition(scores: Sequence[Tensor], ties: Sequence[Sequence[Tensor]], room: int) -> Tensor:
    """log Σ_j exp(Σ_m scores[m][i, j_m] + ties between the j) for every anchor, `room` tuples at a time.

    Where a single anchor has too many tuples the first peer is held at one row after the other. What is left is
    the same sum over the other peers, whose scores have taken up their ties to that row.
    """
    samples = scores[0].shape[1]
    if samples ** len(scores) <= room or len(scores) == 1:
        return _in_pieces(lambda *piece: _sum_tuples(piece, ties), scores, room // samples ** len(scores))
    first, *others = scores
    held = [
        first[:, row]
        + log_partition([x + tie[row] for x, tie in zip(others, ties[0], strict=True)], ties[1:], room)
        for row in range(samples)
    ]
    return torch.stack(held).logsumexp(0)


def log_negatives(scores: Sequence[Tensor], ties: Sequence[Sequence[Tensor]], room: int) -> Tensor:
    """`log_partition` without the tuple (i, …, i) of every anchor i.

    Its terms are sorted by the first peer that looks at another sample: the peers before it are at i, where the
    others' scores take up their ties to that row, and those after it are free. So nothing is subtracted.
    """
    found, held = [], torch.zeros_like(scores[0][:, 0])
    while scores:
        first, *others = scores
        own = torch.eye(len(first), dtype=torch.bool, device=first.device)
        found.append(held + log_partition([first.masked_fill(own, NEVER), *others], ties, room))
        held = held + first.diagonal()
        scores, ties = [x + tie for x, tie in zip(others, ties[0], strict=True)], ties[1:]
    return torch.stack(found).logsumexp(0)


def _in_pieces(function: Callable[..., Tensor], scores: Sequence[Tensor], anchors: int) -> Tensor:
    """The function of a few anchors at a time; a piece keeps only its inputs and is redone for the gradient."""
    pieces = list(zip(*(torch.split(x, max(anchors, 1)) for x in scores), strict=True))
    if len(pieces) == 1:
        return function(*pieces[0])
    done = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat(done)


def _sum_tuples(scores: Sequence[Tensor], ties: Sequence[Sequence[Tensor]]) -> Tensor:
    """log Σ_j exp(…) with all tuples of some anchors at once, (anchors, B, …, B)."""
    count = len(scores)
    tied: Tensor | float = 0.0  # the same for all anchors
    for m, row in enumerate(ties):
        for k, tie in enumerate(row, m + 1):
            tied = tied + spread(tie[None], count, m, k)
    own = spread(scores[0], count, 0)
    for m in range(1, count):
        own = own + spread(scores[m], count, m)
    return (own + tied).flatten(1).logsumexp(1)


def spread(values: Tensor, count: int, *peers: int) -> Tensor:
    """Reshape (anchors, rows of these peers) for broadcasting: an axis for the anchors and one for every peer."""
    shape = [1] * count
    for axis, peer in enumerate(peers, 1):
        shape[peer] = values.shape[axis]
    return values.reshape(len(values), *shape)


def diagonals(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The diagonal of each matrix: where anchor and peers look at the same sample."""
    return [matrix.diagonal() for matrix in matrices]
