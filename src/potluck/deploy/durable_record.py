"""A client's record on its own disk, so that a killed worker goes on where it was when it starts again.

One manifest file names the files that hold the record, so that it changes atomically. It is written after an
exchange and before the reply leaves: what the server has seen can be repeated, and what it has not seen can be
undone. The states of the last accepted rounds are kept, and all answers that led from one to the next: a server
that goes back gets the same bytes for the same questions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from potluck.core.packed import State
from potluck.core.state import Outline
from potluck.core.tensor_files import shapes
from potluck.deploy.bounds import MOST_EXCHANGES
from potluck.deploy.exchanges import START, Exchanged, History, Place, Refused, key_of, order_of
from potluck.deploy.record_files import RecordFiles
from potluck.deploy.wire import pack_reply, unpack_reply
from potluck.engine.protocol import Answer, Request, Stamp
from potluck.engine.transactions import Done, Record
from potluck.errors import RunError, StepFailed

MANIFEST = "record.json"
ONE_SERVER = "let one server alone play a run, and end the others"


class DurableRecord(Record):
    """The record of one client in one run, in a folder of its own.

    A server may start again and go back to one of the last accepted rounds. One that goes on from any other round
    is refused: either the server's folder or the client's was restored from an older copy. `repeats` says how often
    a step is done in one attempt at a round, where that is not once.

    What counts is what the disk has. Where a change could not be written, on a full disk for one, nobody knows how
    much of it is there: the record is read again, and written once more, before anything else is done.
    """

    def __init__(self, folder: Path, repeats: Mapping[str, int] | None = None) -> None:
        self.folder, self._files, self.repeats = folder, RecordFiles(folder, MANIFEST), repeats
        self.incarnation = 0
        self.history = History()
        self._next = ("", START)  # of the exchange under way: its key, and the key of the one before it
        self._steps: tuple[str, ...] = ()  # that it does
        self._held: dict[str, State] = {}  # states by their keys, as far as they are in memory
        self._reasons: dict[str, str] = {}  # why questions were refused
        self._sure = self._begun = False  # whether this is what the disk has, and whether there is a manifest
        self._read()

    # --- what the transaction runner needs ---

    @property
    def begun(self) -> bool:
        """Whether the client has done an exchange of the round that is open."""
        return self.history.at is not None

    def open(self, request: Request) -> Answer | None:
        """Prepare for an exchange; returns the stored answer if this very question was answered before.

        A question that was refused is refused again, in the same words and without any work, while this process
        lives: a new one may have other code.
        """
        self._make_sure()
        stamp, history = request.stamp, self.history
        self._check(stamp)
        late = history.at is not None and self._order(stamp) < 0
        if history.at is None or self._order(stamp) > 0:
            history.settle(stamp.accepted)
        self.incarnation = max(self.incarnation, stamp.incarnation)
        before = history.line[-1] if late else self._before(stamp)
        key = key_of(before, request)
        if key in history.done:
            if not late and (history.now is None or stamp.exchange > history.now.exchange):
                self._stand(key, stamp)
            return self._answer(key)
        self._refuse_disorder(stamp, late)
        if key in history.refused and key in self._reasons:
            raise StepFailed(self._reasons[key])
        self._next, self._steps = (key, before), request.steps
        return None

    def start(self) -> tuple[State | None, dict[str, int]]:
        """The state an exchange begins with, and what the round counted so far."""
        now = self.history.now
        return self._state(self._next[1]), dict(now.counters) if now is not None else {}

    def store(self, request: Request, done: Done) -> None:
        """Store an exchange; it is on disk when this returns. One that finds no room there counts as refused."""
        try:
            self._store(request, done)
        except Exception:
            with contextlib.suppress(RunError):  # the first error says why
                self._make_sure()
                if self._next[0] not in self.history.done:
                    self.refuse(request.stamp.round, None)
            raise

    def _store(self, request: Request, done: Done) -> None:
        assert done.state is not None
        if not self._begun:
            self._keep()  # the manifest comes before all other files
        (key, before), round_ = self._next, request.stamp.round
        sent = self.history.sent_before(before, round_) + (done.answer.up.nbytes if done.answer.up else 0)
        exchanged = Exchanged(
            round_,
            request.stamp.exchange,
            before,
            self.attempt(round_),
            self._files.write_state(done.state),
            self._files.write_answer(pack_reply(done.answer)),
            dict(done.counters),
            sent,
            steps=[*request.steps],
        )
        with self._changed():
            self.history.add(key, exchanged)
            self._held[key] = done.state
            self._stand_at(key, request.stamp)

    def current(self, stamp: Stamp) -> State | None:
        """The state to examine: the work of this round while it is open or accepted, otherwise the base."""
        self._make_sure()
        self._check(stamp)
        return self._state(self.examined(stamp))

    def examined(self, stamp: Stamp) -> str:
        """The key of the state to examine."""
        now, at = self.history.now, self.history.at
        if now is not None and at is not None:
            open_ = self._order(stamp) == 0 and not stamp.settled
            if stamp.accepted == now.round or open_:
                return at.key
        return self.history.base(stamp.accepted)

    # --- what is counted ---

    @property
    def question(self) -> str:
        """The key of the exchange under way; private noise is drawn from it, too.

        A home that was restored from an older copy does not know which attempts have left since.
        """
        return self._next[0]

    def attempt(self, round_: int) -> int:
        """The number of the attempt at a round that the exchange under way belongs to, as counted here.

        The server's own number need not be true. No two messages of one step in a round have the same number and
        follow the same exchange: private noise is drawn from it. The same question is the same attempt.
        """
        refused = self.history.refused.get(self._next[0])
        if refused is not None:
            return refused.attempt
        return self.history.attempt_after(self._next[1], round_, self._steps, self.repeats)

    def refuse(self, round_: int, reason: str | None) -> None:
        """Count the exchange under way, which is not answered; with a reason it would not be if asked again."""
        key, before = self._next
        with self._changed():
            self.history.refuse(key, before, Refused(round_, self.attempt(round_)))
        self._reasons = {key: self._reasons[key] for key in self.history.refused if key in self._reasons}
        if reason is not None:
            self._reasons[key] = reason

    def sent(self, round_: int) -> int:
        """The bytes that have left in this attempt at a round, before the exchange under way."""
        return self.history.sent_before(self._next[1], round_)

    @property
    def round(self) -> int:
        """The newest round the client has answered in, or that was accepted."""
        now = self.history.now
        return now.round if now is not None else self.history.rounds[-1]

    # --- checks ---

    def _check(self, stamp: Stamp) -> None:
        """Refuse an earlier start of the server, and a server that goes on from a round there is no state of."""
        if stamp.incarnation < self.incarnation:
            raise StepFailed(
                f"start {stamp.incarnation} of the server is still sending, start {self.incarnation} is the "
                "newest; end the older one"
            )
        rounds, newest = self.history.rounds, self.round
        if stamp.accepted in (newest, rounds[-1]):
            return
        if stamp.accepted > rounds[-1]:
            raise StepFailed(
                f"the server goes on from round {stamp.accepted} of this client, whose newest state here is of "
                f"round {newest}: its folder is older than the run; bring it back, or start a new run"
            )
        if stamp.accepted not in rounds:
            raise StepFailed(
                f"the server goes on from round {stamp.accepted} of this client, which is past round {rounds[-1]} "
                f"and can go back to {_listed(rounds[:-1])} only: the run's folder is older than its clients; "
                "start a new run"
            )
        if stamp.incarnation == self.incarnation:
            raise StepFailed(
                f"the server goes on from round {stamp.accepted} of this client, which is past round {rounds[-1]}, "
                "without having been started again; end it, and go on with potluck resume"
            )

    def _order(self, stamp: Stamp) -> int:
        now, at = self.history.now, self.history.at
        assert now is not None
        assert at is not None
        return order_of(stamp, at, now.round)

    def _before(self, stamp: Stamp) -> str:
        """The key of the exchange, or of the base, that this exchange follows."""
        if self.history.at is None:
            return self.history.line[-1]
        for key, done in self.history.path(self.history.at.key):
            if done.exchange < stamp.exchange:
                return key
            before = done.before
        return before

    def _refuse_disorder(self, stamp: Stamp, late: bool) -> None:
        """Refuse a new question that comes after later ones."""
        history, now = self.history, self.history.now
        last = history.rounds[-1] if now is None else now.round
        if stamp.round <= history.rounds[-1] or (now is not None and stamp.round < now.round):
            raise StepFailed(f"round {stamp.round} came after round {last}; {ONE_SERVER}")
        if stamp.round <= history.forgotten and stamp.round not in history.tried:
            raise StepFailed(f"round {stamp.round} came after round {max(history.tried)}; {ONE_SERVER}")
        if late or (now is not None and stamp.exchange < now.exchange):
            what = f"attempt {stamp.attempt} at" if late else f"exchange {stamp.exchange} of"
            assert now is not None
            raise StepFailed(
                f"{what} round {stamp.round} came after exchange {now.exchange}, with another content; "
                f"{ONE_SERVER}"
            )
        if now is not None and stamp.exchange == now.exchange:
            raise StepFailed(
                f"exchange {stamp.exchange} of round {stamp.round} came again, with another content; {ONE_SERVER}"
            )
        if self.history.at is not None and len([*history.path(self.history.at.key)]) >= MOST_EXCHANGES:
            raise StepFailed(
                f"round {stamp.round} has more than {MOST_EXCHANGES} exchanges with one client; "
                "use a method that asks less often"
            )

    # --- files ---

    def misfit(self, outline: Outline) -> str | None:
        """Why a state that is kept is none of a model with this outline, None if all may be.

        Only heads of files are read. What is damaged is found by its checksum when it is needed.
        """
        for name in {one.state for one in self.history.done.values()}:
            with contextlib.suppress(OSError, ValueError):
                if (why := outline.misfit(shapes(self.folder / name))) is not None:
                    return why
        return None

    def _stand(self, key: str, stamp: Stamp) -> None:
        """Stand at an exchange, on disk too: a worker that starts again must know what the next one follows."""
        with self._changed():
            self._stand_at(key, stamp)

    def _stand_at(self, key: str, stamp: Stamp) -> None:
        self.history.at = Place(key, stamp.attempt, stamp.incarnation)
        self._held = {one: self._held[one] for one in (key, *self.history.line) if one in self._held}

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """Change the record; it is on disk afterwards. Files that it no longer names are removed then."""
        self._sure = False
        yield
        self._keep()
        self._sure = True
        self._files.clean(self._named)

    def _keep(self) -> None:
        self.history.prune()
        self._files.write_manifest({"incarnation": self.incarnation, **self.history.to_json()})
        self._begun = True

    def _make_sure(self) -> None:
        """Read the record again where the last change failed, and write it: what is there may not be safe yet."""
        if not self._sure:
            self._read()
            self._sure = False
            self._keep()
            self._sure = True

    def _read(self) -> None:
        """Take the record up as the disk has it."""
        self.history, self._held = History(), {}
        values = self._files.read_manifest()
        self._begun = values is not None
        if values is not None:
            self._load(values)
        self._files.count_from(self._named)
        self._files.clean(self._named)
        self._sure = True

    @property
    def _named(self) -> set[str]:
        return {name for one in self.history.done.values() for name in (one.state, one.answer)}

    def _state(self, key: str) -> State | None:
        if key != START and key not in self._held:
            self._held[key] = self._files.read_state(self.history.done[key].state)
        return self._held.get(key)

    def _answer(self, key: str) -> Answer:
        name = self.history.done[key].answer
        answer = unpack_reply(self._files.read(name))
        if not isinstance(answer, Answer):
            raise RunError(f"there is no answer in {self.folder / name}; bring the folder back from a copy")
        return answer

    def _load(self, values: Mapping[str, object]) -> None:
        try:
            self.history = History.from_json(dict(values))
            self.incarnation = max(self.incarnation, int(str(values["incarnation"])))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"the record in {self.folder} cannot be read ({error}); bring the folder back from a copy"
            ) from error


def _listed(rounds: list[int]) -> str:
    return " or ".join(f"round {one}" for one in rounds) if rounds else "no other"
