"""One run of a comparison on its own: extended, and looked at before the comparison is finished."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from typer.testing import CliRunner

import potluck
from potluck.cli.app import app
from potluck.errors import ConfigError, RunError

TINY: dict[str, Any] = {
    "data": {"name": "digits", "samples": 120},
    "partition": {"kind": "iid", "clients": 2},
    "models": ["mlp-small"],
    "training": {"rounds": 1},
    "engine": {"device": "cpu"},
    "progress": False,
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("parts") / "all"
    potluck.compare(methods=["fedavg"], out=home, **TINY)
    return home


@pytest.fixture
def home(played: Path, tmp_path: Path) -> Path:
    """The folder of a finished comparison, for every test its own."""
    return Path(shutil.copytree(played, tmp_path / "all"))


@pytest.fixture
def stopped(home: Path) -> Path:
    """The folder of a comparison that was stopped after its last run."""
    for name in ("comparison.json", "comparison.html"):
        (home / name).unlink()
    return home


def logged(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


def test_a_run_of_a_comparison_is_not_extended_alone(home: Path, tmp_path: Path) -> None:
    run, before = home / "fedavg-seed0", logged(home / "fedavg-seed0")
    with pytest.raises(RunError, match=r"is a run of the comparison .*all; .* with training\.rounds=3;"):
        potluck.resume(run, rounds=3)
    assert logged(run) == before
    assert potluck.resume(run, rounds=1, progress=False).summary["rounds"] == 1
    alone = Path(shutil.copytree(run, tmp_path / "alone"))  # as the sentence says
    assert potluck.resume(alone, rounds=2, progress=False).summary["rounds"] == 2
    longer = potluck.compare(methods=["fedavg"], out=home, **(TINY | {"training": {"rounds": 2}}))
    assert logged(alone) == logged(run)
    assert {entry["rounds_trained"] for entry in longer.comparison["methods"]} == {2}  # type: ignore[union-attr]


def test_a_run_that_was_extended_is_named_with_the_way_out(home: Path, tmp_path: Path) -> None:
    run = home / "fedavg-seed0"
    alone = Path(shutil.move(run, tmp_path / "alone"))
    potluck.resume(alone, rounds=2, progress=False)
    shutil.move(alone, run)
    told = (
        r"fedavg-seed0 now has 2 rounds, and .*comparison\.json was made when it had 1; .*training\.rounds=2$"
    )
    for read in (potluck.open, lambda folder: potluck.plot("curves", folder)):
        with pytest.raises(RunError, match=told):
            read(home)
    with pytest.raises(
        RunError, match=r"compare with training\.rounds=2, .*--rounds 1 \(in Python rounds=\[1\]\)"
    ):
        potluck.compare(methods=["fedavg"], out=home, **TINY)
    found = potluck.compare(methods=["fedavg"], out=home, rounds=[1], **(TINY | {"training": {"rounds": 2}}))
    assert {*found.rounds()["round"]} == {1}


def test_the_page_of_a_run_says_how_the_comparison_gets_more_rounds(home: Path, tmp_path: Path) -> None:
    shown = (home / "fedavg-seed0/report.html").read_text(encoding="utf-8")
    assert "# more rounds: compare again with training.rounds=2, which extends all runs" in shown
    assert "--rounds 2" not in shown


def test_a_comparison_is_drawn_and_reported_before_it_is_finished(stopped: Path, tmp_path: Path) -> None:
    (stopped / "fedavg-seed0/summary.json").unlink()
    figure = potluck.plot("curves", stopped, out=tmp_path / "curves.png")
    shown = " ".join(text.get_text() for text in figure.findobj(Text))  # equal lines share a label
    assert "Local" in shown
    assert "fedavg" in shown.lower()
    pages = [stopped / name / "report.html" for name in ("fedavg-seed0", "local-seed0")]
    for page in pages:
        page.unlink()
    done = CliRunner().invoke(app, ["report", str(stopped), "--json"])
    assert json.loads(done.stdout) == {"pages": [str(page) for page in pages]}
    assert all(page.is_file() for page in pages)
    with pytest.raises(
        RunError, match=r"is not a finished comparison; .*, or open one of .*: \S*local-seed0$"
    ):
        potluck.open(stopped)


def test_a_run_that_has_measured_nothing_yet_is_left_out_of_a_picture(stopped: Path) -> None:
    (stopped / "fedavg-seed0/summary.json").unlink()
    (stopped / "fedavg-seed0/metrics.jsonl").write_bytes(b"")
    assert potluck.plot("clients", stopped).axes  # a picture of one run
    (stopped / "local-seed0/summary.json").unlink()
    (stopped / "local-seed0/metrics.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match="has measured nothing so far; wait for its first evaluated round"):
        potluck.plot("curves", stopped)


def test_a_comparison_of_no_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^compare\(\) is given no method; name some to compare, methods=\["
    ):
        potluck.compare(out=tmp_path / "all", **TINY)
    assert not (tmp_path / "all").exists()
