"""What a client has answered in its last rounds, as a tree: data and rules, no files.

Every exchange follows another one, or the state the round began with. Its key is a digest of all that led to it:
the key before it, round, number, steps, purpose and downlink. So two requests with the same key are the same
question, whatever attempt or start of the server they come from.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from graphlib import TopologicalSorter
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from potluck.core.message import Message
from potluck.engine.protocol import Examination, Request, Stamp

START = ""  # the key of the client's initial state
BASES = 3  # accepted rounds whose states are kept: so far a server may go back
COUNTED = 64  # rounds that no server has accepted, of which attempts are counted
NAMES = ("done", "line", "at", "tried", "forgotten")  # of a history, as every version wrote it
REFUSED = 64  # questions that were refused and are remembered
AHEAD = 2 * BASES  # rounds whose answers are kept, from the open one on; a server goes back over fewer


@dataclass
class Exchanged:
    """One answered exchange: where it stands in the tree, what was counted, and the files that hold the rest."""

    round: int
    exchange: int
    before: str
    attempt: int  # as counted here: the first has 1
    state: str
    answer: str
    counters: dict[str, int]
    sent: int  # bytes that have left in this attempt, this answer included
    continued: bool = False  # whether an exchange of this attempt has followed
    steps: list[str] = field(default_factory=list)  # that it did


@dataclass(frozen=True)
class Refused:
    """A question that was not answered, and the attempt that it was counted as."""

    round: int
    attempt: int


@dataclass(frozen=True)
class Place:
    """Where the client stands: its last exchange, and the server's numbers of that attempt."""

    key: str
    attempt: int
    incarnation: int


@dataclass
class History:
    """The exchanges that are kept, the accepted ones among them, and where the client stands.

    `line` has the keys of the last accepted rounds, oldest first. `tried` counts for every round that may still
    be asked for how many attempts have left the client; `forgotten` is the newest round whose count is gone.
    `refused` are questions of the open round that were not answered: each is one attempt, however often it comes.
    """

    done: dict[str, Exchanged] = field(default_factory=dict)
    line: list[str] = field(default_factory=lambda: [START])
    at: Place | None = None
    tried: dict[int, int] = field(default_factory=dict)
    forgotten: int = 0
    refused: dict[str, Refused] = field(default_factory=dict)

    @property
    def now(self) -> Exchanged | None:
        """The exchange the client stands at in a round that is open."""
        return self.done[self.at.key] if self.at is not None else None

    def round_of(self, key: str) -> int:
        """The round at whose end a state was kept."""
        return self.done[key].round if key != START else 0

    @property
    def rounds(self) -> list[int]:
        """The rounds from which the client can go on, oldest first."""
        return [self.round_of(key) for key in self.line]

    def base(self, accepted: int) -> str:
        """The key of the state at the end of an accepted round."""
        return self.line[self.rounds.index(accepted)]

    def settle(self, accepted: int) -> None:
        """Take the open round into the line if the server accepted it, or go back to the round it accepted."""
        now = self.now
        if now is not None and self.at is not None and now.round == accepted:
            self.line = [*self.line, self.at.key][-BASES:]
        else:
            self.line = self.line[: self.rounds.index(accepted) + 1]
        self.at = None

    def path(self, key: str) -> Iterator[tuple[str, Exchanged]]:
        """An exchange and those before it in the same round, newest first."""
        round_ = self.round_of(key)
        while key in self.done and self.done[key].round == round_:
            yield key, self.done[key]
            key = self.done[key].before

    def attempt_after(
        self, key: str, round_: int, steps: Sequence[str] = (), repeats: Mapping[str, int] | None = None
    ) -> int:
        """The number of the attempt that a new exchange after this one belongs to.

        It is that of the exchange before it, unless another one went on from there, or a step would be done more
        often than the method does it in a round (`repeats`; once where nothing is said).
        """
        before = self.done.get(key)
        if before is not None and before.round == round_ and not before.continued:
            done = Counter(
                step for _, one in self.path(key) if one.attempt == before.attempt for step in one.steps
            )
            if all(done[step] < (repeats or {}).get(step, 1) for step in steps):
                return before.attempt
        return self.tried.get(round_, 0) + 1

    def sent_before(self, key: str, round_: int) -> int:
        """The bytes that have left in the round up to an exchange."""
        before = self.done.get(key)
        return before.sent if before is not None and before.round == round_ else 0

    def add(self, key: str, done: Exchanged) -> None:
        """Add an exchange that was answered."""
        self.done[key] = done
        self._count(done.before, done.round, done.attempt)

    def refuse(self, key: str, before: str, refused: Refused) -> None:
        """Count a question that was not answered; a further one after the same exchange is of another attempt."""
        self.refused[key] = refused
        self._count(before, refused.round, refused.attempt)

    def _count(self, before: str, round_: int, attempt: int) -> None:
        if before in self.done and self.done[before].round == round_:
            self.done[before].continued = True
        self.tried[round_] = max(attempt, self.tried.get(round_, 0))

    def prune(self) -> None:
        """Forget what no server can ask for again: other attempts at rounds that are over, and old rounds."""
        oldest = self.round_of(self.line[0])
        kept = {key for tip in self.line[1:] for key, _ in self.path(tip)} | {self.line[0]}
        open_ = self.now.round if self.now is not None else self.rounds[-1] + 1
        ahead = sorted({one.round for one in self.done.values() if one.round >= open_})[:AHEAD]
        self.done = {key: one for key, one in self.done.items() if key in kept or one.round in ahead}
        self.tried = {round_: number for round_, number in self.tried.items() if round_ > oldest}
        self.refused = {key: one for key, one in self.refused.items() if one.round >= open_}
        for key in [*self.refused][:-REFUSED]:
            del self.refused[key]
        while len(self.tried) > COUNTED:
            self.forgotten = max(self.forgotten, min(self.tried))
            del self.tried[min(self.tried)]

    def to_json(self) -> dict[str, Any]:
        """The history as JSON."""
        return {
            "done": {key: asdict(one) for key, one in self.done.items()},
            "line": self.line,
            "at": asdict(self.at) if self.at is not None else None,
            "tried": {str(round_): number for round_, number in self.tried.items()},
            "forgotten": self.forgotten,
            "refused": {key: asdict(one) for key, one in self.refused.items()},
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> History:
        """The history that `to_json` wrote; a `KeyError` or a `ValueError` if it is none."""
        told = {name: values[name] for name in NAMES} | {"refused": values.get("refused", {})}
        try:
            found = _HISTORY.validate_python(told)
        except ValidationError as error:
            raise ValueError(f"see its {'.'.join(map(str, error.errors()[0]['loc']))!r}") from error
        keys = [key for key in found.line if key != START] + ([found.at.key] if found.at is not None else [])
        if not found.line or any(key not in found.done for key in keys):
            raise ValueError("it names an exchange that it does not have")
        TopologicalSorter({key: [one.before] for key, one in found.done.items()}).prepare()  # refuses circles
        return found


_HISTORY = TypeAdapter(History)


def key_of(before: str, request: Request) -> str:
    """The key of a request that comes after an exchange."""
    stamp = request.stamp
    told = [before, stamp.round, stamp.exchange, request.steps, request.purpose]
    digest = hashlib.sha256(json.dumps(told).encode())
    _add_message(digest, request.down)
    return digest.hexdigest()


def question_of(state: str, examination: Examination) -> str:
    """The key of an examination of a state: what is measured, and with which downlink."""
    told = [state, examination.modes, examination.on, examination.metrics]
    digest = hashlib.sha256(json.dumps(told).encode())
    _add_message(digest, examination.down or Message())
    return digest.hexdigest()


def order_of(stamp: Stamp, place: Place, round_: int) -> int:
    """-1, 0 or 1: a request belongs to an earlier attempt than the one at a place, to the same, to a later one."""
    given = stamp.incarnation, stamp.round, stamp.attempt
    here = place.incarnation, round_, place.attempt
    return (given > here) - (given < here)


def digest_of(message: Message) -> str:
    """A digest of all that a message holds."""
    digest = hashlib.sha256()
    _add_message(digest, message)
    return digest.hexdigest()


def _add_message(digest: Any, message: Message) -> None:
    for name, tensor in message.items():
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
