"""What the server takes of the answers to one exchange, and why it does not take the others.

Always in this order: names, types and shapes, by the wire contract; then finite values; then declared ranges; then
norms against those of the peers. Types come first because no arithmetic is safe on a type that was not declared.
Whatever a client sends, the worst that comes of it is that this client is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from potluck.core.card import Card, ClientId
from potluck.core.contract import Contract, Gate, Shapes, shapes_of
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.plain_values import printable
from potluck.core.server import Server
from potluck.core.values import excess, said_of
from potluck.engine.norms import (
    LARGEST_RATIO,
    MOST_SHRUNK,
    SETTING,
    Form,
    LastNorms,
    Tensors,
    shrunk_share,
    start_ratio,
)
from potluck.engine.protocol import Answer
from potluck.engine.reductions import Reductions, variances
from potluck.engine.yardsticks import BEYOND_NEW, Yardsticks
from potluck.errors import MessageError


def known_shapes(method: Method, server: Server, card: Card) -> Callable[[str], Shapes | None]:
    """The shapes of a client's parts that the server knows: from the client's card, else from its own state."""

    def shapes(part: str) -> Shapes | None:
        known = method.expected(card, part)
        if known is None and part in server and server[part].module is not None:
            return shapes_of(server[part].wire())
        return known

    return shapes


def no_message(client: ClientId, step: str, error: Exception) -> str:
    """A sentence about a client for whom the server could not make a message, from what it knows of it."""
    told = f"{type(error).__name__}: {error}"
    return printable(f"client {client}, step {step}: no message could be made for it ({told})")


@dataclass(frozen=True)
class Exchange:
    """One exchange: which steps, and how many rows a tensor must have where that is known."""

    steps: tuple[str, ...]
    rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The steps in words."""
        return f"step {'+'.join(self.steps)}"


class Acceptance:
    """Judges the answers of clients; `largest_ratio` bounds norms against those of most of their like, if given.

    With `fresh` it bounds first weights too: these come from one client alone.
    Of `strangers` not even what they say of themselves is believed.
    """

    strangers = False

    def __init__(
        self, method: Method, server: Server, gate: Gate | None = None, largest_ratio: float | None = None
    ) -> None:
        self.method, self.server, self.largest_ratio = method, server, largest_ratio
        self.gate = gate if gate is not None else Gate()
        self.notice: Callable[[str], None] = lambda sentence: None
        self.last_norms = LastNorms()
        self.yardsticks = Yardsticks()
        self.sizes: dict[
            ClientId, float
        ] = {}  # of each stranger's largest message in this attempt at a round
        self.first_sizes: dict[ClientId, float] = {}  # of first weights alone

    @property
    def fresh(self) -> Callable[[ClientId], Tensors] | None:
        """Gives the tensors of a new model like a client's."""
        return self.yardsticks.fresh

    @fresh.setter
    def fresh(self, fresh: Callable[[ClientId], Tensors] | None) -> None:
        self.yardsticks = Yardsticks(fresh)

    def begin(self) -> None:
        """Begin an attempt at a round."""
        self.sizes, self.first_sizes = {}, {}

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
        ranged = any(field.ranged or field.low_rank for field in contract.values())
        for answer in answers:
            seen.add_largest(answer)
            symbols = self.method.symbols(self._card(answer)) if ranged else {}
            seen.add_singles(answer, excess(answer.up, contract, symbols) if ranged else None)
            if not self.method.sends_changes:
                seen.add_variances(answer)
        if self.largest_ratio is not None or self.strangers:
            seen.add_norms(answers, contract)
        seen.read()
        reasons = {
            answer.client: self._unsound(answer, contract, f"client {answer.client}, {exchange.name}")
            for answer in answers
            if answer.client in seen.unsound
        }
        for answer in answers if self.largest_ratio is not None and self.fresh is not None else ():
            if answer.client not in reasons and (reason := self._unlikely_start(answer, exchange)):
                reasons[answer.client] = reason
        if self.largest_ratio is not None:
            reasons |= self._too_large(seen, reasons, exchange, self.largest_ratio)
        if self.strangers:
            self._note_sizes(seen, reasons, exchange, contract)
        self.last_norms.note(exchange.steps, seen.norms(reasons))
        return reasons

    def _note_sizes(
        self, seen: Reductions, refused: Mapping[ClientId, str], exchange: Exchange, contract: Contract
    ) -> None:
        sent, cards, norms = seen.sent(refused), self.server.cards, seen.norms(refused)
        others = self.last_norms.of_others(exchange.steps, norms, cards)
        found = self.yardsticks.sizes(sent, contract, others, self._unheard(sent))
        steps = self.method.steps()
        setup = all(steps[step].purpose == "setup" for step in exchange.steps)
        for sizes in (self.sizes, *([self.first_sizes] if setup else [])):
            sizes |= {client: max(size, sizes.get(client, 0.0)) for client, size in found.items()}

    def _too_large(
        self, seen: Reductions, refused: Mapping[ClientId, str], exchange: Exchange, bound: float
    ) -> dict[ClientId, str]:
        """Why norms are not taken. Where clients are divided into halves nobody is refused, and that is said.

        Of weights that nobody else has sent, and between two halves, a new model has the last word.
        """
        norms = seen.norms(refused)
        before = self.last_norms.before(exchange.steps, norms)
        others = self.last_norms.of_others(exchange.steps, norms, self.server.cards if self.strangers else ())
        reasons: dict[ClientId, str] = {}
        ties: dict[Form, list[ClientId]] = {}
        ratios = seen.ratios(refused, before, others)
        large = [one for one, times in ratios.items() if not times.most <= bound]
        if self.strangers and self._unheard(seen.sent(refused)):
            large = [one for one in large if not self._by_most_of_all(one, norms, others[one[1]], bound)]
            times_new = self._times_new(seen, large, exchange)
        else:
            times_new = {}
        for (client, form), times in ratios.items():
            if times_new.get((client, form), math.inf) <= max(bound, LARGEST_RATIO):
                continue  # weights of ordinary size, and those who send next to nothing may be few
            if not times.most <= bound:
                when = "now or last" if others[form] else "in this exchange"
                reasons[client] = (
                    f"client {client}, {exchange.name}: the norm of {form[0]!r} is {times.most:.3g} times the "
                    f"median of its like {when}, at most {bound:g} times are taken {SETTING}"
                )
            elif not times.half <= bound:
                ties.setdefault(form, []).append(client)
        alone = [one for one in norms if one not in ratios]
        reasons |= self._beyond_new(seen, alone, exchange, bound, "and nobody else sent the like")
        for form, larger in ties.items():
            unlike = f"and more than {bound:g} times that of half of its like"
            new = self._beyond_new(seen, [(client, form) for client in larger], exchange, bound, unlike)
            reasons |= new
            left = [client for client in larger if client not in new]
            rest = [client for client in seen.senders(form, refused) if client not in larger]
            if left:
                self.notice(
                    f"round {self.server.round}, {exchange.name}: the norm of {form[0]!r} from {', '.join(left)} "
                    f"is more than {bound:g} times that from {', '.join(rest) or 'others before'}; neither are a "
                    f"majority, so nobody is refused {SETTING}: look into them, and if need be exclude "
                    "one side"
                )
        return reasons

    def _by_most_of_all(
        self,
        one: tuple[ClientId, Form],
        norms: Mapping[tuple[ClientId, Form], float],
        others: Sequence[float],
        bound: float,
    ) -> bool:
        """Whether what a client sent is too large against the like of more than half of all clients."""
        peers = [value for (_, form), value in norms.items() if form == one[1]]
        return 2 * sum(norms[one] > bound * peer > 0 for peer in [*peers, *others]) > len(self.server.cards)

    def _beyond_new(
        self,
        seen: Reductions,
        asked: Sequence[tuple[ClientId, Form]],
        exchange: Exchange,
        bound: float,
        why: str,
    ) -> dict[ClientId, str]:
        """Why weights are not taken that are far larger than those of a new model, where nobody else decides it."""
        if not (asked and self.strangers):
            return {}
        most = max(bound, LARGEST_RATIO)  # training itself may make weights a few times as large
        reasons: dict[ClientId, str] = {}
        for (client, form), times in self._times_new(seen, asked, exchange).items():
            if not times <= most:
                reasons[client] = (
                    f"client {client}, {exchange.name}: the norm of {form[0]!r} is {times:.3g} {BEYOND_NEW}, "
                    f"{why}; at most {most:g} times are taken {SETTING}"
                )
        return reasons

    def _times_new(
        self, seen: Reductions, asked: Sequence[tuple[ClientId, Form]], exchange: Exchange
    ) -> dict[tuple[ClientId, Form], float]:
        """How many times parts are those of a new model; without those that are none of a model."""
        contract, sent, norms = self.method.sent_by(exchange.steps), seen.sent({}), seen.of_tensors()
        found: dict[tuple[ClientId, Form], float] = {}
        for client, form in asked:
            part = next(part for part, _ in sent[client] if part.form == form)
            times = self.yardsticks.times_new(client, part, norms[client], contract)
            if times is not None:
                found[client, form] = times
        return found

    def _unheard(self, sent: Collection[ClientId]) -> int:
        """How many clients have sent nothing yet, so that nobody knows what they would."""
        return sum(
            client not in sent and client not in self.last_norms.values for client in self.server.cards
        )

    def _unlikely_start(self, answer: Answer, exchange: Exchange) -> str:
        """Why the first weights that a client brings are not taken."""
        steps = self.method.steps()
        if any(steps[step].purpose != "setup" for step in exchange.steps) or self.fresh is None:
            return ""
        most = max(self.largest_ratio or 0.0, LARGEST_RATIO)
        for name, declared in self.method.sent_by(exchange.steps).items():
            if declared.like != "model":
                continue
            sent, fresh = answer.up.group(name), self.fresh(answer.client)
            ratio = start_ratio(sent, fresh)
            if shrunk_share(sent, fresh, most) > MOST_SHRUNK:
                return (
                    f"client {answer.client}, {exchange.name}: most of its first weights are below 1/{most:g} "
                    f"of those of a new model {SETTING}"
                )
            if not ratio <= most:
                return (
                    f"client {answer.client}, {exchange.name}: its first weights are {ratio:.3g} times as large as "
                    f"those of a new model, at most {most:g} times are taken {SETTING}"
                )
        return ""

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
