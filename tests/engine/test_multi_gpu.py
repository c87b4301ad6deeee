"""Several devices: the same run as on one, to the byte on a CPU, and the same store from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import StopAfter
from potluck.engine.multi_gpu import MultiGpuEngine, MultiGpuStore, homes
from potluck.engine.settings import EngineSettings
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.queues import VARIABLE
from potluck.runs.api import resume, run
from potluck.runs.loop import Interrupted, Run

SETTINGS: dict[str, Any] = {
    "name": "spread",
    "data": "digits",
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 5, "validation": 0.1},
    "models": ["mlp-small", "conv-large"],
    "method": {"name": "fedmrl", "d1": 16},
    "training": {"rounds": 3, "participation": 0.6, "batch_size": 64, "optimizer": {"lr": 0.05}},
    "checkpoint": {"every": 0},
}
LOGS = ("metrics.jsonl", "ledger.jsonl")


def logs(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in LOGS]


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU twice, in place of two GPUs."""
    both = (torch.device("cpu"), torch.device("cpu"))
    monkeypatch.setattr(EngineSettings, "torch_devices", lambda self: both)


def test_a_run_on_two_devices_is_the_run_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    experiment = Experiment.make(**SETTINGS, engine={"device": "cpu", "workers": 1})
    run(experiment, out=tmp_path / "one")
    request.getfixturevalue("two_devices")
    engines = []
    made = Run.__init__

    def remember(self: Run, *args: Any, **keywords: Any) -> None:
        made(self, *args, **keywords)
        engines.append((self.engine, self.store))

    monkeypatch.setattr(Run, "__init__", remember)
    run(experiment, out=tmp_path / "two")
    assert logs(tmp_path / "two") == logs(tmp_path / "one")
    (engine, store), *_ = engines
    assert isinstance(engine, MultiGpuEngine)
    assert isinstance(store, MultiGpuStore)
    assert all(list(each) for each in store.stores), "both stores hold clients"


@pytest.mark.usefixtures("two_devices")
def test_a_run_on_two_devices_can_be_resumed(tmp_path: Path) -> None:
    experiment = Experiment.make(**SETTINGS, engine={"device": "cpu", "workers": 1})
    run(experiment, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(experiment, out=tmp_path / "cut", watcher=StopAfter(2))
    resume(tmp_path / "cut")
    assert logs(tmp_path / "cut") == logs(tmp_path / "whole")


def test_clients_are_shared_out_in_turn() -> None:
    home = homes(["a", "b", "c"], 2)
    assert [home(client) for client in "abc"] == [0, 1, 0]


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        ([], "name at least one device"),
        (["cpu", "cpu"], "only GPUs can be named together"),
        (["cuda:77", "cuda:78"], "cuda:77 is not there"),
        (["quantum:0"], "there is no device 'quantum:0'"),
    ],
)
def test_devices_that_cannot_be_used_are_named(devices: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Experiment.make(**SETTINGS, engine={"device": devices}).engine.torch_devices()


@pytest.mark.parametrize(
    ("set_before", "asked_for"), [(None, "32"), ("4", "4")], ids=["default", "user's own"]
)
def test_queues_are_asked_for_before_a_script_can_start_cuda(set_before: str | None, asked_for: str) -> None:
    script = f"import potluck, os, sys; print(os.environ[{VARIABLE!r}], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {} if set_before is None else {VARIABLE: set_before}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert told.stdout.split() == [asked_for, "False"], told.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_one_gpu_named_twice_runs_and_resumes(tmp_path: Path) -> None:
    experiment = Experiment.make(**SETTINGS, engine={"device": ["cuda:0", "cuda:0"]})
    run(experiment, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(experiment, out=tmp_path / "cut", watcher=StopAfter(2))
    assert resume(tmp_path / "cut").folder.name == "cut"
    assert (tmp_path / "cut" / "ledger.jsonl").read_bytes() == (
        tmp_path / "whole" / "ledger.jsonl"
    ).read_bytes()
