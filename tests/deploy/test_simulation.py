"""`engine.name: flower-simulation`: the numbers of the serial engine, from processes of Ray's."""

import contextlib
import os

import pytest
import sites
from links import Told
from typer.testing import CliRunner

from helpers import StopAfter
from potluck.cli import app as cli
from potluck.deploy.flower import simulation
from potluck.deploy.flower.processes import installed
from potluck.errors import ConfigError, RunError
from potluck.files import read_json
from potluck.runs.api import resume, run
from potluck.runs.loop import Interrupted

ENGINE = {"engine": {"name": "flower-simulation", "device": "cpu", "workers": 1, "patience": 120}}
OTHER_RAY = simulation.other_ray
METHODS = [{"name": "fedmrl", "d1": 8}, "fedproto"]
with_ray = pytest.mark.skipif(
    not installed("ray") or simulation.other_ray() is not None, reason="needs the extra [simulation]"
)


@pytest.fixture(autouse=True)
def whatever_ray(monkeypatch):
    """What needs no process of Ray's is tried with any version of it."""
    monkeypatch.setattr(simulation, "other_ray", lambda: None)


class InProcess:
    """A courier to simulated clients of this process; every order finds them built anew."""

    def __init__(self, records, clients):
        self.records, self.clients = records, clients

    def nodes(self):
        return list(range(self.clients))

    def took(self):
        return []

    def exchange(self, letters, timeout, most):
        there = simulation.SimulatedClients(self.records)
        return [there.answer(node, data) for node, data in letters]


@pytest.fixture
def in_process(monkeypatch):
    """No Flower and no Ray, but everything else."""

    @contextlib.contextmanager
    def simulating(experiment, clients, home, records):
        yield InProcess(records, clients)

    monkeypatch.setattr(simulation, "installed", lambda name: True)
    monkeypatch.setattr(simulation, "simulating", simulating)


def same(one, other):
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert sites.log(one, name) == sites.log(other, name)


@pytest.mark.parametrize("method", METHODS)
def test_clients_that_are_built_for_every_order_give_the_numbers_of_the_serial_engine(
    in_process, tmp_path, method
):
    run(sites.simulated(method, **ENGINE), out=tmp_path / "flower")
    run(sites.simulated(method), out=tmp_path / "serial")
    same(tmp_path / "flower", tmp_path / "serial")
    assert (tmp_path / "flower" / "clients" / "0" / "record" / "record.json").exists()


def test_a_simulation_has_the_files_of_an_ordinary_run_and_compares_no_norms(
    in_process, monkeypatch, tmp_path
):
    monkeypatch.setattr("potluck.engine.norms.LARGEST_RATIO", 1e-9)  # auto would refuse everyone
    told = Told()
    run(sites.simulated(METHODS[0], **ENGINE), out=tmp_path / "flower", watcher=told)
    run(sites.simulated(METHODS[0]), out=tmp_path / "serial")
    same(tmp_path / "flower", tmp_path / "serial")
    assert not any("goes on without" in notice for notice in told.notices)
    for name in ("split.json", "contract.json"):
        assert (tmp_path / "flower" / name).read_bytes() == (tmp_path / "serial" / name).read_bytes()
    summaries = [read_json(tmp_path / one / "summary.json") for one in ("flower", "serial")]
    times = ("seconds", "seconds_per_round")
    first, second = ({key: one[key] for key in one if key not in times} for one in summaries)
    assert first == second
    named = {path.name for path in (tmp_path / "serial").iterdir()}
    own = {path.name for path in (tmp_path / "flower").iterdir()} - named
    assert own == {"clients", "federation.json"}


def test_a_stopped_simulation_goes_on_to_the_same_numbers(in_process, tmp_path):
    with pytest.raises(Interrupted):
        run(sites.simulated(METHODS[0], **ENGINE), out=tmp_path / "flower", watcher=StopAfter(1))
    resume(tmp_path / "flower")
    run(sites.simulated(METHODS[0]), out=tmp_path / "serial")
    same(tmp_path / "flower", tmp_path / "serial")


def test_without_the_extra_it_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(simulation, "installed", lambda name: name != "ray")
    file = sites.write_experiment(tmp_path / "three.yaml", sites.simulated("local"))
    words = ["run", str(file), "engine.name=flower-simulation", "--out", str(tmp_path / "run")]
    ended = CliRunner().invoke(cli.app, words)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "pip install 'potluck[simulation]'" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_another_ray_than_flower_asks_for_is_one_sentence(monkeypatch):
    monkeypatch.setattr(simulation, "installed", lambda name: True)
    monkeypatch.setattr(
        simulation, "requires", lambda name: ["numpy>1", "ray==2.55.1 ; extra == 'simulation'"]
    )
    monkeypatch.setattr(simulation, "version", lambda name: "2.60.0")
    monkeypatch.setattr(simulation, "other_ray", OTHER_RAY)
    with pytest.raises(
        ConfigError, match=r"needs ray 2\.55\.1, as Flower asks for it, and this is ray 2\.60\.0"
    ):
        simulation.ready(sites.simulated("local"))


def test_a_folder_called_ray_is_not_ray(monkeypatch, tmp_path):
    (tmp_path / "ray_of_hope").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("ray_of_hope")
    assert installed("pytest")


def test_a_folder_called_potluck_where_one_stands_is_not_run(monkeypatch, tmp_path):
    (tmp_path / "potluck").mkdir()
    (tmp_path / "potluck" / "__init__.py").write_text("open('run', 'w').close(); raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulation, "PROGRAM", "import potluck; raise SystemExit(1)")
    with (
        pytest.raises(RunError, match="does not start"),
        simulation.simulating(sites.simulated("local", **ENGINE), 2, tmp_path / "home", tmp_path / "records"),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_simulation_that_dies_is_not_waited_for(monkeypatch, tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise RuntimeError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(simulation, "installed", lambda name: True)
    with pytest.raises(
        RunError, match=r"Flower's simulation does not start: .*broken; see .*simulation\.log"
    ):
        run(sites.simulated("local", **ENGINE), out=tmp_path / "run")


def test_the_ray_of_a_simulation_is_its_own(monkeypatch, tmp_path):
    """It joins no cluster that is on this machine already, and lets nobody join."""
    seen = []

    def process(words, log, environment):
        seen.append(environment)
        raise RunError("stopped")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    monkeypatch.setattr(simulation, "installed", lambda name: True)
    monkeypatch.setattr(simulation, "Process", process)
    for folder in ("a", "b"):
        with pytest.raises(RunError, match="stopped"):
            run(sites.simulated("local", **ENGINE), out=tmp_path / folder)
    for environment in seen:
        assert environment["RAY_ADDRESS"] == "local"
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    one, other = (environment["RAY_AUTH_TOKEN"] for environment in seen)
    assert one != other


def test_an_experiment_that_processes_cannot_be_told_is_refused(monkeypatch):
    monkeypatch.setattr(simulation, "installed", lambda name: True)
    own = {"models": {"pool": lambda task, rep_dim: None}}
    with pytest.raises(ConfigError, match="cannot hand models and data that are Python objects"):
        simulation.ready(sites.simulated("local", **own, **ENGINE))
    with pytest.raises(ConfigError, match="computes on the CPU"):
        simulation.ready(sites.simulated("local", engine={"name": "flower-simulation", "device": "cuda:0"}))


@with_ray
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_simulation_gives_the_numbers_of_the_serial_engine(tmp_path, method):
    run(sites.simulated(method, **ENGINE), out=tmp_path / "flower")
    run(sites.simulated(method), out=tmp_path / "serial")
    same(tmp_path / "flower", tmp_path / "serial")
