"""Going on with a federation by its folder alone."""

import contextlib
from pathlib import Path

import pytest
import sites
from links import FEDMRL, Link, Told, is_training
from typer.testing import CliRunner

import potluck
from potluck.cli.app import app
from potluck.deploy.flower import serve as served
from potluck.deploy.flower.connections import Security
from potluck.deploy.flower.resume import experiment_of, read_told
from potluck.errors import RunError
from potluck.files import read_json, write_json
from potluck.runs.folder import RunFolder


class Killed(BaseException):
    """The server dies here."""


@pytest.fixture
def link(tmp_path, monkeypatch):
    """Sites in this process, where Flower's would be."""
    link = Link(tmp_path)
    calls = []

    @contextlib.contextmanager
    def relaying(address, security, *given):
        calls.append((address, security))
        yield link

    monkeypatch.setattr(served, "relaying", relaying)
    monkeypatch.setattr(served, "require_flower", lambda: None)
    monkeypatch.chdir(tmp_path)
    link.calls = calls
    return link


def command(*words):
    outcome = CliRunner().invoke(app, [*map(str, words)])
    return outcome.exit_code, outcome.output + str(outcome.exception or "")


def die_in_round(link, round_):
    def lose(order):
        if is_training(order, "0", round_):
            raise Killed

    link.lose = lose


def started(tmp_path, link, **security):
    """A federation that was served and whose server died in its second round."""
    die_in_round(link, 2)
    with pytest.raises(Killed):
        served.serve(
            sites.federated(FEDMRL), Path("runs/three"), "127.0.0.1:8123", Security(**security), Told()
        )
    link.lose = lambda order: None
    link.orders.clear()


def test_a_federation_is_resumed_by_its_folder_alone_also_from_another_place(tmp_path, link, monkeypatch):
    started(tmp_path, link)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, said = command("resume", tmp_path / "runs" / "three")
    assert code == 0, said
    assert [address for address, _ in link.calls] == ["127.0.0.1:8123"] * 2
    assert link.calls[0][1] == link.calls[1][1] == Security()
    assert sites.log(tmp_path / "runs" / "three") == sites.serial(FEDMRL, tmp_path / "serial")
    assert len(potluck.open(tmp_path / "runs" / "three").frame())


def test_a_served_run_that_was_complete_is_not_to_be_continued(tmp_path, link, monkeypatch):
    """Ctrl-C falls into the end of Flower's processes, which takes seconds."""
    sites.write_experiment(tmp_path / "three.yaml", sites.federated(FEDMRL))
    relaying = served.relaying

    @contextlib.contextmanager
    def slow_to_end(*given):
        with relaying(*given) as courier:
            yield courier
        raise KeyboardInterrupt

    monkeypatch.setattr(served, "relaying", slow_to_end)
    code, said = command("serve", "three.yaml", "--out", "run")
    assert code == 130
    assert "stopped; the run is complete, see run" in said
    assert "continue with" not in said


def test_a_resumed_federation_logs_and_is_watched_as_a_served_one(tmp_path, link, monkeypatch):
    started(tmp_path, link)
    ports, exposed = [], served.exposed
    monkeypatch.setattr(served, "exposed", lambda port, facts: ports.append(port) or exposed(None, facts))
    code, said = command("resume", "runs/three", "--prometheus", 9464, "--log", "json")
    assert code == 0, said
    assert ports == [9464]
    assert '"message": "round 2/' in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--from-round", 1),
            "--from-round: runs/three is a federation, which goes on after its last checkpoint",
        ),
        (("--log", "xml"), "--log: 'xml' is not a form of log; give text or json"),
    ],
)
def test_options_that_a_federation_has_no_use_for_are_named(tmp_path, link, words, sentence):
    (tmp_path / "runs" / "three").mkdir(parents=True)
    (tmp_path / "runs" / "three" / "serve.json").write_text("{}")
    code, said = command("resume", "runs/three", *words)
    assert code == 2
    assert sentence in said
    (tmp_path / "runs" / "three" / "serve.json").unlink()
    assert "are for federations" in command("resume", "runs/three", "--prometheus", 9464)[1]


def test_a_client_can_be_excluded_when_a_federation_is_resumed(tmp_path, link):
    started(tmp_path, link)
    code, said = command("resume", "runs/three", "--exclude", "2")
    assert code == 0, said
    assert link.asked(2) == ["0", "1"]
    assert read_json(tmp_path / "runs" / "three" / "federation.json")["excluded"] == ["2"]


def test_a_server_that_ended_before_its_clients_came_is_resumed_too(tmp_path, link, monkeypatch):
    monkeypatch.setattr("potluck.deploy.engine.LOOK", 0.05)
    engine = {"device": "cpu", "patience": 0.1}
    sites.write_experiment(tmp_path / "three.yaml", sites.federated(FEDMRL, engine=engine))
    link.away = {"1"}
    code, said = command("serve", "three.yaml")
    assert (code, "have not joined: 1" in said) == (2, True)
    link.away = set()
    code, said = command("resume", "runs/three")
    assert code == 0, said


def test_paths_are_kept_whole_and_no_secret(tmp_path, link):
    trial_keys = pytest.importorskip("potluck.deploy.trial_keys", exc_type=ImportError)
    trial_keys.make_keys(tmp_path / "keys", ["127.0.0.1"], [])
    files = {"ca": "ca.crt", "certificate": "server.crt", "key": "server.key"}
    started(tmp_path, link, **{name: Path("keys") / file for name, file in files.items()})
    told = read_told(tmp_path / "runs" / "three")
    assert told.security == Security(
        False, *(tmp_path / "keys" / file for file in files.values()), node_keys=False
    )
    secret = (tmp_path / "keys" / "server.key").read_text().splitlines()[1]
    assert secret not in (tmp_path / "runs" / "three" / "serve.json").read_text()


def test_a_folder_from_elsewhere_opens_no_door_unless_it_is_trusted(tmp_path, link):
    started(tmp_path, link)
    (tmp_path / "runs" / "three").rename(tmp_path / "found")
    code, said = command("resume", "found")
    assert code == 2
    assert "going on would listen at 127.0.0.1:8123" in said
    assert len(link.calls) == 1
    code, said = command("resume", "found", "--trust")
    assert code == 0, said


def test_code_that_comes_with_the_folder_is_not_run(tmp_path, link):
    started(tmp_path, link)
    folder = tmp_path / "runs" / "three"
    (folder / "evil.py").write_text("import pathlib\npathlib.Path('owned').touch()\n")
    told = read_json(folder / "serve.json")
    told["experiment"]["plugins"] = [str(folder / "evil.py")]
    write_json(folder / "serve.json", told)
    code, said = command("resume", folder)
    assert (code, "was changed since" in said) == (2, True)
    assert not (tmp_path / "owned").exists()


def test_what_flower_kept_in_a_folder_of_somebody_else_is_not_taken_up(tmp_path, link):
    kept = tmp_path / "runs" / "three" / "flower"
    (kept / "apps").mkdir(parents=True)
    (kept.parent / ".lock").touch()
    for name in ("superlink.db", "superlink.json", "superlink.log"):
        (kept / name).write_text("{}")
    started(tmp_path, link)
    assert [path.name for path in kept.iterdir()] == ["superlink.log"]
    (kept / "superlink.db").write_text("ours")
    assert command("resume", "runs/three")[0] == 0
    assert (kept / "superlink.db").exists()


def test_a_second_server_in_a_folder_touches_nothing_of_the_first(tmp_path, link):
    started(tmp_path, link)
    link.calls.clear()
    with RunFolder(tmp_path / "runs" / "three").locked():
        code, said = command("resume", "runs/three")
    assert (code, "another process is at work in" in said, link.calls) == (2, True, [])


def test_what_cannot_be_read_or_changed_is_said_in_one_sentence(tmp_path, link):
    started(tmp_path, link)
    folder = tmp_path / "runs" / "three"
    with pytest.raises(RunError, match=r"--rounds 9: a federation goes on as its clients joined it"):
        experiment_of(read_told(folder), [], 9)
    with pytest.raises(RunError, match=r"seed=3: a federation goes on as its clients joined it"):
        experiment_of(read_told(folder), ["seed=3"], None)
    write_json(folder / "serve.json", {"address": 3})
    with pytest.raises(RunError, match=r"serve\.json was not written by potluck: folder"):
        read_told(folder)


def test_only_federations_have_clients_to_exclude(tmp_path, link):
    (tmp_path / "local").mkdir()
    code, said = command("resume", "local", "--exclude", "2")
    assert (code, "are for federations" in said) == (2, True)
