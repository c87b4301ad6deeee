"""The HTML of a page: its shell and style, sections, tables and pictures. Text is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from matplotlib.figure import Figure

from potluck.report import plots
from potluck.report.render import Column, Sheet, SortKey

# The colours of a picture become variables of the page, so that it follows the reader's theme.
_VARIABLES = {
    plots.INK: "var(--ink)",
    plots.FAINT: "var(--faint)",
    plots.RULE: "var(--rule)",
    plots.PAPER: "var(--paper)",
    **{color: f"var(--c{place})" for place, color in enumerate(plots.PALETTE)},
}

_STYLE = """
:root {
  color-scheme: light dark;
  --ink: #24292f; --faint: #6e7781; --rule: #d8dee4; --paper: #fff; --tint: #f6f8fa;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --faint: #9198a1; --rule: #30363d; --paper: #0d1117; --tint: #161b22;
    --c0: #4ba3dc; --c1: #f0803c; --c2: #2ec596; --c3: #e29fc3; --c4: #f0b429; --c5: #8ccdf2;
  }
}
* { box-sizing: border-box }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 920px; margin: 0 auto; padding: 40px 24px 64px }
h1 { font-size: 30px; line-height: 1.2; margin: 0; letter-spacing: -.01em }
h2 { font-size: 19px; margin: 48px 0 4px }
h3 { font-size: 15px; margin: 0 0 8px }
h4 { font-size: 13px; margin: 14px 0 2px; color: var(--faint) }
p { margin: 0 0 12px; max-width: 76ch }
.lead, .note, .detail { color: var(--faint) }
.lead { margin: 4px 0 0 }
.note, .detail { font-size: 13px; margin: 0 0 6px }
.headline { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px }
.headline { margin-top: 28px }
.card, .box { background: var(--tint); border: 1px solid var(--rule); border-radius: 8px; padding: 14px 16px }
.card span { display: block }
.card .label, .card .detail { font-size: 12.5px; line-height: 1.35; color: var(--faint); margin: 0 }
.card .value { font-size: 25px; font-weight: 600; letter-spacing: -.01em; margin: 2px 0 }
.boxes { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 12px }
.boxes { margin-top: 14px }
.box ul { margin: 0; padding-left: 18px }
.box li { margin: 2px 0; overflow-wrap: anywhere }
.box .detail { display: block; margin: 0 }
figure { margin: 14px 0; overflow-x: auto }
figure svg { display: block; max-width: max(100%, 640px); height: auto }
figure text { font-family: inherit !important }
.scroll { overflow-x: auto; margin: 12px 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: 5px 0 5px 16px; border-bottom: 1px solid var(--rule); text-align: left; font-weight: 400 }
th:first-child, td:first-child { padding-left: 0 }
td { white-space: nowrap }
thead th { color: var(--faint); font-size: 13px; line-height: 1.3; vertical-align: bottom }
th.right, td.right { text-align: right }
tr.marked td { font-weight: 600 }
table.plain { width: auto }
table.plain th { color: var(--faint) }
table.plain td { white-space: normal; overflow-wrap: anywhere }
th button { all: unset; cursor: pointer }
th button:hover, th button:focus-visible { color: var(--ink); text-decoration: underline }
th[aria-sort=ascending] button::after { content: " ↑" }
th[aria-sort=descending] button::after { content: " ↓" }
td.bar {
  min-width: 136px;
  background: linear-gradient(var(--c0), var(--c0)) 100% 100% / calc(var(--share) * 120px) 3px no-repeat;
}
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
pre {
  background: var(--tint); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 16px; overflow-x: auto; margin: 12px 0;
}
details { margin: 12px 0 }
summary { cursor: pointer; color: var(--faint) }
@media print { main { max-width: none; padding: 0 } }
"""

_SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[head.cellIndex].dataset.key;
  const compare = (a, b) => a === b ? 0 : a === "" ? -1 : b === "" ? 1
    : isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true}) : a - b;
  const rows = [...body.rows].sort((a, b) => compare(key(a), key(b)));
  body.append(...(down ? rows.reverse() : rows));
});
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """A whole page; `sections` are HTML, and empty ones are left out."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(subtitle)}</p></header>\n'
        + "\n".join(section for section in sections if section)
        + f"\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def section(title: str, content: str, text: str = "") -> str:
    """A headed part of a page; `content` is HTML, `text` a sentence below the heading."""
    lead = f'<p class="lead">{escape(text)}</p>' if text else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{content}</section>"


def figure(picture: Figure, label: str) -> str:
    """A picture in the colours of the page; `label` is what screen readers say."""
    svg = re.sub(
        r"(fill|stroke): (#[0-9a-f]{6})",
        lambda match: f"{match[1]}: {_VARIABLES.get(match[2], match[2])}",
        plots.to_svg(picture),
    )
    return f'<figure role="img" aria-label="{escape(label)}">{svg}</figure>'


def table(sheet: Sheet, marked: int | None = None, bars: bool = False) -> str:
    """A sheet as HTML, sortable where it has keys; `bars` underlines the last column by its share."""
    sortable = bool(sheet.keys)
    head = "".join(_head(column, sortable) for column in sheet.columns)
    lines = []
    for place, row in enumerate(sheet.rows):
        keys = sheet.keys[place] if sortable else (None,) * len(row)
        shares = [None] * (len(row) - 1) + [keys[-1] if bars else None]
        cells = "".join(map(_cell, row, sheet.columns, keys, shares))
        lines.append(f'<tr class="marked">{cells}</tr>' if place == marked else f"<tr>{cells}</tr>")
    body = "".join(lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _head(column: Column, sortable: bool) -> str:
    name = f'<button type="button">{escape(column.name)}</button>' if sortable else escape(column.name)
    right = ' class="right"' if column.align == "right" else ""
    return f'<th scope="col"{right}>{name}</th>'


def _cell(text: str, column: Column, key: SortKey, share: SortKey) -> str:
    names = ["right"] * (column.align == "right") + ["bar"] * isinstance(share, (int, float))
    css = f' class="{" ".join(names)}"' if names else ""
    style = f' style="--share:{share:.4f}"' if isinstance(share, (int, float)) else ""
    return f'<td{css}{style} data-key="{escape("" if key is None else str(key))}">{escape(text)}</td>'
