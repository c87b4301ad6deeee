"""The ledger: how many scalars and bytes crossed between server and clients, message by message."""

from __future__ import annotations

from typing import Any, Literal

from potluck.core.message import Message


class Ledger:
    """The lines of one round, kept until the round is accepted and logged."""

    def __init__(self, round_: int) -> None:
        self.round = round_
        self.lines: list[dict[str, Any]] = []

    def add(
        self,
        client: str,
        step: str,
        direction: Literal["up", "down"],
        purpose: str,
        message: Message,
        published: int | None = None,
    ) -> None:
        """Count one message, unless it is empty. `published` is the number of scalars the paper counts for it."""
        if not message:
            return
        line = {
            "round": self.round,
            "client": client,
            "step": step,
            "direction": direction,
            "purpose": purpose,
            "scalars": message.scalars,
            "bytes": message.nbytes,
            "names": message.sizes(),
        }
        self.lines.append(line if published is None else {**line, "as_published": published})
