"""Where a class or function was defined, so that two with one name can be told from one that is loaded twice."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any


def same_home(one: Any, other: Any) -> bool:
    """Whether both were defined in one module or file: a plugin is loaded by its path, but may also be imported."""
    return module_of(one) == module_of(other) or (_file(one) is not None and _file(one) == _file(other))


def home(thing: Any) -> str:
    """How a sentence names the place: a module of this library, or the user's file or module."""
    file = _file(thing)
    return module_of(thing) if file is None or is_ours(thing) else str(file)


def is_ours(thing: Any) -> bool:
    """Whether it was defined in this library."""
    return module_of(thing).startswith("potluck.")


def module_of(thing: Any) -> str:
    """The name of the module; of a function with some arguments given that of the function."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__module__", None))


def _file(thing: Any) -> Path | None:
    file = getattr(sys.modules.get(module_of(thing)), "__file__", None)
    return Path(file).resolve() if file else None
