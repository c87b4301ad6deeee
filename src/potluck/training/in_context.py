"""A context variable with another value for a while."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar, Token
from typing import Generic, TypeVar

T = TypeVar("T")


class InContext(contextlib.AbstractContextManager[None], Generic[T]):
    """Inside, a context variable has this value. An engine enters one for every client, so it must be quick."""

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._before: Token[T] = self._variable.set(self._value)

    def __exit__(self, *error: object) -> None:
        self._variable.reset(self._before)
