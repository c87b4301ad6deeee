"""Arguments that make no sense are refused in one sentence, and before a folder is made."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import potluck
from helpers import TINY
from potluck import EarlyStopping, Experiment, Observer, RunResult
from potluck.errors import PotluckError, RunError
from potluck.models import adapt
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Interrupted
from potluck.testing import check_method

SETTINGS: dict[str, Any] = TINY | {"method": "local", "training": {"rounds": 2, "batch_size": 64}}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: potluck.run({"data": "digits"}), r"run\(\*\*values\)"),  # type: ignore[arg-type]
        (lambda: potluck.run(3), "not a int"),  # type: ignore[arg-type]
        (lambda: potluck.run("trial.yaml", training={}), "run.. of a ready experiment takes no 'training'"),
        (
            lambda: potluck.run(**SETTINGS, observers=EarlyStopping(3)),
            r"give a list .*\[EarlyStopping\(…\)\]",
        ),
        (lambda: potluck.run(**SETTINGS, observers=[print]), "print.* is no observer"),
        (lambda: potluck.run(**SETTINGS, observers=[EarlyStopping]), r"write EarlyStopping\(\)"),
        (lambda: potluck.resume("run", experiment={"data": "digits"}), "takes no mapping"),  # type: ignore[arg-type]
        (lambda: potluck.open(3), "takes the folder of a run, not a int"),  # type: ignore[arg-type]
        (lambda: adapt("x"), "adapt takes a torch module, not 'x'"),  # type: ignore[arg-type]
        (lambda: check_method(3), "give a method by its name"),  # type: ignore[arg-type]
        (lambda: potluck.compare(**SETTINGS, methods={"name": "fedavg"}), "methods: give a list such as"),
        (
            lambda: potluck.compare(**SETTINGS, methods=["fedproto"], variants={"a": {"method": "fedavg"}}),
            "methods or variants, not both",
        ),
        (lambda: check_method(Experiment), "give a method by its name"),  # type: ignore[arg-type]
        (lambda: potluck.open(".", plugins=3), "plugins: give True or a list"),  # type: ignore[arg-type]
        (lambda: potluck.run(**SETTINGS, watcher="x"), "watcher: give an observer"),
        (lambda: potluck.run(**SETTINGS, given=3), r"given: give data and split as \(data, split\)"),
        (lambda: potluck.resume(3), "folder: give a path, not a int"),  # type: ignore[arg-type]
        (lambda: potluck.resume("run", rounds="5"), "rounds: give a whole number, not '5'"),  # type: ignore[arg-type]
        (lambda: potluck.resume("run", rounds=True), "rounds: give a whole number, not True"),
        (lambda: potluck.resume("run", from_round="1"), "from_round: give a whole number"),  # type: ignore[arg-type]
        (lambda: potluck.resume(RunResult(Path(), {})), r"takes the folder of a run: result\.folder"),  # type: ignore[arg-type]
        (lambda: potluck.compare(methods={"a": 1}, **SETTINGS), "methods: give a list"),  # type: ignore[arg-type]
        (lambda: potluck.compare(out=3, **SETTINGS), "out: give a path, not a int"),  # type: ignore[arg-type]
        (lambda: Experiment.load(3), "path: give a path, not a int"),  # type: ignore[arg-type]
        (lambda: EarlyStopping("3"), "EarlyStopping: patience: give a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PotluckError, match=sentence):
        call()
    assert not [*tmp_path.iterdir()]


class CtrlC(Observer):
    """Stops after the first round."""

    def round(self, end: Any) -> None:
        raise KeyboardInterrupt


def test_a_stopped_run_without_checkpoints_says_that_it_starts_over(tmp_path: Path) -> None:
    never = Experiment.make(**SETTINGS, checkpoint={"every": "never"})
    with pytest.raises(Interrupted, match=r"potluck resume .* \(from round 1 again"):
        potluck.run(never, out=tmp_path / "never", observers=[CtrlC()])


@pytest.mark.parametrize("moment", ["write_text", "replace"])
def test_a_run_stopped_before_its_first_round_can_be_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, moment, stop)
        with pytest.raises(KeyboardInterrupt):
            potluck.run(Experiment.make(**SETTINGS), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_stopped_between_its_start_and_its_first_round_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("potluck.runs.api.Run", stop)
        with pytest.raises(Interrupted, match="go on with: potluck resume"):
            potluck.run(Experiment.make(**SETTINGS), out=tmp_path / "run")
    assert potluck.resume(tmp_path / "run").summary["rounds"] == 2


def test_a_run_killed_before_its_first_round_says_what_to_do(tmp_path: Path) -> None:
    for name in (".lock", "split.json.123.partial", ".environment.json.ab12cd34"):
        (tmp_path / name).touch()
    with pytest.raises(RunError, match="stopped before the first round; remove it"):
        RunFolder.begun(tmp_path)
    assert RunFolder.taken_over(tmp_path).is_shell()
    (tmp_path / "thesis.partial").touch()
    assert not RunFolder(tmp_path).is_shell()


def test_a_full_disk_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RunError("cannot write a log: No space left") from OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append", full)
        with pytest.raises(RunError, match="make room, then go on with: potluck resume"):
            potluck.run(Experiment.make(**SETTINGS), out=tmp_path / "run")
    assert potluck.resume(tmp_path / "run").summary["rounds"] == 2


def test_a_sample_without_scores_has_no_class(tmp_path: Path) -> None:
    client = potluck.run(Experiment.make(**SETTINGS), out=tmp_path / "run").clients["0"]
    x = potluck.Experiment.make(**SETTINGS).load_data().x[:3].float()  # type: ignore[union-attr]
    x[1] = float("nan")
    with pytest.raises(PotluckError, match="sample 1 holds NaN"):
        client.classify(x)
    with pytest.raises(PotluckError, match=r"there is no folder .* to write model\.onnx into"):
        client.to_onnx(tmp_path / "none" / "model.onnx")
