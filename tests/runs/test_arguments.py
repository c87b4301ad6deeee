"""Arguments that make no sense are refused in one sentence, and before a folder is made."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from torch import nn

import potluck
from helpers import TINY
from potluck import EarlyStopping, Experiment, Observer, RunResult
from potluck.deploy.run import open_folder
from potluck.errors import PotluckError, RunError
from potluck.methods import Local
from potluck.models import adapt
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Interrupted
from potluck.testing import check_method

SETTINGS: dict[str, Any] = TINY | {"method": "local", "training": {"rounds": 2, "batch_size": 64}}
X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: potluck.run({"data": "digits"}), r"run\(\*\*values\)"),  # type: ignore[arg-type]
        (lambda: potluck.run(3), "takes no int; give an Experiment"),  # type: ignore[arg-type]
        (lambda: potluck.run("trial.yaml", training={}), "run.. of a ready experiment takes no 'training'"),
        (
            lambda: potluck.run(**SETTINGS, observers=EarlyStopping(3)),
            r"give a list .*\[EarlyStopping\(…\)\]",
        ),
        (lambda: potluck.run(**SETTINGS, observers=[print]), "print.* is not an observer"),
        (lambda: potluck.run(**SETTINGS, observers=[EarlyStopping]), r"write EarlyStopping\(\)"),
        (lambda: potluck.run(**SETTINGS, seeds=[0, 1]), r"one seed, seed=1; .* potluck\.compare\(…, seeds="),
        (
            lambda: potluck.run(**SETTINGS | {"data": {"north": (X, X[:, 0])}}),
            r"'north' has data, not settings; .*from_datasets",
        ),
        (lambda: potluck.resume("run", experiment={"data": "digits"}), "takes no mapping"),  # type: ignore[arg-type]
        (lambda: potluck.open(3), "folder: give a path, not 3"),  # type: ignore[arg-type]
        (lambda: adapt("x"), "'x' is a str; give adapt a torch module"),  # type: ignore[arg-type]
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
        (lambda: potluck.resume(RunResult(Path(), {})), r"takes the folder of a run; give result\.folder"),  # type: ignore[arg-type]
        (lambda: potluck.compare(methods={"a": 1}, **SETTINGS), "methods: give a list"),  # type: ignore[arg-type]
        (lambda: potluck.compare(out=3, **SETTINGS), "out: give a path, not 3"),  # type: ignore[arg-type]
        (lambda: Experiment.load(3), "path: give a path, not 3"),  # type: ignore[arg-type]
        (lambda: EarlyStopping("3"), "EarlyStopping: patience: give a whole number"),  # type: ignore[arg-type]
        (lambda: EarlyStopping(3, metrics="loss"), r"EarlyStopping\(\) has no argument 'metrics'.*'metric'"),  # type: ignore[call-arg]
        (lambda: EarlyStopping(3, metric=3), "metric: give a text, not 3"),  # type: ignore[arg-type]
        (lambda: potluck.TimeLimit(True), "TimeLimit: True is not a duration"),
        (
            lambda: potluck.run(**SETTINGS | {"method": Local}),
            "give the name of a method, 'local', or a block",
        ),
        (
            lambda: potluck.from_files(io.StringIO("x"), target="t"),  # type: ignore[arg-type]
            "paths: give the path of a file",
        ),
        (lambda: potluck.TimeLimit([3]), r"TimeLimit: \[3\] is not a duration"),  # type: ignore[arg-type]
        (lambda: potluck.run(**SETTINGS, progress="no"), "progress: give True or False, not 'no'"),
        (lambda: potluck.run(**SETTINGS, name=3), r"^name: must be a text \(given: 3\)$"),
        (lambda: potluck.run(**SETTINGS, given=(1, 2, 3)), r"given: give data and split as \(data, split\)"),
        (lambda: potluck.run(**SETTINGS, given=(1, 2)), "data: give a Dataset or several in a tuple, not 1"),
        (lambda: potluck.run(**SETTINGS, metrics=["mine.py:"]), "names no function; write mine.py:function"),
        (lambda: potluck.compare(**SETTINGS, against=3), "against: give a text, not 3"),
        (lambda: potluck.compare(**SETTINGS, seeds={}.get), "seeds: give a list of numbers, not <"),
        (
            lambda: potluck.compare(**SETTINGS, seeds=3),
            r"^seeds: give a list, seeds=\[3\], or for 3 seeds seeds=\[0, 1, 2\]$",
        ),
        (lambda: potluck.compare(**SETTINGS, seeds=[]), "^seeds is empty; leave it out, or name some$"),
        (
            lambda: potluck.compare(**SETTINGS, seeds=[0, 1, 0]),
            "^seeds: 0 is named twice; name each seed once$",
        ),
        (lambda: potluck.metric(low=2, high=1), "^metric: low=2 is not below high=1; give the lowest"),
        (
            lambda: potluck.run(**SETTINGS, metrics=[{"name": "macro_f1", "low": 3}]),
            "^metrics: macro_f1 goes from low=3.0 to high=1.0: low must be below high$",
        ),
        (
            lambda: potluck.run(**SETTINGS | {"data": X}),
            r"from_frame\(frame, target=…\), from_files\(path, target=…\)",
        ),
        (lambda: potluck.compare(**SETTINGS, targets=[None]), "targets: None is not a number"),
        (lambda: potluck.compare(**SETTINGS, progress=1), "progress: give True or False, not 1"),
        (lambda: potluck.resume("run", observers=3), r"such as \[EarlyStopping\(…\)\], not 3"),  # type: ignore[arg-type]
        (
            lambda: potluck.resume(),
            r"missing a required argument: 'folder'; it is called as resume\(folder, ",
        ),  # type: ignore[call-arg]
        (lambda: potluck.open("run", modles={}), r"open\(\) has no argument 'modles'; did you mean 'models'"),  # type: ignore[call-arg]
        (lambda: Experiment(seed="x"), "^the key 'method' is missing$"),  # type: ignore[call-arg, arg-type]
        (lambda: Experiment(**SETTINGS | {"seed": "x"}), r"^seed: must be .*\(given: 'x'\)$"),
        (lambda: Experiment(SETTINGS), r"takes its values by name: Experiment\(\*\*values\)"),  # type: ignore[call-arg, misc]
        (lambda: potluck.OptimizerSettings(rate=1), "^unknown key 'rate'"),  # type: ignore[call-arg]
        (lambda: Experiment.make(SETTINGS), r"it is called as make\(\*\*values\)"),  # type: ignore[misc, arg-type]
        (lambda: Experiment.make(**SETTINGS).make_split(3), "data: give a Dataset .*, not 3"),  # type: ignore[arg-type]
        (lambda: Experiment.make(**SETTINGS).build(None, 3), "split: give a Split, not 3"),  # type: ignore[arg-type]
        (lambda: adapt(nn.Linear(2, 2), head=3), "head: give a text, not 3"),  # type: ignore[arg-type]
        (lambda: adapt(nn.Linear(2, 2), stem=3), "stem and body are the name of a layer or a list"),  # type: ignore[arg-type]
        (lambda: potluck.build("cnn1", 3), "task: give a Task, not 3"),  # type: ignore[arg-type]
        (lambda: check_method(potluck.Method), "Method has no name of its own, so it is no method yet"),
        (lambda: potluck.metric(max), r"it is called as metric\(higher_is_better=…"),  # type: ignore[misc, arg-type]
        (lambda: potluck.from_datasets("cifar10"), "'cifar10' is a name, not a data set: give it as data="),
        (lambda: potluck.from_arrays(X, None), "arrays: cannot make a tensor of y, which is None: give"),  # type: ignore[arg-type]
        (lambda: potluck.from_arrays(X, "cat"), "a tensor of y, which is 'cat'"),  # type: ignore[arg-type]
        (lambda: potluck.from_arrays(X, ["a", None]), "a tensor of y, which holds None"),  # type: ignore[arg-type]
        (lambda: potluck.from_arrays(iter(X), [0, 1]), "a tensor of x, which is of the type"),  # type: ignore[arg-type]
        (lambda: potluck.from_arrays(X.astype(object), [0, 1]), "x, which holds numbers as Python objects"),  # type: ignore[arg-type]
        (lambda: potluck.from_arrays(X, [0, 1], tsak="x"), r"from_arrays\(\) has no argument 'tsak'.*'task'"),  # type: ignore[call-arg, arg-type]
        (lambda: potluck.from_arrays(X, [0, 1], name=3), "name: give a text, not 3"),  # type: ignore[arg-type]
        (lambda: potluck.from_index_file(3, 3), "path: give a path, not 3"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PotluckError, match=sentence):
        call()
    assert not [*tmp_path.iterdir()]


FRONT_DOOR = [
    *(potluck.run, potluck.resume, potluck.compare, potluck.open, potluck.adapt, potluck.build, check_method),
    *(potluck.from_arrays, potluck.from_datasets, potluck.from_files, potluck.from_frame),
    *(potluck.from_index_file, potluck.metric, Experiment.make, Experiment.load, Experiment.variant),
]


@pytest.mark.parametrize("function", FRONT_DOOR, ids=lambda one: str(one.__name__))
def test_what_users_call_is_at_the_front_door(function: Callable[..., Any]) -> None:
    get_type_hints(function)  # all of them can be looked up
    with pytest.raises(PotluckError):
        function(1, 2, 3, 4, 5, 6)


class Leaver(nn.Module):
    """A model that ends the program."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        """Leave once it is trained."""
        return sys.exit(3) if self.training else self.body(x.flatten(1))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exit_in_code_of_ones_own_is_named(tmp_path: Path, workers: int) -> None:
    engine = {"device": "cpu", "workers": workers}
    with pytest.raises(RunError, match=r"test_arguments\.py, line \d+, in forward: sys\.exit ended the run"):
        potluck.run(**SETTINGS | {"models": [Leaver], "engine": engine}, out=tmp_path / "run")


class CtrlC(Observer):
    """Stops after the first round."""

    def round(self, end: Any) -> None:
        raise KeyboardInterrupt


def test_a_stopped_run_without_checkpoints_says_that_it_starts_over(tmp_path: Path) -> None:
    never = Experiment.make(**SETTINGS, checkpoint={"every": "never"})
    with pytest.raises(Interrupted, match=r"potluck resume .* \(from round 1 again"):
        potluck.run(never, out=tmp_path / "never", observers=[CtrlC()])


@pytest.mark.parametrize("moment", ["unlink", "replace"])
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
        with pytest.raises(Interrupted, match="continue with: potluck resume"):
            potluck.run(Experiment.make(**SETTINGS), out=tmp_path / "run")
    assert potluck.resume(tmp_path / "run").summary["rounds"] == 2


def test_a_run_killed_before_its_first_round_says_what_to_do(tmp_path: Path) -> None:
    for name in (".lock", ".split.json.ab12cd34.unfinished", ".environment.json.ab12cd34"):
        (tmp_path / name).touch()
    with pytest.raises(RunError, match="stopped before the first round; remove it"):
        RunFolder.begun(tmp_path)
    assert RunFolder.taken_over(tmp_path).is_shell()
    (tmp_path / "pilots").mkdir()
    with pytest.raises(RunError, match="stopped before the first round; remove it"):
        RunFolder.taken_over(tmp_path)
    (tmp_path / "thesis.partial").touch()
    assert not RunFolder(tmp_path).is_shell()


@pytest.mark.parametrize("name", ["contract.json", "tuning.json", "federation.json"])
def test_a_file_of_ones_own_is_no_start_of_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("pinned")
    for taken in (RunFolder.taken_over, open_folder):
        with pytest.raises(RunError, match=r"something (other|else) than a run; choose another folder"):
            taken(tmp_path)
    with pytest.raises(RunError, match="not a run folder"):
        RunFolder.begun(tmp_path)
    assert (tmp_path / name).read_text() == "pinned"


def test_a_full_disk_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RunError("cannot write a log: No space left") from OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append", full)
        with pytest.raises(RunError, match="make room, then continue with: potluck resume"):
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
