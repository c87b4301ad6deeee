"""What each method or variant of a comparison is paired with: Local under the same settings.

Variants may change how clients train (`training.optimizer.lr: [0.1, 0.01]`). Against one Local for all, a better
learning rate would look like a better method, so every settings of training have a Local of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from potluck.errors import ConfigError, nearest
from potluck.experiment.overrides import by_dotted_key
from potluck.experiment.schema import Experiment

BASELINE = "local"
# Settings that do not change how a client trains alone and is measured. Of the engine the precision counts.
APART = ("name", "method", "public", "engine", "checkpoint", "plugins", "keep", "track")
ILLEGAL = re.compile(r"[^A-Za-z0-9._=+-]+")  # what a value may not bring into the name of a folder

Leaves = dict[str, Any]  # dotted key → value


def with_locals(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """The experiments, with a Local in front for all settings of training that have none yet."""
    settings = {label: training_settings(one) for label, one in experiments.items()}
    known = [settings[label] for label, one in experiments.items() if is_local(one)]
    changing = _changing(settings.values())
    added: dict[str, Experiment] = {}
    for label, experiment in experiments.items():
        if settings[label] not in known:
            known.append(settings[label])
            name = _free_label(settings[label], changing, {*experiments, *added})
            added[name] = alone(experiment)
    return added | dict(experiments)


def references(experiments: Mapping[str, Experiment]) -> dict[str, str]:
    """Label → the label of the Local under the same settings, for all that are not Local themselves."""
    locals_ = {label: training_settings(one) for label, one in experiments.items() if is_local(one)}
    found = {}
    for label, experiment in experiments.items():
        own = training_settings(experiment)
        partner = next((name for name, settings in locals_.items() if settings == own), None)
        if partner is not None and not is_local(experiment):
            found[label] = partner
    return found


def check_reference(against: str | None, labels: Iterable[str]) -> None:
    """Refuse a reference that is not among the compared labels; None stands for Local."""
    labels = list(labels)
    if against is not None and against not in labels:
        raise ConfigError(f"there is no {against!r} here to compare against; {nearest(against, labels)}")


def is_local(experiment: Experiment) -> bool:
    """Whether its clients train alone."""
    return experiment.method.name == BASELINE


def alone(experiment: Experiment) -> Experiment:
    """The same experiment with every client training alone, in the one way to predict that Local has."""
    modes = {} if isinstance(experiment.evaluate.modes, str) else {"modes": "first"}
    evaluate = experiment.evaluate.model_copy(update=modes)
    return experiment.variant(method={"name": BASELINE}, evaluate=evaluate)


def training_settings(experiment: Experiment) -> Leaves:
    """All settings that a client which trains alone depends on."""
    values = yaml.safe_load(experiment.to_yaml())
    kept = {key: value for key, value in values.items() if key not in APART}
    kept["evaluate"] = {key: value for key, value in values["evaluate"].items() if key != "modes"}
    return by_dotted_key(kept) | {"engine.precision": values["engine"]["precision"]}


def _changing(settings: Iterable[Leaves]) -> list[str]:
    """The keys whose values are not the same in all settings."""
    first, *others = settings
    keys = dict.fromkeys(key for one in (first, *others) for key in one)
    return [key for key in keys if any(one.get(key) != first.get(key) for one in others)]


def _free_label(settings: Leaves, changing: Iterable[str], taken: set[str]) -> str:
    """`local`, or `local,lr=0.1` where the settings of training change; a number tells equal ones apart."""
    parts = [f"{key.rpartition('.')[2]}={settings.get(key)}" for key in changing]
    label = ",".join([BASELINE, *(ILLEGAL.sub("-", part) for part in parts)])[:100]
    number, free = 1, label
    while free in taken:
        number += 1
        free = f"{label}-{number}"
    return free
