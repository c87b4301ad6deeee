"""Whole runs: folders, resuming, faults, evaluation protocols."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import potluck
import potluck.core.method
from helpers import Listener, StopAfter, changed_experiment
from potluck.data import ClientSplit, Split
from potluck.engine.store.checkpoints import Checkpoints
from potluck.engine.store.client_store import ClientStore
from potluck.errors import ConfigError, RoundFailed, RunError
from potluck.experiment.schema import Experiment
from potluck.runs.api import resume, run
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Interrupted

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "data": "digits",
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 5, "validation": 0.1},
    "models": ["mlp-small", "conv-large"],
    "method": {"name": "fedmrl", "d1": 16},
    "training": {
        "rounds": 4,
        "participation": 0.6,
        "batch_size": 64,
        "optimizer": {"lr": 0.05, "momentum": 0.9},
    },
    "checkpoint": {"every": 0},
}


def experiment(**changes: Any) -> Experiment:
    return changed_experiment(SETTINGS, changes)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("method", ["fedmrl", "scaffold", "fedproto"])
def test_an_interrupted_run_ends_with_the_same_logs(tmp_path: Path, method: str) -> None:
    options = {"name": "fedmrl", "d1": 16} if method == "fedmrl" else {"name": method}
    asked = Experiment.make(**{**SETTINGS, "method": options})
    whole = run(asked, out=tmp_path / "whole")
    with pytest.raises(Interrupted, match="potluck resume"):
        run(asked, out=tmp_path / "broken", watcher=StopAfter(2))
    ended = resume(tmp_path / "broken")
    for log in ("metrics.jsonl", "ledger.jsonl"):
        assert (tmp_path / "broken" / log).read_bytes() == (tmp_path / "whole" / log).read_bytes()
    assert ended.summary["accuracy"] == whole.summary["accuracy"]
    assert [line["round"] for line in lines(tmp_path / "broken", "timing.jsonl")] == [1, 2, 3, 4]


def test_lines_behind_the_last_checkpoint_are_cut(tmp_path: Path) -> None:
    whole = run(experiment(), out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(experiment(), out=tmp_path / "broken", watcher=StopAfter(2))
    for log in ("metrics.jsonl", "ledger.jsonl", "timing.jsonl"):
        with (tmp_path / "broken" / log).open("a") as file:
            file.write('{"round": 3, "client": "0", "half a li')
    resume(tmp_path / "broken")
    assert (tmp_path / "broken/metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()


def test_without_a_checkpoint_a_run_starts_over(tmp_path: Path) -> None:
    whole = run(experiment(), out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(experiment(), out=tmp_path / "broken", watcher=StopAfter(2))
    for manifest in (tmp_path / "broken/checkpoints").glob("checkpoint*.json"):
        manifest.unlink()
    resume(tmp_path / "broken")
    assert (tmp_path / "broken/metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()


def test_without_checkpoints_nothing_but_logs_is_written(tmp_path: Path) -> None:
    whole = run(experiment(), out=tmp_path / "whole")
    never = experiment(checkpoint={"every": "never"})
    with pytest.raises(Interrupted):
        run(never, out=tmp_path / "bare", watcher=StopAfter(2))
    assert not list((tmp_path / "bare").glob("checkpoints/*"))
    resume(tmp_path / "bare")
    assert (tmp_path / "bare/metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()


def test_a_finished_run_can_be_resumed_and_stays(tmp_path: Path) -> None:
    ended = run(experiment(), out=tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert resume(tmp_path / "run").summary == ended.summary
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_two_runs_agree_and_another_seed_does_not(tmp_path: Path) -> None:
    first, second = (run(experiment(), out=tmp_path / name).folder for name in "ab")
    other = run(experiment(seed=1), out=tmp_path / "c").folder
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    assert (first / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes()
    assert (first / "split.json").read_bytes() == (second / "split.json").read_bytes()


def test_a_run_folder_is_complete(tmp_path: Path) -> None:
    folder = run(experiment(), out=tmp_path / "run").folder
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "checkpoints", "config.yaml", "contract.json", "environment.json", "ledger.jsonl", "metrics.jsonl",
        "models", "report.html", "split.json", "status.json", "summary.json", "timing.jsonl",
    }  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert {"method", "rounds", "seed", "clients", "accuracy", "messages", "seconds_per_round"} <= set(
        summary
    )
    wanted = {
        "last", "best_by_validation", "best_by_test", "weighted_last", "std_over_clients", "worst_tenth",
        "per_client",
    }  # fmt: skip
    assert wanted <= set(summary["accuracy"])
    small = experiment().build().server()["small"]
    scalars = sum(value.numel() for value in small.wire().values())
    assert summary["messages"]["up"]["scalars"] == summary["messages"]["down"]["scalars"] == scalars


def test_the_saved_configuration_is_the_experiment(tmp_path: Path) -> None:
    asked = experiment(engine={"memory": "2GB"}, evaluate={"on": "global"}, method={"clip": None})
    folder = run(asked, out=tmp_path / "run").folder
    again = Experiment.load(folder / "config.yaml")
    assert again.model_dump() == asked.model_dump()


def test_a_client_whose_loss_explodes_is_left_out(tmp_path: Path) -> None:
    listener = Listener()
    hot = experiment(
        training={"participation": 1.0, "per_client": {"1": {"lr": 1e30}}}, method={"clip": None}
    )
    ended = run(hot, out=tmp_path / "run", watcher=listener)
    assert ended.summary["failures"] == {"1": 4}
    assert "not finite" in ended.summary["failure_reasons"]["1"]
    assert "round 1 goes on without client 1" in listener.notices[0]
    assert "not finite" in listener.notices[0]
    assert "training.optimizer.lr" in listener.notices[0]
    assert not any(
        line["client"] == "1" for line in lines(ended.folder, "ledger.jsonl") if line["direction"] == "up"
    )
    values = [line["test"]["loss"] for line in lines(ended.folder)]
    assert np.isfinite(values).all()


def test_a_round_without_quorum_stops_the_run_and_keeps_the_rest(tmp_path: Path) -> None:
    hot = experiment(training={"optimizer": {"lr": 1e30}}, method={"clip": None})
    told = (
        r"round 1: 0 of 3 clients .* not finite.*potluck resume \S+; with other settings start a new run\)$"
    )
    with pytest.raises(RoundFailed, match=told) as error:
        run(hot, out=tmp_path / "run")
    assert "2 are needed: clients 1, 2, 4, step train: " in str(error.value)  # one reason, said once
    assert str(error.value).count("training.optimizer.lr") == 1
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_another_version_is_refused(tmp_path: Path) -> None:
    folder = run(experiment(), out=tmp_path / "run").folder
    about = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(about | {"potluck": "0.0.1"}))
    with pytest.raises(RunError, match=r"was made by potluck 0\.0\.1"):
        resume(folder)


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    folder = run(experiment(), out=tmp_path / "run").folder
    next((folder / "checkpoints").glob("clients-*")).write_bytes(b"short")
    with pytest.raises(RunError, match=r"checkpoint of round 4 in .* cannot be read"):
        resume(folder)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(experiment()).folder == Path("runs/tiny")
    assert run(experiment()).folder == Path("runs/tiny-2")
    with pytest.raises(RunError, match="exists"):
        run(experiment(), out="runs/tiny")
    with pytest.raises(RunError, match="no run folder"):
        resume("runs/nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot make the folder"):
        run(experiment(), out=tmp_path / "file" / "run")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = run(experiment(), out=tmp_path / "run").folder
    with RunFolder(folder).locked(), pytest.raises(RunError, match="another process"):
        resume(folder)


def _no_right(path: object) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_a_lock_is_asked_for_as_nfs_wants_it_and_its_lack_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_nfs(handle: int, how: int) -> None:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    with RunFolder(tmp_path).locked():
        pass
    monkeypatch.undo()
    true = os.open
    refused = lambda path, flags, *mode, **others: (  # noqa: E731
        _no_right(path) if flags & os.O_RDWR else true(path, flags, *mode, **others)
    )
    monkeypatch.setattr(os, "open", refused)  # .lock is another user's of the group
    with RunFolder(tmp_path).locked():
        pass
    monkeypatch.undo()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    sentence = "No locks available; choose a folder on a file system with locks"
    with pytest.raises(RunError, match=sentence), RunFolder(tmp_path).locked():
        pass


def test_checkpoints_are_incremental(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    store, checkpoints = ClientStore(folder=folder), Checkpoints(folder)
    store.put("a", {"model/w": torch.arange(3.0)})
    store.put("b", {"model/w": torch.arange(3.0)})
    checkpoints.save(1, {"x": torch.zeros(2)}, store.save(), {"logs": {}})
    store.put("b", {"model/w": torch.ones(3)})
    checkpoints.save(2, {"x": torch.ones(2)}, store.save(), {"logs": {}})
    checkpoints.wait()
    files = sorted(path.name for path in folder.iterdir())
    assert files == [
        "checkpoint-000001.json", "checkpoint-000002.json", "checkpoint.json", "clients-00000001.safetensors",
        "clients-00000002.safetensors", "clients-00000003.safetensors", "server-000001.safetensors",
        "server-000002.safetensors",
    ]  # fmt: skip
    loaded = Checkpoints(folder).load()
    assert loaded is not None
    assert loaded.round == 2
    assert loaded.server["x"].tolist() == [1, 1]
    again = ClientStore(folder=folder)
    for client, path in loaded.clients.items():
        again.put(client, path)
    assert again.fetch("a")["model/w"].tolist() == [0, 1, 2]
    assert again.fetch("b")["model/w"].tolist() == [1, 1, 1]
    checkpoints.close()


def test_moments_of_evaluation(tmp_path: Path) -> None:
    moments = ["before", "after_training", "after_aggregation"]
    asked = experiment(evaluate={"when": moments, "every": 2, "modes": "all"})
    found = lines(run(asked, out=tmp_path / "run").folder)
    assert {line["round"] for line in found} == {2, 4}
    assert {line["mode"] for line in found} == {"mix-large", "mix-small", "single-large", "single-small"}
    trained = {line["client"] for line in found if line["when"] == "after_training" and line["round"] == 2}
    everyone = {
        line["client"] for line in found if line["when"] == "after_aggregation" and line["round"] == 2
    }
    assert len(trained) == 3
    assert len(everyone) == 5


def test_a_mode_the_method_does_not_have_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    wrong = experiment(evaluate={"modes": ["mix-large", "mix-lage"]})
    with pytest.raises(ConfigError, match=r"evaluate\.modes: fedmrl has no mode 'mix-lage'.*'mix-large'"):
        run(wrong, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    folder = run(experiment(), out=tmp_path / "run").folder
    with pytest.raises(RunError, match=r"another evaluate\.modes: first there, \['mix-large', 'mix-lage'\]"):
        resume(folder, experiment=wrong)


def test_before_a_round_is_after_the_last_one(tmp_path: Path) -> None:
    asked = experiment(evaluate={"when": ["before", "after_aggregation"]})
    found = lines(run(asked, out=tmp_path / "run").folder)
    value = {(line["round"], line["when"], line["client"]): line["test"] for line in found}
    for client in "01234":
        assert value[2, "before", client] == value[1, "after_aggregation", client]


def test_sampled_and_global_evaluation(tmp_path: Path) -> None:
    asked = experiment(evaluate={"who": "sampled", "on": "global", "when": ["after_aggregation"]})
    ended = run(asked, out=tmp_path / "run")
    found = lines(ended.folder)
    assert len(found) == 4 * 3
    tests = sum(len(client.test) for client in asked.build().split.clients)
    assert {line["test"]["samples"] for line in found} == {tests}


def test_held_out_clients_never_train(tmp_path: Path) -> None:
    asked = experiment(partition={"held_out": 2}, training={"participation": 1.0})
    ended = run(asked, out=tmp_path / "run")
    held_out = set(asked.build().split.held_out)
    ups = {line["client"] for line in lines(ended.folder, "ledger.jsonl") if line["direction"] == "up"}
    assert len(ups) == 3
    assert not ups & held_out
    assert ended.summary["accuracy"]["held_out"]["clients"] == 2
    assert not set(ended.summary["accuracy"]["per_client"]) & held_out


def test_a_client_without_test_samples_is_left_out_of_accuracy(tmp_path: Path) -> None:
    data = Experiment.make(**SETTINGS).load_data()
    rows = np.arange(60)
    split = Split.of(
        [
            ClientSplit("a", rows[:20], rows[:0], rows[20:30]),
            ClientSplit("b", rows[30:40], rows[:0], rows[:0]),
        ]
    )
    asked = Experiment.make(**{**SETTINGS, "data": data, "partition": split})
    ended = run(asked, out=tmp_path / "run")
    assert set(ended.summary["accuracy"]["per_client"]) == {"a"}
    with pytest.raises(RunError, match="from Python"):
        resume(ended.folder)
    assert resume(ended.folder, experiment=asked).summary == ended.summary


def test_per_client_values_reach_the_client() -> None:
    asked = experiment(training={"per_client": {"2": {"epochs": 3, "batch_size": 8, "lr": 0.5}}})
    federation = asked.build()
    assert federation.clients.client_training("2").epochs == 3
    assert federation.clients.client_training("2").optimizer.lr == 0.5
    assert federation.clients.client_training("2").optimizer.momentum == 0.9
    assert federation.clients.client_training("1").epochs == 1
    with pytest.raises(ConfigError, match="client '9'"):
        experiment(training={"per_client": {"9": {"epochs": 3}}}).build()


def test_independent_initial_models() -> None:
    def weights(init: str) -> list[torch.Tensor]:
        asked = experiment(models={"pool": ["mlp-small"], "init": init})
        federation = asked.build()
        return [
            next(iter(federation.population.build_model(client).parameters()))
            for client in federation.population.ids[:2]
        ]

    same, other = weights("per_architecture"), weights("per_client")
    assert torch.equal(same[0], same[1])
    assert not torch.equal(other[0], other[1])


def test_the_public_names_are_there() -> None:
    for name in potluck.__all__:
        assert getattr(potluck, name) is not None


def test_models_of_ones_own_must_start_alike_to_be_resumed(tmp_path: Path) -> None:
    def asked() -> Experiment:
        net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
        )
        return experiment(models=[net])

    first = asked()
    ended = run(first, out=tmp_path / "run")
    assert resume(ended.folder, experiment=first).summary == ended.summary
    with pytest.raises(RunError, match="start from other weights"):
        resume(ended.folder, experiment=asked())


PLUGIN = """
from potluck.methods import Local

class Mine(Local):
    name = "mine"
"""


def test_a_method_of_ones_own_in_an_experiment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(potluck.core.method, "_registry", dict(potluck.core.method._registry))
    (tmp_path / "mine.py").write_text(PLUGIN)
    text = experiment().to_yaml()
    file = tmp_path / "experiment.yaml"
    file.write_text(text.replace("plugins: []", "plugins: [mine.py]"))
    asked = Experiment.load(file, ["method=mine", "training.rounds=1"])
    ended = run(asked, out=tmp_path / "run")
    assert ended.summary["method"] == "mine"
    assert resume(ended.folder).summary == ended.summary
    file.write_text(text.replace("plugins: []", "plugins: [nothing.py]"))
    with pytest.raises(ConfigError, match=r"plugins: there is no file .*nothing\.py"):
        Experiment.load(file)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"device": "cuda:1"}, "engine.device: cuda:1 is not there, this machine has 1 GPUs"),
        ({"device": "toaster"}, "engine.device: there is no device 'toaster'"),
        (
            {"device": "cuda", "precision": "bfloat16"},
            r"has compute capability 7\.5, bfloat16 needs 8\.0; use float32",
        ),
        ({"device": "cuda", "precision": "tf32"}, r"has compute capability 7\.5, tf32 needs 8\.0"),
        ({"device": "cpu", "precision": "tf32"}, "engine.precision: tf32 is for GPUs.* use float32"),
    ],
)
def test_a_device_that_cannot(settings: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=sentence):
        experiment(engine=settings).build()
