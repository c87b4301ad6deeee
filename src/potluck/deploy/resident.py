"""The live client of one run at a site."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.message import Message
from potluck.core.method import Method, MethodConfig
from potluck.deploy.agreement import Agreement
from potluck.deploy.durable_record import DurableRecord
from potluck.deploy.wire import (
    Enrolment,
    most_bytes,
)
from potluck.engine.performer import Performer
from potluck.engine.protocol import Answer, Examination, Request
from potluck.engine.transactions import Work
from potluck.errors import (
    MessageError,
    StepFailed,
)
from potluck.federation.federation import Federation


class Agreed(Protocol):
    """What a site agrees to; see `potluck.deploy.agreement`. Each method refuses with a `PotluckError`."""

    def admit_options(self, method: str, config: MethodConfig | Mapping[str, Any]) -> None:
        """Refuse a method or an option."""

    def admit(self, method: Method, client: Client) -> None:
        """Refuse what a method would do with this client."""

    def let_in(self, steps: tuple[str, ...], message: Message) -> None:
        """Refuse a request."""

    def let_out(self, steps: tuple[str, ...], round_: int, message: Message, spent: int = 0) -> int:
        """Refuse a reply, or tell the bytes that have left in this round."""


def load_agreement(path: Path) -> Agreed:
    """The agreement in a file."""
    return Agreement.load(path)


class GuardedPerformer(Performer):
    """Does what the site agreed to, on messages that are sound."""

    def __init__(self, method: Method, record: DurableRecord, agreement: Agreed | None) -> None:
        super().__init__(method)
        self.record, self.agreement = record, agreement

    def perform(self, client: Client, request: Request, first: bool) -> Answer:
        """Refuse what was not agreed to before anything is touched, and before anything leaves."""
        unknown = next((step for step in request.steps if step not in self.method.steps()), None)
        if unknown is not None or not request.steps:
            raise StepFailed(f"{self.method.name} has no step {unknown!r}")
        round_, spent = self.record.spent
        if request.stamp.round < round_:  # else a server could go back and forth, and have limits forgotten
            raise StepFailed(f"round {request.stamp.round} came after round {round_}")
        self._let_in(request.steps, request.down)
        answer = super().perform(client, request, first)
        name = answer.up.not_finite()
        if name is not None:
            raise StepFailed(f"tensor {name!r} would leave and is not finite; lower training.optimizer.lr")
        before = spent if round_ == request.stamp.round else 0
        total = before + answer.up.nbytes
        if self.agreement is not None:
            total = self.agreement.let_out(request.steps, request.stamp.round, answer.up, before)
        self.record.spent = request.stamp.round, total
        return answer

    def examine(self, client: Client, examination: Examination) -> Answer:
        """Measure, on a sound downlink."""
        self._let_in(("evaluate",), examination.down or Message())
        return super().examine(client, examination)

    def _let_in(self, steps: tuple[str, ...], down: Message) -> None:
        if self.agreement is not None:
            self.agreement.let_in(steps, down)
        name = down.not_finite()
        if name is not None:
            raise MessageError(f"tensor {name!r} that came down is not finite")


class Resident:
    """The live client of one run: it does requests as transactions that outlive the process.

    A round that is begun anew has the same batches, as the seeds say, and with `fresh` other private noise: who
    has two messages with the same noise can subtract it.
    """

    def __init__(
        self,
        federation: Federation,
        client: ClientId,
        folder: Path,
        agreement: Agreed | None = None,
        fresh: bool = True,
    ) -> None:
        self.federation, self.client, self.record, self.fresh = (
            federation,
            client,
            DurableRecord(folder),
            fresh,
        )
        self.live = federation.clients.build_client(client)
        if agreement is not None:
            agreement.admit(federation.method, self.live)
        self._initial = self.live.snapshot()
        self.performer = GuardedPerformer(federation.method, self.record, agreement)

    def enrolment(self) -> Enrolment:
        """The card, and the sizes of the splits."""
        return enrolment(self.federation, self.client)

    @property
    def most_bytes(self) -> int:
        """The most bytes an order of this run can rightly have."""
        return most_bytes(self.performer.largest_down(self.live))

    def perform(self, request: Request) -> Answer:
        """Do the steps, unless they were done; the record is on disk when this returns."""
        record, at = self.record, request.stamp
        repeated = record.open(at)
        if repeated is not None:
            return repeated
        state, counters = record.start()
        self.live.restore(self._initial if state is None else state)
        self.federation.clients.enter(self.live, at.round, counters)
        attempt = record.attempt(at.round)
        self.live.attempt = attempt if self.fresh else 1
        answer = self.performer.perform(self.live, request, first=record.work is None)
        record.work = Work(
            at.round,
            at.attempt,
            at.exchange,
            self.live.snapshot(),
            answer,
            self.live.counters,
            at.incarnation,
        )
        return answer

    def examine(self, examination: Examination) -> Answer:
        """Measure the client as it stands; nothing is kept."""
        state = self.record.current(examination.stamp)
        self.live.restore(self._initial if state is None else state)
        self.federation.clients.enter(self.live, examination.stamp.round, {})
        return self.performer.examine(self.live, examination)


def enrolment(federation: Federation, client: ClientId) -> Enrolment:
    """What a client tells when it joins: its card, and the sizes of its splits."""
    return Enrolment(federation.population.card(client), federation.population.samples(client))
