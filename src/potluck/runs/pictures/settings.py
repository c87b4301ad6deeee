"""In which settings runs differ, and what to call them by it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from potluck.errors import ConfigError, nearest
from potluck.report.format import method_label
from potluck.report.log import method_name
from potluck.runs.pictures.asked import RunFiles

# What names a run, or says where and how it is computed and looked at.
ELSEWHERE = (
    "name",
    "seed",
    "seeds",
    "engine",
    "checkpoint",
    "keep",
    "track",
    "plugins",
    "evaluate",
    "metrics",
)
SUCH = "give runs that do, such as those of potluck compare with variants or a sweep"
Values = dict[str, Any]  # dotted key → value


def flat(config: Mapping[str, Any]) -> Values:
    """The settings of a run by dotted keys, without those that no number depends on."""
    found: Values = {}
    for key, value in config.items():
        if key not in ELSEWHERE:
            _flatten(key, value, found)
    return found


def _flatten(key: str, value: Any, into: Values) -> None:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            _flatten(f"{key}.{name}", inner, into)
    else:
        into[key] = value


def varied(runs: Sequence[RunFiles]) -> list[str]:
    """The keys in which runs of one method differ, in the order of the experiment file."""
    groups: dict[str, list[Values]] = {}
    for run in runs:
        groups.setdefault(method_name(run.config), []).append(flat(run.config))
    found: dict[str, None] = {}
    for own in groups.values():
        for key in dict.fromkeys(key for values in own for key in values):
            if len({json.dumps(values.get(key), default=str) for values in own}) > 1:
                found[key] = None
    return list(found)


def labels(runs: Sequence[RunFiles], apart: Sequence[str] = ()) -> list[str]:
    """What each run is called: its method, and its values of what runs differ in; keys `apart` are left out."""
    keys = [key for key in varied(runs) if key not in apart]
    own: dict[str, set[str]] = {}
    for run in runs:
        own.setdefault(method_name(run.config), set()).update(flat(run.config))
    found = []
    for run in runs:
        name, values = method_name(run.config), flat(run.config)
        told = [f"{short(key, keys)}={shown(values.get(key))}" for key in keys if key in own[name]]
        found.append(",".join([name, *told]))
    return found


def in_words(label: str) -> str:
    """A label as a picture shows it: `Local, lr=0.1`."""
    return ", ".join(map(method_label, label.split(",")))


def short(key: str, keys: Sequence[str]) -> str:
    """The last word of a key, unless another key ends in it too."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def shown(value: Any) -> str:
    """A value in a label."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def key_named(word: str, keys: Sequence[str]) -> str:
    """The varied key that a word means: the whole key, or its end."""
    found = [key for key in keys if key == word or key.endswith(f".{word}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"over: {word!r} may be {' or '.join(found)}; give the whole key")
    hint = (
        nearest(word, [*keys, *(key.rpartition(".")[2] for key in keys)])
        if keys
        else f"they differ in no setting; {SUCH}"
    )
    raise ConfigError(f"over: these runs do not differ in {word!r}; {hint}")


def keys_over(runs: Sequence[RunFiles], over: Sequence[str] | None, wanted: int) -> list[str]:
    """The keys that a picture is over: those named, or those in which the runs differ where there are so many."""
    keys = varied(runs)
    what = "one setting" if wanted == 1 else "two settings"
    if over is not None:
        if len(over) != wanted:
            raise ConfigError(f"over: give {what}, separated by a comma, not {len(over)}")
        return [key_named(word, keys) for word in over]
    if len(keys) < wanted:
        told = f"differ in {keys[0]} alone" if keys else "do not differ in any setting"
        one = f", or draw that one: potluck plot option … --over {short(keys[0], keys)}" if keys else ""
        raise ConfigError(f"these runs {told}, and the picture needs {what}; {SUCH}{one}")
    if len(keys) > wanted:
        example = ",".join(keys[:wanted])
        raise ConfigError(
            f"these runs differ in {', '.join(keys)}; say over which {what} to draw: --over {example}"
        )
    return keys
