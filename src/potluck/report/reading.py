"""Reading what anybody may have written: content that makes no sense is the fault of its file, which is named."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from potluck.errors import ConfigError, PotluckError, RunError, first_line
from potluck.files import opened
from potluck.front_door import about_call, own_place

P = ParamSpec("P")
R = TypeVar("R")
REMEDY = "copy the folder again, or run the experiment again"
# What Python, numpy, pandas, torch and pyarrow raise at content they cannot make sense of.
FAULTS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    OSError,
    RuntimeError,
    pa.ArrowException,
)
LONGEST = 1 << 20  # bytes of a line in a log
MOST_BRACKETS = 500  # in a line of a log: what is nested far deeper ends the process that parses it
MOST_CELLS = 1 << 27  # of a table out of a log: a gigabyte of numbers
FEW_FIELDS = 100  # with which a log may have any number of lines
_SHOWN = 200  # characters of what was raised


@contextlib.contextmanager
def reading(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Around whatever interprets the content of a file: if that fails, the file is said to be damaged.

    Errors of this library, and those that come out of code of the user's, stay as they are.
    """
    try:
        yield
    except FAULTS as error:
        if isinstance(error, PotluckError) or own_place(error.__traceback__) is not None:
            raise
        if isinstance(error, PermissionError):
            raise RunError(f"{path} cannot be read: {error.strerror or error}; check its rights") from error
        said = f"{type(error).__name__}: {first_line(error)}"[:_SHOWN]
        raise RunError(f"{path} is damaged, or was not written by potluck ({said}); {remedy}") from error


def shown_from(name: str) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """A method that shows what is in a file of its object's `folder`, read as in `reading`."""

    def guard(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        signature = inspect.signature(method)

        @wraps(method)
        def show(self: Any, /, *args: P.args, **values: P.kwargs) -> R:
            try:
                signature.bind(self, *args, **values)
            except TypeError as misfit:  # a fault of the call, not of the file
                raise ConfigError(about_call(method, signature, misfit, values)) from None
            with reading(self.folder / name):
                return method(self, *args, **values)

        return show

    return guard


def log_lines(path: Path) -> Iterator[bytes]:
    """The lines of a log; one that is too long, or may be nested too deeply to be parsed, is refused."""
    with opened(path, os.O_RDONLY) as handle, os.fdopen(os.dup(handle), "rb") as file:
        number = 0
        while line := file.readline(LONGEST + 1):
            number += 1
            if len(line) > MOST_BRACKETS and _is_too_much(line):
                raise RunError(
                    f"{path}, line {number} is damaged: it is longer or nested more deeply than any line of a log; "
                    f"{REMEDY}"
                )
            yield line


def _is_too_much(line: bytes) -> bool:
    return len(line) > LONGEST or line.count(b"{") + line.count(b"[") > MOST_BRACKETS


def fields_in(lines: Iterable[bytes]) -> set[tuple[str, ...]]:
    """Every field that some line of a log has, with those around it; lines that are no JSON have none."""
    found: set[tuple[str, ...]] = set()
    for line in lines:
        with contextlib.suppress(ValueError):
            found.update(_fields(json.loads(line), ()))
    return found


def _fields(value: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*above, name)
            yield from _fields(inner, (*above, name))
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, above)


def check_width(fields: Collection[Any], lines: int, size: int) -> None:
    """Raise a `ValueError` for so many fields that a table of all lines would take far more memory than the log.

    `size` is that of the log in bytes. Where all lines have all fields, a cell of the table has several of them.
    """
    if len(fields) > FEW_FIELDS and len(fields) * lines > max(MOST_CELLS, size):
        raise ValueError(f"its {lines:,} lines have {len(fields):,} different fields")
