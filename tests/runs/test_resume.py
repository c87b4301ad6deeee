"""Going on with a run: what may change, what is refused by name, and runs that are extended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import potluck
from helpers import StopAfter, changed_experiment
from potluck.data import Split
from potluck.engine.store.checkpoints import Checkpoints
from potluck.errors import PotluckError, RunError
from potluck.experiment.schema import Experiment
from potluck.runs.api import resume, run
from potluck.runs.loop import Interrupted

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "data": {"name": "digits", "samples": 300},
    "partition": {"kind": "iid", "clients": 3, "validation": 0.1},
    "models": ["mlp-small"],
    "method": "local",
    "training": {"rounds": 2, "participation": 0.7, "batch_size": 64},
    "engine": {"device": "cpu"},
    "checkpoint": {"every": 0},
}
LOGS = ("metrics.jsonl", "ledger.jsonl", "observations.jsonl")


def experiment(**changes: Any) -> Experiment:
    return changed_experiment(SETTINGS, changes)


def about(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "environment.json").read_text())
    return found


def edit(folder: Path, path: str, value: Any) -> None:
    """Change one value of config.yaml, as somebody with an editor would."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    *blocks, leaf = path.split(".")
    block = values
    for name in blocks:
        block = block[name]
    block[leaf] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(values))


def logs(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LOGS if (folder / name).exists()}


def everything(folder: Path) -> dict[str, bytes]:
    """All files of a run but its lock, to see that a refusal changes none."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment(), out=tmp_path_factory.mktemp("resume") / "run").folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A finished run of its own for every test."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


# --- settings -------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, str]] = [
    ("training.optimizer.lr", 0.5, "0.01"),
    ("training.batch_size", 8, "64"),
    ("training.rounds", 3, "2"),
    ("seed", 1, "0"),
    ("method.name", "fedavg", "local"),
    ("partition.validation", 0.2, "0.1"),
    ("models.pool", ["mlp-large"], "mlp-small"),
    ("evaluate.every", 2, "1"),
    ("engine.threads", 2, "1"),
    ("engine.precision", "bfloat16", "float32"),
    ("name", "other", "tiny"),
    ("plugins", ["os.py"], r"\[\]"),
]


@pytest.mark.parametrize(("key", "value", "before"), REFUSED)
def test_an_edited_configuration_is_refused_by_the_key(
    folder: Path, key: str, value: Any, before: str
) -> None:
    edit(folder, key, value)
    there = everything(folder)
    with pytest.raises(RunError, match=rf"config\.yaml was edited .*{key}.* was .*{before}.*, now it is"):
        resume(folder)
    assert everything(folder) == there


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"training": {"optimizer": {"lr": 0.5}}}, r"training\.optimizer\.lr: 0\.01 there, 0\.5 now"),
        ({"training": {"rounds": 3}}, r"training\.rounds: 2 there, 3 now; .*--rounds 3 .in Python rounds=3"),
        ({"method": "fedavg"}, r"method\.name: local there, fedavg now"),
        ({"seed": 1}, "another seed: 0 there, 1 now"),
        ({"data": {"samples": 200}}, r"another data\.samples: 300 there, 200 now"),
        ({"engine": {"threads": 2}}, r"engine\.threads: 1 there, 2 now"),
        ({"partition": {"clients": 4}}, r"partition\.clients: 3 there, 4 now"),
    ],
)
def test_another_experiment_is_refused_by_the_key(folder: Path, changes: Any, sentence: str) -> None:
    there = everything(folder)
    with pytest.raises(RunError, match=sentence):
        resume(folder, experiment=experiment(**changes))
    assert everything(folder) == there


def test_where_the_work_is_done_may_change_and_is_written_down(tmp_path: Path) -> None:
    whole = run(experiment(), out=tmp_path / "whole").folder
    with pytest.raises(Interrupted):
        run(experiment(), out=tmp_path / "run", watcher=StopAfter(1))
    moved = experiment(engine={"device": "cpu", "workers": 2, "memory": "1GB"}, checkpoint={"every": "never"})
    resume(tmp_path / "run", experiment=moved)
    assert logs(tmp_path / "run") == logs(whole)
    assert about(tmp_path / "run")["changes"] == [
        {"round": 1, "key": "engine.workers", "before": "auto", "after": 2},
        {"round": 1, "key": "engine.memory", "before": "auto", "after": 1_000_000_000},
        {"round": 1, "key": "checkpoint.every", "before": 0.0, "after": "never"},
    ]
    assert Experiment.load(tmp_path / "run/config.yaml").engine.workers == 2
    edit(tmp_path / "run", "engine.workers", 1)
    resume(tmp_path / "run")
    assert about(tmp_path / "run")["changes"][-1]["after"] == 1


def test_a_folder_of_an_earlier_version_goes_on_with_defaults_for_what_it_did_not_know(
    tmp_path: Path,
) -> None:
    watcher, folder = StopAfter(1), tmp_path / "run"
    with pytest.raises(Interrupted):
        run(experiment(), out=folder, watcher=watcher)
    found, values = about(folder), yaml.safe_load((folder / "config.yaml").read_text())
    for settings in (found["settings"], values):
        del settings["engine"]["compile"], settings["training"]["start_quorum"], settings["keep"]
    (folder / "environment.json").write_text(json.dumps(found))
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    other = experiment(training={"start_quorum": 0.5})
    with pytest.raises(RunError, match=r"another training.start_quorum: 1.0 there, 0.5 now"):
        resume(folder, experiment=other)
    resume(folder)
    assert logs(folder) == logs(run(experiment(), out=tmp_path / "plain").folder)
    assert about(folder)["changes"] == []
    assert about(folder)["settings"]["engine"]["compile"] == "auto"


def test_values_on_the_command_line_may_move_work_only(folder: Path) -> None:
    resume(folder, overrides=["engine.workers=1"])
    assert about(folder)["changes"][0]["key"] == "engine.workers"
    with pytest.raises(RunError, match=r"another seed: 0 there, 3 now"):
        resume(folder, overrides=["seed=3"])


def test_another_machine_is_written_down(folder: Path) -> None:
    (folder / "environment.json").write_text(json.dumps(about(folder) | {"torch": "1.0"}))
    resume(folder)
    assert about(folder)["changes"] == [
        {"round": 2, "key": "torch", "before": "1.0", "after": torch.__version__}
    ]
    resume(folder)
    assert len(about(folder)["changes"]) == 1


# --- data and split -------------------------------------------------------------------------------------


def arrays(seed: int) -> potluck.Dataset:
    draw = np.random.Generator(np.random.PCG64(seed))
    x, y = draw.normal(size=(60, 4)).astype("float32"), draw.integers(0, 2, 60)
    return potluck.from_arrays(x, y, name="mine")


def test_other_data_under_the_same_name_are_refused(tmp_path: Path) -> None:
    def asked(seed: int) -> Experiment:
        return experiment(data=arrays(seed))

    ended = run(asked(0), out=tmp_path / "run")
    assert about(ended.folder)["data"] == [arrays(0).fingerprint]
    assert resume(ended.folder, experiment=asked(0)).summary == ended.summary
    with pytest.raises(RunError, match=r"the data 'mine' are not those .* was begun with"):
        resume(ended.folder, experiment=asked(1))


def test_other_public_data_are_refused(tmp_path: Path) -> None:
    first = experiment(data=arrays(0), public={"data": arrays(1)}, method="fedmd")
    ended = run(first, out=tmp_path / "run")
    assert about(ended.folder)["public"] == arrays(1).fingerprint
    with pytest.raises(RunError, match="the data 'mine' are not those"):
        resume(ended.folder, experiment=first.variant(public={"data": arrays(2)}))


def test_another_split_is_refused(tmp_path: Path) -> None:
    data = arrays(0)
    first, second = (experiment(data=data, seed=seed).make_split(data) for seed in (0, 1))
    ended = run(experiment(data=data, partition=first), out=tmp_path / "run")
    with pytest.raises(RunError, match="partition: the split given now is not the one"):
        resume(ended.folder, experiment=experiment(data=data, partition=second))
    second.save(ended.folder / "split.json", data)
    with pytest.raises(RunError, match=r"split\.json is not the split this run began with"):
        resume(ended.folder, experiment=experiment(data=data, partition=first))


def test_another_standardisation_is_refused(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"a": draw.normal(10, 3, 60), "b": draw.normal(size=60), "site": ["x", "y"] * 30})
    frame["target"] = frame["a"] + frame["b"]
    data = potluck.from_frame(frame, target="target", by="site", task="regression")
    asked = Experiment.make(
        data=data, partition={"kind": "natural"}, models=["mlp-small"], method="fedavg", training={"rounds": 1},
        engine={"device": "cpu"},
    )  # fmt: skip
    folder = run(asked, out=tmp_path / "run").folder
    resume(folder, experiment=asked, rounds=2)
    split = json.loads((folder / "split.json").read_text())
    split["clients"][0]["scaling"]["mean"][0] = 0.0
    (folder / "split.json").write_text(json.dumps(split))
    with pytest.raises(RunError, match=r"split.json is not the split this run began with"):
        resume(folder, experiment=asked, rounds=3)


def test_an_index_file_that_changed_is_refused(tmp_path: Path) -> None:
    data = experiment().load_data()
    splits = [experiment(seed=seed).make_split(data) for seed in (0, 1)]
    splits[0].save(tmp_path / "mine.json")
    values = {**SETTINGS, "partition": {"file": str(tmp_path / "mine.json")}}
    ended = run(Experiment.make(**values), out=tmp_path / "run")
    assert resume(ended.folder).summary == ended.summary
    splits[1].save(tmp_path / "mine.json")
    with pytest.raises(RunError, match="the split given now is not the one"):
        resume(ended.folder)
    (tmp_path / "mine.json").unlink()
    assert resume(ended.folder).summary == ended.summary
    assert Split.load(ended.folder / "split.json") == splits[0]


# --- extending ------------------------------------------------------------------------------------------

METHODS: list[Any] = [
    "local",
    {"name": "fedmrl", "d1": 8},
    {"name": "fedin", "project": "fixed"},
    "scaffold",
    "fedproto",
    "fedre",
]


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one if isinstance(one, str) else one["name"])
def test_an_extended_run_is_a_longer_run(tmp_path: Path, method: Any) -> None:
    """Three rounds, evaluated every two, end with an evaluation that five rounds do not have."""
    moments = ["before", "after_training", "after_aggregation"]

    def asked(rounds: int) -> Experiment:
        return experiment(
            method=method,
            training={"rounds": rounds, "lr_decay": 0.9},
            evaluate={"every": 2, "when": moments},
        )

    short, long = run(asked(3), out=tmp_path / "run"), run(asked(5), out=tmp_path / "long")
    assert b'"round": 3' in logs(short.folder)["metrics.jsonl"]
    ended = resume(tmp_path / "run", rounds=5)
    assert logs(tmp_path / "run") == logs(long.folder)
    assert ended.summary["accuracy"] == long.summary["accuracy"]
    assert ended.summary["messages"] == long.summary["messages"]
    assert (tmp_path / "run/config.yaml").read_bytes() == (long.folder / "config.yaml").read_bytes()
    assert about(tmp_path / "run")["changes"] == [
        {"round": 3, "key": "training.rounds", "before": 3, "after": 5}
    ]


def test_a_run_whose_extension_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between taking an evaluation out of the logs and the checkpoint that knows of it, and later."""

    def asked(rounds: int) -> Experiment:
        return experiment(training={"rounds": rounds}, evaluate={"every": 2})

    long = run(asked(5), out=tmp_path / "long").folder
    run(asked(3), out=tmp_path / "run")
    save = Checkpoints.save

    def killed(*args: Any) -> None:
        raise OSError("the power is gone")

    monkeypatch.setattr(Checkpoints, "save", killed)
    with pytest.raises(OSError, match="power"):
        resume(tmp_path / "run", rounds=5)
    monkeypatch.setattr(Checkpoints, "save", save)
    manifest = tmp_path / "run/checkpoints" / Checkpoints.MANIFEST
    with pytest.raises(Interrupted):
        resume(tmp_path / "run", watcher=StopAfter(4))
    assert json.loads(manifest.read_text())["round"] == 4
    resume(tmp_path / "run")
    assert logs(tmp_path / "run") == logs(long)


def test_an_extension_without_further_checkpoints(tmp_path: Path) -> None:
    def asked(rounds: int, **changes: Any) -> Experiment:
        return experiment(training={"rounds": rounds}, evaluate={"every": 2}, **changes)

    long = run(asked(5), out=tmp_path / "long").folder
    run(asked(3), out=tmp_path / "run")
    never = asked(3, checkpoint={"every": "never"})
    with pytest.raises(Interrupted):
        resume(tmp_path / "run", experiment=never, rounds=5, watcher=StopAfter(4))
    resume(tmp_path / "run")
    assert logs(tmp_path / "run") == logs(long)


def test_fewer_rounds_than_played_are_refused(folder: Path) -> None:
    with pytest.raises(RunError, match="has 2 rounds already; ask for more than that, not 1"):
        resume(folder, rounds=1)
    before = logs(folder)
    resume(folder, rounds=2)
    assert logs(folder) == before


def test_a_stopped_run_may_become_shorter(tmp_path: Path) -> None:
    short = run(experiment(training={"rounds": 3}, evaluate={"every": 2}), out=tmp_path / "short").folder
    with pytest.raises(Interrupted):
        run(
            experiment(training={"rounds": 6}, evaluate={"every": 2}),
            out=tmp_path / "run",
            watcher=StopAfter(1),
        )
    resume(tmp_path / "run", rounds=3)
    assert logs(tmp_path / "run") == logs(short)


# --- broken and foreign folders -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["environment.json", "split.json", "config.yaml"])
def test_a_half_written_folder_is_said_to_be_one(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(RunError, match=rf"cannot be resumed, as it has no {name}.*start a new one"):
        resume(folder)


@pytest.mark.parametrize(
    "name", ["environment.json", "split.json", "config.yaml", "checkpoints/checkpoint.json"]
)
def test_a_truncated_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:40])
    with pytest.raises(PotluckError, match=Path(name).name.split(".")[0]) as caught:
        resume(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 2}', "null"])
def test_a_file_of_something_else_is_refused(folder: Path, content: str) -> None:
    (folder / "environment.json").write_text(content)
    with pytest.raises(RunError, match=str(folder)):
        resume(folder)


def test_facts_that_are_missing_are_named(folder: Path) -> None:
    (folder / "environment.json").write_text(
        json.dumps({key: value for key, value in about(folder).items() if key != "split"})
    )
    with pytest.raises(RunError, match="says nothing of 'split'"):
        resume(folder, rounds=3)


def test_a_refused_run_is_left_as_it_was(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    written = {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"metrics\.jsonl is missing, and the last checkpoint knows it"):
        resume(folder, rounds=3)
    assert written == {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}


def test_lost_lines_are_noticed(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[:-10])
    with pytest.raises(RunError, match=r"metrics\.jsonl is shorter than at the last checkpoint"):
        resume(folder)


def test_a_checkpoint_reaches_no_file_outside_its_folder(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious.safetensors"
    manifest = folder / "checkpoints" / Checkpoints.MANIFEST
    content = json.loads(manifest.read_text())
    precious.write_bytes((folder / "checkpoints" / content["server"]).read_bytes())
    manifest.write_text(json.dumps(content | {"server": "../../precious.safetensors"}))
    with pytest.raises(RunError, match="not a file beside it"):
        resume(folder, rounds=3)
    assert precious.exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_nothing_is_written_or_removed_through_a_link(folder: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "letter").write_text("dear you")
    shutil.move(folder / name, folder / "moved")
    (folder / name).symlink_to(elsewhere if name == "checkpoints" else elsewhere / "letter")
    with pytest.raises(RunError, match=rf"{name} is a link to another place"):
        resume(folder)
    assert (elsewhere / "letter").read_text() == "dear you"


def test_a_run_of_objects_says_how_it_goes_on(tmp_path: Path) -> None:
    asked = experiment(data=arrays(0))
    with pytest.raises(Interrupted, match=r"continue with: potluck\.resume\(.*, experiment=experiment\)"):
        run(asked, out=tmp_path / "run", watcher=StopAfter(1))
