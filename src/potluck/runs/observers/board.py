"""The board of a run, kept in its folder: how far it is, what was said, and how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from potluck.core.plain_values import printable
from potluck.errors import RoundFailed, StoppedComplete, first_line
from potluck.live.board import Board
from potluck.live.status_file import kept
from potluck.runs.folder import RunFolder
from potluck.runs.observers.base import Observer, RoundEnd


class BoardNotes(Observer):
    """Writes on the board how far the run is, and what was said last."""

    def __init__(self, board: Board, renew: Callable[[], None] = lambda: None) -> None:
        """`renew` puts the board into the folder at once."""
        self.board, self.renew = board, renew

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """The rounds begin."""
        board = self.board
        board.name, board.method, board.rounds, board.round = name, method, rounds, done
        self._standing()

    def round(self, end: RoundEnd) -> None:
        """Count the round; who dropped out after its answer had come is known only now."""
        self.board.ended(end.round, end.failures)
        self.board.worked(end.client_seconds)
        if end.round == self.board.rounds:
            self._standing()

    def _standing(self) -> None:
        """Rounds are being played, or after the last one models and report are being written."""
        self.board.state = "running" if self.board.round < self.board.rounds else "writing"
        self.renew()

    def advise(self, sentence: str) -> None:
        """Keep it, as everything that is said."""
        self.board.say(sentence)

    def notice(self, sentence: str) -> None:
        """Keep it."""
        self.board.say(sentence)


@contextlib.contextmanager
def lasting(board: Board) -> Iterator[None]:
    """Note how a run ends: by itself, or before its end and why."""
    try:
        yield
    except StoppedComplete:
        board.state = "finished"
        raise
    except BaseException as error:
        by_hand = isinstance(error, KeyboardInterrupt)
        board.state, board.why = "stopped", "by hand" if by_hand else printable(first_line(error))
        for client, reason in error.failures.items() if isinstance(error, RoundFailed) else ():
            board.dropped(client, reason)
        raise
    board.state = "finished"


@contextlib.contextmanager
def on_board(folder: RunFolder, name: str, method: str, rounds: int, fresh: bool) -> Iterator[BoardNotes]:
    """Keep the board of a run on this machine in its folder: at once, or one that goes on when its rounds begin.

    A run that is not resumed after all leaves its folder as it was.
    """
    board = Board(kind="run", name=name, method=method, rounds=rounds, state="starting")
    notes = BoardNotes(board)
    with contextlib.ExitStack() as stack:

        def start() -> None:
            notes.renew = stack.enter_context(kept(folder.path, board.facts))

        notes.renew = start
        if fresh:
            start()
        with lasting(board):
            yield notes
