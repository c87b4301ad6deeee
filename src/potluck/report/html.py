"""Pages out of templates: HTML that loads nothing, escapes every name and follows the reader's theme."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from potluck.report.format import fit_to_write, with_units

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = re.compile(
    r"(?<!\S)(?=[^\s-]*-)([^\s]{3,28})(?!\S)"
)  # with a hyphen, and short enough for a line of a phone


def render(template: str, context: Mapping[str, Any]) -> bytes:
    """A page, from one of the files in `templates`."""
    script = Markup(_templates().get_template("page.js").render())
    shell = {"script": script, "script_hash": _hash(script)}
    return fit_to_write(_templates().get_template(template).render({**shell, **context})).encode()


def _hash(script: str) -> str:
    """What a page's policy says of the one script that may run; any other is refused by the browser."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("potluck.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalize,
    )
    environment.filters |= {"svg": svg, "words": in_words, "whole": with_whole_names}
    return environment


def _finalize(value: Any) -> Any:
    """Texts keep numbers and units together; what is HTML already stays as it is."""
    return with_units(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def with_whole_names(text: str) -> Markup:
    """A text in which no line ends inside `mix-large`; a browser may end one after any hyphen."""
    parts = NAME.split(with_units(text))
    parts[::2] = map(escape, parts[::2])
    parts[1::2] = (Markup('<span class="whole">{}</span>').format(part) for part in parts[1::2])
    return Markup("").join(parts)


def svg(picture: Figure) -> Markup:
    """A picture in the colours of the page, so that it follows the reader's theme."""
    from potluck.report.pictures import style
    from potluck.report.pictures.files import to_svg

    names = {style.INK: "ink", style.FAINT: "faint", style.RULE: "rule", style.PAPER: "paper"}
    names |= {color: f"c{place}" for place, color in enumerate(style.PALETTE)}
    svg = re.sub(
        r"(fill|stroke): (#[0-9a-f]{6})",
        lambda match: f"{match[1]}: {f'var(--{names[match[2]]})' if match[2] in names else match[2]}",
        to_svg(picture),
    )
    return Markup(svg)  # matplotlib has escaped the names in it


def in_words(value: Any) -> str:
    """Any value of a JSON file as one line of text."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {in_words(entry)}" for name, entry in value.items())
    return " × ".join(map(in_words, value)) if isinstance(value, (list, tuple)) else str(value)
