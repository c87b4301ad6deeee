"""What is refused before a process starts, and the shim between Flower and a worker."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sites
from typer.testing import CliRunner

from potluck import cli
from potluck.engine.flower import frames
from potluck.engine.flower.join import Watched
from potluck.engine.flower.processes import Process, Security, environment, is_loopback, split_address
from potluck.errors import ConfigError

TLS = ("ca", "certificate", "key")
FILE = Path("file")


@pytest.fixture
def place(tmp_path_factory):
    """A folder with a short name: sockets have no long ones."""
    return tmp_path_factory.mktemp("s")


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000"])
def test_plain_text_is_the_default_on_this_machine(address):
    assert is_loopback(address)
    Security().check(address, TLS)


@pytest.mark.parametrize(
    ("security", "sentence"),
    [
        (Security(), "0.0.0.0:8000 is beyond this machine: give --ca, --certificate, --key, or --insecure"),
        (Security(ca=FILE, key=FILE), "--certificate is missing"),
        (Security(insecure=True, ca=FILE), "--insecure and --ca do not go together"),
    ],
)
def test_plain_text_beyond_this_machine_has_to_be_asked_for(security, sentence):
    with pytest.raises(ConfigError, match=sentence):
        security.check("0.0.0.0:8000", TLS)
    Security(insecure=True).check("0.0.0.0:8000", TLS)
    Security(ca=FILE, certificate=FILE, key=FILE).check("0.0.0.0:8000", TLS)


@pytest.mark.parametrize("address", ["127.0.0.1", ":8000", "host:port", "host:0", "host:70000"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(ConfigError, match="is no address"):
        split_address(address)


def test_flower_is_kept_from_calling_home(tmp_path):
    found = environment(tmp_path)
    assert (found["FLWR_TELEMETRY_ENABLED"], found["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")


def test_bad_input_is_one_sentence_and_starts_nothing(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    sites.write_experiment(tmp_path / "here.yaml", sites.simulated("local"))
    sites.write_experiment(tmp_path / "there.yaml", sites.federated("local"))
    join = ["join", "--client", "0", "--model", "a.py:build", "--data", "a.py:load"]
    wrong = {
        ("serve", "here.yaml"): "a federation needs to know its clients",
        ("serve", "there.yaml", "--address", "0.0.0.0:9"): "is beyond this machine",
        ("serve", "there.yaml", "evaluate.on=global"): "evaluate.on",
        ("run", "there.yaml"): "run it with potluck serve",
        (*join, "--server", "127.0.0.1:9"): "there is no file a.py",
        (*join, "--server", "example.org:9"): "is beyond this machine: give --ca, or --insecure",
    }
    for words, sentence in wrong.items():
        ended = CliRunner().invoke(cli.app, list(words))
        assert (ended.exit_code, ended.stdout) == (2, "")
        assert sentence in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "sites").exists()


def test_a_process_that_ends_is_started_again_unless_its_input_is_bad(tmp_path):
    def start(code):
        return lambda: Process([sys.executable, "-c", code], tmp_path / "log", {})

    notices = []
    fine = start("print('oh')")
    watched = Watched(fine, fine(), time.monotonic(), pause=0.0)
    first = watched.process
    first.popen.wait(30)
    watched.look(notices.append)
    assert watched.process is not first
    assert "(oh); it is started again" in notices[0]
    watched.process.end()
    bad = start("import sys; print('error: no such model'); sys.exit(2)")
    watched = Watched(bad, bad(), time.monotonic())
    watched.process.popen.wait(30)
    with pytest.raises(ConfigError, match="no such model"):
        watched.look(notices.append)


def test_frames_come_as_they_were_sent_and_nonsense_ends_the_connection():
    here, there = socket.socketpair()
    with here, there:
        frames.send(here, {"to": [1]}, [b"", b"abc"])
        assert frames.receive(there) == ({"to": [1]}, [b"", b"abc"])
        here.sendall(b"\xff" * 8)
        with pytest.raises(EOFError):
            frames.receive(there)


# --- Flower's apps --------------------------------------------------------------------------------------


def test_flowers_apps_import_no_torch():
    pytest.importorskip("flwr")
    code = "import sys, potluck.engine.flower.apps; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bytes_pass_through_flowers_records():
    apps = pytest.importorskip("potluck.engine.flower.apps", exc_type=ImportError)
    assert apps.unwrap(apps.wrap(b"some bytes")) == b"some bytes"


class Reply:
    """As much of Flower's message as the relay reads."""

    def __init__(self, number, content=None, error=None):
        self.metadata, self.content, self.error = SimpleNamespace(reply_to_message_id=number), content, error

    def has_error(self):
        return self.error is not None


def test_the_relay_gives_every_letter_its_answer_or_a_sentence(monkeypatch):
    apps = pytest.importorskip("potluck.engine.flower.apps", exc_type=ImportError)
    monkeypatch.setattr(apps, "Message", lambda *args, **options: args)
    error = SimpleNamespace(code=2, reason="Traceback\nValueError: no")
    replies = [Reply("c", apps.RecordDict()), Reply("b", error=error), Reply("a", apps.wrap(b"answer"))]
    grid = SimpleNamespace(
        push_messages=lambda letters: ["a", "b", "c", None], pull_messages=lambda numbers: replies
    )
    sentences, answers = apps.exchange(grid, [1, 2, 3, 4], [b""] * 4, 5)
    assert answers == [b"answer", b"", b"", b""]
    assert sentences == [
        "",
        "Flower reports error 2: ValueError: no",
        "its reply holds no message",
        "no answer within 5 s",
    ]


def test_the_shim_waits_for_a_worker_and_says_when_it_ends_over_an_order(place):
    apps = pytest.importorskip("potluck.engine.flower.apps", exc_type=ImportError)
    path = place / "w"

    def work():
        with frames.listening(path) as door:
            first, _ = door.accept()
            with first:
                _, (order,) = frames.receive(first)
                frames.send(first, {}, [order.upper()])
            second, _ = door.accept()
            second.close()

    worker = threading.Thread(target=work)
    with pytest.raises(ConnectionError, match="there is no worker"):
        apps.ask_worker(str(path), b"order", wait=0)
    worker.start()
    assert apps.ask_worker(str(path), b"order", wait=10) == b"ORDER"
    with pytest.raises(ConnectionError, match="ended over the order"):
        apps.ask_worker(str(path), b"order", wait=10)
    worker.join()
