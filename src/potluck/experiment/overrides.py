"""Reading experiment files, and overriding their values by dotted keys."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from potluck.errors import ConfigError, first_line
from potluck.files import read_given

Override = str | Mapping[str, Any]  # `key=value`, or a mapping from keys to values


class _Yaml(yaml.SafeLoader):
    """YAML in which only true and false are booleans, so that `on` in `evaluate.on` stays text.

    A key that stands twice in one mapping is an error: otherwise the second would win without a word. What `<<`
    merges is counted, as a few lines can merge without end, and numbers are short: 1:59:59 is one too.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._merged = self._composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next value, or key, of the text: a long text is refused before all of it takes memory."""
        self._composed += 1
        if self._composed > 2 * _LARGEST:
            place = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "it has too many values for an experiment; write fewer", place
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put into a mapping what it merges."""
        super().flatten_mapping(node)
        self._merged += len(node.value)
        if self._merged > _LARGEST:
            raise _refused(node, "too much is merged by <<; write it out")

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node."""
        if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            raise _refused(node, f"a number of more than {_LONGEST_NUMBER} letters")
        if node.tag in _NUMBERS and _OTHERWISE.match(node.value):
            number = super().construct_object(node, deep)
            problem = f"{node.value} is {number} in YAML; write that, or put quotes around a text"
            raise _ReadOtherwise(None, None, problem, node.start_mark)
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node."""
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise _refused(key, f"the key {key.value!r} is there twice; keep one")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)


def _refused(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _ReadOtherwise(yaml.constructor.ConstructorError):
    """A number that YAML reads otherwise than people do."""


_Yaml.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


_PLAIN = {
    "mapping values are not allowed here": "a colon that is not expected; check the indentation of this line and "
    "the one before, and put a text with a colon in quotes",
    "expected ',' or ']', but got '<stream end>'": "the file ends inside a list; close it with ]",
    "expected ',' or '}', but got '<stream end>'": "the file ends inside a block; close it with }",
}
# What PyYAML raises itself where a value is not what its tag says: !!bool maybe, !!float x, 2001-99-99.
_NO_VALUE = (ValueError, KeyError, AttributeError, TypeError, OverflowError)


_DEEPEST = 40  # levels of an experiment file
_LARGEST = 200_000  # values of one, those that anchors repeat counted each time
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_LONGEST_NUMBER = 1000  # letters
# Digits that YAML reads otherwise than people do: 010 is 8, and 1:30 is 90.
_OTHERWISE = re.compile(r"[-+]?(?:0[0-7_]*[0-7]$|[0-9_]+:)")
_LONGEST_PLACE = 10  # digits of a position in a list


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; an error is one sentence with the line."""
    try:
        values = copy.deepcopy(_parsed(read_given(path, "experiment file")))
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply for an experiment; write it flat") from error
    except _NO_VALUE as error:
        raise ConfigError(
            f"{path} has a value that is not what it is marked as ({first_line(error)}); correct it"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        problem = "a tab; use spaces" if "'\\t'" in problem else _PLAIN.get(problem, problem)
        raise ConfigError(f"{path}{where}: {problem}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no experiment: it must be a mapping of keys to values")
    if not _is_small(values):
        raise ConfigError(
            f"{path} is too large for an experiment: nested too deeply, or repeated by its anchors; "
            "write it without them"
        )
    return values


@functools.lru_cache(maxsize=2)
def _parsed(text: str) -> Any:
    """The values of a file; a comparison reads the same one for every variant."""
    return yaml.load(text, Loader=_Yaml)


def _is_small(values: Any) -> bool:
    """Whether a value has few parts and levels; with anchors a short file can be endless."""
    level, seen = [values], 0
    for _ in range(_DEEPEST):
        blocks = [one for one in level if isinstance(one, dict | list | set | tuple)]
        level = []
        for one in blocks:
            level.extend(one.values() if isinstance(one, dict) else one)
            if seen + len(level) > _LARGEST:
                return False
        seen += len(level)
    return not level


def by_dotted_key(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings as a flat mapping; lists stay whole.

    >>> by_dotted_key({"seed": 0, "training": {"rounds": 3}})
    {'seed': 0, 'training.rounds': 3}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{above}{key}"
        found |= by_dotted_key(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return found


def as_overrides(given: Any) -> list[Any]:
    """Overrides as a list; one may be given alone. None of those given as text may undo another."""
    if isinstance(given, str | Mapping):
        return [given]
    if not isinstance(given, Iterable):
        raise ConfigError(f"overrides: give a list such as ['training.rounds=5'], not {given!r}")
    listed = list(given)
    _refuse_undone([one for one in listed if isinstance(one, str)])
    return listed


def _refuse_undone(overrides: Sequence[str]) -> None:
    """Refuse a key that is set twice, and a block that is set after one of its keys."""
    for place, later in enumerate(overrides):
        key = later.partition("=")[0]
        for earlier in overrides[:place]:
            if earlier.partition("=")[0] == key:
                raise ConfigError(f"{earlier!r} and {later!r} set the same key; keep one of them")
            if earlier.startswith(f"{key}."):
                raise ConfigError(f"{later!r} would undo {earlier!r} before it; write {later!r} first")


def apply_override(values: dict[str, Any], override: Override) -> None:
    """Set one value, `training.rounds=5`, `models.0=cnn3`, `method.d1=50`, or several, `{"training.rounds": 5}`."""
    if isinstance(override, Mapping):
        for key, value in override.items():
            _set(values, key, copy.deepcopy(value), f"{key}: {value}")
        return
    _set(values, *read_override(override), override)


def read_override(override: str) -> tuple[str, Any]:
    """The key and the value of an override that is given as text."""
    key, equals, text = override.partition("=") if isinstance(override, str) else ("", "", "")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not an override; write key=value, for example training.rounds=5")
    if not text.strip():
        raise ConfigError(f"{override!r} has no value; write one after the =, or null where none is meant")
    try:
        value = yaml.load(text, Loader=_Yaml)
    except _ReadOtherwise as error:
        raise ConfigError(f"{override!r}: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, *_NO_VALUE) as error:
        raise ConfigError(f"the value of {override!r} is not YAML; put quotes around it") from error
    unspaced = (
        [one for one in value if ":" in str(one) and value[one] is None] if isinstance(value, dict) else []
    )
    if unspaced:
        raise ConfigError(
            f"{override!r}: write a space after the colon: {str(unspaced[0]).replace(':', ': ', 1)}"
        )
    return key, value


def _set(values: dict[str, Any], key: str, value: Any, override: str) -> None:
    place: Any = values
    *path, leaf = key.split(".")
    if path[:1] == ["models"] and isinstance(values.get("models"), list) and not key.split(".")[1].isdigit():
        values["models"] = {"pool": values["models"]}  # the short form, `models: [mlp-small, conv-small]`
    for step in path:
        place = _descend(place, step, override)
    if isinstance(place, list):
        place[_position(place, leaf, override)] = value
    elif leaf == "name" or not isinstance(place.get(leaf), dict) or not isinstance(value, str):
        place[leaf] = value
    elif leaf == "partition":
        raise ConfigError(f"{override!r}: a partition is a block of keys; write {key}.kind={value}")
    elif key == "models" and "pool" in place[leaf]:
        place[leaf] = place[leaf] | {"pool": [value]}
    elif key == "method" and place[leaf].get("name") != value:
        place[leaf] = {"name": value}  # the options belong to the old method
    else:
        place[leaf] = place[leaf] | {"name": value}


def _descend(place: Any, step: str, override: str) -> Any:
    at = _position(place, step, override) if isinstance(place, list) else step
    if isinstance(place, dict):
        place.setdefault(step, {})
    if isinstance(place[at], str):  # the short form, `method: fedavg`
        place[at] = {"name": place[at]}
    inner = place[at]
    if not isinstance(inner, dict | list):
        raise ConfigError(f"{override!r}: {step!r} is a value and has no keys; write {step}=VALUE")
    return inner


def _position(place: list[Any], step: str, override: str) -> int:
    if not step.isdecimal() or len(step) > _LONGEST_PLACE or int(step) >= len(place):
        raise ConfigError(f"{override!r}: {step!r} is not a position in a list of {len(place)}; count from 0")
    return int(step)
