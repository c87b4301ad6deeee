"""Values as an experiment file can hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in a `repr`: another one in every process


def is_plain(value: Any) -> bool:
    """Whether YAML can express a value: text, numbers, and lists and mappings of these."""
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, str | int | float | bool | None)


def plain(value: Any) -> Any:
    """A value that YAML can express; a Python object becomes its name in angle brackets, for the record only."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, nn.Module):
        return f"<{type(value).__name__}>"
    return f"<{getattr(value, '__name__', _ADDRESS.sub('', repr(value)))}>"
