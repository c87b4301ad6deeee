"""Code of one's own: plugin files and modules, and functions named in an experiment file."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError

_PREFIX = "potluck_plugin:"  # before the path of a file in the table of modules


def load_plugin(name: str, folder: Path) -> None:
    """Import a module by name, or a file by its path, so that what it registers can be used."""
    try:
        if name.endswith(".py"):
            _import_file(folder / name)
        else:
            importlib.import_module(name)
    except Exception as error:
        raise ConfigError(f"plugins: {name} cannot be loaded: {type(error).__name__}: {error}") from error


def _import_file(file: Path) -> None:
    """Run a Python file once in this process, as a module of its own."""
    key = f"{_PREFIX}{file.resolve()}"
    if key in sys.modules:
        return
    module = types.ModuleType(key)
    module.__file__ = str(file)
    code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
    sys.modules[key] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[key]
        raise


def load_function(name: str) -> Callable[..., Any]:
    """The function behind `file.py:function` or `module:function`."""
    home, _, _ = name.rpartition(":")
    if not home.endswith(".py"):
        return find_function(name)
    try:
        _import_file(Path(home))
    except Exception as error:
        raise ConfigError(f"{home} cannot be loaded: {type(error).__name__}: {error}") from error
    key = name.removeprefix(f"{home}:")
    function = getattr(sys.modules[f"{_PREFIX}{Path(home).resolve()}"], key, None)
    if not callable(function):
        raise ConfigError(f"{name!r}: there is no function {key!r} in {home}")
    found: Callable[..., Any] = function
    return found


def find_function(name: str) -> Callable[..., Any]:
    """The function behind `module:function`; a plugin file goes by its name without `.py`."""
    home, colon, key = name.partition(":")
    if not colon or not home or not key:
        raise ConfigError(f"{name!r} names no function; write module:function")
    function = getattr(_module(home), key, None)
    if not callable(function):
        raise ConfigError(f"{name!r}: there is no function {key!r} in {home}")
    found: Callable[..., Any] = function
    return found


def _module(name: str) -> types.ModuleType:
    files = [key for key in sys.modules if key.startswith(_PREFIX) and Path(key).stem == name]
    if files:
        return sys.modules[files[-1]]
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be imported ({type(error).__name__}: {error}); name its file under plugins"
        ) from error
