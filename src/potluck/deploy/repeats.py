"""Clients that answer the same question in two ways.

A site keeps its answers on disk. When a round is tried again, it gives the same bytes for the same question,
whatever happened meanwhile. One that gives others can make every further try a new question for all the others,
and a site takes only so many in a round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from potluck.core.card import ClientId
from potluck.deploy.exchanges import digest_of
from potluck.engine.protocol import Answer, Failure, Outcome, Request

Attempt = tuple[int, int, int]  # round, attempt, start of the server


class Repeats:
    """Remembers the questions and answers of the newest round, as digests."""

    def __init__(self) -> None:
        self._attempt: Attempt = (0, 0, 0)
        self._asked: dict[ClientId, str] = {}  # the last question to each client in this attempt
        self._answers: dict[tuple[ClientId, str], str] = {}

    def check(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes of one exchange, with a failure in place of an answer that was another one before."""
        for request in requests[:1]:
            self._enter((request.stamp.round, request.stamp.attempt, request.stamp.incarnation))
        messages = {id(request.down): request.down for request in requests}  # most are one and the same
        downs = {key: digest_of(message) for key, message in messages.items()}
        return [
            self._checked(request, downs[id(request.down)], outcome)
            for request, outcome in zip(requests, outcomes, strict=True)
        ]

    def _enter(self, attempt: Attempt) -> None:
        if attempt[0] != self._attempt[0]:
            self._answers = {}
        if attempt != self._attempt:
            self._attempt, self._asked = attempt, {}

    def _checked(self, request: Request, down: str, outcome: Outcome) -> Outcome:
        client, stamp = request.client, request.stamp
        told = [
            self._asked.get(client, ""),
            stamp.accepted,
            stamp.exchange,
            request.steps,
            request.purpose,
            down,
        ]
        question = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        self._asked[client] = question
        if not isinstance(outcome, Answer):
            return outcome
        given = digest_of(outcome.up)
        if self._answers.setdefault((client, question), given) == given:
            return outcome
        return Failure(
            client,
            f"client {client}: it answered the same question otherwise when round {stamp.round} was tried before; "
            "check what runs there",
        )
