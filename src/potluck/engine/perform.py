"""One request on one live client: the same few lines for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from potluck.client import Card, Client
from potluck.engine.base import Answer, Examination, Request
from potluck.evaluate import measure
from potluck.message import Message, Shapes, check
from potluck.method import Method
from potluck.models import Model
from potluck.state import Moments


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Names and shapes of live tensors."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


class Performer:
    """Does the steps of a method on a live client and enforces the wire contract on the client's side."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def perform(self, client: Client, request: Request, first: bool) -> Answer:
        """Receive, do the steps, and let out only what is declared; `first`: the client's first of this round."""
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
        up = Message(content).apart_from(client.tensors().values())
        self._check_up(client, up, request.steps)
        return Answer(client.id, up, client.report)

    def examine(self, client: Client, examination: Examination) -> Answer:
        """Measure on top of the downlink; whoever holds the client throws its state away afterwards."""
        if examination.down is not None:
            self._check(client, examination.down, "evaluate", "down")
        client.step = f"evaluate {'+'.join(examination.modes)} {examination.on}"
        with client.rng.child("examine").as_default(client.device):
            if examination.down is not None:
                self.method.receive(client, examination.down)
            client.report.metrics = measure(self.method, client, examination.modes, examination.on)
        return Answer(client.id, Message(), client.report)

    def _check(self, client: Client, message: Message, step: str, direction: str) -> None:
        who = f"client {client.id}, step {step}, {direction}"
        check(message, self.method.down_contract(step), self._symbols(client), self._shapes(client), who)

    def _check_up(self, client: Client, message: Message, steps: tuple[str, ...]) -> None:
        contract = {name: field for step in steps for name, field in self.method.up_contract(step).items()}
        who = f"client {client.id}, step {'+'.join(steps)}"
        check(message, contract, self._symbols(client), self._shapes(client), who)

    def _symbols(self, client: Client) -> dict[str, int]:
        return self.method.symbols(client_card(client))

    @staticmethod
    def _shapes(client: Client) -> Callable[[str], Shapes | None]:
        return lambda part: shapes_of(client[part].wire()) if part in client else None


def client_card(client: Client) -> Card:
    """The client's own view of its card: what it can tell of itself without being asked."""
    extra: dict[str, object] = {"classes_held": client.classes_held}
    if "model" in client and isinstance(client["model"].module, Model):
        extra["width"] = client["model"].rep_dim
    return Card(client.id, client.samples, client.task, extra)


def _forget_round_moments(client: Client) -> None:
    for part in client.parts.values():
        if isinstance(part.content, Moments) and part.content.lifetime == "round":
            part.content.clear()
