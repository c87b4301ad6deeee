"""What is refused before a process starts, and the shim between Flower and a worker."""

import contextlib
import datetime
import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.request import proxy_bypass

import pytest
import sites
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.deploy.fingerprints import client_keys
from potluck.deploy.flower import commands, processes
from potluck.deploy.flower.certificates import OutOfTime, check_server
from potluck.deploy.flower.connections import Security, free_port, is_loopback, split_address
from potluck.deploy.flower.processes import Process, environment
from potluck.deploy.flower.superlinks import Superlink
from potluck.deploy.flower.watching import Watched
from potluck.engine import frames
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


def test_calls_within_the_machine_go_through_no_proxy(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", "example.net")

    def past(environment, host):
        with monkeypatch.context() as here:
            for name in ("no_proxy", "NO_PROXY"):
                here.setenv(name, environment[name])
            return bool(proxy_bypass(host))

    here, other = environment(tmp_path), environment(tmp_path, "127.0.0.5:8000")
    assert all(past(here, host) for host in ("127.0.0.1:8000", "localhost:8000", "example.net"))
    assert "::1" in here["no_proxy"].split(",")
    assert not past(here, "fl.example.org:8443")  # for a site it may be the only way out
    assert (past(here, "127.0.0.5"), past(other, "127.0.0.5")) == (False, True)
    assert not past(environment(tmp_path, "fl.example.org:8443"), "fl.example.org")
    assert here["HTTPS_PROXY"] == "http://proxy.example.org:3128"


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("*", "*"),
        ("example.net, *", "*"),
        ("[::1], example.net", "::1,example.net,localhost,127.0.0.1"),
        ("", "localhost,127.0.0.1,::1"),
    ],
)
def test_hosts_without_a_proxy_are_told_in_a_form_that_flower_takes(tmp_path, monkeypatch, told, kept):
    """A star counts alone, and an address in brackets ends every call."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", told)
    found = environment(tmp_path)
    assert found["NO_PROXY"] == found["no_proxy"] == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [("NO_PROXY", "fe80::/10"), ("HTTPS_PROXY", "proxy:port"), ("ALL_PROXY", "gopher://proxy:1")],
)
def test_a_node_names_proxies_with_which_no_call_can_be_made(tmp_path, monkeypatch, name, value):
    pytest.importorskip("flwr")
    for other in [other for other in os.environ if other.lower().endswith("_proxy")]:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    process = processes.start_supernode(
        "127.0.0.1:9", Security(insecure=True), tmp_path, tmp_path / "worker", free_port()
    )
    try:
        assert process.popen.wait(120) == 2
        assert re.fullmatch(
            r"error: the proxies of the environment cannot be used \(.+\); correct HTTPS_PROXY, .+",
            process.tail(),
        )
    finally:
        process.end()


def test_flowers_commands_and_a_superlink_use_no_proxy(tmp_path, monkeypatch):
    """Both speak with the SuperLink alone, which `serve` reaches itself."""
    program = tmp_path / "flwr"
    program.write_text('#!/bin/sh\nprintf \'{"success": true, "run-id": "%s"}\' "$no_proxy $NO_PROXY"\n')
    program.chmod(0o755)
    monkeypatch.setattr(commands, "program", lambda name: str(program))
    monkeypatch.setenv("NO_PROXY", "example.net")
    assert commands.flwr(tmp_path, "run.log", "the run", "run")["run-id"] == "* *"
    given = {}

    def started(words, log, environment, **others):
        given.update(environment)
        return SimpleNamespace(alive=True)

    monkeypatch.setattr(processes, "Process", started)
    monkeypatch.setattr(processes, "is_open", lambda address: True)
    monkeypatch.setattr(processes, "program", lambda name: name)
    processes.start_superlink("192.0.2.7:8000", Security(insecure=True), tmp_path)
    assert (given["no_proxy"], given["NO_PROXY"]) == ("*", "*")


@pytest.mark.parametrize(
    ("name", "why", "other"),
    [
        ("l" * 100, "is too long for sockets", "a shorter"),
        ('q"', "has signs that Flower does not take", "another"),
    ],
)
def test_a_folder_for_temporary_files_that_will_not_do_is_named(place, monkeypatch, name, why, other):
    """Nobody has chosen the paths of the sockets in it."""
    folder = place / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with (
        pytest.raises(ConfigError, match=re.escape(f"{why}: {folder}; set TMPDIR to {other} one")),
        frames.meeting_folder(),
    ):
        pass
    assert not [*folder.iterdir()]


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
        ("serve", "there.yaml", "--node-keys"): "give --client-keys",
        ("serve", "there.yaml", "--client-keys", "none"): "the key of client 0, none/0.pub, cannot be read",
        ("run", "there.yaml"): "run it with potluck serve",
        (*join, "--server", "127.0.0.1:9"): "there is no file a.py",
        (*join, "--server", "example.org:9"): "is beyond this machine: give --ca, or --insecure",
    }
    for words, sentence in wrong.items():
        ended = CliRunner().invoke(app, list(words))
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
    assert "ended: oh; it is started again" in notices[0]
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


def test_keys_are_known_by_the_fingerprints_ssh_shows(tmp_path):
    pytest.importorskip("cryptography")
    from potluck.deploy.trial_keys import make_keys

    make_keys(tmp_path, ["localhost"], ["0", "1"])
    found = client_keys(tmp_path / "clients", ["0", "1"])
    assert found["0"].startswith("SHA256:")
    assert len(set(found.values())) == 2
    (tmp_path / "clients" / "1.pub").write_bytes((tmp_path / "clients" / "0.pub").read_bytes())
    with pytest.raises(ConfigError, match="the clients 0 and 1 have the same key"):
        client_keys(tmp_path / "clients", ["0", "1"])
    (tmp_path / "clients" / "1.pub").write_text("no key")
    with pytest.raises(ConfigError, match=r"1\.pub is no public key"):
        client_keys(tmp_path / "clients", ["0", "1"])


def test_a_servers_way_to_speak_is_looked_at_before_a_site_joins(tmp_path):
    pytest.importorskip("cryptography")
    from potluck.deploy.trial_keys import make_keys

    make_keys(tmp_path / "a", ["127.0.0.1"], [])
    make_keys(tmp_path / "b", ["127.0.0.1"], [])
    with listening(tmp_path / "a") as address:
        assert check_server(address, Security(ca=tmp_path / "a" / "ca.crt"))
        with pytest.raises(ConfigError, match="is not to be trusted"):
            check_server(address, Security(ca=tmp_path / "b" / "ca.crt"))
        with pytest.raises(ConfigError, match="speaks TLS, and this would be plain text; give --ca"):
            check_server(address, Security())
    assert not check_server(f"127.0.0.1:{free_port()}", Security())  # nobody is there yet


@pytest.mark.parametrize(
    ("earlier", "said"),
    [(60, "certificate has expired"), (-1, "certificate is not yet valid")],
)
def test_a_certificate_out_of_its_time_is_no_bad_input_of_a_site(tmp_path, monkeypatch, earlier, said):
    pytest.importorskip("cryptography")
    from potluck.deploy import trial_keys

    monkeypatch.setattr(trial_keys, "EARLIER", datetime.timedelta(days=earlier))
    trial_keys.make_keys(tmp_path / "a", ["127.0.0.1"], [])
    with listening(tmp_path / "a") as address, pytest.raises(OutOfTime) as refused:
        check_server(address, Security(ca=tmp_path / "a" / "ca.crt"))
    assert str(refused.value) == (
        f"the certificate of {address} is not taken: {said}; if the clock of this machine is right, whoever runs "
        "the server has to renew it"
    )


def test_a_name_that_is_not_in_the_certificate_is_told_as_one(tmp_path):
    pytest.importorskip("cryptography")
    from potluck.deploy.trial_keys import make_keys

    make_keys(tmp_path / "a", ["fl.example.org"], [])
    with listening(tmp_path / "a", "127.0.0.2") as address, pytest.raises(ConfigError) as refused:
        check_server(address, Security(ca=tmp_path / "a" / "ca.crt"))
    assert str(refused.value).endswith("127.0.0.2'; reach the server by a name in its certificate")


@pytest.mark.parametrize("command", ["join", "serve"])
def test_a_file_that_is_no_certificate_is_named(tmp_path, monkeypatch, command):
    pytest.importorskip("flwr")
    from potluck.deploy.trial_keys import make_keys

    make_keys(tmp_path / "k", ["127.0.0.1"], [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("")
    sites.write_experiment(tmp_path / "there.yaml", sites.federated("local"))
    site = f"{sites.write_site(tmp_path / '0', '0')}"
    words = {
        "join": ["--client", "0", "--model", f"{site}:build", "--data", f"{site}:load"],
        "serve": ["there.yaml", "--certificate", "k/server.crt", "--key", "k/server.key"],
    }[command]
    where = {"join": "--server", "serve": "--address"}[command]
    ended = CliRunner().invoke(app, [command, *words, where, f"127.0.0.1:{free_port()}", "--ca", "empty"])
    assert ended.exit_code == 2
    assert "empty is no certificate of an authority" in ended.stderr


def test_a_server_names_the_certificate_of_a_superlink_that_it_does_not_trust(tmp_path):
    pytest.importorskip("cryptography")
    from potluck.deploy.trial_keys import make_keys

    make_keys(tmp_path / "a", ["127.0.0.1"], [])
    make_keys(tmp_path / "b", ["127.0.0.1"], [])
    with listening(tmp_path / "a") as address:
        superlink = Superlink(address, Security(ca=tmp_path / "b" / "ca.crt"), tmp_path, print)
        with pytest.raises(
            ConfigError, match=r"give the certificate of its authority with --ca, not .*/b/ca"
        ):
            superlink.open()


@contextlib.contextmanager
def listening(keys, host="127.0.0.1"):
    """The address of somebody who has a certificate of a folder."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")
    with socket.create_server((host, 0)) as door:
        threading.Thread(target=greet, args=(door, context), daemon=True).start()
        yield f"{host}:{door.getsockname()[1]}"


def greet(door, context):
    while True:
        try:
            context.wrap_socket(door.accept()[0], server_side=True).close()
        except ssl.SSLError:
            continue
        except OSError:
            return


def test_the_last_error_of_a_program_of_flowers_is_told(tmp_path):
    said = r"print('INFO: a\n\x1b[91mERROR \x1b[0m:     Exit Code: 305\nIt failed.\n\nINFO: the end')"
    process = Process([sys.executable, "-c", said], tmp_path / "log", {})
    process.popen.wait(30)
    assert process.tail() == "Exit Code: 305 It failed."
    again = Process([sys.executable, "-c", "print('fine')"], tmp_path / "log", {})
    again.popen.wait(30)
    assert again.tail() == "fine"


# --- Flower's apps --------------------------------------------------------------------------------------


def test_flowers_apps_import_no_torch():
    pytest.importorskip("flwr")
    code = "import sys, potluck.deploy.flower.apps; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bytes_pass_through_flowers_records():
    apps = pytest.importorskip("potluck.deploy.flower.apps", exc_type=ImportError)
    assert apps.unwrap(apps.wrap(b"some bytes", "t")) == (b"some bytes", "t")


class Reply:
    """As much of Flower's message as the relay reads."""

    def __init__(self, number, content=None, error=None):
        self.metadata, self.content, self.error = SimpleNamespace(reply_to_message_id=number), content, error

    def has_error(self):
        return self.error is not None


class Grid:
    """As much of Flower's Grid as the relay uses; a node's answer is made from the letter it gets."""

    def __init__(self, *answers):
        self.answers, self.letters = answers, []

    def push_messages(self, messages):
        self.letters = [content for content, *_ in messages]
        return [None if answer is None else str(number) for number, answer in enumerate(self.answers)]

    def pull_messages(self, numbers):
        (number,) = map(int, numbers)
        return [Reply(str(number), **self.answers[number](self.letters[number]))]


def no_memory(letter):
    raise MemoryError


def test_the_relay_gives_every_letter_its_answer_or_a_sentence(monkeypatch):
    apps = pytest.importorskip("potluck.deploy.flower.apps", exc_type=ImportError)
    monkeypatch.setattr(apps, "Message", lambda *args, **options: args)
    error = SimpleNamespace(code=2, reason="Traceback\nValueError: no")
    cases = {
        "": lambda letter: {"content": apps.wrap(b"answer", apps.unwrap(letter)[1])},
        "Flower reports error 2: ValueError: no": lambda letter: {"error": error},
        "its reply holds no message": lambda letter: {"content": apps.RecordDict()},
        "its reply does not name the order it is one to": lambda letter: {"content": apps.wrap(b"", "guess")},
        "its reply has 9 bytes, at most 8 are allowed": lambda letter: {
            "content": apps.wrap(bytes(9), apps.unwrap(letter)[1])
        },
        "its reply takes far more memory than the 8 bytes allowed": no_memory,
        "no answer within 5 s": None,
    }
    number = len(cases)
    sentences, answers, _ = apps.exchange(
        Grid(*cases.values()), range(number), [b""] * number, 5, [8] * number
    )
    assert sentences == list(cases)
    assert answers == [b"answer", *[b""] * (number - 1)]


@pytest.mark.parametrize(
    ("hard", "sentence"),
    [
        (-1, "its reply takes far more memory than the 8 bytes allowed"),
        (1 << 50, "its reply takes far more memory than the 8 bytes allowed"),
        (1 << 20, "the server has not the memory to read its reply: allow it more (ulimit -v)"),
    ],
)
def test_no_site_is_blamed_for_a_limit_of_the_server(monkeypatch, hard, sentence):
    apps = pytest.importorskip("potluck.deploy.flower.apps", exc_type=ImportError)
    pulling = pytest.importorskip("potluck.deploy.flower.pulling", exc_type=ImportError)
    monkeypatch.setattr(apps, "Message", lambda *args, **options: args)
    monkeypatch.setattr(pulling.resource, "getrlimit", lambda which: (hard, hard))
    monkeypatch.setattr(pulling.resource, "setrlimit", lambda which, limits: None)
    sentences, _, _ = apps.exchange(Grid(no_memory), [0], [b""], 5, [8])
    assert sentences == [sentence]


def test_the_relay_stays_within_its_memory():
    pulling = pytest.importorskip("potluck.deploy.flower.pulling", exc_type=ImportError)
    with pulling.bounded(1 << 26), pytest.raises(MemoryError):
        bytes(1 << 32)
    assert len(bytes(1 << 27)) == 1 << 27


def test_a_frame_that_is_too_large_is_refused_before_it_is_read():
    here, there = socket.socketpair()
    with here, there:
        head = b'{"note": {}, "sizes": [1000000000000]}'
        here.sendall(len(head).to_bytes(8, "little") + head)
        with pytest.raises(
            frames.TooLarge, match="an order has 1,000,000,000,000 bytes, at most 10 are allowed"
        ):
            frames.receive(there, 10, "an order")


@pytest.mark.parametrize("sizes", ["[-1]", "[Infinity]", '["a"]', "3"])
def test_a_head_that_makes_no_sense_is_no_frame(sizes):
    here, there = socket.socketpair()
    with here, there:
        head = f'{{"note": {{}}, "sizes": {sizes}}}'.encode()
        here.sendall(len(head).to_bytes(8, "little") + head)
        with pytest.raises(EOFError):
            frames.receive(there)


def test_the_shim_waits_for_a_worker_and_says_when_it_ends_over_an_order(place):
    apps = pytest.importorskip("potluck.deploy.flower.apps", exc_type=ImportError)
    path = place / "w"

    def work():
        with frames.listening(path) as door:
            first, _ = door.accept()
            with first:
                _, (order,) = frames.receive(first)
                frames.send(first, {}, [order.upper()])
            second, _ = door.accept()
            second.close()
            third, _ = door.accept()
            with third:
                frames.send(third, {}, [b"too large"])  # without having read it

    worker = threading.Thread(target=work)
    with pytest.raises(ConnectionError, match=r"^there is no worker at its site$"):
        apps.ask_worker(str(path), b"order", wait=0)
    worker.start()
    assert apps.ask_worker(str(path), b"order", wait=10) == b"ORDER"
    with pytest.raises(ConnectionError, match="ended over the order"):
        apps.ask_worker(str(path), b"order", wait=10)
    assert apps.ask_worker(str(path), bytes(1 << 22), wait=10) == b"too large"
    worker.join()
