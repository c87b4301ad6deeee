"""What each method or variant of a comparison is paired with: Local under the same settings.

Variants may change how clients train (`training.optimizer.lr: [0.1, 0.01]`). Against one Local for all, a better
learning rate would look like a better method, so every settings of training have a Local of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from potluck.errors import ConfigError, nearest
from potluck.experiment.export import to_values
from potluck.experiment.overrides import by_dotted_key
from potluck.experiment.schema import Experiment

BASELINE = "local"
# Settings that do not change how a client trains alone and is measured. Of the engine the precision counts.
APART = ("name", "method", "public", "engine", "checkpoint", "plugins", "keep", "track")
ILLEGAL = re.compile(r"[^A-Za-z0-9._=+-]+")  # what a value may not bring into the name of a folder

Leaves = dict[str, Any]  # dotted key → value


def with_locals(
    experiments: Mapping[str, Experiment],
    base: Experiment | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Experiment]:
    """The experiments, with a Local in front for all settings of training that have none yet.

    A Local is named after what it trains with other than `base`, by default the first experiment. `changes` has
    the keys that each label sets.
    """
    settings = {label: training_settings(one) for label, one in experiments.items()}
    known = [settings[label] for label, one in experiments.items() if is_local(one)]
    usual = training_settings(base if base is not None else next(iter(experiments.values())))
    added: dict[str, Experiment] = {}
    for label, experiment in experiments.items():
        if settings[label] not in known:
            known.append(settings[label])
            own = _own_settings(settings[label], usual, (changes or {}).get(label, ()))
            added[_free_label(own, {*experiments, *added})] = alone(experiment)
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
    values = to_values(experiment)
    kept = {key: value for key, value in values.items() if key not in APART}
    kept["evaluate"] = {key: value for key, value in values["evaluate"].items() if key != "modes"}
    return by_dotted_key(kept) | {"engine.precision": values["engine"]["precision"]}


def _own_settings(settings: Leaves, usual: Leaves, changed: Iterable[str]) -> Leaves:
    """The settings that are not the usual ones; where all are, those that were set to what they are anyway."""
    keys = [*settings, *(key for key in usual if key not in settings)]
    other = [key for key in keys if (settings.get(key) or None) != (usual.get(key) or None)]
    set_ = tuple(f"{key}." for key in changed)
    return {
        key: settings.get(key) for key in other or [key for key in settings if f"{key}.".startswith(set_)]
    }


def _free_label(settings: Leaves, taken: set[str]) -> str:
    """`local`, or `local,lr=0.1` after its settings of training; a number tells equal labels apart."""
    parts = [f"{_short_name(key)}={value}" for key, value in settings.items()]
    label = ",".join([BASELINE, *(ILLEGAL.sub("-", part) for part in parts)])[:100]
    number, free = 1, label
    while free in taken:
        number += 1
        free = f"{label}-{number}"
    return free


def _short_name(key: str) -> str:
    """The last word of a dotted key, or `per_client.1.lr` for what one client has of its own."""
    _, own, rest = key.partition("per_client.")
    return own + rest if own else key.rpartition(".")[2]
