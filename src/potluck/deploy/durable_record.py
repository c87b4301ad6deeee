"""A client's record on its own disk, so that a killed worker goes on where it was when it starts again.

One manifest file names the files that hold the record, so that it changes atomically. It is written after an
exchange and before the reply leaves: what the server has seen can be repeated, and what it has not seen can be
undone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from potluck.core.packed import State
from potluck.deploy.wire import pack_reply, unpack_reply
from potluck.engine.protocol import Answer, Stamp
from potluck.engine.store.state_files import StateFiles, read, sync
from potluck.engine.transactions import Record, Work
from potluck.errors import RunError, StepFailed
from potluck.files import write_whole

MANIFEST = "record.json"


class DurableRecord(Record):
    """The record of one client in one run, in a folder of its own.

    `base` is the state at the end of `round`. A server that continues from a round this client has no state of is
    refused: either the server's folder or the client's was restored from an older copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, StateFiles(folder)
        self.base: State | None = None
        self.round = self.incarnation = 0
        self.spent: tuple[int, int] = (0, 0)  # a round, and the bytes that left in all attempts at it
        self.tried: tuple[int, int] = (0, 0)  # a round, and how often it was started here
        self._base_file = self._work_file = ""
        self._work: Work | None = None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (folder / MANIFEST).exists():
            self._load()
        self._clean()

    @property
    def work(self) -> Work | None:
        """The round the client is in; assigning it returns when it is on disk."""
        return self._work

    @work.setter
    def work(self, work: Work | None) -> None:
        if work is not None:
            self._save(work)
        self._work = work

    def settle(self, accepted: int) -> None:
        """Keep or drop the work. The disk follows with the next exchange: until then this can be repeated."""
        if self._work is not None and self._work.round == accepted:
            self.round, self._base_file = accepted, self._work_file
        super().settle(accepted)

    def open(self, stamp: Stamp) -> Answer | None:
        """Prepare for an exchange, if the server is not older than this client."""
        self._follow(stamp)
        return super().open(stamp)

    def attempt(self, round_: int) -> int:
        """The number of this attempt at a round, counted here because the server's number need not be true."""
        before, number = self.tried
        if self._work is None:
            number = number + 1 if before == round_ else 1
        self.tried = round_, number
        return number

    def current(self, stamp: Stamp) -> State | None:
        """The state to examine, if the server is not older than this client."""
        self._follow(stamp)
        return super().current(stamp)

    def _follow(self, stamp: Stamp) -> None:
        if stamp.incarnation < self.incarnation:
            raise StepFailed(
                f"start {stamp.incarnation} of the server is still sending, start {self.incarnation} is the newest"
            )
        self.incarnation = stamp.incarnation
        newest = self._work.round if self._work is not None else self.round
        if stamp.accepted < self.round:
            raise StepFailed(
                f"the server goes on from round {stamp.accepted} of this client, which is past round {self.round} "
                "and cannot go back: the run's folder is older than its clients; start a new run"
            )
        if stamp.accepted not in (self.round, newest):
            raise StepFailed(
                f"the server goes on from round {stamp.accepted} of this client, whose newest state here is of "
                f"round {newest}: its folder is older than the run; bring it back, or start a new run"
            )

    def _save(self, work: Work) -> None:
        state = self._files.write(work.state)
        sync(state)
        write_whole(self.folder / _answer_of(state.name), pack_reply(work.answer))
        about = {
            "round": work.round,
            "attempt": work.attempt,
            "exchange": work.exchange,
            "incarnation": work.incarnation,
            "counters": work.counters,
            "state": state.name,
        }
        manifest = {
            "base": self._base_file,
            "round": self.round,
            "incarnation": self.incarnation,
            "spent": self.spent,
            "tried": self.tried,
            "work": about,
        }
        write_whole(self.folder / MANIFEST, json.dumps(manifest).encode())
        self._work_file = state.name
        self._clean()

    def _load(self) -> None:
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text())
            self._base_file, self.round = str(manifest["base"]), int(manifest["round"])
            self.incarnation = int(manifest["incarnation"])
            self.spent = int(manifest["spent"][0]), int(manifest["spent"][1])
            self.tried = int(manifest["tried"][0]), int(manifest["tried"][1])
            if self._base_file:
                self.base = read(self.folder / self._base_file)
            self._work = self._loaded_work(manifest["work"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"the record in {self.folder} cannot be read: {error}") from error

    def _loaded_work(self, about: dict[str, Any]) -> Work:
        self._work_file = str(about["state"])
        answer = unpack_reply((self.folder / _answer_of(self._work_file)).read_bytes())
        if not isinstance(answer, Answer):
            raise ValueError(f"there is no answer beside {self._work_file}")
        return Work(
            about["round"],
            about["attempt"],
            about["exchange"],
            read(self.folder / self._work_file),
            answer,
            dict(about["counters"]),
            about["incarnation"],
        )

    def _clean(self) -> None:
        """Remove files that the manifest does not name."""
        named = {MANIFEST, self._base_file, self._work_file, _answer_of(self._work_file)}
        for path in self.folder.iterdir():
            if path.name not in named:
                path.unlink()


def _answer_of(state: str) -> str:
    """The name of the file with the answer that belongs to the file of a state."""
    return f"{state}.answer"
