"""The state of a run: taken back, saved and restored as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.core.plain_values import printable
from potluck.core.state import Outline
from potluck.core.tensor_files import shapes
from potluck.engine.multi_gpu import MultiGpuStore
from potluck.engine.rounds import Rounds
from potluck.engine.store.checkpoints import Checkpoint
from potluck.engine.store.client_store import ClientStore
from potluck.signals import held_back

T = TypeVar("T")


class RunState:
    """Everything a round changes: server, clients, whose work was accepted, and who dropped out."""

    def __init__(self, rounds: Rounds, store: ClientStore | MultiGpuStore) -> None:
        self.rounds, self.server, self.store = rounds, rounds.server, store
        self.round = 0  # the last round that is in the logs
        self.failures: dict[ClientId, int] = {}  # in how many rounds a client dropped out
        self.reasons: dict[ClientId, str] = {}  # why it did so the last time

    @contextlib.contextmanager
    def transaction(self, round_: int, cohort: Sequence[ClientId]) -> Iterator[Callable[[], None]]:
        """Take everything back if the block raises before it has set `round` to this round.

        Gives a function that takes back one attempt at the round, so that another can follow.
        """
        before, undo_clients = self.server.snapshot(), self.store.mark(cohort)
        accepted = _entries(self.rounds.accepted, cohort)
        failures, reasons = _entries(self.failures, cohort), _entries(self.reasons, cohort)

        def undo_attempt() -> None:
            self.server.restore(before)
            self.rounds.engine.settle(round_, cohort, ())

        try:
            yield undo_attempt
        except BaseException:
            if self.round < round_:
                with held_back():
                    undo_attempt()
                    undo_clients()  # the round may have been settled before it was stopped
                    _put_back(self.rounds.accepted, accepted)
                    _put_back(self.failures, failures)
                    _put_back(self.reasons, reasons)
            raise

    def count_failures(self, reasons: Mapping[ClientId, str]) -> None:
        """Remember who dropped out of a round, and why."""
        for client, reason in reasons.items():
            self.failures[client] = self.failures.get(client, 0) + 1
            self.reasons[client] = printable(reason)

    def saved(self) -> tuple[State, Mapping[ClientId, Future[Path]], dict[str, Any]]:
        """The server's state, the files of the clients' states, and notes, for a checkpoint."""
        notes = {
            "accepted": dict(self.rounds.accepted),
            "failures": dict(self.failures),
            "reasons": dict(self.reasons),
        }
        return self.server.snapshot(), self.store.save(), notes

    def restore(self, checkpoint: Checkpoint) -> None:
        """Stand where a checkpoint was saved; a `ValueError` if its tensors are not those of this run."""
        self._check(checkpoint)
        device = self.rounds.federation.device
        self.server.restore({name: value.to(device) for name, value in checkpoint.server.items()})
        for client, path in checkpoint.clients.items():
            self.store.put(client, path)
        self.round, self.failures = checkpoint.round, dict(checkpoint.notes["failures"])
        self.reasons = {client: str(reason) for client, reason in checkpoint.notes.get("reasons", {}).items()}
        self.rounds.accepted = dict(checkpoint.notes["accepted"])

    def _check(self, checkpoint: Checkpoint) -> None:
        """Refuse tensors with other names or shapes than server and clients have; of each kind one is built."""
        if (misfit := self.server.outline().misfit(shapes(checkpoint.server_file))) is not None:
            raise ValueError(f"the server's {misfit}")
        clients, outlines = self.rounds.federation.clients, dict[str, Outline]()
        for client, path in checkpoint.clients.items():
            kind = clients.kind(client)
            if kind not in outlines:
                outlines[kind] = clients.build_client(client).outline()
            if (misfit := outlines[kind].misfit(shapes(path))) is not None:
                raise ValueError(f"client {client}'s {misfit}")


def _entries(values: Mapping[ClientId, T], clients: Iterable[ClientId]) -> dict[ClientId, T | None]:
    """The entries of some clients, None where there is none: a round changes no others."""
    return {client: values.get(client) for client in clients}


def _put_back(values: dict[ClientId, T], entries: Mapping[ClientId, T | None]) -> None:
    """Let some clients have the entries they had."""
    for client, value in entries.items():
        if value is None:
            values.pop(client, None)
        else:
            values[client] = value
