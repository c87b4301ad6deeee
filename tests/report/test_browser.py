"""Pages in a real browser, as wide as a phone: nothing is wider than the screen, and tables sort."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess

import pytest
from made_up import make_run

from potluck.report.comparison_page import write_comparison
from potluck.report.page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")

PROBE = """
const button = [...document.querySelectorAll("th button")].find(one => one.textContent === NAME);
const place = button.parentElement.cellIndex, rows = button.closest("table").tBodies[0].rows;
const column = () => [...rows].map(row => row.cells[place].dataset.key);
button.focus(); button.click(); const up = column(); button.click();
const off = [...document.querySelectorAll("main *")].filter(one => !one.closest(".scroll, .picture, pre")
  && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80));
parent.postMessage({width: innerWidth, content: document.documentElement.scrollWidth, off, up, down: column(),
  sorted: button.parentElement.getAttribute("aria-sort")}, "*");
"""
FRAME = """<iframe src="probed.html" style="width:390px;height:900px;border:0"></iframe>
<script>addEventListener("message", event => document.title = "found " + JSON.stringify(event.data))</script>"""


def in_browser(path, folder, column):
    """What a page says of itself in a frame of 390 pixels; a window itself cannot be so narrow."""
    probe = PROBE.replace("NAME", json.dumps(column))
    allowed = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    page = path.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{allowed}' ")
    (folder / "probed.html").write_text(page.replace("</body>", f"<script>{probe}</script></body>"))
    (folder / "frame.html").write_text(FRAME)
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    address = (folder / "frame.html").as_uri()
    command = [BROWSER, *options, "--virtual-time-budget=2000", "--dump-dom", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    found = re.search(r"<title>found (.*?)</title>", shown)
    assert found, "the page's own script or the probe did not run"
    return json.loads(html.unescape(found[1]))


def check(found):
    assert found["width"] == found["content"] == 390
    assert found["off"] == []
    numbers = [float(key) for key in found["up"] if key]
    assert len(numbers) > 1
    assert numbers == sorted(numbers)
    assert [float(key) for key in found["down"] if key] == numbers[::-1]
    assert found["sorted"] == "descending"


def test_a_report_fits_a_phone_and_sorts(tmp_path):
    path = write_report(make_run(tmp_path / ("run-" + 40 * "long"), clients=5, rounds=3, predictions=True))
    check(in_browser(path, tmp_path, "accuracy"))


def test_a_comparison_fits_a_phone_and_sorts(tmp_path):
    def method(name, mean, difference):
        curve = {
            "rounds": [1, 2],
            "mean": [0.1, mean],
            "low": [0.1, mean],
            "high": [0.2, mean],
            "bytes": [10, 20],
        }
        gains = {"better": 1, "equal": 0, "worse": 1, "differences": {"0": {"0": 0.3, "1": -0.1}}}
        amount = {"scalars": 10, "bytes": 40}
        return {
            "method": name, "when": "after_aggregation", "mode": "model", "difference": difference, "curve": curve,
            "accuracy": {"mean": mean, "std_over_seeds": None}, "messages": {"up": amount, "down": amount},
            "seconds_per_round": 0.1, "runs": {"0": f"{name}-seed0"},
            **({"against": "local", "by_client": gains} if difference else {}),
        }  # fmt: skip

    interval = {"mean": 0.1, "low": -0.1, "high": 0.3, "tie": True, "pairs": 9}
    methods = [
        method("local", 0.7, None),
        method("long" * 40, 0.8, interval),
        method("fedavg", 0.6, interval),
    ]
    comparison = {
        "baseline": "local",
        "seeds": ["0"],
        "view": "last",
        "draws": 10,
        "level": 0.9,
        "methods": methods,
    }
    path = write_comparison(tmp_path / "comparison.html", comparison)
    check(in_browser(path, tmp_path, "accuracy %"))
