"""Several experiments in one file: `variants` that are compared side by side, and a `sweep` over settings.

    variants:                       # on one split, with the same private models
      fedproto: {method: fedproto}
      method.d1: [100, 200]         # the variants d1=100 and d1=200
    sweep:                          # each setting is a comparison of all variants
      partition.alpha: [0.1, 0.5]   # the settings alpha=0.1 and alpha=0.5

An entry of a block is a label with the values it changes, by dotted keys, or one dotted key with a list of values.
`potluck compare` runs them all; `potluck run` ignores both blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.experiment.overrides import Override, read_yaml
from potluck.experiment.schema import Experiment
from potluck.runs.compare import BASELINE, check, own_overrides

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")  # a label is the name of a folder
# Blocks that all runs of a comparison share. Public data is not among them: it changes neither the split nor the
# models nor the private batches.
COMMON = ("data", "partition", "models", "federation", "seed", "seeds")
Changes = dict[str, Any]  # dotted key → value


def read_sweep(
    path: Path | str, methods: Sequence[str] = (), overrides: Sequence[str] = ()
) -> dict[str, dict[str, Experiment]]:
    """The experiments of a file by setting and variant; without a sweep the only setting is "".

    `methods` replace the variants of the file. Local is always among the variants. Overrides are applied before
    settings and variants; one such as `fedmrl.d1=50` sets an option of all variants of a method.
    """
    path = Path(path)
    file = read_yaml(path)
    general, own = own_overrides(overrides)
    variants = read_block(file.get("variants"), "variants")
    if methods or not variants:
        named = methods or [Experiment.load(path, general).method.name]
        variants = {method: {"method": method} for method in named}
    if BASELINE not in variants:
        variants = {BASELINE: {"method": BASELINE}} | variants
    for label, changes in variants.items():
        _refuse_common(label, changes)
    settings = read_block(file.get("sweep"), "sweep") or {"": {}}
    loaded = {
        setting: {label: _load(path, [*general, common, changes], own) for label, changes in variants.items()}
        for setting, common in settings.items()
    }
    _refuse_unused(own, [one for experiments in loaded.values() for one in experiments.values()])
    return loaded


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


def read_block(block: Any, key: str) -> dict[str, Changes]:
    """The changes of each label; a key with a list of values becomes one label per value."""
    if not isinstance(block or {}, Mapping):
        raise ConfigError(f"{key}: must be a block of labels, or keys with lists of values")
    found: dict[str, Changes] = {}
    for name, value in (block or {}).items():
        if isinstance(value, Mapping):
            entries = [(str(name), {str(path): one for path, one in value.items()})]
        elif isinstance(value, list):
            entries = [(f"{str(name).rpartition('.')[2]}={one}", {str(name): one}) for one in value]
        else:
            raise ConfigError(
                f"{key}.{name}: give a label with a block of values, or a key with a list of them"
            )
        for label, changes in entries:
            _add(found, label, changes, key)
    return found


def _add(found: dict[str, Changes], label: str, changes: Changes, key: str) -> None:
    if not LABEL.fullmatch(label):
        raise ConfigError(
            f"{key}: {label!r} cannot name a folder; write a label of letters, digits and . _ = + - "
            "with the values in a block after it"
        )
    if label in found:
        raise ConfigError(f"{key}: there are two entries {label!r}; give one of them another label")
    found[label] = changes


def _refuse_common(label: str, changes: Changes) -> None:
    for key in changes:
        if key.partition(".")[0] in COMMON:
            raise ConfigError(
                f"variants.{label} changes {key}, which all variants share: put it under sweep, where each "
                "setting is a comparison of its own"
            )


def _load(path: Path, overrides: Sequence[Override], own: Mapping[str, Sequence[str]]) -> Experiment:
    experiment = Experiment.load(path, overrides)
    options = [f"method.{one.partition('.')[2]}" for one in own.get(experiment.method.name, ())]
    return Experiment.load(path, [*overrides, *options]) if options else experiment


def _refuse_unused(own: Mapping[str, Sequence[str]], experiments: Sequence[Experiment]) -> None:
    used = {experiment.method.name for experiment in experiments}
    for method in own:
        if method not in used:
            raise ConfigError(
                f"{own[method][0]!r} sets an option of {method}, which is not one of the methods"
            )
