"""The server: the shared half of a method, and the view it has of its clients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from potluck.core.card import Card, ClientId
from potluck.core.state import Holder, Precision
from potluck.core.task import Task


class Server(Holder):
    """Named modules and tensors that belong to everyone, and the cards of the enrolled clients.

    `task` is that of the first client; where tasks differ (`Method.tasks` is `any`) each is on its card.
    """

    def __init__(
        self,
        task: Task,
        cards: Mapping[ClientId, Card],
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
    ) -> None:
        super().__init__(task, device, precision)
        self.cards = cards
