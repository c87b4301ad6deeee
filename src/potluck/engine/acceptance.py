"""What the server takes of the answers to one exchange, and why it does not take the others.

Always in this order: names, types and shapes, by the wire contract; then finite values; then declared ranges; then
norms against those of the peers. Types come first because no arithmetic is safe on a type that was not declared.
Whatever a client sends, the worst that comes of it is that this client is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.contract import Contract, Gate, Shapes, shapes_of
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.plain_values import printable
from potluck.core.server import Server
from potluck.core.values import excess, said_of
from potluck.engine.norms import SentPart, norm_ratios, parts_of
from potluck.engine.protocol import Answer
from potluck.errors import MessageError


def known_shapes(method: Method, server: Server, card: Card) -> Callable[[str], Shapes | None]:
    """The shapes of a client's parts that the server knows: from the client's card, else from its own state."""

    def shapes(part: str) -> Shapes | None:
        known = method.expected(card, part)
        if known is None and part in server and server[part].module is not None:
            return shapes_of(server[part].wire())
        return known

    return shapes


@dataclass(frozen=True)
class Exchange:
    """One exchange: which steps, on which downlinks, and how many rows a tensor must have where that is known."""

    steps: tuple[str, ...]
    downs: Mapping[ClientId, Message] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The steps in words."""
        return f"step {'+'.join(self.steps)}"


class Acceptance:
    """Judges the answers of clients; `largest_ratio` bounds norms against the median of their like, if given."""

    def __init__(
        self, method: Method, server: Server, gate: Gate | None = None, largest_ratio: float | None = None
    ) -> None:
        self.method, self.server, self.largest_ratio = method, server, largest_ratio
        self.gate = gate if gate is not None else Gate()

    def check(self, client: ClientId, message: Message, contract: Contract, *what: str) -> None:
        """Refuse a message with other names, types or shapes than the contract has for this client."""
        card = self.server.cards[client]

        def symbols() -> dict[str, int]:
            return self.method.symbols(card)

        shapes = known_shapes(self.method, self.server, card)
        self.gate.check(message, contract, symbols, shapes, (f"client {client}", *what))

    def refusals(self, exchange: Exchange, answers: Sequence[Answer]) -> dict[ClientId, str]:
        """A sentence for every client whose answer is not taken."""
        contract = self.method.sent_by(exchange.steps)
        reasons: dict[ClientId, str] = {}

        def guarded(judge: Callable[[Answer], str], asked: Sequence[Answer]) -> list[Answer]:
            for answer in asked:
                try:
                    reason = judge(answer)
                except MessageError as error:
                    reason = str(error)
                except Exception as error:  # whatever it is, it is the fault of this answer alone
                    reason = (
                        f"client {answer.client}, {exchange.name}: its answer cannot be checked "
                        f"({type(error).__name__}: {error})"
                    )
                if reason:
                    reasons[answer.client] = printable(reason)
            return [answer for answer in asked if answer.client not in reasons]

        typed = guarded(lambda answer: self._forms(answer, contract, exchange), answers)
        try:
            return reasons | self._values(typed, contract, exchange)
        except Exception:  # one of them cannot be reckoned with: find it alone, then judge the others
            alone = guarded(lambda one: "".join(self._values([one], contract, exchange).values()), typed)
            return reasons | self._values(alone, contract, exchange)

    def _forms(self, answer: Answer, contract: Contract, exchange: Exchange) -> str:
        """Why the names, types and shapes of an answer are not those declared."""
        who, up = f"client {answer.client}, {exchange.name}", answer.up
        for name, value in up.items():
            if value.layout is not torch.strided or value.is_quantized or value.is_meta:
                return f"{who}: tensor {name!r} is no plain tensor"
        self.check(answer.client, up, contract, exchange.name)
        for name, rows in exchange.rows.items():
            found = len(up[name]) if name in up else 0
            if found != rows:
                return f"{who}: tensor {name!r} has {found} rows, asked were {rows}"
        return ""

    def _values(
        self, answers: Sequence[Answer], contract: Contract, exchange: Exchange
    ) -> dict[ClientId, str]:
        """Why values are not taken: all are reduced on the device and read back at once."""
        seen = Reductions(self.server.device)
        for answer in answers:
            seen.add_largest(answer)
            seen.add_singles(answer, excess(answer.up, contract, self.method.symbols(self._card(answer))))
            if not self.method.sends_changes:
                seen.add_variances(answer)
        if self.largest_ratio is not None:
            seen.add_norms(answers, contract, exchange.downs)
        seen.read()
        reasons = {
            answer.client: self._unsound(answer, contract, f"client {answer.client}, {exchange.name}")
            for answer in answers
            if answer.client in seen.unsound
        }
        for (client, name), ratio in seen.ratios(reasons).items() if self.largest_ratio is not None else ():
            if not ratio <= (self.largest_ratio or math.inf):
                reasons[client] = (
                    f"client {client}, {exchange.name}: the norm of {name!r} is {ratio:.3g} times the median of "
                    f"its like in this exchange, at most {self.largest_ratio:g} times are taken (training.max_norm)"
                )
        return reasons

    def _card(self, answer: Answer) -> Card:
        return self.server.cards[answer.client]

    def _unsound(self, answer: Answer, contract: Contract, who: str) -> str:
        """One sentence that names the bad value of an answer."""
        name = answer.up.not_finite()
        if name is not None:
            return f"{who}: tensor {name!r} is not finite; {self.method.remedy}"
        symbols = self.method.symbols(self._card(answer))
        for key, declared in contract.items():
            beyond = excess(answer.up, {key: declared}, symbols)
            if beyond is not None and not bool(beyond <= 0):
                return f"{who}: tensor {key!r} has other numbers than {said_of(declared, symbols)}"
        held = [] if self.method.sends_changes else variances(answer.up)
        negative = next((name for name, value in held if not bool(value.min() >= 0)), None)
        if negative is not None:
            return f"{who}: tensor {negative!r} holds variances, and has negative numbers"
        return f"{who}: the loss is not finite; {self.method.remedy}"


def variances(message: Message) -> list[tuple[str, Tensor]]:
    """The running variances in a message, by the name that PyTorch's batch norm gives them."""
    return [
        (name, value)
        for name, value in message.items()
        if name.endswith("running_var") and value.is_floating_point() and value.numel()
    ]


class Reductions:
    """Single numbers about the answers of an exchange, gathered on the device and read back once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.unsound: set[ClientId] = set()
        self._largest: list[Tensor] = []
        self._singles: list[Tensor] = []
        self._owners: list[list[ClientId]] = [[], []]
        self._parts: list[tuple[ClientId | None, SentPart]] = []
        self._measured: list[Tensor] = []
        self._norms: list[float] = []

    def add_largest(self, answer: Answer) -> None:
        """The floating-point tensors of an answer; the largest magnitude of each is looked at."""
        floats = [value for value in answer.up.values() if value.is_floating_point() and value.numel()]
        self._largest += floats
        self._owners[0] += [answer.client] * len(floats)

    def add_singles(self, answer: Answer, beyond: Tensor | None) -> None:
        """The losses of an answer, and how far its numbers are outside their ranges."""
        single = [*answer.report.losses.values()]
        single += [] if beyond is None else [torch.where(beyond <= 0, 0.0, torch.inf)]
        self._singles += single
        self._owners[1] += [answer.client] * len(single)

    def add_variances(self, answer: Answer) -> None:
        """The variances of batch norm in an answer, which are not negative."""
        lowest = [value.min() for _, value in variances(answer.up)]
        self._singles += [torch.where(low >= 0, 0.0, torch.inf) for low in lowest]
        self._owners[1] += [answer.client] * len(lowest)

    def add_norms(
        self, answers: Sequence[Answer], contract: Contract, downs: Mapping[ClientId, Message]
    ) -> None:
        """The norms of what can be compared; where two clients sent a part, the server's own is the third."""
        for answer in answers:
            for part in parts_of(answer.up, contract):
                self._measure(answer.client, part, answer.up)
        common = Counter(part.form for _, part in self._parts)
        pairs = {form for form, count in common.items() if count == 2}
        for down in downs.values() if pairs else ():
            for part in parts_of(down, contract):
                if part.form in pairs:
                    pairs.discard(part.form)
                    self._measure(None, part, down)

    def _measure(self, client: ClientId | None, part: SentPart, message: Message) -> None:
        self._parts.append((client, part))
        self._measured += [message[name] for name in part.tensors]

    def read(self) -> None:
        """Wait for the device, once."""
        largest = [*torch._foreach_norm(self._largest, torch.inf)] if self._largest else []
        norms = [*torch._foreach_norm(self._measured)] if self._measured else []
        everything = [value.float().to(self.device) for value in largest + self._singles + norms]
        read = torch.stack(everything).tolist() if everything else []
        owners = self._owners[0] + self._owners[1]
        self.unsound = {
            client for client, value in zip(owners, read, strict=False) if not math.isfinite(value)
        }
        self._norms = read[len(owners) :]

    def ratios(self, refused: Mapping[ClientId, str]) -> dict[tuple[ClientId, str], float]:
        """How many times the median of its like each part is, among the clients not refused."""
        sent: dict[ClientId, list[tuple[SentPart, float]]] = {}
        down: dict[tuple[object, ...], float] = {}
        norms = iter(self._norms)
        for client, part in self._parts:
            mean_square = sum(next(norms) ** 2 for _ in part.tensors) / part.size
            if client is None:
                down[part.form] = math.sqrt(mean_square)
            elif client not in refused:
                sent.setdefault(client, []).append((part, math.sqrt(mean_square)))
        return norm_ratios(sent, down)
