"""The user's own classes and functions, brought to a run that can only name them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from potluck.core.method import Method
from potluck.errors import ConfigError, ModelError, RunError, nearest
from potluck.experiment.validation import validated
from potluck.methods.registry import find_method
from potluck.models import Entries, Entry, ModelPool
from potluck.models.build import source_name, unpack
from potluck.runs.kept_models.outline import Outline, pool_of

NAMED = re.compile(r"<(.+)>")  # how an outline names a Python object
PLUGINS = "import the file that defines it first, or pass plugins=True"
Plugins = bool | Sequence[str]  # True: all code that a run folder names may run


def method_of(outline: Outline, models: Entries | None, plugins: Plugins = False) -> tuple[Method, ModelPool]:
    """The method of a run and its models; `models` brings the classes that the run can only name."""
    _refuse_functions(outline, plugins)
    given = _by_name_or_key(outline, models)
    named = {name: unpack(entry)[0] for name, entry in given.items()}
    architectures = outline["pool"]["architectures"]
    entries = {key: _entry(key, known, given, named) for key, known in architectures.items()}
    options = _filled(outline["method"], named)
    try:
        found = find_method(options["name"])
    except ConfigError as error:
        raise ConfigError(f"the run's method {options['name']!r} is not known here; {PLUGINS}") from error
    pool = pool_of(outline, entries)
    return found(validated(found.Config, options, "method"), pool), pool


def _refuse_functions(outline: Outline, plugins: Plugins) -> None:
    """Refuse an outline that names functions: validating an option of a method would import them.

    Every text with a colon counts, as any module name and any file can stand before it.
    """
    if plugins is True:
        return
    known = {Path(name).stem if name.endswith(".py") else name for name in plugins or ()}
    for text in _texts([outline["method"], outline["pool"]["architectures"]]):
        if ":" in text and not NAMED.fullmatch(text) and text.partition(":")[0] not in known:
            raise RunError(
                f"the run names the function {text!r}, and code that a folder names runs only if you ask for it; "
                "pass plugins=True"
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _by_name_or_key(outline: Outline, models: Entries | None) -> dict[str, Entry]:
    """What was given, by the name that the run has for it, or by the key of an architecture."""
    if models is None:
        return {}
    if isinstance(models, Mapping) and not {"name", "model"} & set(models):
        return dict(_chosen(outline, str(who), entry) for who, entry in models.items())
    listed = cast("list[Entry]", list(models) if isinstance(models, list | tuple) else [models])
    named = {source_name(unpack(entry)[0]): entry for entry in listed}
    if len(named) == len(listed) and _names(outline) <= named.keys():
        return named
    return _in_order(outline, listed)


def _chosen(outline: Outline, who: str, entry: Entry) -> tuple[str, Entry]:
    """A given model is for a client and those like it, or for all that the run has under a name."""
    if who in outline["clients"]:
        return outline["clients"][who]["architecture"], entry
    known = _names(outline)
    if who not in known:
        raise ConfigError(
            f"models names {who!r}, which is no client and no class of this run; {nearest(who, known)}"
        )
    return who, entry


def _in_order(outline: Outline, listed: Sequence[Entry]) -> dict[str, Entry]:
    """A list as in the experiment: the first mention of each architecture, in order."""
    keys, entries = list(outline["pool"]["architectures"]), list(ModelPool(list(listed)).entries.values())
    if len(entries) != len(keys):
        raise ConfigError(
            f"models has {len(entries)} models, the run has {len(keys)} ({', '.join(keys)}); give the same list "
            "as in the experiment, or name them: models={'Net': Net}"
        )
    return dict(zip(keys, entries, strict=True))


def _names(outline: Outline) -> set[str]:
    """The names of all Python objects in the outline's models and in the method's options."""
    texts = _texts([outline["pool"]["architectures"], outline["method"]])
    return {found[1] for text in texts if (found := NAMED.fullmatch(text))}


def _entry(key: str, known: Mapping[str, Any], given: Mapping[str, Entry], named: Mapping[str, Any]) -> Entry:
    """The entry of an architecture: options as in the run, unless the given entry sets them."""
    name = NAMED.fullmatch(known["source"])
    own = given.get(key, given.get(name[1]) if name else None)
    options = _filled(known["options"], named)
    if own is None and name is not None:
        raise ModelError(
            f"the run has a model {name[1]} of your own; bring its class or a function that builds it: "
            f"potluck.open(folder, models={{{name[1]!r}: {name[1]}}})"
        )
    if own is None:
        return {"name": _registered(known["source"]), **options}
    source, others = unpack(own)
    return {"name" if isinstance(source, str) else "model": source, **options, **others}


def _registered(name: str) -> str:
    try:
        unpack(name)
    except ModelError as error:
        raise ModelError(f"the run's model {name!r} is not known here; {PLUGINS}") from error
    return name


def _filled(value: Any, named: Mapping[str, Any]) -> Any:
    """A value of an outline with Python objects in place of their names."""
    if isinstance(value, Mapping):
        return {key: _filled(inner, named) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, named) for inner in value]
    found = NAMED.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    if found[1] not in named:
        raise ModelError(
            f"the run names {found[1]}, an object of your own; bring it: "
            f"potluck.open(folder, models={{{found[1]!r}: {found[1]}}})"
        )
    return named[found[1]]
