"""The user's own classes and functions, brought to a run that can only name them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from potluck.core.method import Method
from potluck.core.model import Model
from potluck.core.validation import validated
from potluck.errors import ConfigError, ModelError, RunError, nearest
from potluck.methods.registry import find_method
from potluck.models import Entries, Entry, ModelPool
from potluck.models.build import source_name, unpack
from potluck.models.pool import is_module_key
from potluck.plugins import listed, split_name
from potluck.runs.kept_models.outline import Outline
from potluck.runs.own_code import texts_in

NAMED = re.compile(r"<(.+)>")  # how an outline names a Python object
PLUGINS = "import the file that defines it first, or pass plugins=True (potluck plot: --plugins)"
Plugins = bool | Sequence[str]  # True: all code that a run folder names may run


def listed_plugins(plugins: Any) -> Plugins:
    """True, False or a list of plug-ins, with whole paths; one may be given alone."""
    return plugins if isinstance(plugins, bool) else listed(plugins, "True or a list of files or modules")


def method_of(outline: Outline, models: Entries | None, plugins: Plugins = False) -> tuple[Method, ModelPool]:
    """The method of a run and its models; `models` brings the classes that the run can only name."""
    _refuse_functions(outline, plugins)
    given = given_models(outline, models)
    named = {name: unpack(entry)[0] for name, entry in given.items()}
    pool = _pool(outline, given, named)
    own = set(_named_in(outline["method"])) - named.keys()
    if own:
        raise ConfigError(_bring(min(own), own | pool.lacking_names, pool.need_a_list))
    options = _filled(outline["method"], named)
    try:
        found = find_method(options["name"])
    except ConfigError as error:
        raise ConfigError(f"the run's method {options['name']!r} is not known here; {PLUGINS}") from error
    return found(validated(found.Config, options, "method"), pool), pool


class PartialPool(ModelPool):
    """The models of a run, some of which cannot be built, as nobody has brought their classes."""

    lacking: Mapping[str, Sequence[str]] = {}  # the names of these classes, by architecture
    need_a_list: bool = False  # whether the names do not tell which model is which

    @property
    def lacking_names(self) -> set[str]:
        """All classes that nobody has brought."""
        return {name for names in self.lacking.values() for name in names}

    def _build(self, key: str, *place: Any, **options: Any) -> Model:
        if self.lacking.get(key):
            raise ConfigError(_bring(self.lacking[key][0], self.lacking_names, self.need_a_list))
        return super()._build(key, *place, **options)


def _pool(outline: Outline, given: Mapping[str, Entry], named: Mapping[str, Any]) -> PartialPool:
    about, clients = outline["pool"], outline["clients"]
    lacking = {key: _lacking(key, known, given, named) for key, known in about["architectures"].items()}
    entries = {
        key: nn.Module if lacking[key] else _entry(key, known, given, named)  # any callable holds the place
        for key, known in about["architectures"].items()
    }
    owners = {client: facts["architecture"] for client, facts in clients.items()}
    pool = PartialPool.of_keys(entries, owners, about["rep_dim"], about["adapter"])
    pool.lacking = lacking
    pool.need_a_list = _need_a_list({key: about["architectures"][key] for key in lacking if lacking[key]})
    return pool


def _need_a_list(architectures: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether some were modules, which no class alone makes again, or share a name and are not the same."""
    entries = [(known["source"], str(known["options"])) for known in architectures.values()]
    return any(is_module_key(key) for key in architectures) or len({*entries}) < len(entries)


def _bring(needed: str, lacking: Collection[str], as_list: bool) -> str:
    """The sentence that asks for everything of the user's own that is lacking: by name, or as a list."""
    names = [needed, *sorted(set(lacking) - {needed})]
    are = "are" if len(names) > 2 else "is"
    others = f"; so {are} {', '.join(names[1:])}" if names[1:] else ""
    named = "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"
    way = f"potluck.open(folder, models={named})"
    if as_list or not all(name.isidentifier() for name in names):
        way = (
            "potluck.open(folder, models=[…]), the list of models that the experiment had, or by client, "
            "models={'0': …}"
        )
    what = "a model" if as_list else "a class or function"
    return (
        f"{needed} is needed here, {what} of your own that a folder cannot hold{others}: {way}; potluck.plot takes "
        "models=… too"
    )


def _refuse_functions(outline: Outline, plugins: Plugins) -> None:
    """Refuse an outline that names functions: validating an option of a method would import them.

    Every text with a colon counts, as any module name and any file can stand before it.
    """
    if plugins is True:
        return
    known = {Path(name).stem if name.endswith(".py") else name for name in plugins or ()}
    for text in texts_in([outline["method"], outline["pool"]["architectures"]]):
        if ":" in text and not NAMED.fullmatch(text) and split_name(text)[0] not in known:
            raise RunError(
                f"the run names the function {text!r}, and code that a folder names runs only if you ask for it; "
                "pass plugins=True"
            )


def given_models(outline: Outline, models: Entries | None) -> dict[str, Entry]:
    """What was given, by the name that the run has for it, or by the key of an architecture."""
    if models is None:
        return {}
    if isinstance(models, Mapping) and not {"name", "model"} & set(models):
        return dict(_chosen(outline, str(who), entry) for who, entry in models.items())
    listed = cast("list[Entry]", list(models) if isinstance(models, list | tuple) else [models])
    named = {source_name(unpack(entry)[0]): entry for entry in listed}
    own = {name for name, entry in named.items() if not isinstance(unpack(entry)[0], str)}
    if len(named) == len(listed) and own <= _names(outline) and bool(own) == bool(_names(outline)):
        return named
    return _in_order(outline, listed)


def _chosen(outline: Outline, who: str, entry: Entry) -> tuple[str, Entry]:
    """A given model is for a client and those like it, or for all that the run has under a name."""
    if who in outline["clients"]:
        return outline["clients"][who]["architecture"], entry
    known, clients = _names(outline), list(outline["clients"])
    if who not in known:
        hint = nearest(who, [*known, *clients]) if len(clients) <= 20 else nearest(who, known)
        raise ConfigError(f"models names {who!r}, which is neither a client nor a class of this run; {hint}")
    return who, entry


def known_names(outline: Outline) -> list[str]:
    """Every name that `models` may give a class by: those of classes and of clients."""
    return [*sorted(_names(outline)), *outline["clients"]]


def _in_order(outline: Outline, listed: Sequence[Entry]) -> dict[str, Entry]:
    """A list as in the experiment: the first mention of each architecture, in order."""
    architectures = outline["pool"]["architectures"]
    keys, entries = list(architectures), list(ModelPool(list(listed)).entries.values())
    if len(entries) != len(keys):
        raise ConfigError(
            f"models lists {len(entries)} different models, the run has {len(keys)} "
            f"({', '.join(_called(known) for known in architectures.values())}); give the same list as in the "
            "experiment, or name them: models={'Net': Net}"
        )
    return dict(zip(keys, entries, strict=True))


def _names(outline: Outline) -> set[str]:
    """The names of all Python objects in the outline's models and in the method's options."""
    return set(_named_in([outline["pool"]["architectures"], outline["method"]]))


def _named_in(value: Any) -> list[str]:
    return [found[1] for text in texts_in(value) if (found := NAMED.fullmatch(text))]


def _called(known: Mapping[str, Any]) -> str:
    """What the user calls an architecture."""
    name = NAMED.fullmatch(known["source"])
    return name[1] if name else str(known["source"])


def _lacking(
    key: str, known: Mapping[str, Any], given: Mapping[str, Entry], named: Mapping[str, Any]
) -> list[str]:
    """The Python objects that an architecture needs and that were not given."""
    needed = known["options"] if key in given else known
    return [name for name in _named_in(needed) if name not in named]


def _entry(key: str, known: Mapping[str, Any], given: Mapping[str, Entry], named: Mapping[str, Any]) -> Entry:
    """The entry of an architecture: options as in the run, unless the given entry sets them."""
    name = NAMED.fullmatch(known["source"])
    own = given.get(key, given.get(name[1]) if name else None)
    options = _filled(known["options"], named)
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
    return value if found is None else named[found[1]]
