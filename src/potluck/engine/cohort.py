"""The clients of one round as the server's script sees them: it asks, the cohort checks and counts messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from potluck.core.card import Card, ClientId
from potluck.core.message import LastMessage
from potluck.core.method import Down, Method
from potluck.core.plain_values import printable
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.engine.acceptance import Acceptance, Exchange, no_message
from potluck.engine.ledger import Ledger
from potluck.engine.protocol import Answer, Engine, Failure, Outcome, Request, Stamp
from potluck.errors import RoundFailed, some

MOST_REASONS = 3  # that a sentence gives


def clients_needed(quorum: float, clients: int) -> int:
    """How many clients a share of them is, rounded up, so that half of them is never less; at least one.

    >>> [clients_needed(0.5, clients) for clients in (0, 3, 4, 5)], clients_needed(0.1, 30)
    ([1, 2, 2, 3], 3)
    """
    return max(1, math.ceil(round(quorum * clients, 9)))  # 0.1 * 30 is a little above 3


class Cohort:
    """The sampled clients. A client that fails, is refused or stays away is out for the rest of the round."""

    def __init__(
        self,
        engine: Engine,
        method: Method,
        server: Server,
        ids: Sequence[ClientId],
        stamps: Callable[[ClientId, int], Stamp],
        ledger: Ledger,
        quorum: int = 1,
        acceptance: Acceptance | None = None,
    ) -> None:
        self.engine, self.method, self.server, self.ledger = engine, method, server, ledger
        self.acceptance = acceptance if acceptance is not None else Acceptance(method, server)
        self.asked = tuple(ids)
        self.stamps = stamps
        self.quorum = quorum
        self.failures: dict[ClientId, str] = {}
        self.lost: set[ClientId] = set()  # of these, who gave no answer
        self.exchange = 0
        self._messages = LastMessage()

    @property
    def ids(self) -> tuple[ClientId, ...]:
        """The clients still in the round, in client order."""
        return tuple(client for client in self.asked if client not in self.failures)

    @property
    def total(self) -> int:
        """The number of all enrolled clients, not only the sampled ones."""
        return len(self.server.cards)

    @property
    def cards(self) -> Mapping[ClientId, Card]:
        """The card of every enrolled client."""
        return self.server.cards

    def ask(
        self,
        step: Callable[..., Any] | Sequence[Callable[..., Any]],
        down: Down | None = None,
        only: Sequence[ClientId] | None = None,
        rows: Mapping[str, int] | None = None,
    ) -> Replies:
        """Have clients do a step, or several in order on one downlink, and wait for their replies.

        `down` is the downlink, one per client if it is a function; None sends the method's own. `only` addresses
        some of the clients. `rows` says how many rows a tensor of every reply must have, where the contract leaves
        that open; 0: the tensor must not be there.
        """
        steps = self._names(step)
        addressed = [client for client in self.ids if only is None or client in only]
        self.exchange += 1
        requests = self._requests(addressed, steps, down)
        replies = self._accept(Exchange(steps, rows or {}), self._outcomes(requests))
        self._check_quorum()
        return replies

    def leave_out(self, client: ClientId, reason: str) -> None:
        """Leave a client out of the rest of the round, as if its reply had been refused."""
        self.failures[client] = printable(f"client {client}: {reason}")
        self._check_quorum()

    def _check_quorum(self) -> None:
        """End the attempt at the round where too few clients are left."""
        if len(self.ids) < self.quorum:
            raise RoundFailed(
                f"round {self.server.round}: {len(self.ids)} of {len(self.asked)} clients are left, "
                f"{self.quorum} are needed: {_in_short(self.failures)}",
                self.failures,
                self.lost,
            )

    def _outcomes(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        return self.engine.run_sparing(requests, len(self.ids) - self.quorum)

    def _names(self, step: Callable[..., Any] | Sequence[Callable[..., Any]]) -> tuple[str, ...]:
        """The names of the steps asked for; an error in the code of a method, so the round is not tried again."""
        asked: list[Any] = [*step] if isinstance(step, Sequence) and not isinstance(step, str) else [step]
        known = self.method.steps()
        for one in asked:
            if getattr(one, "__name__", None) not in known:
                named = repr(one) if isinstance(one, str) else getattr(one, "__qualname__", repr(one))
                example = next(iter(known), "train")
                raise TypeError(
                    f"clients.ask({named}): give a method under @client_step, such as self.{example}"
                )
        if not asked:
            raise TypeError("clients.ask([]): name at least one step")
        return tuple(one.__name__ for one in asked)

    def _requests(
        self, clients: Sequence[ClientId], steps: tuple[str, ...], down: Down | None
    ) -> list[Request]:
        """A request for each client. If none can be made for a stranger, the round goes on without it."""
        requests = []
        for client in clients:
            try:
                requests.append(self._request(client, steps, down))
            except Exception as error:  # whatever it is, it comes of what is known of this client
                if not self.acceptance.strangers:
                    raise
                self.failures[client] = no_message(client, "+".join(steps), error)
        return requests

    def _request(self, client: ClientId, steps: tuple[str, ...], down: Down | None) -> Request:
        if down is None:
            content = self.method.downlink(self.server, client)
        else:
            content = down(client) if callable(down) else down
        message = self._messages.of(content)
        contract = self.method.down_contract(steps[0])
        self.acceptance.check(client, message, contract, f"step {steps[0]}", "down")
        purpose = self.method.steps()[steps[0]].purpose
        published = self.method.as_published("down", message)
        self.ledger.add(client, "+".join(steps), "down", purpose, message, published)
        return Request(client, steps, message, self.stamps(client, self.exchange), purpose)

    def _accept(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Replies:
        answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        self.failures |= {
            outcome.client: outcome.reason for outcome in outcomes if isinstance(outcome, Failure)
        }
        self.lost |= {one.client for one in outcomes if isinstance(one, Failure) and one.lost}
        self.failures |= self.acceptance.refusals(exchange, answers)
        kept = [answer for answer in answers if answer.client not in self.failures]
        steps = exchange.steps
        purpose = self.method.steps()[steps[0]].purpose
        for answer in kept:
            published = self.method.as_published("up", answer.up)
            self.ledger.add(answer.client, "+".join(steps), "up", purpose, answer.up, published)
        return Replies(
            {answer.client: answer.up for answer in kept},
            self.cards,
            {answer.client: answer.report for answer in kept},
        )


def _in_short(failures: Mapping[ClientId, str]) -> str:
    """The first reasons why clients are out; those of one reason are named together."""
    alike: dict[str, list[ClientId]] = {}
    for client, reason in failures.items():
        alike.setdefault(reason.removeprefix(f"client {client}"), []).append(client)
    told = [
        f"clients {some(ids)}{reason}" if len(ids) > 1 else failures[ids[0]] for reason, ids in alike.items()
    ]
    more = sum(map(len, [*alike.values()][MOST_REASONS:]))
    return "; ".join(told[:MOST_REASONS]) + (f"; and {more} more" if more else "")
