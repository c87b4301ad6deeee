"""The wheel: what is in it, and that a report can be written from it alone."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "potluck"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("setuptools") is None,
        reason="setuptools, which builds wheels, is not installed",
    ),
]

WRITE_A_REPORT = """
import json, sys
from pathlib import Path
import potluck
from potluck.report.comparison_page import write_comparison
from potluck.report.page import write_report

entry = {"method": "local", "accuracy": {"mean": 0.5}, "messages": {"up": {"scalars": 0}, "down": {"scalars": 0}}}
pages = [
    write_report(Path(sys.argv[1])),
    write_comparison(Path(sys.argv[1]) / "comparison.html", {"methods": [entry]}),
]
print(json.dumps({"package": potluck.__file__, "pages": [page.read_text(encoding="utf-8") for page in pages]}))
"""


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build leaves files beside the sources, and reads those an earlier one left."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "src" / "potluck", ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, source)
    (built,) = out.glob("potluck-*.whl")
    return built


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    there = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(file.relative_to(PACKAGE.parent))
        for file in PACKAGE.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert {"potluck/demo.yaml", "potluck/py.typed", "potluck/report/templates/run.html.j2"} <= expected
    assert expected - there == set()


def test_a_report_is_written_from_the_installed_wheel_alone(wheel, tmp_path):
    installed, run = tmp_path / "installed", tmp_path / "run"
    zipfile.ZipFile(wheel).extractall(installed)  # what installing a wheel of Python alone does
    run.mkdir()
    (run / "config.yaml").write_text("method: {name: fedmrl}\ndata: {name: digits}\n")
    measured = {"round": 1, "client": "0", "when": "before", "test": {"accuracy": 0.5, "samples": 4}}
    (run / "metrics.jsonl").write_text(json.dumps(measured) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", WRITE_A_REPORT, str(run)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert Path(told["package"]).is_relative_to(installed)
    report, comparison = told["pages"]
    for part in (
        "fedmrl on digits",
        "Accuracy over rounds",
        "50.00\N{NO-BREAK SPACE}%",
        "prefers-color-scheme",
        "aria-sort",
    ):
        assert part in report, part
    assert "1 method" in comparison
