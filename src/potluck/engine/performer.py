"""One request on one live client: the same few lines on every engine and at every site."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from potluck.core.card_fields import own_card
from potluck.core.client import Client
from potluck.core.contract import Contract, Gate, Shapes, largest_size, shapes_of
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.own_metrics import OwnMetric, OwnMetrics
from potluck.core.state import Moments
from potluck.engine.evaluation.measuring import measure
from potluck.engine.protocol import Answer, Examination, Request
from potluck.errors import StepFailed


class Performer:
    """Does the steps of a method on a live client, and enforces the wire contract on the client's side."""

    def __init__(self, method: Method, metrics: OwnMetrics | None = None) -> None:
        self.method, self.metrics = method, dict(metrics or {})
        self.gate = Gate()

    def perform(self, client: Client, request: Request, first: bool) -> Answer:
        """Receive the downlink, do the steps, and return only what is declared.

        `first` says whether this is the client's first request of the round.
        """
        self._check(client, request.down, request.steps[0], "down")
        own_message = self.method.steps()[request.steps[0]].down is not None
        if first:
            _forget_round_moments(client)
        with client.rng.child("exchange", request.stamp.exchange, *request.steps).as_default(client.device):
            if not own_message:
                self.method.receive(client, request.down)
            content: dict[str, Tensor | Mapping[str, Tensor]] = {}
            for step in request.steps:
                client.step = step
                function = getattr(self.method, step)
                content |= (function(client, request.down) if own_message else function(client)) or {}
        up = Message(content).apart_from(client.memory())
        self._check_up(client, up, request.steps)
        return Answer(client.id, up, client.report)

    def examine(self, client: Client, examination: Examination) -> Answer:
        """Receive the downlink and measure; the caller discards the client's state afterwards."""
        if examination.down is not None:
            self._check(client, examination.down, "evaluate", "down")
        own = [self._metric(name) for name in examination.metrics]
        client.step = f"evaluate {'+'.join(examination.modes)} {examination.on}"
        with client.rng.child("examine").as_default(client.device):
            if examination.down is not None:
                self.method.receive(client, examination.down)
            client.report.metrics, seen = measure(
                self.method, client, examination.modes, examination.on, own, examination.predictions
            )
        return Answer(client.id, Message(seen), client.report)

    def _metric(self, name: str) -> OwnMetric:
        if name not in self.metrics:
            raise StepFailed(
                f"it is asked for the metric {name!r}, which it does not have; give it there, or take it out of "
                "evaluate.metrics"
            )
        return self.metrics[name]

    def _check(self, client: Client, message: Message, step: str, direction: str) -> None:
        who = (f"client {client.id}", f"step {step}", direction)
        self._pass(client, message, self.method.down_contract(step), who)

    def _check_up(self, client: Client, message: Message, steps: tuple[str, ...]) -> None:
        who = (f"client {client.id}", f"step {'+'.join(steps)}")
        self._pass(client, message, self.method.sent_by(steps), who)

    def largest_down(self, client: Client) -> int | None:
        """The most bytes a valid message to this client can have, None if the contract leaves that open."""
        symbols = self.method.symbols(own_card(client, self.method.card_fields))
        steps = (*self.method.steps(), "evaluate")
        sizes = [largest_size(self.method.down_contract(step), symbols, _shapes(client)) for step in steps]
        known = [size for size in sizes if size is not None]
        return max(known) if len(known) == len(sizes) else None

    def _pass(self, client: Client, message: Message, contract: Contract, who: tuple[str, ...]) -> None:
        def symbols() -> dict[str, int]:
            return self.method.symbols(own_card(client, self.method.card_fields))

        self.gate.check(message, contract, symbols, _shapes(client), who)


def _shapes(client: Client) -> Callable[[str], Shapes | None]:
    """Looks up the shapes of the tensors in a part of the client; a part that it has not holds none."""
    return lambda part: shapes_of(client[part].wire()) if part in client else {}


def _forget_round_moments(client: Client) -> None:
    for part in client.parts.values():
        if isinstance(part.content, Moments) and part.content.lifetime == "round":
            for value in part.content.values():
                value.zero_()
