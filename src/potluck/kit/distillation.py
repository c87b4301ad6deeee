"""Distillation on public data: the divergence from teachers, and the samples that tell when to stop."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from potluck.core.public import Public
from potluck.kit.public_knowledge import drawn_rows


def divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(σ(teacher/T) ‖ σ(logits/T)), the mean over samples.

    >>> import torch
    >>> divergence(torch.zeros(1, 2), torch.tensor([[99.0, 0.0]]), 1.0)  # all on one class: log 2
    tensor(0.6931)
    """
    mine, wanted = (one.float() / temperature for one in (logits, teacher))
    return F.kl_div(mine.log_softmax(1), wanted.log_softmax(1), reduction="batchmean", log_target=True)


def divergence_of_each(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(σ(teacher) ‖ σ(logits)) of every sample; the teacher carries no gradient.

    >>> import torch
    >>> divergence_of_each(torch.zeros(2, 2), torch.tensor([[99.0, 0.0], [0.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    mine, wanted = (one.float().log_softmax(1) for one in (logits, teacher.detach()))
    return F.kl_div(mine, wanted, reduction="none", log_target=True).sum(1)


def held_back(public: Public, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The rows held back, the same in every round, and the others; missing samples are in neither."""
    order = drawn_rows(public, 0, len(public))
    order = order[public.mask.cpu().numpy()[order]]
    count = int(share * len(order))
    return np.sort(order[:count]), np.sort(order[count:])
