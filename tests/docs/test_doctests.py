"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def modules_with_examples() -> list[str]:
    """Found in the text: importing every module only to look for examples would be slow."""
    found = [
        path for path in (SOURCE / "potluck").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")
    ]
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in sorted(found)]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_give_what_they_say(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed, capsys.readouterr().out
