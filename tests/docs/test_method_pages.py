"""The pages in docs/methods/ say what docstrings, contracts and options say."""

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from potluck.cli.method_examples import explained_in_demo
from potluck.methods.registry import find_method, method_names

ROOT = Path(__file__).parents[2]
OURS = [name for name in method_names() if find_method(name).__module__.startswith("potluck.methods")]

explained = cache(explained_in_demo)


def test_every_page_is_up_to_date() -> None:
    tool = method_pages()
    tool.explained_in_demo = explained
    old = [
        path.name for path, text in tool.pages(OURS).items() if said(path.read_text("utf-8")) != said(text)
    ]
    assert not old, f"run `make pages`: {old}"


def method_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("method_pages", ROOT / "tools" / "method_pages.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_underscores_of_formulas_never_begin_italics() -> None:
    literal = method_pages().literal
    assert literal("dist(z, P̂_y), min_{c} and n_k") == r"dist(z, P̂\_y), min\_{c} and n_k"
    assert literal("`_a` is code\n    so is min_{c}") == "`_a` is code\n    so is min_{c}"


def test_drawings_do_not_depend_on_the_fonts_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = method_pages()
    family = "font-family: 'DejaVu Sans', sans-serif"
    monkeypatch.setattr(tool, "to_svg", lambda picture: f"{family}, 'Noto Sans CJK SC'; fill: none")
    assert f"{family};" in tool.drawing(explained("fedproto"))


def test_formulas_and_lists_stand_apart_from_sentences() -> None:
    """Markdown would join them to the paragraph before."""
    run_on = re.compile(r"^(?! |\d\. |- )\S.*\n(?: {4}\S|1\. |- ).*", re.MULTILINE)
    pages = {name: (ROOT / "docs" / "methods" / f"{name}.md").read_text("utf-8") for name in OURS}
    found = {name: run_on.findall(text.partition("## What leaves")[0]) for name, text in pages.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def said(text: str) -> str | list[str]:
    """Of a drawing its words: where they stand depends on the version of matplotlib."""
    return re.findall("<text[^>]*>([^<]*)", text) if text.startswith("<?xml") else text


def test_every_method_has_sizes_in_the_demo() -> None:
    found = {name: explained(name) or {} for name in OURS}
    assert [name for name, one in found.items() if not one] == []
    assert found["fedgh"]["up_formula"] == "C_k·d + C_k"
    assert found["fedgh"]["up_scalars"] == 8 * 64 + 8  # client 0 holds eight classes
    assert found["local"]["down_formula"] == ""
