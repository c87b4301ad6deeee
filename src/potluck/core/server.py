"""The server: the shared state of a method, and the cards of the clients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from potluck.core.card import Card, ClientId
from potluck.core.state import Holder, Precision
from potluck.core.task import Task


class Server(Holder):
    """The shared modules and tensors, and the cards of the enrolled clients.

    `task` is the task of the first client. Where tasks differ (`Method.tasks` is `any`) each is on its client's
    card.
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
