"""What others have written, made safe to print on a terminal."""

from __future__ import annotations

import re

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
LONGEST = 500  # characters


def printable(text: str, most: int = LONGEST) -> str:
    """The text on one line, without terminal escapes; a question mark for every other sign without a shape."""
    words = " ".join(ESCAPES.sub("", text[: 20 * most]).split())[:most]
    return "".join(letter if letter.isprintable() else "?" for letter in words)
