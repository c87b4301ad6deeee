"""Where a class or function was defined, so that two with one name can be told from one that is loaded twice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def same_home(one: Any, other: Any) -> bool:
    """Whether both were defined in one module or file: a plugin is loaded by its path, but may also be imported."""
    return _module(one) == _module(other) or (_file(one) is not None and _file(one) == _file(other))


def home(thing: Any) -> str:
    """How a sentence names the place: a module of this library, or the user's file or module."""
    file = _file(thing)
    return _module(thing) if file is None or is_ours(thing) else str(file)


def is_ours(thing: Any) -> bool:
    """Whether it was defined in this library."""
    return _module(thing).startswith("potluck.")


def _module(thing: Any) -> str:
    return str(getattr(thing, "__module__", None))


def _file(thing: Any) -> Path | None:
    file = getattr(sys.modules.get(_module(thing)), "__file__", None)
    return Path(file).resolve() if file else None
