"""Methods by name. Importing this module imports the package, which registers every method of this library."""

from __future__ import annotations

from potluck.core.method import Method, registered
from potluck.errors import ConfigError, nearest


def method_names() -> list[str]:
    """Every registered method."""
    return sorted(registered())


def find_method(name: str) -> type[Method]:
    """The class of a method, or a sentence that suggests the nearest name."""
    known = registered()
    if name not in known:
        raise ConfigError(f"there is no method {name!r}; {nearest(name, known)}")
    return known[name]
