"""Write docs/tutorial.ipynb from docs/tutorial.md: text becomes Markdown cells, Python blocks become code cells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)


def cells(text: str) -> list[dict[str, Any]]:
    """The cells of a page, each with an id of its own.

    >>> [cell["cell_type"] for cell in cells("# Title\\n\\n```python\\n1 + 1\\n```\\n\\nThe end.\\n")]
    ['markdown', 'code', 'markdown']
    """
    found = []
    for number, part in enumerate(BLOCK.split(text)):
        source = part.strip("\n").splitlines(keepends=True)
        if not source:
            continue
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": source}
        if number % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            cell |= {"cell_type": "markdown"}
        found.append(cell)
    return found


def notebook(text: str) -> str:
    """A notebook of version 4.5, as JSON."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {
        "cells": cells(text),
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main() -> None:
    """Write the notebook anew."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    (DOCS / "tutorial.ipynb").write_text(notebook(text), encoding="utf-8")


if __name__ == "__main__":
    main()
