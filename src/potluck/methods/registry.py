"""Find methods by name. Importing this module registers every method of this library."""

from __future__ import annotations

from potluck.core.method import Method, registered
from potluck.core.origin import home
from potluck.errors import ConfigError, nearest


def method_names() -> list[str]:
    """The names of all registered methods, sorted."""
    return sorted(registered())


LOADING = "--plugin FILE.py, or in the experiment plugins: [FILE.py]"


def find_method(name: str, loading: str = LOADING) -> type[Method]:
    """The class of a method; an unknown name is refused with the nearest known one.

    `loading` is how the user can have a file with a method of their own loaded.
    """
    known = registered()
    if name not in known:
        own = f"for one of your own name its file: {loading}"
        raise ConfigError(f"there is no method {name!r}; {nearest(name, known)} ({own})")
    method = known[name]
    if method.round is Method.round:
        raise ConfigError(
            f"method {name} ({home(method)}, class {method.__name__}) defines no round; write "
            "round(self, server, clients), as docs/methods/writing.md shows"
        )
    return method
