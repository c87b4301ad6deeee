"""A server that outlives relays and SuperLinks: over sockets, with a SuperLink that is made up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from potluck.core.plain_values import printable
from potluck.deploy.flower import commands, relay, superlinks
from potluck.deploy.flower.connections import Security
from potluck.engine import frames
from potluck.errors import RunError


class Flower:
    """A SuperLink that starts a relay in a thread for every submission; each behaves as told."""

    def __init__(self, *behaviours, home=Path("flower")):
        self.behaviours, self.home = list(behaviours), home
        self.submitted, self.mended, self.asked, self.channels = [], 0, [], []
        self.away, self.distrusted = "", 0

    def lost(self):
        return self.away

    def mend(self):
        self.mended += 1
        behaviour = self.behaviours[0] if self.behaviours else ""
        if behaviour == "away":
            self.behaviours.pop(0)
            raise RunError("nobody listens at 127.0.0.1:8000")
        self.away = ""

    def distrust(self):
        self.distrusted += 1
        return ""

    def submit(self, path):
        self.submitted.append(path.name)
        behaviour = self.behaviours.pop(0)
        if behaviour == "starts nothing":
            return
        if behaviour == "refuses":
            raise RunError("Flower does not take the run")
        threading.Thread(target=self._relay, args=(str(path), behaviour), daemon=True).start()

    def _relay(self, path, behaviour):
        channel = frames.connect(path)
        self.channels.append(channel)  # one that is silent stays open
        with contextlib.suppress(EOFError, OSError):
            while True:
                note, letters = frames.receive(channel)
                self.asked.append((behaviour, note["ask"]))
                if note["ask"] == "nodes" and behaviour != "dies at once":
                    frames.send(channel, {"nodes": [1, 2], "keys": ["a", "b"]})
                elif behaviour == "answers":
                    frames.send(
                        channel,
                        {"failures": [""] * len(letters), "seconds": []},
                        [one.upper() for one in letters],
                    )
                elif behaviour == "hangs":
                    self.away = "nobody listens at 127.0.0.1:8000"
                    return
                else:
                    channel.shutdown(socket.SHUT_RDWR)
                    return


@pytest.fixture
def courier(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(relay, "LOOK", 0.02)
    monkeypatch.setattr(relay.time, "sleep", lambda seconds: waits.append(seconds))
    waits, notices = [], []

    def over(*behaviours, patience=60.0):
        flower = Flower(*behaviours)
        made = relay.Courier(flower, tmp_path_factory.mktemp("s"), patience, notices.append)
        made.connect()
        return flower, made, waits, notices

    return over


LETTERS = [(1, b"one"), (2, b"two")]


def test_an_exchange_is_repeated_when_the_relay_dies_hangs_or_does_not_come(courier):
    flower, made, waits, notices = courier("dies", "hangs", "away", "refuses", "away", "dies", "answers")
    assert made.exchange(LETTERS, 60, [9, 9]) == [b"ONE", b"TWO"]
    assert made.nodes() == [1, 2]
    assert made.keys() == {1: "a", 2: "b"}
    assert len(set(flower.submitted)) == len(flower.submitted) == 5
    assert waits == [1.0, 2.0, 4.0]  # of one search; the others found the SuperLink at once
    assert [notice.split(" (")[0] for notice in notices if "lost" in notice] == [
        "the connection to Flower is lost"
    ] * 3
    assert sum("connected to Flower again" in notice for notice in notices) == 3


def test_a_superlink_that_takes_runs_and_starts_none_is_started_again(courier, monkeypatch):
    monkeypatch.setattr(relay, "START", 0.2)
    flower, made, _, _ = courier("dies", "starts nothing", "answers")
    assert made.exchange(LETTERS, 60, [9, 9]) == [b"ONE", b"TWO"]
    assert (flower.distrusted, flower.mended) == (1, 2)


def test_the_folder_of_the_sockets_is_made_again_where_it_was_cleared_away(courier):
    _, made, _, _ = courier("dies", "answers")
    shutil.rmtree(made.folder)
    assert made.exchange(LETTERS, 60, [9, 9]) == [b"ONE", b"TWO"]
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700


def test_a_folder_that_somebody_else_put_there_is_not_used(courier, tmp_path):
    _, made, _, _ = courier("answers")
    made.folder = tmp_path / "sockets"
    made.folder.symlink_to(tmp_path)
    with pytest.raises(RunError, match="was put there by somebody else"):
        made.connect()


def test_a_superlink_that_lost_its_database_is_told_the_keys_again(tmp_path, monkeypatch):
    registered, security = [], Security(insecure=True, client_keys=tmp_path, node_keys=True)
    one = superlinks.Superlink("127.0.0.1:8000", security, tmp_path, print, ["north"])

    def started(*_):
        (tmp_path / superlinks.DATABASE).touch()
        return SimpleNamespace(alive=True, end=lambda: None)

    monkeypatch.setattr(superlinks, "is_open", lambda address: True)
    monkeypatch.setattr(superlinks, "start_superlink", started)
    monkeypatch.setattr(
        superlinks, "bare_keys", lambda folder, clients: {"ecdsa key": tmp_path / "north.pub"}
    )
    monkeypatch.setattr(one, "_register_one", lambda path: registered.append(path.name) or "7")
    one.own = SimpleNamespace(alive=False, end=lambda: None)
    one.mend()
    assert registered == ["north.pub"]
    one.own = SimpleNamespace(alive=False, end=lambda: None)
    one.mend()
    assert registered == ["north.pub"]  # its database has it
    (tmp_path / superlinks.DATABASE).unlink()
    one.own = SimpleNamespace(alive=False, end=lambda: None)
    one.mend()
    assert registered == ["north.pub", "north.pub"]


def test_only_a_superlink_of_ones_own_is_ended(tmp_path):
    ended = []
    one = superlinks.Superlink("127.0.0.1:1", Security(), tmp_path, print)
    assert one.distrust().startswith("; restart the SuperLink")
    one.own = SimpleNamespace(end=lambda: ended.append(1))
    assert (one.distrust(), ended) == ("", [1])


def test_a_server_gives_up_when_its_patience_is_at_its_end(courier, monkeypatch):
    _, made, _, _ = courier("dies", *["away"] * 50, patience=3.0)
    clock = iter(range(1000))
    monkeypatch.setattr(relay.time, "monotonic", lambda: next(clock))
    with pytest.raises(RunError, match=r"no connection to Flower for 3 s \(nobody listens"):
        made.exchange(LETTERS, 60, [9, 9])


def test_an_exchange_that_always_kills_the_relay_ends_the_server_in_one_sentence(courier):
    _, made, _, _ = courier(*["dies"] * 30)
    with pytest.raises(RunError, match="lost 20 times over the same exchange"):
        made.exchange(LETTERS, 60, [9, 9])


def test_nodes_have_time_to_come_back(courier, monkeypatch):
    _, made, waits, _ = courier("dies", "answers")
    shown = iter([[], [1], [1, 2], [1, 2]])
    monkeypatch.setattr(relay.Relay, "nodes", lambda self: next(shown))
    assert made.exchange(LETTERS, 60, [9, 9]) == [b"ONE", b"TWO"]
    assert waits == [relay.LOOK] * 2


# --- Flower's commands ----------------------------------------------------------------------------------


FLWR = """#!/bin/sh
echo "$@" >> "$FLWR_HOME/told"
ls -A . > "$FLWR_HOME/where"
for last; do test -e "$last/pyproject.toml" && (cd "$last" && find . -type f) > "$FLWR_HOME/packed"; done
case "$3" in *.pub) echo '{"success": true, "node-id": "7"}' ;; *) echo '{"success": true, "run-id": "5"}' ;; esac
"""
REFUSING = """#!/bin/sh
printf '\\033]0;owned\\007\\n\\342\\225\\255\\342\\224\\200 Error \\342\\224\\200\\342\\225\\256\\n'
printf '\\342\\224\\202 The key is \\033[31mno key\\033[0m.\\b\\b \\342\\224\\202\\n'
printf '\\342\\225\\260\\342\\224\\200\\342\\225\\257\\n'
exit 1
"""


@pytest.fixture
def flwr(tmp_path, monkeypatch):
    """Flower's command, replaced by a script."""

    def write(text):
        path = tmp_path / "flwr"
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setattr(commands, "program", lambda name: str(path))
        return tmp_path / "home"

    return write


def test_what_flower_refuses_is_one_printable_sentence(flwr):
    home = flwr(REFUSING)
    with pytest.raises(RunError, match="Flower does not take the key: The key is no key") as raised:
        commands.flwr(home, "keys.log", "the key", "supernode", "register", "a.pub")
    assert str(raised.value).isprintable()


def test_commands_run_where_no_folder_can_be_taken_for_an_app(flwr, tmp_path, monkeypatch):
    home = flwr(FLWR)
    (tmp_path / "potluck").mkdir()
    (tmp_path / "potluck" / "pyproject.toml").write_text("[project]\nname='potluck'\n")
    monkeypatch.chdir(tmp_path)
    commands.flwr(home, "run.log", "the run", "stop", "5")
    (home / "commands" / "potluck").mkdir(parents=True)
    (home / "commands" / "potluck" / "pyproject.toml").write_text("[project]\nname='potluck'\n")
    commands.flwr(home, "run.log", "the run", "stop", "5")
    assert (home / "where").read_text() == ""


def test_the_app_that_flower_sends_to_sites_holds_nothing_that_lay_in_the_run_folder(flwr, tmp_path):
    home = flwr(FLWR)
    for name in ("potluck-relay/potluck", "apps/potluck.potluck-relay.1.0.0.12345678/potluck"):
        (home / name).mkdir(parents=True)
        (home / name / "__init__.py").write_text("theirs")
    one = superlinks.Superlink("127.0.0.1:8000", Security(insecure=True), home, print)
    one.submit(tmp_path / "socket")
    assert (home / "packed").read_text().split() == ["./pyproject.toml"]
    assert not (home / "apps").exists()


@pytest.mark.parametrize("there", [False, True])
def test_what_sites_send_is_for_nobody_else_on_the_servers_machine(flwr, tmp_path, monkeypatch, there):
    """The database of a SuperLink holds the messages of single sites as long as they are under way."""
    home, modes = flwr(FLWR), []
    database = home / superlinks.DATABASE
    home.mkdir()
    if there:
        database.write_bytes(b"of an earlier start")
        database.chmod(0o644)
    monkeypatch.setattr(superlinks, "start_superlink", lambda *given: modes.append(given[-1].stat().st_mode))
    monkeypatch.setattr(superlinks, "is_open", lambda address: False)
    one = superlinks.Superlink("127.0.0.1:8000", Security(insecure=True), home, print)
    before = os.umask(0)
    try:
        one.open()
    finally:
        os.umask(before)
    assert [mode & 0o777 for mode in modes] == [0o600]
    assert database.read_bytes() == (b"of an earlier start" if there else b"")


def test_a_superlink_of_our_own_keeps_its_keys_and_stops_relays_of_earlier_starts(
    flwr, tmp_path, monkeypatch
):
    home, keys = flwr(FLWR), tmp_path / "clients"
    keys.mkdir()
    for name in ("north", "east"):
        (keys / f"{name}.pub").write_text(f"ecdsa-sha2-nistp384 key-of-{name}\n")
    started = []

    def start(address, security, home, database):
        database.touch()
        started.append(database)

    monkeypatch.setattr(superlinks, "start_superlink", start)
    monkeypatch.setattr(superlinks, "is_open", lambda address: False)
    security = Security(ca=tmp_path / "ca.crt", node_keys=True, client_keys=keys)

    def opened():
        """What Flower was told by a server that starts."""
        (home / "told").unlink(missing_ok=True)
        one = superlinks.Superlink("127.0.0.1:8000", security, home, print, ["east", "north", "west"])
        one.open()
        one.submit(tmp_path / "socket")
        told = (home / "told").read_text().replace(str(tmp_path), "").splitlines()
        return [line.partition(" potluck ")[0].partition(" --")[0] for line in told]

    register = ["supernode register /clients/east.pub", "supernode register /clients/north.pub"]
    assert opened() == [*register, "run"]
    assert opened() == ["stop 5", "run"]
    (keys / "east.pub").unlink()
    assert opened() == ["supernode unregister 7", "stop 5", "run"]
    (home / superlinks.DATABASE).unlink()
    assert opened() == [register[1], "run"]
    assert started == [home / superlinks.DATABASE] * 4
    assert json.loads((home / superlinks.KEPT).read_text())["relays"] == ["5"]


def test_escapes_of_terminals_are_taken_out():
    assert printable("a\x1b[2J\x1b]0;title\x07b\x1b[31mc\x9b1m\x07\n d") == "abc?1m? d"
    assert len(printable("x" * 10_000)) == 1000
