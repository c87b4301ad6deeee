"""What the documents name exists: paths, dotted names, classes, functions, and the layers in the picture."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from potluck.core.card_fields import FIELDS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "potluck"
DESIGN = ROOT / "docs" / "design.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = [ROOT, SOURCE, ROOT / "examples" / "hospitals"]  # a path is relative to one of these

# What stands in code and is not ours: the reader's own, entry points, commit titles, names of torch and systemd.
FOREIGN_PATHS = {"mine.py", "FILE.py", "heads.py", "my_method.py", "site.py"}
FOREIGN_DOTTED = {"potluck.engines"}
FOREIGN_NAMES = {
    *dir(builtins),
    "DataLoader",
    "Flatten",
    "ReLU",
    "NoNewPrivileges",
    "Field",
    "Mine",
    "cat",
    "feat",
    "fix",
}

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w./-]+\.py\b")
FOLDER = re.compile(r"(?:src/potluck/)?([a-z_]+)/(?:[a-z_]+/)*")
DOTTED = re.compile(r"\bpotluck(?:\.\w+)+")
CLASS = re.compile(r"([A-Z][a-z]\w*(?:\.\w+)?)(?:\(.*\))?")  # `Rounds`, `Rounds.play`
CALL = re.compile(r"(?:[\w\"\[\]]+\.)*(\w+)\(.*\)")  # `fit(…)`, `client["model"].features(x)`
PLACED = re.compile(r"`([\w.]+)(?:\([^`]*\))?`\s\(`([\w/]+\.py)`")  # `Rounds.play` (`engine/rounds.py`)
HOP = re.compile(r"^ *([\w.]+) +([\w/]+\.py) ", re.MULTILINE)  # a line of the way of a round
ROOM = re.compile(r"^│ (\w+)/ ", re.MULTILINE)  # a line of the picture of the layers


# --- what the source defines ----------------------------------------------------------------------------


@cache
def definitions(path: Path) -> dict[str, tuple[set[str], set[str]]]:
    """Everything a file defines by name; a class with its members and the names of its bases."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, tuple[set[str], set[str]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
            found[node.name] = {*defined(ast.walk(node))}, bases
    for name in {*defined(tree.body), *functions(ast.walk(tree))} - {*found}:
        found[name] = set(), set()
    return found


def functions(nodes: Iterable[ast.AST]) -> Iterator[str]:
    return (node.name for node in nodes if isinstance(node, ast.FunctionDef))


def defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Functions, and names that get a value or a type: `name = …`, `self.name = …`, `name: int`."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in filter(None, targets):
            for place in ast.walk(target):
                if isinstance(place, ast.Name | ast.Attribute):
                    yield place.id if isinstance(place, ast.Name) else place.attr
        yield from functions([node])


@cache
def all_definitions() -> dict[str, tuple[set[str], set[str]]]:
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in SOURCE.rglob("*.py"):
        for name, (members, bases) in definitions(path).items():
            known = found.setdefault(name, (set(), set()))
            known[0].update(members)
            known[1].update(bases)
    return found


def is_defined(name: str, path: Path | None = None) -> bool:
    """Whether `name`, `Class` or `Class.member` is in a file, or anywhere; members may be inherited."""
    first, _, member = name.partition(".")
    known = all_definitions() if path is None else definitions(path)
    if first not in known or not member:
        return first in known
    members, bases = known[first]
    return member in members or any(is_defined(f"{base}.{member}") for base in bases)


# --- what a document names ------------------------------------------------------------------------------


def stale(text: str) -> list[str]:
    """What a text names and nobody finds."""
    prose = FENCE.sub("", text)
    codes = CODE.findall(prose)
    drawn = "".join(block for language, block in FENCE.findall(text) if language == "text")
    placed = PLACED.findall(prose) + HOP.findall(drawn)
    return [
        *stale_paths(codes),
        *(name for code in codes for name in DOTTED.findall(code) if not dotted_exists(name)),
        *(code for code in codes if not name_exists(code)),
        *(f"{name} in {path}" for name, path in placed if not is_placed(name, path)),
    ]


def stale_paths(codes: Iterable[str]) -> Iterator[str]:
    """Python files, and folders that lie in one of our rooms."""
    for code in codes:
        folder = FOLDER.fullmatch(code)
        ours = [code] if folder and (code.startswith("src/") or (SOURCE / folder[1]).is_dir()) else []
        for path in {*ours, *PATH.findall(code)} - FOREIGN_PATHS:
            if not any((start / path).exists() for start in FOLDERS):
                yield path


def dotted_exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found is not None or name in FOREIGN_DOTTED
    return False


def name_exists(code: str) -> bool:
    """Whether code that is the name of a class, of a member of one, or a call names something of ours."""
    match = CLASS.fullmatch(code) or CALL.fullmatch(code)
    return match is None or match[1] in FOREIGN_NAMES or is_defined(match[1])


def is_placed(name: str, path: str) -> bool:
    """Whether something is defined in the file where a document says it is."""
    return any((start / path).exists() and is_defined(name, start / path) for start in FOLDERS)


# --- the tests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document: Path) -> None:
    assert stale(document.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "see `engine/perform.py`",
        "`python benchmarks/nothing.py --tiny`",
        "in `engine/cude/`",
        "`potluck.world.World`",
        "`potluck.training.fit.fitted`",
        "the `World` of",
        "`Rounds.begin` does",
        "`Nobody.play` does",
        "`still_standing(module)` does",
        "`Cohort` (`engine/rounds.py`) is",
        "```text\nRuns.play  runs/loop.py  plays\n```",
        "```text\nRun.play  runs/circle.py  plays\n```",
    ],
)
def test_a_stale_name_is_found(text: str) -> None:
    assert stale(text)


def test_inherited_and_assigned_members_are_found() -> None:
    assert stale("`SerialEngine.settle`, `Client.attempt`, `Method.tasks`, `Run.engine`") == []


def test_the_picture_has_every_layer_in_order() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = [layer for layer in reversed(layers) if (SOURCE / layer).is_dir()]
    assert ROOM.findall(DESIGN.read_text(encoding="utf-8")) == rooms
    assert sorted(rooms) == sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def test_the_layers_are_on_the_first_screens() -> None:
    lines = DESIGN.read_text(encoding="utf-8").splitlines()
    opening = lines[: lines.index("## Six words")]
    assert len(opening) <= 75
    drawn = [line for line in opening if "│" in line or HOP.match(line)]
    assert max(map(len, drawn)) <= 100
    assert sum(bool(HOP.match(line)) for line in drawn) >= 15


def test_the_table_of_card_fields_is_that_of_the_code() -> None:
    section = (
        DESIGN.read_text(encoding="utf-8").partition("| field | meaning | symbol |")[2].partition("\n\n")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| .* \|(?: `(\w+)`)? \|$", section, re.MULTILINE)
    assert rows == [(name, field.symbol) for name, field in FIELDS.items()]
