"""Write a page in docs/methods/ for every method, from its docstring, contract and options, and their index.

Each page has a drawing of what crosses, in docs/images/wire/, and a narrow one for phones.

    python tools/method_pages.py           write them
    python tools/method_pages.py --check   end with 1 if one of them is not up to date

What stands below the line `<!-- notes -->` of a page is written by hand and stays.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from potluck.cli.method_examples import FOR_DEMO, explained_in_demo
from potluck.cli.views.contract import PURPOSES
from potluck.cli.views.methods import method_entry, whole_sheet
from potluck.cli.views.options import options_sheet
from potluck.core.method import Method
from potluck.core.options import options_of
from potluck.methods.registry import find_method, method_names
from potluck.report.format import count
from potluck.report.pictures.files import XML, to_svg
from potluck.report.pictures.style import PAPER
from potluck.report.pictures.wire import wire_picture
from potluck.report.render import Column, Sheet, markdown, words

FOLDER = Path(__file__).parents[1] / "docs" / "methods"
DRAWINGS = FOLDER.parent / "images" / "wire"
CLIENTS = 8  # of the demo
NOTES = "<!-- notes -->"
TASKS = {
    "classes": "one class per sample, the same classes everywhere",
    "features": "classes, labels or numbers, the same everywhere",
    "one": "of any kind, the same everywhere",
    "any": "of any kind, each client its own",
}
MARKS = {
    "INFERRED": "INFERRED marks what the paper does not state: it is our reading of it.",
    "UNVERIFIED": "UNVERIFIED marks what we recall of the paper and could not check.",
}
EMPHASIS = re.compile(r"(`[^`]*`)|(?<!\w)_|_(?!\w)")  # code, or an underscore that would begin or end italics
WAYS = {"up": "What leaves a client", "down": "What comes to a client"}


def main() -> int:
    """Write the pages, or only compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say which pages are old")
    check, old = parser.parse_args().check, 0
    for path, text in pages(method_names()).items():
        if not path.exists() or path.read_text("utf-8") != text:
            old += 1
            print(f"{'old' if check else 'written'}: {path.name}")
            if not check:
                path.write_text(text, "utf-8")
    return int(check and old > 0)


def pages(names: Sequence[str]) -> dict[Path, str]:
    """The text of every page by its path."""
    entries, found = [], {}
    for name in names:
        method, explained = find_method(name), explained_in_demo(name)
        path = FOLDER / f"{name}.md"
        found[path] = page(method, explained) + hand_written(path)
        if crosses(explained):
            found[DRAWINGS / f"{name}.svg"] = drawing(explained)
            found[DRAWINGS / f"{name}.narrow.svg"] = drawing(explained, narrow=True)
        entries.append(method_entry(method, explained))
    found[FOLDER / "README.md"] = index(entries)
    return found


def hand_written(path: Path) -> str:
    """The notes at the end of a page, with the line that marks them."""
    if not path.exists() or NOTES not in (text := path.read_text("utf-8")):
        return ""
    return "\n" + text[text.index(NOTES) :]


def page(method: type[Method], explained: Mapping[str, Any] | None) -> str:
    """One method: what it is, what crosses, its options."""
    parts = [*described(method), facts(method, explained)]
    if crosses(explained):
        title = parts[0].removeprefix("# ")
        parts += [
            "## What crosses",
            f"![What crosses between server and clients in {title}](../images/wire/{method.name}.svg)",
        ]
    for way, title in WAYS.items():
        parts += [f"## {title}", crossing(explained, way)]
    parts += ["## Options", markdown(options_sheet(method.name, options_of(method.Config))).rstrip()]
    return with_code("\n\n".join(parts)) + "\n"


def with_code(text: str) -> str:
    """Words between backticks in tables and notes as code, which `markdown` would show as they are."""
    return re.sub(r"\\`([^`|\n]+)\\`", lambda match: "`" + match[1].replace("\\_", "_") + "`", text)


def crosses(explained: Mapping[str, Any] | None) -> bool:
    """Whether there is a message to draw."""
    return any(step["up"] or step["down"] for step in (explained or {}).get("steps", ()))


def drawing(explained: Mapping[str, Any] | None, narrow: bool = False) -> str:
    """Server, clients and what crosses, as SVG on paper of its own, so that it can be read on dark pages too."""
    svg = to_svg(wire_picture(explained or {}, {}, CLIENTS, narrow=narrow))
    svg = re.sub(r"(?<=sans-serif)(?:, '[^']+')+", "", svg)  # fonts that only some machines have
    return f"{XML}{svg.replace('fill: none', f'fill: {PAPER}', 1)}"


def described(method: type[Method]) -> list[str]:
    """The docstrings: of the paper's file and class, then of the class that adds ablations."""
    paper = [one for one in method.__mro__ if vars(one).get("name") == method.name][-1]
    file = sys.modules[paper.__module__].__doc__ or ""
    first, _, more = inspect.cleandoc(file).partition("\n\n")
    name = first.partition(" (")[0].partition(":")[0]
    texts = [f"# {name}", f"{first} `method: {method.name}` in an experiment."]
    texts += [more] if "Up:" in more else []
    classes = (paper,) if paper is method else (paper, method)
    texts += [listed(inspect.getdoc(one) or "") for one in classes]
    marks = [said for mark, said in MARKS.items() if any(mark in text for text in texts)]
    return [*map(literal, texts), *marks]


def literal(text: str) -> str:
    """Text whose underscores are letters of formulas, never signs of italics; code stays as it is."""
    lines = (line if line.startswith("    ") else EMPHASIS.sub(_escaped, line) for line in text.split("\n"))
    return "\n".join(lines)


def _escaped(found: re.Match[str]) -> str:
    return found[1] or "\\_"


def listed(text: str) -> str:
    """Text with an empty line before each list, without which Markdown sees none."""
    return re.sub(r"(?m)^(?!- | )(.+)\n(?=- )", r"\1\n\n", text)


def facts(method: type[Method], explained: Mapping[str, Any] | None) -> str:
    """What the method asks for and promises with its default options, as a list."""
    rows = {
        "models": method.models,
        "tasks": TASKS[method.tasks],
        "public data": "needed" if method.needs_public_data else "",
        "never leaves a client": ", ".join(explained["stays"] if explained else method.stays),
        "ways to predict": ", ".join(f"`{mode}`" for mode in method.modes) if len(method.modes) > 1 else "",
    }
    return "\n".join(f"- **{name}**: {value}" for name, value in rows.items() if value)


def crossing(explained: Mapping[str, Any] | None, way: str) -> str:
    """A row for every tensor that crosses in one direction, with its size in the demo."""
    entries = [
        entry | {"when": when(step, entry, way)}
        for step in (explained or {}).get("steps", ())
        for entry in step[way]
    ]
    if explained is None or not entries:
        return "Nothing."
    columns = (
        words("name", itemgetter("name")),
        words("scalars", itemgetter("formula")),
        Column("in the demo", itemgetter("scalars"), count),
        words("when", itemgetter("when")),
        words("meaning", itemgetter("meaning")),
    )
    options = ", ".join(f"`{one}`" for one in FOR_DEMO.get(explained["method"], ()))
    where = f"client 0 (`{explained['client']['model']}`) of the demo{f' with {options}' if options else ''}"
    note = f"In all {count(explained[f'{way}_scalars'])} scalars a round for {where}."
    return markdown(Sheet("", columns, entries, (note,))).rstrip()


def when(step: Mapping[str, Any], entry: Mapping[str, Any], way: str) -> str:
    """How often something crosses."""
    often = f"{count(step['times'][way])} times a round" if "times" in step else PURPOSES[step["purpose"]]
    return often + (", optional" if entry["optional"] else "")


def index(entries: Sequence[Mapping[str, Any]]) -> str:
    """The list of all methods, each with a link to its page."""
    table = markdown(whole_sheet(entries))
    for name in map(itemgetter("name"), entries):
        table = table.replace(f"\n| {name} |", f"\n| [{name}]({name}.md) |")
    how = "[Write a method](writing.md) explains how to add one"
    intro = f"{len(entries)} methods, each with its own page. {how}."
    return with_code(f"# Methods\n\n{intro}\n\n{table}")


if __name__ == "__main__":
    sys.exit(main())
