"""What the shell completes: methods, data sets, kinds of pictures and run folders.

Nothing here loads torch: a shell asks at every press of the tab key. A test keeps the names up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import typer

METHODS = Path(__file__).parents[1] / "methods"
METHOD_NAME = re.compile(r'^    name = "([^"]+)"', re.MULTILINE)
DATA_SETS = (
    "cifar10", "cifar10-attributes", "cifar10-captions", "cifar100", "digits", "digits-attributes",
    "digits-captions", "digits-segments", "fashion_mnist", "files", "mnist", "newsgroups20", "noise", "sst2",
    "svhn", "tiny_imagenet",
)  # fmt: skip
PICTURES = (
    "split", "curves", "clients", "gains", "differences", "cost", "option", "grid", "cka", "tsne", "pca",
    "confusion", "timeline", "wire",
)  # fmt: skip
RESULTS = ("config.yaml", "comparison.json", "sweep.json")  # a folder with one of them can be opened
PLACES = ("*", "*/*", "*/*/*")  # where such folders are looked for, seen from here
PLAIN = re.compile(
    r"[\w./][\w./+,@%-]*"
)  # paths that every shell reads as they are; zsh evaluates all others


def method_names() -> list[str]:
    """The names of this library's methods, read off their files."""
    return sorted(
        name for file in METHODS.glob("*.py") for name in METHOD_NAME.findall(file.read_text("utf-8"))
    )


def methods(incomplete: str) -> list[str]:
    """Methods that begin like that."""
    return _beginning(method_names(), incomplete)


def listed_methods(incomplete: str) -> list[str]:
    """The same for the last name of a list such as `fedavg,fedp`."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in methods(last)]


def pictures(incomplete: str) -> list[str]:
    """Kinds of pictures that begin like that."""
    return _beginning(PICTURES, incomplete)


def results(incomplete: str) -> list[str]:
    """Folders of runs, comparisons and sweeps, here and below `runs`.

    One whose name a shell could take for something else is left out: the shell knows how to quote it.
    """
    paths = (path for place in PLACES for path in Path().glob(place) if PLAIN.fullmatch(str(path)))
    return sorted(_beginning((str(path) for path in paths if _is_result(path)), incomplete))


def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """The values of `method=` and `data=`. Bash gives key, sign and value as words of their own."""
    before = [word for word in ctx.params.get("overrides") or () if word != "="]
    if before and "=" not in before[-1]:
        return _values(before[-1], incomplete)
    key, _, begun = incomplete.partition("=")
    return [f"{key}={value}" for value in _values(key, begun)]


def _values(key: str, begun: str) -> list[str]:
    names: Iterable[str] = method_names() if key == "method" else DATA_SETS if key == "data" else ()
    return _beginning(names, begun)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _is_result(path: Path) -> bool:
    return any((path / name).is_file() for name in RESULTS)
