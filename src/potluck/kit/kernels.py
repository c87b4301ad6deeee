"""Kernels, which hold how alike a model finds each pair of samples: alignment and mean, with samples missing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

TINY = 1e-12


def cka(one: Tensor, other: Tensor, there: Tensor | None = None) -> Tensor:
    """Linear centred kernel alignment of two kernels over the samples that are there.

    >>> import torch
    >>> cka(torch.eye(2), torch.tensor([[4.0, 2.0], [2.0, 4.0]]))
    tensor(1.)
    """
    weight = one.new_ones(len(one)) if there is None else there
    a, b = centred(one, weight), centred(other, weight)
    sizes = (a * a).sum().clamp_min(TINY).sqrt() * (b * b).sum().clamp_min(TINY).sqrt()
    return (a * b).sum() / sizes


def centred(kernel: Tensor, there: Tensor) -> Tensor:
    """HKH over the samples that are there; zero elsewhere."""
    pairs = there[:, None] * there
    inside, count = kernel * pairs, there.sum().clamp_min(1)
    rows, columns = inside.sum(1, keepdim=True), inside.sum(0, keepdim=True)
    return (inside - rows / count - columns / count + inside.sum() / count.square()) * pairs


def mean_kernel(kernels: Iterable[Tensor]) -> Tensor:
    """Average every entry over the kernels that have both samples: those that are not zero on the diagonal."""
    total: Tensor | None = None
    count: Tensor | None = None
    for kernel in kernels:
        there = (kernel.diagonal() > 0).to(kernel.dtype)
        pairs = there[:, None] * there
        total = kernel * pairs if total is None else total + kernel * pairs
        count = pairs if count is None else count + pairs
    assert total is not None
    assert count is not None
    return total / count.clamp_min(1)
