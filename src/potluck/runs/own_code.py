"""The user's own code that an experiment names: known by its content, and run again only if that is safe.

An experiment names code in two ways: a file or a module under `plugins`, and `module:function` as the value of an
option. A run folder can come from anywhere, so nothing here imports what it finds. Classes and functions that are
given from Python are the subject of `own_objects.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from potluck.core.method import Method
from potluck.core.plain_values import shown
from potluck.data import registry as data
from potluck.errors import RunError
from potluck.experiment.export import to_values
from potluck.experiment.origins import homes, is_foreign, model_names
from potluck.experiment.schema import Experiment
from potluck.files import read_bounded
from potluck.methods.registry import find_method
from potluck.models import registry as models
from potluck.plugins import LARGEST_CODE, home_of, imported_beside, module_name
from potluck.runs.own_objects import own_sources
from potluck.runs.started_here import is_sealed, tracker_places

FETCHED = ("weights", "tokenizer")  # options that name a file, or a repository of the hub
NAMED = 10  # files that a sentence names
TRUST = "say --trust (trust=True in Python)"


def own_code(settings: Mapping[str, Any], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """The files and modules that settings name, each with a hash of its content; none is imported.

    `known` is what a run folder says. Earlier versions left out what lies in packages: their hash is taken as well.
    """
    found = {name: file for name in _names(settings) if (file := _file_of(name)) is not None}
    return {name: _hash_as(file, (known or {}).get(name)) for name, file in found.items()}


def check_named_code(folder: Path, settings: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Refuse code that has changed since the run in `folder` began; nothing is imported to find out."""
    _refuse_changed(folder, own_code(settings, known), known)


def check_own_code(folder: Path, experiment: Experiment, known: Mapping[str, str]) -> None:
    """Refuse code of an experiment that has changed since the run in `folder` began, given objects included.

    The experiment is loaded, so it is known what comes from where: a plugin that nothing comes from may change.
    """
    settings = to_values(experiment)
    unused = unused_plugins(experiment)
    named = {name: content for name, content in own_code(settings, known).items() if name not in unused}
    given = {name: content for name, content in own_sources(experiment).items() if name in known}
    _refuse_changed(folder, named | given, known)


def _refuse_changed(folder: Path, code: Mapping[str, str], known: Mapping[str, str]) -> None:
    """It may compute other numbers."""
    for name, content in code.items():
        if known.get(name) != content:
            raise RunError(
                f"{with_imported(name)} is not the code that {folder} was begun with, so the rest would not fit "
                "what is there; restore that code, or start a new run in another folder (--out, in Python out=…)"
            )


def with_imported(name: str) -> str:
    """A file or module for a sentence about its hash, with the files beside it that the hash covers too."""
    file = _file_of(name)
    beside = [os.path.relpath(one, file.parent) for one in imported_beside(file)] if file is not None else []
    further = [f"{len(beside) - NAMED} more files"] if len(beside) > NAMED else []
    return f"{name} (with {', '.join(beside[:NAMED] + further)}, which it imports)" if beside else name


def unused_plugins(experiment: Experiment) -> set[str]:
    """The plugins that neither the method nor any model, data set or function of an experiment comes from.

    None of them if something comes from a module that is no plugin: a plugin may have fetched it from there.
    """
    settings = to_values(experiment)
    plugins = {name: module_name(name) for name in settings["plugins"]}
    method = find_method(experiment.method.name)
    used = {
        *homes(method.name, experiment.groups).values(),
        *(one.__module__ for one in method.__mro__ if one not in (object, Method)),
        *(models.origin(name) for name in model_names(settings["method"])),
        *([] if experiment.public is None else [data.origin(experiment.public.data.name)]),
    }
    if any(is_foreign(home) and home not in plugins.values() for home in used):
        return set()
    named = {home for text in texts_in(settings) if (home := home_of(text)) is not None}
    return {
        name for name, home in plugins.items() if home not in used and not {name, Path(name).stem} & named
    }


def reach(settings: Mapping[str, Any], code: Mapping[str, str]) -> dict[str, str | None]:
    """What settings reach beyond their run folder: code, by what `own_code` said of it, places of trackers, files
    and repositories with weights and tokenizers, and the address of a cluster.
    """
    named = {name: code.get(name) for name in _names(settings)}
    return named | dict.fromkeys(fetched(settings)) | tracker_places(settings) | _address(settings)


def _address(settings: Mapping[str, Any]) -> dict[str, str]:
    """The address of a cluster."""
    engine = settings.get("engine")
    address = engine.get("address") if isinstance(engine, Mapping) else None
    return {"engine.address": address} if isinstance(address, str) else {}


def _without_address(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings without the address of a cluster: host:port reads like module:function, and is no code."""
    if not _address(settings):
        return settings
    return {**settings, "engine": {key: one for key, one in settings["engine"].items() if key != "address"}}


def fetched(settings: Mapping[str, Any]) -> Iterator[str]:
    """The files and repositories of the hub that models and data of settings name.

    An option `weights` of the method itself is none of them: it says how clients are weighted.
    """
    method = settings.get("method")
    options = list(method.values()) if isinstance(method, Mapping) else []
    yield from _under(FETCHED, {**settings, "method": options})


def _under(keys: tuple[str, ...], value: Any) -> Iterator[str]:
    """The texts that stand under some keys, however deep."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        yield from (value[key] for key in keys if isinstance(value.get(key), str))
    for one in inner:
        yield from _under(keys, one)


def is_started_here(settings: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether a run is one that you started here with what settings reach; `about` has its seal."""
    return is_sealed(reach(settings, about.get("code", {})), about.get("seal"))


def check_trusted(
    folder: Path, settings: Mapping[str, Any], about: Mapping[str, Any], remedy: str = TRUST
) -> None:
    """Refuse to run code that a run folder names but that may be somebody else's; `about` has the folder's seal.

    `remedy` is what to do after a look at it.
    """
    files = {name: file for name in _names(settings) if (file := _file_of(name)) is not None}
    others = folder.stat().st_uid != os.getuid()
    for name, file in files.items():
        relative = name.endswith(".py") and not Path(name).is_absolute()  # potluck writes whole paths
        if others or relative or folder.resolve() in file.resolve().parents:
            why = (
                f"another user's run folder names the code {name}"
                if others
                else f"the code {name} comes with the run folder"
            )
            raise RunError(f"{folder}: {why}, and going on would run it; read it first, then {remedy}")
    reached = reach(settings, about.get("code", {}))
    if reached and not is_started_here(settings, about):
        what = ", ".join(reached)
        raise RunError(
            f"{folder}: you did not start this run on this machine as it is now, and going on would use {what}; "
            f"look at that first, then {remedy}"
        )


def _names(settings: Mapping[str, Any]) -> list[str]:
    """Every file or module that settings name, once; a function in a plugin file stands for that file."""
    listed = settings.get("plugins") or []
    if not isinstance(listed, list | tuple):
        raise RunError(
            f"plugins: it must be a list of files and modules, not {shown(listed)}; repair config.yaml"
        )
    plugins = list(map(str, listed))
    files = {Path(name).stem for name in plugins if name.endswith(".py")}
    texts = texts_in(_without_address(settings))
    found = [home for text in texts if (home := home_of(text)) is not None]
    return list(dict.fromkeys([*plugins, *(name for name in found if name not in files)]))


def texts_in(value: Any) -> Iterator[str]:
    """Every text in lists and mappings, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def _file_of(name: str) -> Path | None:
    """The file of a module, found without importing it or its package; None where there is none."""
    if name.endswith(".py"):
        with contextlib.suppress(OSError):  # a name that no file can have
            return Path(name) if Path(name).is_file() else None
        return None
    spec: ModuleSpec | None = None
    places: list[str] | None = None  # of a package; None: where Python looks for modules
    for word in name.split("."):
        # By its last word alone: under the whole name Python would ask for its packages, which are not imported.
        spec = PathFinder.find_spec(word, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _hash_as(file: Path, known: str | None) -> str:
    """A hash of a file and of the files beside it that it imports; the earlier one if that is the `known` one."""
    now = _hash(file)
    if known in (None, now):
        return now
    earlier = (_hash(file, packages, apart=False) for packages in (True, False))
    return next((one for one in earlier if one == known), now)


def _hash(file: Path, packages: bool = True, apart: bool = True) -> str:
    """A hash of a file alone, or of all its files by name; not `apart`: joined without names, as it was before."""
    try:
        files = (file, *imported_beside(file, packages))
        texts = [read_bounded(one, LARGEST_CODE) for one in files]
        if apart and len(files) > 1:
            texts = [
                f"{hashlib.sha256(text).hexdigest()}  {os.path.relpath(one, file.parent)}\n".encode()
                for one, text in zip(files, texts, strict=True)
            ]
        return hashlib.sha256(b"".join(texts)).hexdigest()
    except OSError as error:
        raise RunError(
            f"{file} cannot be read: {error.strerror or error}; check the path and its rights"
        ) from error
