"""Classes and functions that an experiment in Python is given: known by their source text, where there is one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from pydantic import BaseModel
from torch import nn

from potluck.experiment.origins import model_names
from potluck.experiment.schema import Experiment
from potluck.front_door import is_installed
from potluck.methods.registry import find_method
from potluck.models.registry import lookup, names
from potluck.plugins import is_plugin_file


def own_sources(experiment: Experiment) -> dict[str, str]:
    """The user's classes and functions by name, each with a hash of its source; also those they use.

    What has no source to be found (a lambda, a class typed at a prompt) and what a plugin defines is left out.
    """
    return sources_of(list(_given(experiment)))


def sources_of(given: Any) -> dict[str, str]:
    """The same of classes, functions and modules alone, in lists and mappings too."""
    texts: dict[str, set[str]] = {}
    for one in _reached(list(_objects(given))):
        text = _source(one)
        if text is not None:
            texts.setdefault(one.__name__, set()).add(text)
    return {name: _hash(found) for name, found in texts.items()}


def _hash(texts: set[str]) -> str:
    return hashlib.sha256("\0".join(sorted(texts)).encode()).hexdigest()


def _given(experiment: Experiment) -> Iterator[Any]:
    """Every class and function that an experiment is given, or that this program registered under a name in it."""
    pools, known = [group.models for group in experiment.groups], set(names())
    yield find_method(experiment.method.name)
    yield from _objects([pools, experiment.method, experiment.metrics])
    yield from (lookup(name).builder for name in model_names(pools) if name in known)


def _objects(value: Any) -> Iterator[Any]:
    if isinstance(value, BaseModel):
        yield from _objects(dict(value))
    elif isinstance(value, Mapping):
        yield from _objects(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _objects(inner)
    elif isinstance(value, functools.partial):
        yield from _objects([value.func, value.args, value.keywords])
    elif isinstance(value, nn.Module):
        yield from {type(part) for part in value.modules()}
    elif inspect.isclass(value) or inspect.isfunction(value):
        yield value


def _reached(waiting: list[Any]) -> list[Any]:
    """What is the user's own among these: their bases, and the classes and functions they name, included."""
    found: dict[int, Any] = {}
    while waiting:
        one = waiting.pop()
        if id(one) not in found and _is_own(one):
            found[id(one)] = one
            waiting += _named(one)
    return list(found.values())


def _is_own(thing: Any) -> bool:
    """Whether a thing is a class or function in a file that is neither this library's nor an installed one's."""
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return False
    try:
        file = Path(inspect.getfile(thing)).resolve()
    except (TypeError, OSError):
        return False
    return not is_installed(file)


def _named(thing: Any) -> list[Any]:
    """The bases of a class, and everything that its functions name in their module."""
    functions = [thing] if inspect.isfunction(thing) else _methods(thing)
    found = [] if inspect.isfunction(thing) else list(thing.__bases__)
    for function in functions:
        found += [
            function.__globals__[name] for name in _words(function.__code__) if name in function.__globals__
        ]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                found.append(cell.cell_contents)
    return found


def _methods(kind: type) -> list[FunctionType]:
    inner = [getattr(value, "__func__", getattr(value, "fget", value)) for value in vars(kind).values()]
    return [inspect.unwrap(one) for one in inner if inspect.isfunction(one)]


def _words(code: CodeType) -> Iterator[str]:
    """All names in a function, those of comprehensions and inner functions included."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _words(inner)


def _source(thing: Any) -> str | None:
    if thing.__name__ == "<lambda>" or is_plugin_file(thing.__module__):
        return None
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        return None
