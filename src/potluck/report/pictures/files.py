"""Pictures as files: PNG, SVG and PDF, the same bytes for the same figure."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from potluck.errors import ConfigError
from potluck.report.format import fit_to_write
from potluck.report.pictures.style import FONT, own_style

FORMATS = ("png", "pdf", "svg")


def format_of(path: Path) -> str:
    """The format that the name of a file asks for; a name that ends in anything else is refused."""
    found = path.suffix.lower().lstrip(".")
    if found not in FORMATS:
        raise ConfigError(f"{path}: give a name that ends in .png, .pdf or .svg")
    return found


def to_bytes(figure: Figure, form: str, dpi: int = 160) -> bytes:
    """The picture as the content of a file of one of the `FORMATS`."""
    if form == "svg":
        return f"{XML}{to_svg(figure)}".encode()
    return to_pdf(figure) if form == "pdf" else to_png(figure, dpi)


XML = '<?xml version="1.0" encoding="utf-8"?>\n'


@own_style()
def to_png(figure: Figure, dpi: int = 160) -> bytes:
    """The picture on white, as PNG."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


@own_style()
def to_svg(figure: Figure) -> str:
    """The picture as an `<svg>` element: real text, no background, no date, nothing from outside."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # The text is drawn with the reader's fonts, so it does not matter which characters ours lack.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(buffer, format="svg", transparent=True, dpi=160, metadata=nothing)
    text = fit_to_write(buffer.getvalue())
    svg = text[text.index("<svg") :].replace(f"'{FONT}'", f"'{FONT}', sans-serif")
    return re.sub(r'<g id="[a-zA-Z]+\w*_\d+"', "<g", svg)


@own_style()
def to_pdf(figure: Figure) -> bytes:
    """The picture as PDF, for papers: vectors, real text, no date."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"pdf.fonttype": 42}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(buffer, format="pdf", transparent=True, metadata={"CreationDate": None})
    return buffer.getvalue()
