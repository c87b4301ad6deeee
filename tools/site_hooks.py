"""Hooks of the documentation site: pages from files outside docs/, an entry per method, links that lead outside.

Drawings of what crosses become part of their page, so that they follow its light or dark colours. Words of code
and numbers with their units stay on one line. On a phone lines of code wrap below where they begin, tables of facts
become lists, and pictures fit the screen; a tap opens them.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from potluck.report.format import with_units

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?)\[((?:[^\]\\]|\\.)*)\]\(([^)#\s]*)(#[^)\s]*)?\)|(src(?:set)?=\")([^\"]+)")
DRAWING = re.compile(r'<p><img alt="([^"]*)" src="[./]*/(images/wire/[\w-]+\.svg)" */?></p>')
CODE = re.compile(r"(?<=<code>)[^<\n]*(?=</code>)")
BLOCK = re.compile(r'<div class="([^"]*)highlight">(.*?)</div>', re.DOTALL)
LINE = re.compile(
    r'<span id="[^"]*__span[^"]*">(?:<a [^>]*></a>)?(.*?)</span>(?=<span id="[^"]*__span|\s*</code>)',
    re.DOTALL,
)
TAG = re.compile(r"<[^>]+>")
COMMENT = re.compile(r'(?<=<span class="c1">)# [^\s<]+')  # no line ends with the sign of a comment
GAP = re.compile(r'(?:<span class="w">( +)</span>|( {2,}))(?=<span class="c1?">)')  # before a comment
PUNCTUATION = re.compile(r'(<span class="[op]">[^<]*[(\[{,.=]</span>)(?=<span)')  # a line may end after it
PLAIN = re.compile(r"(?<=<code>).*?(?=</code>)", re.DOTALL)
COLUMNS = re.compile(r"\S {2,}\S.*\S {2,}\S")  # of a drawing in words
FULL = 70  # letters of a line that its writer ended for want of room
BEGINS = re.compile(r" *(?:\d\. |\S+(?: \S+)? (?:=|←) )")  # a step or a formula
FEW = 3  # lines of a text whose formulas only look like columns
BETWEEN = re.compile(r"(?<=>)[^<]+(?=<)")  # the text between two tags
TABLE = re.compile(r"<table>\s*<thead>(.*?)</thead>(.*?)</table>", re.DOTALL)
CELL = re.compile(r"<t([hd])( [^>]*)?>(.*?)</t\1>", re.DOTALL)
NAME = re.compile(r"(?<=[>(])[\w.]+(?:-[\w.]+)+(?=[,<)])")  # `LG-FedAvg`, `(mix-large)`: of a cell
PICTURE = re.compile(r'<p>(<img alt="[^"]*" src="([^"]+\.png)" */?>)</p>')
DRAWN = "─│┌╭"  # boxes that are drawn with signs do not wrap
PRINTED = re.compile(r"^[^$\n].*\S {2,}\S", re.MULTILINE)  # nor do columns, of tables that a command prints
# a browser may end a line after any hyphen of `--methods`, any slash of `runs/first`, and before `…`
BREAKABLE = re.compile(r"\S*[-/]\S*(?: …\S*)?|\S+ …\S*|…\S+")
SINGLE = re.compile(
    r'(\(?)(<code><span class="word">[^ ]*</span></code>)([.,;:)]*)'
)  # and what stands beside it
COLORS = {"#24292f": "ink", "#6e7781": "faint", "#fefefe": "paper", "#0072b2": "down", "#d55e00": "up"}
HARD_SPACE = re.compile(r"(?:(?<=&[gl]t;)|(?<=&[gl]t;=)) (?=\d)")  # in `<= 1`
BESIDE_TEXT = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<[^>]+>)", re.DOTALL)
YES_OR_NO = 4  # letters of a cell
MOST_COLUMNS, LETTERS = 8, 41  # of a table that can be a list on a phone; of a line of a table there
PAIR = 28  # letters of the longest words of a table of two columns that stays one on a phone
WHOLE = 28  # letters of a word of code that fits on a line of a phone
SETTING = re.compile(r"(?=.{,24}$)[\w.]+: [\w.-]+")
SMALL_NUMBER = re.compile(r"\b\d+(?:\.\d+)?e-\d+\b")  # `1e-4`, in which a line could end
PATH = re.compile(r"[\w./*-]+")  # of a file, as a text
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page per method to the navigation, in the order of their names, and examples of docstrings as code."""
    config.markdown_extensions.append(Examples())  # type: ignore[arg-type]
    config.theme.static_templates.discard("404.html")  # it finds its styles only at the root of a server
    pages = sorted(path for path in (DOCS / "methods").glob("*.md") if path.stem not in ("README", "writing"))
    for section in config.nav or []:
        if "Methods" in section:
            section["Methods"].append({"Every method": [f"methods/{path.name}" for path in pages]})
    return config


class Examples(Extension):
    """Doctests in docstrings become blocks of code; Markdown would take `>>>` for quotations in quotations."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Come before fenced blocks are read."""
        md.preprocessors.register(_Examples(md), "doctests", 28)


class _Examples(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        """Put a fence around every paragraph that begins with a prompt."""
        found: list[str] = []
        inside = fenced = False
        for line in [*lines, ""]:
            fenced ^= line.startswith("```")
            if not inside and not fenced and line.startswith(">>> "):
                inside = True
                found += ["", "```pycon"]
            elif inside and not line.strip():
                inside = False
                found.append("```")
            found.append(line)
        return found[:-1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take README, CONTRIBUTING and CHANGELOG into the site."""
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw what crosses in the colours of the page, keep words of code whole, and make room on a phone."""
    html = CODE.sub(_whole_words, DRAWING.sub(_drawing, html))
    html = SINGLE.sub(r'<span class="beside">\g<0></span>', html)
    html = TABLE.sub(_facts, BLOCK.sub(_wrapping, html))
    return _with_units(PICTURE.sub(r'<p><a class="picture" href="\2">\1</a></p>', html))


def _with_units(html: str) -> str:
    """Keep a number and its unit on one line, but leave code as it is."""
    parts = BESIDE_TEXT.split(html)
    parts[::2] = [
        SMALL_NUMBER.sub(
            r'<span class="whole">\g<0></span>', HARD_SPACE.sub("\N{NO-BREAK SPACE}", with_units(part))
        )
        for part in parts[::2]
    ]
    return "".join(parts)


def _wrapping(match: re.Match[str]) -> str:
    """Give every line of a block of code the place where what does not fit goes on, below its own beginning."""
    kind, code = match.groups()
    text = TAG.sub("", code)
    columns = ("console" in kind and PRINTED.search(text)) or (
        "text" in kind and len(COLUMNS.findall(text)) > FEW
    )
    if columns or any(sign in code for sign in DRAWN):
        return f'<div class="{kind}highlight drawn">{code}</div>'
    if "__span" not in code:
        code = PLAIN.sub(_lines, code)
    return f'<div class="{kind}highlight wraps">{LINE.sub(_line, code)}</div>'


def _lines(match: re.Match[str]) -> str:
    """The lines of a block that nobody coloured; lines of one sentence flow together where there is less room."""
    flows: list[list[str]] = []
    for line in match[0].splitlines():
        if flows and _goes_on(flows[-1], line):
            flows[-1].append(line.lstrip())
        else:
            flows.append([line])
    return "".join(map(_flow, flows))


def _flow(lines: list[str]) -> str:
    indent = _below(lines[0]) if len(lines) > 1 else _indent(lines[0])
    turn = '<span class="turn">\n</span>'
    return f'<span style="--indent:{indent}ch">{turn.join(lines)}\n</span>'


def _goes_on(lines: list[str], line: str) -> bool:
    """Whether a line is the rest of the sentence before it: below its beginning, and no step or formula."""
    before = unescape(lines[-1]) if len(lines) == 1 else " " * _below(lines[0]) + unescape(lines[-1])
    begins = len(line) - len(line.lstrip())
    full = len(before) > FULL and not before.endswith((";", ":"))
    return full and begins == _below(lines[0]) and not BEGINS.match(line)


def _below(text: str) -> int:
    """Where the words of a line begin, after a label such as `Up:     `."""
    return re.match(r"(?:[A-Z]\w*: +)? *", text).end()  # type: ignore[union-attr]


def _indent(text: str) -> int:
    label = re.match(r"[A-Z]\w*: +", text)  # `Up:     the weights`
    return label.end() if label else re.match(r"(?:>>> |\.\.\. )? *", text).end() + 2  # type: ignore[union-attr]


def _line(match: re.Match[str]) -> str:
    indent = _indent(unescape(TAG.sub("", match[1])))
    whole = GAP.sub(r'<span class="gap">\1\2</span>', match[0])
    whole = PUNCTUATION.sub(_way_out, whole)
    whole = BETWEEN.sub(lambda part: BREAKABLE.sub(_word, part[0]), whole)
    whole = COMMENT.sub(r'<span class="whole">\g<0></span>', whole)
    return whole.replace("<span ", f'<span style="--indent:{indent}ch" ', 1)


def _way_out(match: re.Match[str]) -> str:
    """Let a line end after a sign inside a word that is longer than a line of a phone."""
    before, after = (TAG.sub("", part) for part in (match.string[: match.end()], match.string[match.end() :]))
    word = re.search(r"\S*$", before)[0] + re.match(r"\S*", after)[0]  # type: ignore[index]
    return f"{match[1]}<wbr>" if len(unescape(word)) > WHOLE else match[1]


def _facts(match: re.Match[str]) -> str:
    """Name the column in every cell of a table of facts, so that it can be read as a list."""
    heads = CELL.findall(match[1])
    names = [TAG.sub("", cell[2]) for cell in heads]
    pair = len(names) == 2 and _longest_words(heads, match[2]) <= PAIR
    if _is_matrix(match[2]):
        return f'<div class="matrix">{match[0]}</div>'
    if len(names) > MOST_COLUMNS:
        return NAME.sub(_word, match[0])
    if pair or ("meaning" not in names and not _crowded(heads, match[2])):
        return match[0]
    rows = [_row(row, names) for row in match[2].split("</tr>")]
    return f'<div class="facts"><table><thead>{match[1]}</thead>{"</tr>".join(rows)}</table></div>'


def _is_matrix(body: str) -> bool:
    """Whether all columns but the first say little more than yes or no, so that they are compared."""
    cells = [cell for row in body.split("</tr>") for cell in CELL.findall(row)[1:]]
    return not any("right" in cell[1] or len(TAG.sub("", cell[2])) > YES_OR_NO for cell in cells)


def _crowded(heads: list[tuple[str, str, str]], body: str) -> bool:
    """Whether a table of words is too wide for a phone; columns of numbers are compared, so they stay columns."""
    numbers = sum("right" in head[1] for head in heads)
    if not 2 < len(heads) < MOST_COLUMNS or 2 * numbers > len(heads) or not all(head[2] for head in heads):
        return False
    return _longest_words(heads, body) > LETTERS


def _longest_words(heads: list[tuple[str, str, str]], body: str) -> int:
    """The letters of a line that has the longest word of every column."""
    rows = [heads, *map(CELL.findall, body.split("</tr>"))]
    columns = zip(*(row for row in rows if len(row) == len(heads)), strict=True)
    return sum(max(_longest_word(cell[2]) for cell in column) for column in columns)


def _longest_word(html: str) -> int:
    return max(map(len, re.split(r"[\s,/]+", TAG.sub("", html))))


def _row(row: str, names: list[str]) -> str:
    left = iter(names)
    return CELL.sub(lambda cell: _named_cell(cell, next(left)), row)


def _named_cell(cell: re.Match[str], name: str) -> str:
    nothing = ' class="nothing"' if cell[3].strip() in ("", "–") else ""
    return f'<td{cell[2] or ""}{nothing} data-name="{name}"><span>{cell[3]}</span></td>'


def _whole_words(match: re.Match[str]) -> str:
    """A setting such as `method: fedavg` stays whole; so do words."""
    if SETTING.fullmatch(unescape(match[0])):
        return f'<span class="whole setting">{match[0]}</span>'
    return BREAKABLE.sub(_word, match[0])


def _word(match: re.Match[str]) -> str:
    """A word that stays whole; one that is too long may end a line after a slash."""
    if len(unescape(match[0])) <= WHOLE:
        return f'<span class="whole">{match[0]}</span>'
    return f'<span class="word">{match[0].replace("/", "/<wbr>")}</span>'


def _drawing(match: re.Match[str]) -> str:
    """A drawing in two widths, of which the page shows one."""
    wide = DOCS / match[2]
    return _inline(wide, "wide", match[1]) + _inline(wide.with_suffix(".narrow.svg"), "narrow", match[1])


def _inline(path: Path, width: str, label: str) -> str:
    svg = path.read_text("utf-8")
    for color, name in COLORS.items():
        svg = svg.replace(color, f"var(--wire-{name})")
    return f'<div class="wire {width}" role="img" aria-label="{label}">{svg[svg.index("<svg") :]}</div>'


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the part that makes search work from file:// from this site, not from another."""
    local = f"{'../' * page.file.src_uri.count('/')}assets/file_search.js"
    return output.replace("https://unpkg.com/iframe-worker/shim", local)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    source = next((name for name, made in OUTSIDE.items() if made == page.file.src_uri), None)
    home = ROOT if source else (DOCS / page.file.src_uri).parent
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lambda match: _link(match, home, page.file.src_uri), part) for part in parts[::2]]
    return "".join(parts)


def _link(match: re.Match[str], home: Path, page: str) -> str:
    picture, text, target, anchor, source, path = match.groups()
    wanted = path if source else target
    if not wanted or "://" in wanted or wanted.startswith("mailto:"):
        return match[0]
    place = _in_site((home / wanted).resolve())
    if place is None:
        return _unlinked(text) if not source else match[0]  # the site does not have it
    depth = page.count("/")
    address = "../" * depth + place
    if source:
        return f"{source}{address}"
    return f"{picture}[{text}]({address}{anchor or ''})"


def _unlinked(text: str) -> str:
    """What stays of a link to a file that the site does not have: a path as code, other words as they are."""
    return f"`{text}`" if "/" in text and PATH.fullmatch(text) else text


def _in_site(path: Path) -> str | None:
    """Where a file of the repository is in the site; None if it is not."""
    if path.parent == ROOT and path.name in OUTSIDE:
        return OUTSIDE[path.name]
    if path == DOCS / "methods":
        return "methods/README.md"
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) and path.is_file() else None
