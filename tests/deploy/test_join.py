"""`potluck join` before it meets anybody: what would leave, and options that do not go together."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals"


def join(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "potluck", "join", "--client", "north", *words],
        cwd=cwd, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "--server is missing"),
        ("--server 127.0.0.1:1", "--model and --data are missing"),
        ("--server 127.0.0.1:1 --only node", "--only needs --socket"),
        ("--server 127.0.0.1:1 --only half", "'half' is neither worker nor node"),
        ("--check none.yaml --model a.py:f --data a.py:g", "there is no experiment file none.yaml"),
        ("--server 127.0.0.1:1 --write contract.json", "--write goes with --check"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, words: str, sentence: str) -> None:
    done = join(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_check_joins_nobody_and_writes_what_it_would_take(tmp_path: Path) -> None:
    shutil.copytree(HOSPITALS, tmp_path / "h")
    here = tmp_path / "h"
    subprocess.run([sys.executable, "make_data.py"], cwd=here, check=True, capture_output=True, timeout=600)
    site = ["--model", "north/site.py:build", "--data", "north/site.py:load"]
    done = join("--check", "experiment.yaml", *site, "--write", "contract.json", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert json.loads((here / "contract.json").read_text())["method"] == "fedmrl"
