"""Where two experiments differ, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from potluck.experiment.export import to_values
from potluck.experiment.plain import plain
from potluck.experiment.settings import ExperimentSettings


@dataclass(frozen=True)
class Difference:
    """A key with the value it has there (in a run folder) and the one it has here."""

    key: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.there} there, {self.here} here"

    def is_below(self, *keys: str) -> bool:
        """Whether it is one of these keys, or inside the block or list of one."""
        return any(self.key == key or self.key.startswith(f"{key}.") for key in keys)


def changes_since(there: Any, experiment: ExperimentSettings) -> Iterator[Difference]:
    """Every key under which an experiment has another value than a run folder keeps of it.

    A key that the folder lacks is one that the version which wrote it did not know: it has its default there.
    """
    here = to_values(experiment)
    return differences(_with_defaults(there, here, experiment), here)


def _with_defaults(there: Any, here: Any, block: Any) -> Any:
    """The values there, with the keys that only `here` has at the defaults which they have in `block`."""
    if not (isinstance(there, dict) and isinstance(here, dict) and isinstance(block, BaseModel)):
        return there
    fields = type(block).model_fields
    unknown = [key for key in here if key not in there and key in fields and not fields[key].is_required()]
    known = {
        key: _with_defaults(value, here.get(key), getattr(block, key, None)) for key, value in there.items()
    }
    return known | {key: _default(fields[key]) for key in unknown}


def _default(field: FieldInfo) -> Any:
    return to_jsonable_python(field.get_default(call_default_factory=True), fallback=plain)


def differences(there: Any, here: Any, key: str = "") -> Iterator[Difference]:
    """Every key under which two experiments, as `to_values` gives them, have other values.

    >>> [str(one) for one in differences({"seed": 0, "training": {"rounds": 5}}, {"seed": 0, "training": {}})]
    ['training.rounds: 5 there, None here']
    """
    if isinstance(there, dict) and isinstance(here, dict):
        for inner in dict.fromkeys([*there, *here]):
            path = f"{key}.{inner}" if key else str(inner)
            yield from differences(there.get(inner), here.get(inner), path)
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for place, (one, other) in enumerate(zip(there, here, strict=True)):
            yield from differences(one, other, f"{key}.{place}")
    elif there != here:
        yield Difference(key, there, here)
