"""Hooks of the documentation site: pages from files outside docs/, an entry per method, links that lead outside.

Drawings of what crosses become part of their page, so that they follow its light or dark colours. Words of code
with hyphens stay on one line.
"""

from __future__ import annotations

import re
from pathlib import Path

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?)\[((?:[^\]\\]|\\.)*)\]\(([^)#\s]*)(#[^)\s]*)?\)|(src=\")([^\"]+)")
DRAWING = re.compile(r'<p><img alt="([^"]*)" src="[./]*/(images/wire/[\w-]+\.svg)" */?></p>')
CODE = re.compile(r"(?<=<code>)[^<\n]*(?=</code>)")
HYPHENED = re.compile(r"\S*-\S*")  # a browser may end a line after any hyphen of `--methods`
COLORS = {"#24292f": "ink", "#6e7781": "faint", "#fefefe": "paper", "#0072b2": "down", "#d55e00": "up"}
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page per method to the navigation, in the order of their names, and examples of docstrings as code."""
    config.markdown_extensions.append(Examples())  # type: ignore[arg-type]
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
    """Draw what crosses in the colours of the page, and keep words of code whole."""
    return CODE.sub(_whole_words, DRAWING.sub(_drawing, html))


def _whole_words(match: re.Match[str]) -> str:
    return HYPHENED.sub(r'<span class="word">\g<0></span>', match[0])


def _drawing(match: re.Match[str]) -> str:
    svg = (DOCS / match[2]).read_text("utf-8")
    for color, name in COLORS.items():
        svg = svg.replace(color, f"var(--wire-{name})")
    return (
        f'<div class="wire" role="img" aria-label="{match[1]}" tabindex="0">{svg[svg.index("<svg") :]}</div>'
    )


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
        return text if not source else match[0]  # the site does not have it; the text says what it is
    depth = page.count("/")
    address = "../" * depth + place
    if source:
        return f"{source}{address}"
    return f"{picture}[{text}]({address}{anchor or ''})"


def _in_site(path: Path) -> str | None:
    """Where a file of the repository is in the site; None if it is not."""
    if path.parent == ROOT and path.name in OUTSIDE:
        return OUTSIDE[path.name]
    if path == DOCS / "methods":
        return "methods/README.md"
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) and path.is_file() else None
