"""What an ensemble of teachers says of samples: its consensus, and those who dissent."""

from __future__ import annotations

import torch
from torch import Tensor


def ensemble(logits: Tensor) -> dict[str, Tensor]:
    """What an ensemble says of every sample; `logits` are teachers × samples × classes.

    With v_k = Var_c(o_k) as the weight of teacher k:
    - `labels`: argmax Σ_k v_k·o_k, and `known`: 1 where some v_k is above 0;
    - `dissent`: Σ_{k∈D} v_k·o_k / Σ_{k∈D} v_k over D, the teachers whose largest logit is elsewhere, and
      `divided`: 1 where there is such a teacher.
    All logits are finite. Computed in double precision, as the square of a large float32 is not.
    """
    logits = logits.double()
    trust = logits.var(2)
    labels = _weighted(logits, trust).argmax(1)
    against = trust * (logits.argmax(2) != labels)
    return {
        "labels": labels,
        "known": (trust.sum(0) > 0).float(),
        "dissent": _weighted(logits, against).float(),
        "divided": (against.sum(0) > 0).float(),
    }


def _weighted(logits: Tensor, weights: Tensor) -> Tensor:
    """The mean over teachers by their weights for each sample; zeros where nobody has one."""
    total = weights.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)
    return ((weights / total).unsqueeze(2) * logits).sum(0)
