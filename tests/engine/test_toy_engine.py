"""A new engine is one class, found by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import potluck.engine.registry as registry
from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.packed import State
from potluck.deploy.flower.simulation import Simulation
from potluck.engine.factory import player
from potluck.engine.protocol import Examination, Outcome, Request
from potluck.engine.registry import register_engine
from potluck.engine.runner import StoringEngine, TransactionRunner, guarded
from potluck.engine.settings import EngineSettings
from potluck.engine.store.client_store import ClientStore
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.federation.builder import ClientBuilder
from potluck.runs.api import resume, run
from potluck.runs.loop import Interrupted
from potluck.runs.observers import Observer, RoundEnd

SETTINGS: dict[str, Any] = {
    "name": "toy",
    "data": "digits",
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 4, "validation": 0.1},
    "models": ["mlp-small", "conv-large"],
    "method": {"name": "fedmrl", "d1": 16},
    "training": {"rounds": 3, "participation": 0.75, "batch_size": 64, "optimizer": {"lr": 0.05}},
    "checkpoint": {"every": 0},
}


class FreshClients(StoringEngine):
    """Builds a live client for every request, and serves the last client first."""

    def __init__(
        self,
        clients: ClientBuilder,
        settings: EngineSettings,
        store: ClientStore,
        notice: Callable[[str], None],
    ) -> None:
        self.clients, self.store, self.runner = clients, store, TransactionRunner(clients)
        notice("fresh clients for every request")

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        return [self._outcome(request) for request in requests[::-1]][::-1]

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        return [self._outcome(examination) for examination in examinations[::-1]][::-1]

    def sit(self, client: ClientId, state: State | None) -> Client:
        live = self.clients.build_client(client)
        if state is not None:
            live.restore(state)
        return live

    def _outcome(self, request: Request | Examination) -> Outcome:
        def work() -> Outcome:
            return self.runner.serve(request, self.store, self).answer

        return guarded(self.clients, request.client, work)


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The registered engines, as they were before; no package is installed that brings others."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    return registry._registered


class Listener(Observer):
    """Hears notices, and may press Ctrl-C after a round."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.heard: list[str] = []

    def notice(self, sentence: str) -> None:
        self.heard.append(sentence)

    def round(self, end: RoundEnd) -> None:
        if end.round == self.last:
            raise KeyboardInterrupt


def experiment(name: str) -> Experiment:
    return Experiment.make(**SETTINGS, engine={"name": name, "device": "cpu", "workers": 1})


def logs(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "ledger.jsonl")]


def test_a_toy_engine_gives_the_numbers_of_the_serial_engine(tmp_path: Path) -> None:
    register_engine("fresh")(FreshClients)
    listener = Listener()
    run(experiment("local"), out=tmp_path / "serial")
    run(experiment("fresh"), out=tmp_path / "toy", watcher=listener)
    assert listener.heard == ["fresh clients for every request"]
    assert logs(tmp_path / "toy") == logs(tmp_path / "serial")
    with pytest.raises(Interrupted):
        run(experiment("fresh"), out=tmp_path / "cut", watcher=Listener(last=2))
    resume(tmp_path / "cut")
    assert logs(tmp_path / "cut") == logs(tmp_path / "serial")


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.name: must be 'local' or .*\(given: 'nowhere'\)$"):
        experiment("nowhere")
    with pytest.raises(ConfigError, match="there is no engine 'locla'; did you mean 'local'"):
        player("locla")


def test_an_installed_package_brings_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be"):
        experiment("brought")
    brought = EntryPoint("brought", f"{__name__}:FreshClients", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [brought] if group == registry.GROUP else [])
    assert experiment("brought").engine.name == "brought"
    assert registry.find_engine("brought") is FreshClients
    assert player("brought") is None


def test_some_engines_play_a_run_themselves(engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert player("local") is None
    assert player("flower-simulation") is Simulation
    del engines["flower-simulation"]
    with pytest.raises(ConfigError, match="there is no engine 'flower-simulation'"):
        player("flower-simulation")
