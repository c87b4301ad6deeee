"""The live client of one run at a site."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.card_fields import own_card
from potluck.core.client import Client
from potluck.core.message import Message
from potluck.core.method import Method, MethodConfig
from potluck.core.own_metrics import OwnMetrics
from potluck.core.packed import State
from potluck.core.values import excess, said_of
from potluck.deploy.agreement import (
    ATTEMPTS,
    EVALUATIONS,
    Agreement,
    certain_message,
    refuse_attempt,
    refuse_evaluation,
)
from potluck.deploy.bounds import check_repeats
from potluck.deploy.durable_record import DurableRecord
from potluck.deploy.evaluations import Evaluations
from potluck.deploy.exchanges import question_of
from potluck.deploy.wire import SAME_VERSION, Enrolment, most_bytes
from potluck.engine.norms import start_ratio
from potluck.engine.performer import Performer
from potluck.engine.protocol import Answer, Examination, Request
from potluck.engine.runner import TransactionRunner
from potluck.engine.yardsticks import RUNNING
from potluck.errors import MessageError, ModelError, StepFailed
from potluck.federation.federation import Federation

MOST_GROWN = 10.0  # times its first weights may be what a client has, when it is asked for first weights


class Agreed(Protocol):
    """What a site agrees to; see `potluck.deploy.agreement`. Each method raises a `PotluckError` to refuse."""

    def admit_options(self, method: str, config: MethodConfig | Mapping[str, Any]) -> None:
        """Refuse a method or one of its options."""

    def admit(self, method: Method, client: Client) -> None:
        """Refuse what a method would do with this client."""

    def let_measure(self, metrics: Sequence[str]) -> None:
        """Refuse a metric."""

    def let_join(self, joined: int) -> None:
        """Refuse a further run."""

    def let_play(self, rounds: int) -> None:
        """Refuse a run of so many rounds."""

    def let_examine(self, round_: int, asked: int) -> None:
        """Refuse a further evaluation in a round."""

    def let_in(self, steps: tuple[str, ...], message: Message) -> None:
        """Refuse a request."""

    def let_try(self, round_: int, attempt: int) -> None:
        """Refuse a further attempt at a round."""

    def let_out(self, steps: tuple[str, ...], round_: int, message: Message, spent: int = 0) -> int:
        """Refuse a reply, or return the bytes that have left in this attempt at the round so far."""


def load_agreement(path: Path) -> Agreed:
    """Load the agreement in a file."""
    return Agreement.load(path)


class GuardedPerformer(Performer):
    """Does only what the site agreed to, and only on messages whose numbers are finite.

    `fresh` draws other private noise for every question and attempt; `initial` is the state the client began with.
    """

    def __init__(
        self,
        method: Method,
        record: DurableRecord,
        agreement: Agreed | None,
        initial: State,
        fresh: bool = True,
        metrics: OwnMetrics | None = None,
        rounds: int | None = None,
    ) -> None:
        super().__init__(method, metrics)
        self.initial = initial
        self.evaluations, self.rounds = Evaluations(record.folder), rounds
        self.record, self.agreement, self.fresh = record, agreement, fresh

    def perform(self, client: Client, request: Request, first: bool) -> Answer:
        """Refuse what was not agreed to, before the client is touched and before anything leaves."""
        round_ = request.stamp.round
        unknown = next((step for step in request.steps if step not in self.method.steps()), None)
        if unknown is not None or not request.steps:
            raise StepFailed(f"{self.method.name} has no step {unknown!r}; {SAME_VERSION}")
        self._refuse_repeats(request.steps)
        self._refuse_round(round_, 1, 0)
        attempt = self.record.attempt(round_)
        self._let_try(round_, attempt)
        self._let_in(client, request.steps, request.down)
        with self._counted(round_):
            self._let_out(request.steps, round_, self._certain(client, request.steps))
            client.attempt, client.question = (attempt, self.record.question) if self.fresh else (1, "")
            self._begin_anew(client, request.steps)
            answer = super().perform(client, request, first)
            if answer.up.not_finite() is not None:  # which tensor is the site's own affair
                raise StepFailed("what would leave is not finite; lower training.optimizer.lr")
            self._refuse_spoiled(client)
            self._let_out(request.steps, round_, answer.up)
        return answer

    def _refuse_repeats(self, steps: tuple[str, ...]) -> None:
        """Refuse an order that does a step more often than the method does in a round; attempts count by that."""
        repeats = self.record.repeats or {}
        for step in steps:
            asked, most = steps.count(step), repeats.get(step, 1)
            if asked > most:
                usual = "once" if most == 1 else f"{most} times"
                raise StepFailed(
                    f"an order does {step!r} {asked} times, and {self.method.name} does it {usual} in a round; "
                    f"{SAME_VERSION}"
                )

    def _begin_anew(self, client: Client, steps: tuple[str, ...]) -> None:
        """Asked for first weights, go back to those it began with where its own have grown beyond all measure.

        A server asks a client that has played before only if nobody could train on with what it had. A server that
        lies can make grow what it sends down, so a private model goes back only if it has grown itself.
        """
        if self.method.steps()[steps[0]].purpose != "setup":
            return
        now = client.tensors()
        parts = [str(declared.like) for declared in self.method.sent_by(steps).values()]
        sent = {name for name in now if any(_is_within(name, part) for part in parts)}
        if self._has_grown(now, sent):
            private = [{*names} - sent for names in _by_module(client).values()]
            stay = [name for names in private if not self._has_grown(now, names) for name in names]
            client.restore({**self.initial, **{name: now[name].clone() for name in stay}})

    def _has_grown(self, now: State, names: Collection[str]) -> bool:
        """Whether these tensors are far larger than at the start, or not finite."""
        return not start_ratio(_weights(now, names), _weights(self.initial, names)) <= MOST_GROWN

    def _refuse_spoiled(self, client: Client) -> None:
        """Refuse what made a model that stays at the site not finite, so that the state before it is kept."""
        found = {name: value for names in _by_module(client).values() for name, value in names.items()}
        spoiled = [name for name, value in found.items() if not _is_finite(value)]
        before = (self.record.start()[0] or self.initial) if spoiled else {}
        if any(_is_finite(before[name]) for name in spoiled):
            raise StepFailed("what was trained is not finite; lower training.optimizer.lr")

    def examine(self, client: Client, examination: Examination) -> Answer:
        """Measure the client, if the metrics and the downlink are agreed to and it is finite."""
        if examination.predictions:
            raise StepFailed(
                "predictions are asked for, which stay at a site; leave evaluate.predictions out"
            )
        if not examination.modes:
            raise StepFailed("an evaluation came that names no mode; name one in evaluate.modes")
        mode = next((mode for mode in examination.modes if mode not in self.method.modes), None)
        if mode is not None or examination.on not in ("own", "global"):
            raise StepFailed(
                f"{self.method.name} has no mode {mode!r}; name one of {', '.join(self.method.modes)}"
                if mode is not None
                else f"there are no samples {examination.on!r} to measure on; measure on own or global"
            )
        if self.agreement is not None:
            self.agreement.let_measure(examination.metrics)
        self._let_in(client, ("evaluate",), examination.down)
        self._let_examine(examination)
        return super().examine(client, examination)

    def _let_examine(self, examination: Examination) -> None:
        """Refuse an evaluation too many, or of a round that the run does not have; others are counted on disk."""
        round_ = examination.stamp.round
        if self.agreement is None and not self.fresh:
            return
        self._refuse_round(round_, 0, 1)
        question = question_of(self.record.examined(examination.stamp), examination)
        asked = self.evaluations.number(round_, question)
        if self.agreement is not None:
            self.agreement.let_examine(round_, asked)
        else:
            refuse_evaluation(round_, asked, EVALUATIONS)
        self.evaluations.note(round_, question)

    def _refuse_round(self, round_: int, first: int, further: int) -> None:
        """Refuse a round that the run does not have, as it was told when the site joined."""
        if self.rounds is not None and not first <= round_ <= self.rounds + further:
            raise StepFailed(
                f"round {round_} is asked about, the run has {self.rounds}; start a new run for more rounds"
            )

    def _let_try(self, round_: int, attempt: int) -> None:
        """Refuse one attempt too many; without an agreement as many are allowed as one proposes."""
        if self.agreement is not None:
            self.agreement.let_try(round_, attempt)
        elif self.fresh:
            refuse_attempt(round_, attempt, ATTEMPTS)

    def _certain(self, client: Client, steps: tuple[str, ...]) -> Message:
        """What will leave for certain, known before any work: tensors without memory."""
        return certain_message(self.method, client, steps) if self.agreement is not None else Message()

    def _let_out(self, steps: tuple[str, ...], round_: int, up: Message) -> None:
        """Refuse what goes beyond the agreement."""
        if self.agreement is not None:
            self.agreement.let_out(steps, round_, up, self.record.sent(round_))

    @contextmanager
    def _counted(self, round_: int) -> Iterator[None]:
        """Count an attempt of which nothing leaves, too: a site works for nothing only so often.

        Whatever ends it counts, errors of the site's own code too: that one came may tell of the data. The same
        question counts once. A step that failed would fail again; anything else may pass, as a full disk does.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.record.refuse(round_, str(error) if isinstance(error, StepFailed | MessageError) else None)
            raise

    def _let_in(self, client: Client, steps: tuple[str, ...], down: Message | None) -> None:
        """Refuse a downlink: names, types and shapes come first, as not every type can be asked for its values."""
        if self.agreement is not None:
            self.agreement.let_in(steps, down or Message())
        if down is None:
            return
        self._check(client, down, steps[0], "down")
        name = down.not_finite()
        if name is not None:
            raise MessageError(f"tensor {name!r} that came down is not finite; {self.method.remedy}")
        self._let_in_range(client, steps[0], down)

    def _let_in_range(self, client: Client, step: str, down: Message) -> None:
        """Refuse values outside of what the contract declares: counts and class numbers are used as they are."""
        symbols = self.method.symbols(own_card(client, self.method.card_fields))
        for name, declared in self.method.down_contract(step).items():
            beyond = excess(down, {name: declared}, symbols)
            if beyond is not None and not bool(beyond <= 0):
                said = said_of(declared, symbols)
                raise MessageError(
                    f"step {step}, down: tensor {name!r} has other numbers than {said}; {SAME_VERSION}"
                )


def _weights(state: State, names: Collection[str]) -> dict[str, Tensor]:
    """The weights among some tensors of a state, without running statistics: they are as large as samples are."""
    return {
        name: value
        for name, value in state.items()
        if name in names and value.is_floating_point() and not name.endswith(RUNNING)
    }


def _is_within(name: str, part: str) -> bool:
    """Whether a tensor belongs to a part of the state, or to a module in one (`model/head`)."""
    return name == part or name.startswith(f"{part}." if "/" in part else f"{part}/")


def _by_module(client: Client) -> dict[str, dict[str, Tensor]]:
    """The tensors of each part that is a module, by their full names."""
    return {
        name: {f"{name}/{key}": value for key, value in part.tensors().items()}
        for name, part in client.parts.items()
        if part.module is not None
    }


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())


@dataclass(frozen=True)
class SoleSeat:
    """The one live client of a site."""

    live: Client
    initial: State

    def sit(self, client: ClientId, state: State | None) -> Client:
        """The live client, with this state (None: the initial state)."""
        self.live.restore(self.initial if state is None else state)
        return self.live


@dataclass(frozen=True)
class SoleRecord:
    """The one record of a site, where an engine has those of many clients."""

    kept: DurableRecord

    def record(self, client: ClientId) -> DurableRecord:
        """The record."""
        return self.kept

    def peek(self, client: ClientId) -> DurableRecord:
        """The record."""
        return self.kept


class Resident:
    """The live client of one run: it does requests as transactions that outlive the process.

    A round that is started again has the same batches, as the seeds say. With `fresh` it has other private noise:
    whoever has two messages with the same noise can subtract it. `rounds` are those of the run, if they are known:
    nothing is done in others.
    """

    def __init__(
        self,
        federation: Federation,
        client: ClientId,
        folder: Path,
        agreement: Agreed | None = None,
        fresh: bool = True,
        rounds: int | None = None,
    ) -> None:
        self.federation, self.client = federation, client
        self.record = DurableRecord(folder, _repeats(federation))
        self.live, metrics = federation.clients.build_client(client), federation.clients.metrics
        if (misfit := self.record.misfit(self.live.outline())) is not None:
            raise ModelError(
                f"client {client}: its model is not the one that it began this run with: {misfit}; bring the "
                "earlier model back, or join a new run"
            )
        if agreement is not None:
            agreement.admit(federation.method, self.live)
            agreement.let_measure(tuple(metrics))
        self._seat, self._records = SoleSeat(self.live, self.live.snapshot()), SoleRecord(self.record)
        self.performer = GuardedPerformer(
            federation.method, self.record, agreement, self._seat.initial, fresh, metrics, rounds
        )
        self._runner = TransactionRunner(federation.clients, self.performer)

    def enrolment(self) -> Enrolment:
        """What the client tells when it joins: its card, and the sizes of its splits."""
        return enrolment(self.federation, self.client)

    @property
    def most_bytes(self) -> int:
        """The most bytes an order of this run can have."""
        return most_bytes(self.performer.largest_down(self.live))

    def perform(self, request: Request) -> Answer:
        """Do the steps, unless they were done before; the record is on disk when this returns."""
        return self._runner.serve(request, self._records, self._seat).answer

    def examine(self, examination: Examination) -> Answer:
        """Measure the client as it stands; nothing is kept."""
        return self._runner.serve(examination, self._records, self._seat).answer


def _repeats(federation: Federation) -> dict[str, int]:
    """How often a client is asked for a step in a round, as the method says, where that is not once."""
    repeats = {step: max(both) for step, both in federation.method.repeats(federation.population).items()}
    check_repeats(repeats)
    return repeats


def enrolment(federation: Federation, client: ClientId) -> Enrolment:
    """What a client tells when it joins: its card, and the sizes of its splits."""
    return Enrolment(federation.population.card(client), federation.population.samples(client))
