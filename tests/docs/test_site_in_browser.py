"""The documentation site in a real browser, as wide as a phone and as a desk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import PATH, WIDE, Chromium

pytest.importorskip("material")
pytestmark = [pytest.mark.skipif(PATH is None, reason="there is no Chromium"), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
WRAPPED = """[...document.querySelectorAll(".wraps code")].filter(one => one.scrollWidth > one.clientWidth + 1)
  .map(one => one.textContent.slice(0, 60))"""
PICTURES = """[...document.querySelectorAll("article img")].map(one => one.getBoundingClientRect())
  .filter(box => box.left < 0 || box.right > innerWidth + 1).length"""
FIRST = """(() => { const [picture, code] = ["img", "pre"].map(name => document.querySelector(`article ${name}`));
  return Boolean(picture.compareDocumentPosition(code) & Node.DOCUMENT_POSITION_FOLLOWING) })()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make check` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def test_no_page_is_wider_than_a_phone(site: Path, browser: Chromium) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        browser.open(page.as_uri(), 390)
        found = browser.says(WIDE)
        assert found["content"] == found["width"] == 390, page.name
        assert found["broken"] == [], page.name
        assert browser.says(WRAPPED) == [], page.name
        assert browser.says(PICTURES) == 0, page.name


@pytest.mark.parametrize("name", ["index.html", "index.zh.html", "install.html", "tutorial.html"])
def test_on_the_first_pages_nothing_scrolls_sideways(name: str, site: Path, browser: Chromium) -> None:
    for width in (390, 768, 1440):
        browser.open((site / name).as_uri(), width)
        assert browser.says(WIDE)["scrolling"] == [], width


def test_the_gallery_begins_with_pictures(site: Path, browser: Chromium) -> None:
    browser.open((site / "gallery.html").as_uri(), 390)
    assert browser.says(FIRST)
    links = "[...document.querySelectorAll('.thumbnails a')]"
    leading = f"{links}.filter(one => document.querySelector(one.hash)).length"
    assert browser.says(f"{links}.length") == browser.says(leading) > 10


def test_a_wide_table_keeps_its_first_column_in_sight(site: Path, browser: Chromium) -> None:
    browser.open((site / "results.html").as_uri(), 390)
    wraps = "[...document.querySelectorAll('.md-typeset__scrollwrap')].find(one => one.scrollWidth > 500)"
    left = f"(() => {{ const one = {wraps}; one.scrollLeft = 100;"
    left += " return one.querySelector('td').getBoundingClientRect().left })()"
    assert browser.says(left) >= 0


def test_numbers_with_units_and_words_of_code_stay_together(site: Path) -> None:
    for name in ("results", "performance"):
        page = (site / f"{name}.html").read_text("utf-8")
        text = re.sub(r"<(pre|code|svg|script).*?</\1>|<[^>]+>", "", page, flags=re.DOTALL)
        assert not re.search(r"\d (%|±|kB|ms)(?!\w)", text)
    assert '<span class="whole">runs/first</span>' in (site / "tutorial.html").read_text("utf-8")
    assert "<wbr>" not in (site / "how_to" / "follow.html").read_text("utf-8")


def test_no_line_begins_with_a_full_stop_and_no_name_breaks_at_its_hyphen(site: Path) -> None:
    operating = (site / "operating.html").read_text("utf-8")
    word = '<span class="word">tests/<wbr>deploy/<wbr>test_stand_ins.py</span>'
    assert f'<span class="beside"><code>{word}</code>.</span>' in operating
    assert '<span class="whole">LG-FedAvg</span>' in (site / "results.html").read_text("utf-8")
    assert "<code>examples/</code>" in re.sub(
        r"</?span[^>]*>", "", (site / "experiment.html").read_text("utf-8")
    )


def test_a_table_of_yes_and_no_stays_a_table_on_a_phone(site: Path, browser: Chromium) -> None:
    browser.open((site / "tasks.html").as_uri(), 390)
    assert browser.says("getComputedStyle(document.querySelector('.matrix thead')).display") != "none"
    assert browser.says(WIDE)["scrolling"] == []


@pytest.mark.parametrize(("page", "width"), [("comparing.html", 1440), ("how_to/real_sites.html", 768)])
def test_the_button_that_copies_hides_no_code(site: Path, browser: Chromium, page: str, width: int) -> None:
    browser.open((site / page).as_uri(), width)
    covered = """[...document.querySelectorAll(".wraps")].filter(block => {
      const button = block.querySelector(".md-code__button").getBoundingClientRect();
      const line = document.createRange(), texts = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
      while (texts.nextNode()) {
        line.selectNode(texts.currentNode);
        const hidden = box => box.right > button.left && (box.top + box.bottom) / 2 < button.bottom;
        if (texts.currentNode.data.trim() && [...line.getClientRects()].some(hidden)) return true;
      }
    }).length"""
    assert browser.says(covered) == 0


def test_options_of_a_method_are_a_list_on_a_phone(site: Path, browser: Chromium) -> None:
    page = (site / "methods" / "fedmrl.html").as_uri()
    heads = "getComputedStyle(document.querySelector('.facts thead')).display"
    browser.open(page, 390)
    assert browser.says(heads) == "none"
    narrow = """[...document.querySelectorAll(".facts tbody tr")]
      .filter(row => row.offsetWidth < row.closest("table").clientWidth).length"""
    browser.open((site / "tasks.html").as_uri(), 390)
    assert browser.says(narrow) == 0
    browser.open(page, 1440)
    assert browser.says(heads) != "none"


def test_the_site_is_dark_where_the_system_is(site: Path, browser: Chromium) -> None:
    ground = "document.body.getAttribute('data-md-color-scheme')"
    page = (site / "install.html").as_uri()
    for dark, scheme in ((False, "default"), (True, "slate"), (False, "default")):
        browser.open(page, 768, dark=dark)
        assert browser.says(ground) == scheme
