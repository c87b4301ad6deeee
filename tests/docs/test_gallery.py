"""The gallery: its page is that of tools/gallery.py, its pictures are small, and every command draws one."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.runs.pictures.api import KINDS

ROOT = Path(__file__).parents[2]
SMALLER = {"[0.1, 0.3, 1.0]": "[0.3, 1.0]", "[8, 16, 32]": "[8, 16]", "[0.01, 0.02, 0.05]": "[0.01, 0.02]"}
TINY = "data.samples=160 training.rounds=1 engine.device=cpu"
PAGES = (
    "potluck.runs.results.run_result.write_report",
    "potluck.runs.comparisons.play.write_comparison",
    "potluck.runs.comparisons.comparison.write_sweep",
)


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "tools" / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gallery"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


tool = _tool()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the page, as small as they can be."""
    folder = tmp_path_factory.mktemp("gallery")
    with tool.inside(folder), pytest.MonkeyPatch.context() as patch:
        for page in PAGES:  # they take longer than the runs
            patch.setattr(page, lambda *given: None)
        for name, text in tool.FILES.items():
            for long, short in SMALLER.items():
                text = text.replace(long, short)
            Path(name).write_text(text, "utf-8")
        for command in tool.RUNS:
            few = re.sub(r"--seeds \S+", "--seeds 0", command).replace("fedavg,", "")
            few = few.replace("fedproto,fedmrl", "fedproto") if "alphas" in few else few
            clients = "" if "digits.yaml" in command else " partition.clients=2 models=[mlp-small]"
            _call(f"{few} {TINY}{clients}")
        (folder / "runs" / "traced").symlink_to(folder / "runs" / "digits" / "fedproto-seed0")
    return folder


def _call(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, f"{command}\n{result.output}"


def test_the_page_is_up_to_date() -> None:
    assert tool.PAGE.read_text("utf-8") == tool.page(), "run `python tools/gallery.py --page`"


def test_every_kind_is_on_the_page() -> None:
    assert {shlex.split(one.command)[2] for one in tool.PICTURES} == set(KINDS)


@pytest.mark.parametrize("one", tool.PICTURES, ids=lambda one: one.image)
def test_pictures_are_there_and_small(one: Any) -> None:
    path = tool.IMAGES / one.image
    assert path.stat().st_size < 60_000
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width <= tool.WIDEST


def test_no_picture_is_left_over() -> None:
    assert {path.name for path in tool.IMAGES.iterdir()} == {one.image for one in tool.PICTURES}


@pytest.mark.parametrize("one", tool.PICTURES, ids=lambda one: one.image)
def test_every_command_draws_its_picture(one: Any, made: Path) -> None:
    with tool.inside(made):
        _call(f"{one.command} --samples 40" if " tsne " in one.command else one.command)
        assert Path(one.image).read_bytes().startswith(b"\x89PNG")
