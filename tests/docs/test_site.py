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
    shown = [
        name for page in pages for name in re.findall(r"^::: potluck\.(\w+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(shown) == len(set(shown))
    assert {*shown} == {*potluck.__all__, "open"} - TYPES - {"__version__"}
