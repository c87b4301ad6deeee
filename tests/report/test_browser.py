"""Our pages in a real browser: nothing is wider than the screen, tables sort, and text can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up import make_run

from chromium import PATH, WIDE, Chromium
from potluck.live.page import shown
from potluck.live.snapshot import Watch
from potluck.report.comparison_page import write_comparison, write_sweep
from potluck.report.page import write_report

pytestmark = pytest.mark.skipif(PATH is None, reason="there is no Chromium")
LONG = 40 * "long"
AMOUNT = {"scalars": 10, "bytes": 40}
INTERVAL = {"mean": 0.1, "low": -0.1, "high": 0.3, "tie": True, "pairs": 9}
OFF = """[...document.querySelectorAll("main *")].filter(one => one.getClientRects().length)
  .filter(one => !one.closest(".scroll, .picture") && one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.outerHTML.slice(0, 80))"""
OPENED = "document.querySelectorAll('details').forEach(one => one.open = true)"
SORTED = """(() => {
  const button = [...document.querySelectorAll("th button")].find(one => one.textContent === NAME);
  const place = button.parentElement.cellIndex, rows = button.closest("table").tBodies[0].rows;
  const column = () => [...rows].map(row => row.cells[place].dataset.key).filter(Boolean).map(Number);
  button.focus(); button.click(); const up = column(); button.click();
  return {up, down: column(), sorted: button.parentElement.getAttribute("aria-sort")};
})()"""
# Colours of text and ground where words are faint, as [red, green, blue] from 0 to 255.
FAINT = """(() => {
  const one = document.querySelector(".lead"), numbers = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  return [getComputedStyle(one).color, getComputedStyle(document.body).backgroundColor].map(numbers);
})()"""

# Names in the first column of a plain table that do not fit on one line.
BROKEN = """[...document.querySelectorAll("table.plain th")].filter(one => {
  const words = document.createRange(); words.selectNodeContents(one);
  return new Set([...words.getClientRects()].map(box => box.top)).size > 1;
}).map(one => one.textContent)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def check_fits(browser: Chromium, address: str) -> None:
    """Nothing leaves the screen, and only tables scroll, whatever is folded out."""
    for width in (390, 768, 1440):
        browser.open(address, width)
        browser.says(OPENED)
        found = browser.says(WIDE)
        assert found["content"] == found["width"] == width
        assert browser.says(OFF) == []
        assert [one for one in found["scrolling"] if 'class="scroll' not in one] == []


def check_sorts(browser: Chromium, column: str) -> None:
    found = browser.says(SORTED.replace("NAME", repr(column)))
    assert len(found["up"]) > 1
    assert found["up"] == sorted(found["up"])
    assert found["down"] == found["up"][::-1]
    assert found["sorted"] == "descending"


def method(name: str, mean: float, difference: dict[str, Any] | None) -> dict[str, Any]:
    curve = {
        "rounds": [1, 2],
        "mean": [0.1, mean],
        "low": [0.1, mean],
        "high": [0.2, mean],
        "bytes": [10, 20],
    }
    gains = {"better": 1, "equal": 0, "worse": 1, "differences": {"0": {"0": 0.3, "1": -0.1}}}
    return {
        "method": name, "when": "after_aggregation", "mode": "model", "difference": difference, "curve": curve,
        "accuracy": {"mean": mean, "std_over_seeds": None}, "messages": {"up": AMOUNT, "down": AMOUNT},
        "seconds_per_round": 0.1, "runs": {"0": f"{name}-seed0"},
        **({"against": "local", "by_client": gains} if difference else {}),
    }  # fmt: skip


def comparison() -> dict[str, Any]:
    methods = [method("local", 0.7, None), method(LONG, 0.8, INTERVAL), method("fedavg", 0.6, INTERVAL)]
    return {
        "baseline": "local", "seeds": ["0"], "view": "last", "draws": 10, "level": 0.9, "methods": methods
    }  # fmt: skip


def test_a_report_fits_and_sorts(tmp_path: Path, browser: Chromium) -> None:
    path = write_report(make_run(tmp_path / f"run-{LONG}", clients=5, rounds=3, predictions=True))
    check_fits(browser, path.as_uri())
    check_sorts(browser, "accuracy")


def test_names_of_the_environment_stay_whole_and_nothing_is_not_shown(
    tmp_path: Path, browser: Chromium
) -> None:
    folder = make_run(tmp_path / "run")
    environment = {"registered": {"Net": 64 * "a"}, "portable": False, "changes": [], "views": None}
    (folder / "environment.json").write_text(json.dumps(environment))
    path = write_report(folder)
    check_fits(browser, path.as_uri())
    for width in (390, 1440):
        browser.open(path.as_uri(), width)
        browser.says(OPENED)
        assert browser.says(BROKEN) == []
    shown = browser.says("[...document.querySelectorAll('table.plain th')].map(one => one.textContent)")
    assert shown == ["registered", "portable"]


def test_a_comparison_fits_and_sorts(tmp_path: Path, browser: Chromium) -> None:
    path = write_comparison(tmp_path / "comparison.html", comparison())
    check_fits(browser, path.as_uri())
    check_sorts(browser, "accuracy %")


def test_a_sweep_fits_and_sorts(tmp_path: Path, browser: Chromium) -> None:
    settings = {f"alpha={value}": {"partition.alpha": value} for value in (0.1, 0.5, 1.0)}
    sweep = {"name": LONG, "settings": settings}
    path = write_sweep(tmp_path / "sweep.html", sweep, dict.fromkeys(settings, comparison()))
    check_fits(browser, path.as_uri())
    check_sorts(browser, "accuracy %")


def test_the_live_page_fits(tmp_path: Path, browser: Chromium) -> None:
    for name in ("one", LONG):
        make_run(tmp_path / "runs" / name, clients=5, rounds=3)
    with shown(0, Watch([tmp_path / "runs"])) as address:
        browser.open(address, 390)
        drawn = (
            "new Promise(done => { const look = () => document.querySelector('#overview table') ? done(true)"
        )
        assert browser.says(f"{drawn} : setTimeout(look, 20); look() }})")
        check_live(browser)


def check_live(browser: Chromium) -> None:
    found = browser.says(WIDE)
    assert found["content"] == found["width"] == 390
    assert browser.says(OFF) == []


@pytest.mark.parametrize("dark", [False, True])
def test_faint_words_can_be_read(dark: bool, tmp_path: Path, browser: Chromium) -> None:
    """Their contrast is at least 4.5, as WCAG asks of text."""
    browser.open(write_report(make_run(tmp_path / "run")).as_uri(), 768, dark=dark)
    ink, ground = map(luminance, browser.says(FAINT))
    assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5
    assert (ink > ground) == dark


def luminance(color: list[float]) -> float:
    red, green, blue = ((c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
