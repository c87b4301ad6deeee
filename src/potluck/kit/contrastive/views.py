"""SimCLR's loss: two views of every sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.kit.contrastive.comparison import full_precision
from potluck.kit.masks import mean_where


def nt_xent(first: Tensor, second: Tensor, tau: float, there: Tensor | None = None) -> Tensor:
    """Cross-entropy of every view with its partner among all other views, the mean over the 2B views there are.

    ℓ_i = −log( exp(s(u_i, u_i⁺)/τ) / Σ_{j≠i} exp(s(u_i, u_j)/τ) ), s the cosine. `there` masks missing samples.

    >>> nt_xent(torch.eye(2), torch.eye(2), 0.5)  # log(1 + 2·exp(−2))
    tensor(0.2395)
    """
    with full_precision(first):
        views = F.normalize(torch.cat([first.float(), second.float()]), dim=1)
        pairs = len(first)
        own = torch.eye(2 * pairs, dtype=torch.bool, device=views.device)
        present = (
            views.new_ones(2 * pairs, dtype=torch.bool) if there is None else torch.cat([there, there]) > 0
        )
        similarity = views @ views.T / tau
        positive = torch.cat([similarity.diagonal(pairs), similarity.diagonal(-pairs)])
        # A missing view keeps its partner, so that its loss, which has no weight, is finite.
        hidden = own | ~(present | own.roll(pairs, 1))
        return mean_where(similarity.masked_fill(hidden, -torch.inf).logsumexp(1) - positive, present)
