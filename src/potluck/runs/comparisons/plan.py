"""Several experiments at once: `variants` that are compared side by side, and a `sweep` over settings.

    variants:                       # on one split, with the same private models
      fedproto: {method: fedproto}
      method.d1: [100, 200]         # the variants d1=100 and d1=200
      grid:                         # a product: d1=8,lr=0.1 and so on, four variants
        method.d1: [8, 16]
        training.optimizer.lr: [0.1, 0.01]
    sweep:                          # each setting is a comparison of all variants
      partition.alpha: [0.1, 0.5]   # the settings alpha=0.1 and alpha=0.5

An entry of a block is a label with the values it changes, by dotted keys, one dotted key with a list of values, or
`grid` with several such keys. `potluck compare` runs them all; `potluck run` ignores both blocks.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from potluck.errors import ConfigError, nearest
from potluck.experiment.overrides import Override, apply_override, read_override, read_yaml
from potluck.experiment.schema import Experiment, load_plugins
from potluck.methods.registry import find_method, method_names
from potluck.runs.comparisons.play import check
from potluck.runs.comparisons.references import APART, BASELINE, alone, is_local, with_locals

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+,-]*")  # a label is the name of a folder
LONGEST = 150  # characters of a label; the folder's name has the seed besides
GRID = "grid"
MOST = 10_000  # entries of a block: each is a run, or a comparison, of its own
# Blocks that all runs of a comparison share. Public data is not among them: it changes neither the split nor the
# models nor the private batches.
COMMON = ("data", "partition", "models", "federation", "seed", "seeds")
SEEDS = "--seeds 0,1,2 (in Python seeds=[0, 1, 2])"
Changes = dict[str, Any]  # dotted key → value
Load = Callable[[Sequence[Override]], Experiment]


@dataclass(frozen=True)
class Plan:
    """What is compared: experiments by setting and label, and what each setting and each label changes.

    `bases` has the experiment of each setting before any variant changes it. Without a sweep the only setting
    is "".
    """

    experiments: dict[str, dict[str, Experiment]]
    settings: dict[str, Changes]
    variants: dict[str, Changes]
    bases: dict[str, Experiment]

    @property
    def first(self) -> Experiment:
        """The experiment as written, which gives the whole its name and its seed."""
        return next(iter(self.bases.values()))

    @property
    def size(self) -> int:
        """How many runs a seed has."""
        return sum(map(len, self.experiments.values()))

    @property
    def is_sweep(self) -> bool:
        """Whether there is a comparison for each of several settings."""
        return list(self.experiments) != [""]


# --- where plans come from ------------------------------------------------------------------------------


def read_sweep(
    path: Path | str,
    methods: Sequence[Any] = (),
    overrides: Sequence[str] = (),
    variants: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
) -> Plan:
    """What a file compares; `methods` replace its variants, and so do `variants` and `sweep` where they are given.

    Overrides are applied before settings and variants; one such as `fedmrl.d1=50` sets an option of all variants
    of a method.
    """
    path = Path(path)
    file = read_yaml(path)
    load_plugins(path, overrides)
    general, own = own_overrides(overrides)
    replaced = file.get("variants") if variants is None else variants
    _refuse_idle_override(file, general, methods, None if methods else replaced)
    _refuse_set_twice(_name(_written(file, general)), general, own)

    def load(changes: Sequence[Override]) -> Experiment:
        experiment = Experiment.load(path, [*general, *changes])
        options = _own_options(own, experiment.method.name)
        return Experiment.load(path, [*general, *changes, options]) if options else experiment

    plan = _plan(
        load,
        methods,
        replaced,
        file.get("sweep") if sweep is None else sweep,
    )
    planned = (one for experiments in plan.experiments.values() for one in experiments.values())
    _refuse_unused(own, {one.method.name for one in planned})
    return plan


def experiments_by_method(
    path: Path | str, methods: Sequence[str], overrides: Sequence[str] = ()
) -> dict[str, Experiment]:
    """The experiment of a file under several methods.

    The method that the file names keeps its options, the others have their defaults. An override such as
    `fedmrl.d1=50` sets an option of one method, any other override applies to all.
    """
    load_plugins(path, overrides)
    general, own = own_overrides(overrides)
    _refuse_unused(own, methods)
    written = Experiment.load(path, general).method.name
    _refuse_set_twice(written, general, own)
    experiments = {}
    for method in methods:
        chosen = {} if method == written else {"method": {"name": method}}
        experiments[method] = Experiment.load(path, [*general, chosen, _own_options(own, method)])
    return experiments


def _own_options(own: Mapping[str, Sequence[str]], method: str) -> Changes:
    """What overrides such as `fedmrl.d1=50` change in the experiment of that method."""
    read = map(read_override, own.get(method, ()))
    return {f"method.{key.partition('.')[2]}": value for key, value in read}


def own_overrides(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides that apply to all methods, and by method those that begin with its name."""
    general: list[str] = []
    own: dict[str, list[str]] = {}
    known = set(method_names())
    for override in overrides:
        method = override.partition("=")[0].partition(".")[0]
        (own.setdefault(method, []) if method in known else general).append(override)
    return general, own


def plan_of(
    experiment: Experiment,
    methods: Sequence[Any] = (),
    variants: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
) -> Plan:
    """What is compared of an experiment made in Python; its data and models may be objects."""
    return _plan(lambda changes: changed(experiment, changes), methods, variants, sweep)


def refuse_idle_method(method: Any, methods: Sequence[Any], variants: Any, given: str = "method") -> None:
    """Refuse a method that is given but not among those compared."""
    if method is None or not (methods or variants):
        return
    labelled = _by_method(methods) if methods else read_block(variants, "variants")
    played = {_name(changes.get("method", method)) for changes in labelled.values()}
    if _name(method) not in {BASELINE, *played}:
        are = "is" if len(played) == 1 else "are"
        raise ConfigError(
            f"{given}: {_name(method)} would not be compared, as only {', '.join(sorted(played))} {are}; "
            f"leave it out, or add it to {'methods' if methods else 'variants'}"
        )


def _refuse_idle_override(
    file: Mapping[str, Any], overrides: Sequence[str], methods: Sequence[Any], variants: Any
) -> None:
    """Refuse an override of a method that is not among those compared."""
    if about := _about_method(overrides):
        refuse_idle_method(_written(file, overrides), methods, variants, " ".join(about))


def _about_method(overrides: Sequence[str]) -> list[str]:
    return [one for one in overrides if _block(one.partition("=")[0]) == "method"]


def _written(file: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    """The method that a file names, as the overrides change it."""
    values = copy.deepcopy(dict(file))
    for one in _about_method(overrides):
        apply_override(values, one)
    return values.get("method")


def _refuse_set_twice(written: str, general: Sequence[str], own: Mapping[str, Sequence[str]]) -> None:
    """Refuse an option of the file's method that is set both as `method.d1` and by its name, as `fedmrl.d1`."""
    by_key = {one.partition("=")[0]: one for one in general}
    for one in own.get(written, ()):
        other = by_key.get(f"method.{one.partition('=')[0].partition('.')[2]}")
        if other is not None:
            raise ConfigError(f"{other!r} and {one!r} set the same key; keep one of them")


def changed(experiment: Experiment, changes: Sequence[Override]) -> Experiment:
    """The experiment with some values set by dotted keys, as overrides of a file set them."""
    if not changes:
        return experiment
    values = _opened(experiment)
    for change in changes:
        apply_override(values, change)
    return experiment.variant(**values)


def _opened(value: Any) -> Any:
    """Validated blocks as mappings of the values that were given, and their kind; other objects as they are."""
    if not isinstance(value, BaseModel):
        return value
    given = value.model_fields_set | ({"kind"} & set(type(value).model_fields))
    return {name: _opened(getattr(value, name)) for name in sorted(given)}


def _plan(load: Load, methods: Sequence[Any], variants: Any, sweep: Any) -> Plan:
    labelled = read_block(variants, "variants")
    if methods or not labelled:
        labelled = _by_method(methods or [load([]).method.name])
    for label, changes in labelled.items():
        _refuse_common(label, changes)
        _refuse_options(f"variants.{label}", changes)
    settings = read_block(sweep, "sweep") or {"": {}}
    for setting, common in settings.items():
        _refuse_seed(setting, common)
        _refuse_options(f"sweep.{setting}", common)
        _refuse_idle(setting, common, labelled)
    bases = {setting: _base(load, common, labelled) for setting, common in settings.items()}
    experiments = {
        setting: _variants(
            lambda changes, common=common: load(_together(common, *changes)),  # type: ignore[misc]
            labelled,
            bases[setting],
        )
        for setting, common in settings.items()
    }
    return Plan(experiments, settings, labelled, bases)


def _base(load: Load, common: Changes, labelled: Mapping[str, Changes]) -> Experiment:
    """The experiment as written; with its first variant where it is whole only with one."""
    try:
        return load([common])
    except ConfigError:
        return load(_together(common, next(iter(labelled.values()))))


def _together(common: Changes, own: Changes) -> list[Override]:
    """What a setting and a variant change; a method comes before its options, and a variant has the last word."""
    method = own.get("method", common.get("method"))
    if method is None:
        return [common, own]
    kept = {key: value for key, value in common.items() if key != "method" and not _overwrites(own, key)}
    return [{"method": method}, kept, {key: value for key, value in own.items() if key != "method"}]


def _overwrites(own: Changes, key: str) -> bool:
    """Whether a variant leaves nothing of what a setting says under a key."""
    block, _, option = key.partition(".")
    if block != "method" or "method" not in own or not option:
        return any(key == other or key.startswith(f"{other}.") for other in own)
    method = own["method"]
    given = option == "name" or (isinstance(method, Mapping) and option in method)
    return given or key in own or option.partition(".")[0] not in _options(method)


def _options(method: Any) -> Collection[str]:
    """The options of a method, given by its name or as a block."""
    return find_method(_name(method)).Config.model_fields


def _name(method: Any) -> str:
    return str(method.get("name") if isinstance(method, Mapping) else method)


def _by_method(methods: Sequence[Any]) -> dict[str, Changes]:
    """A variant per method, given by its name or as a block with a name and options."""
    found: dict[str, Changes] = {}
    for method in {str(one): one for one in methods}.values():
        name = method.get("name") if isinstance(method, Mapping) else method
        if not isinstance(name, str):
            raise ConfigError(
                f"methods: {method!r} names no method; give a name, or a block with name and options"
            )
        find_method(name)
        _add(found, name, {"method": method}, "methods")
    return found


def _variants(load: Load, labelled: Mapping[str, Changes], base: Experiment) -> dict[str, Experiment]:
    """The experiments of one setting: the variants, and the Locals that they are paired with.

    A plain `local` is for the variants that leave training as it is. One that sets a learning rate, be it the same,
    has a Local that names it.
    """
    made = {label: _measurable(load([changes])) for label, changes in labelled.items()}
    for label, experiment in made.items():
        _refuse_false_local(label, experiment)
    plain = any(all(_block(key) in APART for key in changes) for changes in labelled.values())
    if BASELINE not in made and plain:
        made = {BASELINE: _measurable(load([{"method": BASELINE}]))} | made
    return with_locals(made, base, labelled)


def _block(key: str) -> str:
    return key.partition(".")[0]


def _measurable(experiment: Experiment) -> Experiment:
    """Local in the one mode it has, whatever modes the other methods are asked for."""
    named = is_local(experiment) and not isinstance(experiment.evaluate.modes, str)
    return alone(experiment) if named else experiment


def check_sweep(settings: Mapping[str, Mapping[str, Experiment]]) -> None:
    """Refuse an experiment that cannot work, before any other has trained for hours."""
    for experiments in settings.values():
        first = next(iter(experiments.values()))
        data = first.load_data(labels_only=True)
        split = first.make_split(data)
        for experiment in experiments.values():
            check(
                experiment.variant(engine=experiment.engine.on_cpu()),
                data,
                split,
            )


# --- blocks ---------------------------------------------------------------------------------------------


def read_block(block: Any, key: str) -> dict[str, Changes]:
    """The changes of each label; a key with a list of values becomes one label per value."""
    if not isinstance(block or {}, Mapping):
        raise ConfigError(f"{key}: must be a block of labels, or keys with lists of values")
    found: dict[str, Changes] = {}
    for name, value in (block or {}).items():
        for label, changes in _entries(str(name), value, key):
            _add(found, label, changes, key)
    _refuse_many(len(found), key)
    return found


def _refuse_many(entries: int, key: str) -> None:
    """Refuse more entries than anybody can run, before they are made."""
    if entries > MOST:
        raise ConfigError(
            f"{key}: these are {entries:,} entries, and at most {MOST:,} can be run; give fewer"
        )


def _entries(name: str, value: Any, key: str) -> list[tuple[str, Changes]]:
    """The labels of one entry of a block, with what they change."""
    if name == GRID:
        return _grid(value, key)
    if isinstance(value, Mapping):
        return [(name, {str(path): one for path, one in value.items()})]
    if isinstance(value, list | tuple):
        if not value:
            raise ConfigError(f"{key}.{name}: the list is empty; give at least one value")
        _refuse_many(len(value), f"{key}.{name}")
        _refuse_equal(value, f"{key}.{name}")
        return [(f"{name.rpartition('.')[2]}={one}", {name: one}) for one in value]
    raise ConfigError(f"{key}.{name}: give a label with a block of values, or a key with a list of them")


def _grid(block: Any, key: str) -> list[tuple[str, Changes]]:
    """Every combination of the values of some keys."""
    if not isinstance(block, Mapping) or not block:
        raise ConfigError(f"{key}.grid: must be a block of keys with lists of values")
    for name, values in block.items():
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(
                f"{key}.grid.{name}: give a list of values; grid is a product of lists and no label "
                "(a variant needs another one)"
            )
        _refuse_many(len(values), f"{key}.grid.{name}")
        _refuse_equal(values, f"{key}.grid.{name}")
    _refuse_many(math.prod(map(len, block.values())), f"{key}.grid")
    names = _short_names([str(name) for name in block])
    combined = [dict(zip(map(str, block), one, strict=True)) for one in itertools.product(*block.values())]
    return [(",".join(f"{names[path]}={one}" for path, one in each.items()), each) for each in combined]


def _refuse_equal(values: Sequence[Any], key: str) -> None:
    """Refuse values that are the same setting under two names, such as 2 and 2.0, or 1 and true."""
    for place, value in enumerate(values):
        other = next((one for one in values[:place] if one == value and repr(one) != repr(value)), None)
        if other is not None:
            raise ConfigError(f"{key}: {other!r} and {value!r} are the same setting; leave one of them out")


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last word of each dotted key, or as many words as it takes to tell the keys apart."""

    def ends(words: int) -> dict[str, str]:
        return {key: ".".join(key.split(".")[-words:]) for key in keys}

    longest = max(key.count(".") + 1 for key in keys)
    return next(
        found for words in range(1, longest + 1) if len({*(found := ends(words)).values()}) == len(keys)
    )


def _add(found: dict[str, Changes], label: str, changes: Changes, key: str) -> None:
    if not LABEL.fullmatch(label) or len(label) > LONGEST:
        raise ConfigError(
            f"{key}: {label!r} cannot name a folder; write a label of letters, digits and . _ = + , - "
            "with the values in a block after it"
        )
    if label in found:
        raise ConfigError(f"{key}: there are two entries {label!r}; give one of them another label")
    found[label] = changes


def _refuse_common(label: str, changes: Changes) -> None:
    for key in changes:
        if key == "seed":
            raise ConfigError(f"variants.{label} changes seed, which all variants share: use {SEEDS}")
        if _block(key) in COMMON:
            raise ConfigError(
                f"variants.{label} changes {key}, which all variants share: put it under sweep, where each "
                "setting is a comparison of its own"
            )


def _refuse_false_local(label: str, experiment: Experiment) -> None:
    """Refuse another method under the label that tables show as Local."""
    if label.partition(",")[0] == BASELINE and not is_local(experiment):
        raise ConfigError(
            f"variants.{label} runs {experiment.method.name}, and {BASELINE} is the label of clients that train "
            "alone; give it another label"
        )


def _refuse_seed(setting: str, changes: Changes) -> None:
    if "seed" in changes:
        raise ConfigError(
            f"sweep.{setting} changes seed, but every setting has the seeds of the comparison: use {SEEDS}"
        )


def _refuse_options(where: str, changes: Changes) -> None:
    """Refuse an option of a method beside another method, which has no such option."""
    if "method" not in changes:
        return
    for key in changes:
        option = key.split(".")[1] if key.startswith("method.") else "name"
        if option not in (known := _options(changes["method"])):
            name = _name(changes["method"])
            raise ConfigError(f"{where}: {key} has no meaning for {name}; {nearest(option, known)}")


def _refuse_idle(setting: str, common: Changes, labelled: Mapping[str, Changes]) -> None:
    """Refuse a setting that no variant would feel: the comparisons of the sweep would be the same."""
    for key in common:
        if all(_overwrites(own, key) for own in labelled.values()):
            if key in ("method", "method.name"):
                raise ConfigError(
                    f"sweep.{setting}: {key} changes nothing, as a sweep changes what all methods share; "
                    "put methods under methods (--methods) or variants"
                )
            raise ConfigError(
                f"sweep.{setting}: {key} changes nothing, as it has no meaning for {', '.join(labelled)} or is set "
                "there; name variants that have it"
            )


def _refuse_unused(own: Mapping[str, Sequence[str]], methods: Collection[str]) -> None:
    """Refuse an override for one method if that method is not among those that run."""
    for method in own:
        if method not in methods:
            raise ConfigError(
                f"{own[method][0]!r} sets an option of {method}, which is not one of the methods; "
                "name it among them, or "
                "leave the option out"
            )
