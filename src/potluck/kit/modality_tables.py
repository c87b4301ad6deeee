"""Global representations of public samples, one table per modality; a sample that nobody has is a row of zeros."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.replies import Replies
from potluck.kit.masks import present
from potluck.kit.public_knowledge import modality

Tables = Mapping[str, Tensor]  # |P|×d by modality


def own_and_others(tables: Tables, name: str) -> tuple[Tensor | None, list[Tensor]]:
    """The table of a modality, and those of the others; where there is no other, its own stands in."""
    own = tables.get(name)
    others = [table for other, table in sorted(tables.items()) if other != name]
    return own, others or ([own] if own is not None else [])


def clients_by_modality(replies: Replies) -> dict[str, list[ClientId]]:
    """The clients that answered, by what they see of a public sample."""
    groups: dict[str, list[ClientId]] = {}
    for client in replies:
        groups.setdefault(modality(replies.cards[client].task), []).append(client)
    return groups


def weighted_by_agreement(z: Tensor, scores: Tensor) -> Tensor:
    """Σ_k softmax_k(s_ik)·z_ki over the clients that have sample i; zero where none has. z: clients × P × d.

    >>> weighted_by_agreement(torch.tensor([[[1.0]], [[0.0]]]), torch.zeros(2, 1))  # the second lacks the sample
    tensor([[1.]])
    """
    weights = scores.masked_fill(~present(z), -torch.inf).softmax(0).nan_to_num(0.0)
    return (weights.unsqueeze(2) * z).sum(0)


def kept_where_missing(new: Tables, old: Tables) -> dict[str, Tensor]:
    """The new tables; a sample that nobody sent this time keeps its old row."""
    return {
        name: torch.where(present(table)[:, None], table, old[name]) if name in old else table
        for name, table in new.items()
    }
