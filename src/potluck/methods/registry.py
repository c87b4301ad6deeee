"""Find methods by name. Importing this module registers every method of this library."""

from __future__ import annotations

from potluck.core.method import Method, registered
from potluck.errors import ConfigError, nearest


def method_names() -> list[str]:
    """The names of all registered methods, sorted."""
    return sorted(registered())


def find_method(name: str) -> type[Method]:
    """The class of a method; an unknown name is refused with the nearest known one."""
    known = registered()
    if name not in known:
        own = "one of your own is found once its file is loaded, by plugins: [FILE.py] or --plugin FILE.py"
        raise ConfigError(f"there is no method {name!r}; {nearest(name, known)} ({own})")
    return known[name]
