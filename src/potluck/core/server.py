"""The server: the shared state of a method, and the cards of the clients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from potluck.core.card import Card, ClientId
from potluck.core.state import Holder, Precision
from potluck.core.task import Task


class Server(Holder):
    """The shared modules and tensors, and the cards of the enrolled clients.

    What a method reads:

    - `server["small"]`: a part of its declared state (a `Part`), or a module in one, `server["small/head"]`;
    - `cards`: the card of every enrolled client, by its id;
    - `task`: the task of the first client; where tasks differ (`Method.tasks` is `any`) each is on a card;
    - `round`, from 1; `device`, where its tensors are, and `precision`;
    - `public`, the public data, for methods with `needs_public_data`;
    - `draw("purpose")`: a generator; `rng`, the randomness of this round (an `Rng`); `numbers([…])`.
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
