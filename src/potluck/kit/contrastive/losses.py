"""Contrastive losses between one client's representations of public data and those of its peers.

The anchor is a matrix of B representations of one public batch (B×d) and carries the gradient; peers are M such
matrices of the same samples in the same order, taken as constants. Rows are brought to length 1 unless
`normalize=False`. For anchor i the positive is the tuple in which every peer looks at sample i.

- `info_nce`: one peer, −log softmax over its rows.
- `pairwise`: the sum of it over the peers.
- `muscle`: a softmax over all B^M tuples, weighted by how much the peers agree among themselves.
- `gramian`: a softmax over the volumes anchor and peers span.

All take the same masks, for samples that a client has not got in its modality: `weight`, a number per anchor (0:
this client lacks the sample), and `present`, per peer None (it has all) or one truth value per row. A row that
is not present is never a positive and never a negative. An anchor is compared with the peers that have its
sample, as if the others were not there; where none has it, it does not count.

Everything is computed in float32 at least, also under autocast, in shapes that depend on no value, and nothing
is read back, so that a step with these losses can be captured. In the precision `tf32` a GPU still rounds the
factors of the inner products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from potluck.errors import ConfigError

Temperature = float | Tensor
Masks = Sequence[Tensor | None]
Reduction = Literal["mean", "none"]
Negatives = Literal["tuples", "anchor"]

TAU, TAU_PREV = 0.2, 0.15  # FedMuscle's τ^(N) and τ^(N−1), for all pairs
MEMORY = 256 * 2**20  # bytes for the tuples of one piece, with what its gradient needs
_COPIES = 5  # numbers alive per tuple in the backward pass of a piece, measured (benchmarks/muscle.py)
_SMALLEST = 1e-6  # squared length, below which vectors count as linearly dependent


class Temperatures(nn.Module):
    """Learned temperatures for `muscle(anchor, peers, *temperatures())`: the same for all pairs, or one per pair.

    log τ and log γ are the parameters, and τ^(N−1) = 1 / (1/τ^(N) + γ): γ stays positive whatever a step does. The
    paper has fixed temperatures; learning them is ours.
    """

    def __init__(
        self,
        peers: int | None = None,
        tau: float = TAU,
        tau_prev: float = TAU_PREV,
        *,
        per_pair: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < tau_prev < tau:
            raise ConfigError(f"learned temperatures need 0 < tau_prev < tau, not {tau_prev} and {tau}")
        if per_pair and not peers:
            raise ConfigError("temperatures per pair need the number of peers")
        sides = (peers, peers + 1) if per_pair and peers else ()
        self.log_tau = nn.Parameter(torch.full(sides[1:] * 2, math.log(tau)))
        self.log_gamma = nn.Parameter(torch.full(sides[:1] * 2, math.log(1 / tau_prev - 1 / tau)))

    def forward(self) -> tuple[Tensor, Tensor]:
        """τ^(N), scalar or (M+1)×(M+1) with the anchor first, and τ^(N−1), scalar or M×M among the peers."""
        tau, gamma = _symmetric(self.log_tau).exp(), _symmetric(self.log_gamma).exp()
        among_peers = tau[1:, 1:] if tau.ndim else tau
        return tau, 1 / (1 / among_peers + gamma)


def info_nce(
    anchor: Tensor,
    peer: Tensor,
    tau: Temperature = TAU,
    *,
    weight: Tensor | None = None,
    present: Tensor | None = None,
    normalize: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    """InfoNCE: −log( exp(z_i·p_i / τ) / Σ_j exp(z_i·p_j / τ) ), the mean over anchors i."""
    return pairwise(
        anchor, [peer], tau, weight=weight, present=[present], normalize=normalize, reduction=reduction
    )


def pairwise(
    anchor: Tensor,
    peers: Sequence[Tensor],
    tau: Temperature = TAU,
    *,
    weight: Tensor | None = None,
    present: Masks | None = None,
    normalize: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    """The sum of InfoNCE over the peers, which is `muscle` at γ = 0. `tau`: scalar, or (M+1)×(M+1)."""
    with _full_precision(anchor):
        batch = _prepare(anchor, peers, weight, present, normalize)
        losses = [_one_peer(scores) for scores in batch.scores(tau)]
        return batch.reduce(torch.stack(losses).sum(0), reduction)


def muscle(
    anchor: Tensor,
    peers: Sequence[Tensor],
    tau: Temperature = TAU,
    tau_prev: Temperature = TAU_PREV,
    *,
    weight: Tensor | None = None,
    present: Masks | None = None,
    normalize: bool = True,
    memory: int = MEMORY,
    reduction: Reduction = "mean",
) -> Tensor:
    """The Muscle loss (FedMuscle, ICLR 2026), for anchor i and tuples j = (j_1 … j_M):

        L_i = −log[ α_(i…i) exp(Σ_m z_i·z^m_i / τ_m) / Σ_j α_j exp(Σ_m z_i·z^m_{j_m} / τ_m) ]
        α_j = exp(−Σ_{m<k} γ_mk z^m_{j_m}·z^k_{j_k}),    γ = 1/τ^(N−1) − 1/τ^(N)

    and the mean over anchors. That the sum holds the positive tuple, that rows are normalised and that the batch
    counts by its mean are inferred, not published.

    `tau` is τ^(N), a scalar or an (M+1)×(M+1) matrix whose first row and column are the anchor's, symmetric;
    `tau_prev` is τ^(N−1), a scalar or the M×M matrix among the peers. Tensors may be learned: see
    `Temperatures`. With B×B matrices of inner products a tuple costs a few additions, whatever d is. Where the
    B^(M+1) exponents and their gradient take more than `memory` bytes they are computed in pieces, and once more
    for the gradient.
    """
    with _full_precision(anchor):
        batch = _prepare(anchor, peers, weight, present, normalize)
        scores, ties = batch.scores(tau), batch.ties(_gamma(tau, tau_prev))
        positive = _positive(scores, ties)
        room = max(memory // (_COPIES * positive.element_size()), 1)
        return batch.reduce(_log_partition(scores, ties, room) - positive, reduction)


def gramian(
    anchor: Tensor,
    peers: Sequence[Tensor],
    tau: float = TAU,
    *,
    negatives: Negatives = "tuples",
    weight: Tensor | None = None,
    present: Masks | None = None,
    memory: int = MEMORY,
    reduction: Reduction = "mean",
) -> Tensor:
    """Minus log softmax of −V/τ, V the volume anchor and peers span: sqrt(det Gram) of M+1 vectors of length 1.

    `negatives="tuples"`: all B^M tuples of the peers, as in Muscle. `negatives="anchor"`: tuples of one sample
    only, with anchors of other samples; as in GRAM (Cicchetti et al., ICLR 2025; recalled) the mean of two
    softmaxes, over the samples for each anchor and over the anchors for each sample. Which of them FedMuscle
    compares with is not known, nor its temperature.
    """
    if negatives not in ("tuples", "anchor"):
        raise ConfigError(f"negatives is {negatives!r}, expected 'tuples' or 'anchor'")
    with _full_precision(anchor):
        _expect_positive("tau", tau)
        batch = _prepare(anchor, peers, weight, present, normalize=True)
        if negatives == "anchor":
            return batch.reduce(_gram_by_sample(batch, tau), reduction)
        room = max(memory // (_COPIES * (len(peers) + 1) * batch.anchor.element_size()), 1)
        return batch.reduce(_gram_by_tuple(batch, tau, room), reduction)


def theorem1_value(
    loss: Tensor,
    anchor: Tensor,
    peers: Sequence[Tensor],
    *,
    weight: Tensor | None = None,
    present: Masks | None = None,
) -> Tensor:
    """M·log B − L, which FedMuscle's Theorem 1 takes for a lower bound of the information anchor and peers share.

    It is no bound: the theorem needs α to be a true ratio of densities, and with fixed temperatures it is not. A
    constant anchor, which knows nothing, scores 1.43 with two opposite peers at B = 16; identical models on 16
    orthogonal items share log 16 = 2.77 and score 4.79 at M = 2. Log it as what it is, and `information_bounds`
    beside it. `loss` is the mean that `muscle` gave for the same batch and masks. With masks log B is that of the
    rows present.
    """
    with torch.no_grad(), _full_precision(anchor):
        batch = _prepare(anchor, peers, weight, present, normalize=False)
        logs = torch.stack([has * has.sum().clamp_min(1).log() for has in batch.floats()])
        return batch.reduce(logs.sum(0), "mean") - loss.detach()


def information_bounds(
    anchor: Tensor,
    peers: Sequence[Tensor],
    tau: Temperature = TAU,
    *,
    weight: Tensor | None = None,
    present: Masks | None = None,
    normalize: bool = True,
) -> Tensor:
    """log B − InfoNCE for every peer, (M,): in expectation no more than the information anchor and that peer share.

    The largest is a bound for what the anchor shares with all peers together. Average over batches first and
    take the largest then; the largest of every single batch is too large on average.
    """
    with torch.no_grad(), _full_precision(anchor):
        batch = _prepare(anchor, peers, weight, present, normalize)
        bounds = [
            _mean(has.sum().clamp_min(1).log() - _one_peer(scores), batch.weight * has)
            for scores, has in zip(batch.scores(tau), batch.floats(), strict=True)
        ]
        return torch.stack(bounds)


@dataclass(frozen=True)
class _Batch:
    """Anchor and peers, checked; rows that are not present are zero."""

    anchor: Tensor
    peers: tuple[Tensor, ...]
    weight: Tensor  # of the anchors
    present: tuple[Tensor, ...] | None  # truth values, None where nothing is missing

    def floats(self) -> list[Tensor]:
        """Which rows each peer has, as zeros and ones."""
        if self.present is None:
            return [torch.ones_like(self.weight)] * len(self.peers)
        return [has.to(self.weight.dtype) for has in self.present]

    def products(self) -> list[Tensor]:
        """z_i·z^m_j per peer m, B×B."""
        return [self.anchor @ peer.T for peer in self.peers]

    def among(self) -> list[list[Tensor]]:
        """z^m_j·z^k_l for every pair of peers m < k, B×B: among()[m][k − m − 1]."""
        count = len(self.peers)
        return [[self.peers[m] @ self.peers[k].T for k in range(m + 1, count)] for m in range(count)]

    def candidates(self) -> list[Tensor]:
        """Per peer, B×B: whether its row j is a candidate for anchor i; nothing where all are.

        An anchor whose sample a peer lacks has one candidate there, the row of that sample. It is zero, hence
        its inner products are too, and the peer drops out of positive and sum alike.
        """
        if self.present is None:
            return []
        own = torch.eye(len(self.weight), dtype=torch.bool, device=self.anchor.device)
        return [has[:, None] & has | own for has in self.present]

    def scores(self, tau: Temperature) -> list[Tensor]:
        """z_i·z^m_j / τ_m per peer, B×B; −∞ where row j is no candidate for anchor i."""
        inverse = 1 / self._temperature(tau)
        scores = [x * inverse[m] for m, x in enumerate(self.products())]
        allowed = self.candidates()
        return [x.masked_fill(~allowed[m], -math.inf) for m, x in enumerate(scores)] if allowed else scores

    def ties(self, gamma: Temperature) -> list[list[Tensor]]:
        """−γ_mk·z^m_j·z^k_l for every pair of peers m < k, B×B."""
        count = len(self.peers)
        table = _on_device(gamma, self.anchor)
        _expect_shape("tau_prev", table, (count, count))
        table = -table.expand(count, count)
        return [[x * table[m, k] for k, x in enumerate(row, m + 1)] for m, row in enumerate(self.among())]

    def _temperature(self, tau: Temperature) -> Tensor:
        """τ of the anchor with each peer, (M,)."""
        _expect_positive("tau", tau)
        count = len(self.peers)
        table = _on_device(tau, self.anchor)
        _expect_shape("tau", table, (count + 1, count + 1))
        return table[0, 1:] if table.ndim else table.expand(count)

    def reduce(self, losses: Tensor, reduction: Reduction) -> Tensor:
        """The mean over the anchors that some peer can answer, or every anchor's loss, zero for the others."""
        if reduction not in ("mean", "none"):
            raise ConfigError(f"reduction is {reduction!r}, expected 'mean' or 'none'")
        answered = self.weight
        if self.present is not None:
            answered = answered * torch.stack(self.present).any(0)
        return _mean(losses, answered) if reduction == "mean" else losses * (answered > 0)


def _prepare(
    anchor: Tensor, peers: Sequence[Tensor], weight: Tensor | None, present: Masks | None, normalize: bool
) -> _Batch:
    _check(anchor, peers, weight, present)
    dtype = torch.promote_types(anchor.dtype, torch.float32)
    rows = len(anchor)
    weights = anchor.new_ones(rows, dtype=dtype) if weight is None else weight.detach().to(dtype)
    masks = None
    if present is not None and any(mask is not None for mask in present):
        everything = torch.ones(rows, dtype=torch.bool, device=anchor.device)
        masks = tuple(everything if mask is None else mask.detach() > 0 for mask in present)

    def rows_of(matrix: Tensor, has: Tensor | None) -> Tensor:
        matrix = matrix.to(dtype)
        if has is not None:
            matrix = matrix.masked_fill(~has[:, None], 0)
        return F.normalize(matrix, dim=1) if normalize else matrix

    return _Batch(
        rows_of(anchor, None if weight is None else weights > 0),
        tuple(rows_of(peer.detach(), masks[m] if masks else None) for m, peer in enumerate(peers)),
        weights,
        masks,
    )


def _check(anchor: Tensor, peers: Sequence[Tensor], weight: Tensor | None, present: Masks | None) -> None:
    """One sentence for shapes that cannot be compared."""
    if anchor.ndim != 2:
        raise ConfigError(f"the anchor has shape {tuple(anchor.shape)}, expected samples × width")
    rows, width = anchor.shape
    if rows < 2:
        raise ConfigError(f"a batch of {rows} has no negatives; contrast at least 2 public samples")
    if not peers:
        raise ConfigError("the list of peers is empty; a contrastive loss needs at least one")
    for place, peer in enumerate(peers):
        if peer.ndim != 2 or peer.shape[1] != width:
            raise ConfigError(
                f"peer {place} has shape {tuple(peer.shape)} and the anchor {tuple(anchor.shape)}: "
                "bring all representations to one width"
            )
        if len(peer) != rows:
            raise ConfigError(
                f"peer {place} represents {len(peer)} samples and the anchor {rows}, not the same"
            )
    if present is not None and len(present) != len(peers):
        raise ConfigError(f"there are {len(present)} masks for {len(peers)} peers")
    for name, mask in [("weight", weight), *(("a mask of present", mask) for mask in present or ())]:
        if mask is not None and tuple(mask.shape) != (rows,):
            raise ConfigError(f"{name} has shape {tuple(mask.shape)}, expected {(rows,)}")


def _on_device(value: Temperature, like: Tensor) -> Tensor:
    """The value beside a tensor; a plain number is filled in there, for a copy could not be captured."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)


def _expect_shape(name: str, value: Tensor, shape: tuple[int, int]) -> None:
    if value.ndim and tuple(value.shape) != shape:
        raise ConfigError(f"{name} has shape {tuple(value.shape)}, expected a scalar or {shape}")


def _expect_positive(name: str, value: Temperature) -> None:
    if not isinstance(value, Tensor) and not value > 0:
        raise ConfigError(f"{name} is {value}, expected a positive temperature")


def _gamma(tau: Temperature, tau_prev: Temperature) -> Temperature:
    """γ = 1/τ^(N−1) − 1/τ^(N), among the peers. Only plain numbers can be checked without reading back."""
    _expect_positive("tau_prev", tau_prev)
    if isinstance(tau, Tensor):
        tau = tau[1:, 1:] if tau.ndim else tau
    elif not isinstance(tau_prev, Tensor) and tau_prev > tau:
        raise ConfigError(
            f"tau_prev is {tau_prev} and tau {tau}: γ = 1/tau_prev − 1/tau must not be negative"
        )
    return 1 / tau_prev - 1 / tau


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2 if matrix.ndim else matrix


def _full_precision(like: Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, enabled=False)


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    """The weighted mean; zero, with a gradient of zero, where nothing has any weight."""
    return (values * weight).sum() / weight.sum().clamp_min(1e-12)


def _one_peer(scores: Tensor) -> Tensor:
    """InfoNCE of every anchor."""
    return scores.logsumexp(1) - scores.diagonal()


def _positive(scores: Sequence[Tensor], ties: Sequence[Sequence[Tensor]]) -> Tensor:
    """The exponent of the tuple (i, …, i) for every anchor i."""
    return torch.stack(_diagonals([*scores, *(tie for row in ties for tie in row)])).sum(0)


def _log_partition(scores: Sequence[Tensor], ties: Sequence[Sequence[Tensor]], room: int) -> Tensor:
    """log Σ_j exp(Σ_m scores[m][i, j_m] + ties between the j) for every anchor, `room` tuples at a time.

    Where a single anchor has too many tuples the first peer is held at one row after the other: what is left is
    the same sum over the other peers, whose scores have taken up their ties to that row.
    """
    samples = scores[0].shape[1]
    if samples ** len(scores) <= room or len(scores) == 1:
        return _in_pieces(lambda *piece: _sum_tuples(piece, ties), scores, room // samples ** len(scores))
    first, *others = scores
    held = [
        first[:, row]
        + _log_partition([x + tie[row] for x, tie in zip(others, ties[0], strict=True)], ties[1:], room)
        for row in range(samples)
    ]
    return torch.stack(held).logsumexp(0)


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
    tied: Tensor | float = 0.0  # what all anchors share
    for m, row in enumerate(ties):
        for k, tie in enumerate(row, m + 1):
            tied = tied + _spread(tie[None], count, m, k)
    own = _spread(scores[0], count, 0)
    for m in range(1, count):
        own = own + _spread(scores[m], count, m)
    return (own + tied).flatten(1).logsumexp(1)


def _spread(values: Tensor, count: int, *peers: int) -> Tensor:
    """(anchors, rows of these peers) as a tensor with an axis for the anchors and one per peer."""
    shape = [1] * count
    for axis, peer in enumerate(peers, 1):
        shape[peer] = values.shape[axis]
    return values.reshape(len(values), *shape)


@dataclass(frozen=True)
class _Span:
    """Anchors and peers as far as they stand at right angles to the peers that are held at one row.

    `held` is the squared volume of those; `lengths` and `anchors` are squared too.
    """

    cosines: list[Tensor]  # with the anchors, per peer (anchors, B)
    barriers: list[Tensor]  # per peer (anchors, B), or none at all
    anchors: Tensor  # (anchors,)
    lengths: list[Tensor]  # per peer (B,)
    among: list[list[Tensor]]  # per pair of peers (B, B)
    held: Tensor  # a scalar

    def own(self) -> list[Tensor]:
        """What each anchor has for itself."""
        return [self.anchors, *self.cosines, *self.barriers]

    def of(self, anchors: Tensor, *rows: Tensor) -> _Span:
        """The same peers with what other anchors have."""
        count = len(self.cosines)
        return replace(self, anchors=anchors, cosines=[*rows[:count]], barriers=[*rows[count:]])

    def leaves(self) -> tuple[list[Tensor], _Span]:
        """Anchors and cosines to differentiate by, and the same span made of them."""
        found = [x.detach().requires_grad_() for x in (self.anchors, *self.cosines)]
        return found, self.of(*found, *self.barriers)

    def hold(self, row: int) -> _Span:
        """The first peer held at a row: one step of the elimination in `_volume`."""
        length, towards = self.lengths[0][row].clamp_min(_SMALLEST), self.cosines[0][:, row]
        ties = [tie[row] for tie in self.among[0]]
        return _Span(
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
        lengths = [_spread(x[None], count, m) for m, x in enumerate(self.lengths)]
        volumes = _volume(
            [_spread(x, count, m) for m, x in enumerate(self.cosines)],
            [
                [_spread(x[None], count, m, k) for k, x in enumerate(pairs, m + 1)]
                for m, pairs in enumerate(self.among)
            ],
            [*lengths, _spread(self.anchors, count)],
        )
        exponents = volumes * self.held.sqrt() / -tau
        for m, barrier in enumerate(self.barriers):
            exponents = exponents + _spread(barrier, count, m)
        return exponents.flatten(1).logsumexp(1)


def _gram_by_tuple(batch: _Batch, tau: float, room: int) -> Tensor:
    """Gramian of every anchor, all tuples of the peers its candidates, `room` tuples at a time."""
    products, among, ones = batch.products(), batch.among(), torch.ones_like(batch.weight)
    barriers = [own.log() for own in batch.candidates()]
    span = _Span(products, barriers, ones, [ones] * len(products), among, ones.new_ones(()))
    positive = _volume(_diagonals(products), [_diagonals(row) for row in among]) / -tau
    return _log_volumes(span, tau, room) - positive


def _log_volumes(span: _Span, tau: float, room: int) -> Tensor:
    """log Σ exp(−V/τ) for every anchor: at once, or in pieces of which nothing is kept."""
    if span.cosines[0].shape[1] ** len(span.cosines) * len(span.anchors) <= room:
        return span.log_sum(tau)
    value: Tensor = _InPieces.apply(span, tau, room, *span.own())  # type: ignore[no-untyped-call]
    return value


class _InPieces(torch.autograd.Function):
    """A value per anchor that depends on what this anchor has alone, and its gradient computed along with it."""

    @staticmethod
    def forward(ctx: Any, span: _Span, tau: float, room: int, *own: Tensor) -> Tensor:
        value, gradients = _differentiated(span.of(*own), tau, room)
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        missing = len(ctx.needs_input_grad) - 3 - len(ctx.saved_tensors)  # barriers are constants
        return None, None, None, *(_times(x, above) for x in ctx.saved_tensors), *[None] * missing


def _differentiated(span: _Span, tau: float, room: int) -> tuple[Tensor, list[Tensor]]:
    """log Σ exp(−V/τ) and its gradient by anchors and cosines, `room` tuples at a time.

    Where a single anchor has too many tuples the first peer is held at one row after the other.
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
        kept, new = ((x - total).exp().nan_to_num(0.0) for x in (before, value))  # −∞ − −∞: nothing yet
        sums = [_times(one, kept) + _times(other, new) for one, other in zip(sums, own, strict=True)]
    return total, sums


def _piece(span: _Span, tau: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves, some = span.leaves()
    with torch.enable_grad():
        value = some.log_sum(tau)
    return value.detach(), torch.autograd.grad(value, leaves, torch.ones_like(value))


def _times(values: Tensor, factor: Tensor) -> Tensor:
    """Every anchor's values times its factor."""
    return values * factor.reshape(-1, *[1] * (values.ndim - 1))


def _gram_by_sample(batch: _Batch, tau: float) -> Tensor:
    """Gramian of every anchor: its tuple among those of other samples, and itself among the anchors of others."""
    products, has = batch.products(), batch.floats()
    among = [_diagonals(row) for row in batch.among()]
    # Of every tuple an anchor sees the peers that have its own sample; where one is missing it is no candidate.
    seen = [x * own[:, None] for x, own in zip(products, has, strict=True)]
    seen_among = [
        [x * (has[m] * has[k])[:, None] for k, x in enumerate(row, m + 1)] for m, row in enumerate(among)
    ]
    whole = torch.stack([own[:, None] <= own for own in has]).all(0)
    over_samples = (_volume(seen, seen_among) / -tau).masked_fill(~whole, -math.inf)
    volumes = _volume([x.T for x in products], [[x[:, None] for x in row] for row in among])
    # A missing anchor keeps its own column, for a finite loss that has no weight.
    real = (batch.weight > 0) | torch.eye(len(volumes), dtype=torch.bool, device=volumes.device)
    over_anchors = (volumes / -tau).masked_fill(~real, -math.inf)
    return (_one_peer(over_samples) + _one_peer(over_anchors)) / 2


def _diagonals(matrices: Sequence[Tensor]) -> list[Tensor]:
    return [matrix.diagonal() for matrix in matrices]


def _volume(
    cosines: Sequence[Tensor], among: Sequence[Sequence[Tensor]], lengths: Sequence[Tensor] | None = None
) -> Tensor:
    """The volume of vectors, from the inner products of the peers with the anchor and among themselves.

    `lengths` are their squared lengths, the anchor's last; 1 by default.

    Symmetric elimination with the anchor last: `added[m]` is the square of what vector m adds to the span of
    those before it. Entries are broadcast, so that most of the work is done before the large ones meet. A row
    that is zero has no cosines and counts as a unit vector at right angles to all: the volume is that of the
    others.
    """
    last = len(cosines)
    gram = {(m, k): x for m, row in enumerate(among) for k, x in enumerate([*row, cosines[m]], m + 1)}
    added = [*(lengths or [cosines[0].new_ones([1] * cosines[0].ndim)] * (last + 1))]
    for p in range(last + 1):
        added[p] = added[p].clamp_min(_SMALLEST)
        for a in range(p + 1, last + 1):
            ratio = gram[p, a] / added[p]
            added[a] = added[a] - ratio * gram[p, a]
            for b in range(a + 1, last + 1):
                gram[a, b] = gram[a, b] - ratio * gram[p, b]
    squared = added[0]
    for x in added[1:]:
        squared = squared * x
    return squared.sqrt()
