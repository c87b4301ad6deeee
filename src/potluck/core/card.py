"""The card: what a client says of itself when it enrols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.core.task import Task

ClientId = str


@dataclass(frozen=True)
class Card:
    """What a client says of itself: samples and task, and the further fields that the method asks for.

    `extra` holds the further fields by name; they are read like attributes: `card.width`.
    `potluck.core.card_fields` has the table of all fields.
    """

    client: ClientId
    samples: int
    task: Task
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name == "extra" or name not in self.extra:
            raise AttributeError(f"the card of a client has no {name!r}; a method asks for it in card_fields")
        return self.extra[name]
