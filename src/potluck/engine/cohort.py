"""The clients of one round as the server's script sees them: it asks, the cohort checks and counts messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.contract import Contract, Gate, Shapes, excess, shapes_of
from potluck.core.formulas import formula_value
from potluck.core.message import Message
from potluck.core.method import Down, Method
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.engine.ledger import Ledger
from potluck.engine.protocol import Answer, Engine, Failure, Outcome, Request, Stamp
from potluck.errors import MessageError, RoundFailed


def known_shapes(method: Method, server: Server, card: Card) -> Callable[[str], Shapes | None]:
    """The shapes of a client's parts that the server knows: from the client's card, else from its own state."""

    def shapes(part: str) -> Shapes | None:
        known = method.expected(card, part)
        if known is None and part in server and server[part].module is not None:
            return shapes_of(server[part].wire())
        return known

    return shapes


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
        gate: Gate | None = None,
    ) -> None:
        self.engine, self.method, self.server, self.ledger = engine, method, server, ledger
        self.gate = gate if gate is not None else Gate()
        self.asked = tuple(ids)
        self.stamps = stamps
        self.quorum = quorum
        self.failures: dict[ClientId, str] = {}
        self.lost: set[ClientId] = set()  # of these, who gave no answer
        self.exchange = 0

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
    ) -> Replies:
        """Have clients do a step, or several in order on one downlink, and wait for their replies.

        `down` is the downlink, one per client if it is a function; None sends the method's own. `only` addresses
        some of the clients.
        """
        steps = tuple(one.__name__ for one in (step if isinstance(step, Sequence) else [step]))
        addressed = [client for client in self.ids if only is None or client in only]
        self.exchange += 1
        requests = [self._request(client, steps, down) for client in addressed]
        replies = self._accept(steps, self.engine.run(requests))
        if len(self.ids) < self.quorum:
            reasons = [*self.failures.values()]
            shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
            raise RoundFailed(
                f"round {self.server.round}: {len(self.ids)} of {len(self.asked)} clients are left, "
                f"{self.quorum} are needed: {shown}",
                self.failures,
                self.lost,
            )
        return replies

    def _request(self, client: ClientId, steps: tuple[str, ...], down: Down | None) -> Request:
        if down is None:
            content = self.method.downlink(self.server, client)
        else:
            content = down(client) if callable(down) else down
        message = content if isinstance(content, Message) else Message(content)
        self._check(client, message, self.method.down_contract(steps[0]), f"step {steps[0]}", "down")
        purpose = self.method.steps()[steps[0]].purpose
        published = self.method.as_published("down", message)
        self.ledger.add(client, "+".join(steps), "down", purpose, message, published)
        return Request(client, steps, message, self.stamps(client, self.exchange), purpose)

    def _accept(self, steps: tuple[str, ...], outcomes: Sequence[Outcome]) -> Replies:
        answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        what = f"step {'+'.join(steps)}"
        self.failures |= {
            outcome.client: outcome.reason for outcome in outcomes if isinstance(outcome, Failure)
        }
        self.lost |= {one.client for one in outcomes if isinstance(one, Failure) and one.lost}
        contract = self.method.sent_by(steps)
        finite = self._sound(answers, contract)
        for answer in answers:
            try:
                self._check(answer.client, answer.up, contract, what)
                if not finite[answer.client]:
                    raise MessageError(self._unsound(answer, contract, f"client {answer.client}, {what}"))
            except MessageError as error:
                self.failures[answer.client] = str(error)
        kept = [answer for answer in answers if answer.client not in self.failures]
        purpose = self.method.steps()[steps[0]].purpose
        for answer in kept:
            published = self.method.as_published("up", answer.up)
            self.ledger.add(answer.client, "+".join(steps), "up", purpose, answer.up, published)
        return Replies(
            {answer.client: answer.up for answer in kept},
            self.cards,
            {answer.client: answer.report for answer in kept},
        )

    def _check(self, client: ClientId, message: Message, contract: Contract, *what: str) -> None:
        card = self.cards[client]

        def symbols() -> dict[str, int]:
            return self.method.symbols(card)

        shapes = known_shapes(self.method, self.server, card)
        self.gate.check(message, contract, symbols, shapes, (f"client {client}", *what))

    def _sound(self, answers: Sequence[Answer], contract: Contract) -> dict[ClientId, bool]:
        """Which clients sent values that are finite and in range: reduced on the device, read back once."""
        tensors: list[Tensor] = []
        numbers: list[Tensor] = []
        owners: list[list[ClientId]] = [[], []]
        for answer in answers:
            floats = [value for value in answer.up.values() if value.is_floating_point() and value.numel()]
            symbols = self.method.symbols(self.cards[answer.client])
            beyond = excess(answer.up, contract, symbols)
            single = [*answer.report.losses.values()]
            single += [] if beyond is None else [torch.where(beyond > 0, torch.inf, 0.0)]
            tensors += floats
            numbers += single
            owners[0] += [answer.client] * len(floats)
            owners[1] += [answer.client] * len(single)
        sound = {answer.client: True for answer in answers}
        largest = [*torch._foreach_norm(tensors, torch.inf)] if tensors else []
        everything = [value.float().to(self.server.device) for value in largest + numbers]
        flags = torch.stack(everything).isfinite().tolist() if everything else []
        for client, finite in zip(owners[0] + owners[1], flags, strict=True):
            sound[client] &= finite
        return sound

    def _unsound(self, answer: Answer, contract: Contract, who: str) -> str:
        """One sentence that names the bad value of an answer."""
        name = answer.up.not_finite()
        if name is not None:
            return f"{who}: tensor {name!r} is not finite; {self.method.remedy}"
        symbols = self.method.symbols(self.cards[answer.client])
        for key, field in contract.items():
            beyond = excess(answer.up, {key: field}, symbols)
            if beyond is not None and bool(beyond > 0):
                return f"{who}: tensor {key!r} has a number outside 0 … {formula_value(field.below, symbols) - 1}"
        return f"{who}: the loss is not finite; {self.method.remedy}"
