"""The documentation site has a place for every public name and every page."""

import re
from pathlib import Path

import potluck

ROOT = Path(__file__).parents[2]
TYPES = {
    "ClientId",
    "Content",
    "Contract",
    "Gradients",
}  # names of plain types, explained where they are used


def test_every_public_name_is_in_the_reference() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    name = re.compile(r"^::: potluck\.(?:models\.\w+\.)?(\w+)$", re.MULTILINE)
    shown = [one for page in pages for one in name.findall(page.read_text())]
    assert len(shown) == len(set(shown))
    assert {*shown} == {*potluck.__all__, "open"} - TYPES - {"__version__"}


def test_no_page_holds_both_sides_of_a_merge() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    assert len(pages) > 80
    marked = re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE)
    assert [page.name for page in pages if marked.search(page.read_text())] == []
