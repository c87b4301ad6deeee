"""A process that is killed at one of its file operations, or whose disk is full at some of them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch

CHANGES = ("replace", "rename", "unlink", "fsync", "write", "ftruncate", "mkdir", "chmod", "rmdir")


class Killed(BaseException):
    """The process ends here."""


class Kill:
    """Counts what changes files, and ends the process at one of them: by its number, or by the end of a path."""

    def __init__(self, at: int | str | None = None) -> None:
        self.at, self.operations, self.dead = at, 0, False
        self._one_at_a_time = threading.RLock()
        self._patch = pytest.MonkeyPatch()

    def _step(self, paths: tuple[Any, ...]) -> None:
        with self._one_at_a_time:
            self.operations += 1
            named = isinstance(self.at, str) and any(str(path).endswith(self.at) for path in paths)
            self.dead = self.dead or named or self.operations == self.at
            if self.dead:
                raise Killed

    def _watched(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*values: Any, **options: Any) -> Any:
            self._step(values)
            return change(*values, **options)

        return changed

    def _opened(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            self._step(())
        return self._open(path, flags, *rest, **options)

    def __enter__(self) -> Kill:
        self._open = os.open
        self._patch.setattr(os, "open", self._opened)
        for name in CHANGES:
            self._patch.setattr(os, name, self._watched(getattr(os, name)))
        save = safetensors.torch.save_file
        self._patch.setattr(safetensors.torch, "save_file", self._watched(save))
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        self._patch.undo()
        return kind is not None and self.dead


class Full:
    """A disk that is full at some operations that need room: from one on, by its number, or by the end of a path.

    `lasting` is how many fail. With `done` an operation takes place and is told to have failed all the same.
    """

    GROWING = ("replace", "fsync", "mkdir")

    def __init__(self, at: int | str | None, lasting: int = 1, done: bool = False) -> None:
        self.at, self.lasting, self.done, self.operations = at, lasting, done, 0
        self.resting = False  # while a test looks at the files itself
        self._patch = pytest.MonkeyPatch()

    def _fails(self, paths: tuple[Any, ...]) -> bool:
        if self.resting:
            return False
        self.operations += 1
        if isinstance(self.at, str):
            failing = self.lasting > 0 and any(str(path).endswith(self.at) for path in paths)
            self.lasting -= failing
            return failing
        return self.at is not None and self.at <= self.operations < self.at + self.lasting

    def _watched(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*values: Any, **options: Any) -> Any:
            failing = self._fails(values)
            made = change(*values, **options) if self.done or not failing else None
            if failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            return made

        return changed

    def _opened(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and not self.done and self._fails(()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._open(path, flags, *rest, **options)

    def __enter__(self) -> Full:
        self._open = os.open
        self._patch.setattr(os, "open", self._opened)
        for name in self.GROWING:
            self._patch.setattr(os, name, self._watched(getattr(os, name)))
        return self

    def __exit__(self, *rest: object) -> None:
        self._patch.undo()
