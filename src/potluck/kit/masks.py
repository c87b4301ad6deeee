"""Samples that are missing: a row of zeros in a table, a zero in a mask.

A client may lack a public sample in its modality. Its row in a message is then all zeros, and no mean counts it.
"""

from __future__ import annotations

from torch import Tensor


def present(rows: Tensor) -> Tensor:
    """Whether each row holds a sample: a missing one is all zeros.

    >>> import torch
    >>> present(torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
    tensor([ True, False])
    """
    return rows.ne(0).any(-1)


def mean_where(values: Tensor, weight: Tensor) -> Tensor:
    """The weighted mean of one value per sample; zero, with a gradient of zero, where no sample has a weight.

    >>> import torch
    >>> mean_where(torch.tensor([1.0, 5.0]), torch.tensor([True, False]))
    tensor(1.)
    """
    weight = weight.to(values.dtype)
    return (values * weight).sum() / weight.sum().clamp_min(1e-12)
