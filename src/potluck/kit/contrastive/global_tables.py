"""CreamFL's contrasts: a representation against global ones, of which a table has a row per public sample.

Rows have length 1; a row of zeros means that nobody has the sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.kit.masks import mean_where, present

CHUNK = 1024  # rows of a |P|×|P| matrix at a time


def intra(z: Tensor, positive: Tensor, negative: Tensor, there: Tensor, tau: float) -> Tensor:
    """−log( e^{z·g/τ} / (e^{z·g/τ} + e^{z·p/τ}) ), the mean over samples that are there."""
    gap = ((z * negative).sum(1) - (z * positive).sum(1)) / tau
    return mean_where(F.softplus(gap), there & present(positive))


def inter(z: Tensor, tables: Sequence[Tensor], rows: Tensor, there: Tensor, tau: float) -> Tensor:
    """−log( e^{z·G_i/τ} / Σ_j e^{z·G_j/τ} ), the mean over tables and samples that are there."""
    terms = [mean_where(-log_share(z, table, rows, tau), there & present(table[rows])) for table in tables]
    return torch.stack(terms).mean()


def log_share(z: Tensor, table: Tensor, rows: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """log softmax over all samples j of z_i·G_j / τ, taken at the sample's own row, `CHUNK` samples at a time."""
    own = torch.arange(len(z), device=z.device) if rows is None else rows
    hidden = ~present(table)
    found = []
    for part, places in zip(torch.split(z, CHUNK), torch.split(own, CHUNK), strict=True):
        logits = part @ table.T / tau
        positive = logits.gather(1, places[:, None]).squeeze(1)
        found.append(positive - logits.masked_fill(hidden, -torch.inf).logsumexp(1))
    return torch.cat(found)
