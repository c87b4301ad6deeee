"""Processes of a site: they end with their parent, leftovers are found, and one that hangs is started again."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import typer
from federations import below, command

from potluck.cli.exits import _fail
from potluck.core.plain_values import printable
from potluck.deploy import guard
from potluck.deploy.flower import join as joins
from potluck.deploy.flower import processes, watching
from potluck.deploy.flower.connections import Security
from potluck.deploy.flower.join import Joining, alone, check_home, join
from potluck.deploy.flower.processes import PULSE, Process, _started, end_stale
from potluck.deploy.flower.watching import NodeWatch, Watched, WorkerWatch, answers
from potluck.deploy.flower.worker import READERS, work
from potluck.deploy.logs import Log, line
from potluck.deploy.node_pulse import Pulse, PulseFile, skew_of, trouble
from potluck.deploy.record_files import stays
from potluck.engine import frames
from potluck.errors import ConfigError, RunError

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print('up', flush=True); time.sleep(600)"
)


@pytest.fixture
def place(tmp_path_factory):
    """A folder with a short name: sockets have no long ones."""
    return tmp_path_factory.mktemp("s")


def until(happened, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_gone(pid):
    return _started(pid) == ""


# --- children and their parents -------------------------------------------------------------------------


def test_children_end_when_their_parent_is_killed(tmp_path):
    """Also one that ignores SIGTERM, and what it has started itself."""
    code = (
        "import sys, time; from pathlib import Path; from potluck.deploy.flower.processes import Process;"
        f"Process([sys.executable, '-c', {STUBBORN!r}], Path('log'), {{}}); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    until(lambda: (tmp_path / "log").exists() and "up" in (tmp_path / "log").read_text())
    children = [pid for pid, _ in below(parent.pid)]
    assert len(children) == 3  # guard, command, and what that has started
    parent.kill()
    parent.wait()
    until(lambda: all(map(is_gone, children)))


def test_a_child_ends_when_its_guard_is_killed(tmp_path):
    process = Process(SLEEP, tmp_path / "log", {})
    until(lambda: "up" in (tmp_path / "log").read_text())
    child = command(process)
    os.kill(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
    process.end()
    until(lambda: is_gone(child))


def test_a_guard_passes_exit_codes_on(tmp_path):
    for code, seen in (("import sys; sys.exit(2)", 2), ("import os; os.kill(os.getpid(), 9)", 137)):
        process = Process([sys.executable, "-c", code], tmp_path / "log", {})
        assert process.popen.wait(60) == seen
        process.end()
    absent = Process([str(tmp_path / "none")], tmp_path / "log", {})
    assert absent.popen.wait(60) == 2
    assert absent.tail().endswith("No such file or directory")
    absent.end()


def test_a_guard_for_whose_command_there_is_no_process_now_does_not_speak_of_bad_input(monkeypatch, capsys):
    monkeypatch.setattr(guard.sys, "argv", ["guard.py", "0", "/bin/true"])
    monkeypatch.setattr(guard.signal, "signal", lambda number, handler: None)
    full = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(guard.subprocess, "Popen", Mock(side_effect=full))
    monkeypatch.setattr(guard.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        guard.main()
    assert ended.value.code not in (0, watching.BAD_INPUT)
    assert "error: /bin/true: Resource temporarily unavailable" in capsys.readouterr().err


def test_a_leftover_is_ended_before_a_new_process_starts_and_a_stranger_is_not(tmp_path):
    note, words = tmp_path / "worker.pid", [*SLEEP, str(tmp_path)]
    left = Process(words, tmp_path / "log", {}, note=note)
    new = Process(words, tmp_path / "log", {}, note=note)
    assert left.popen.wait(30) != 0
    assert new.alive
    note.write_text(json.dumps({"pid": new.popen.pid, "started": "Mon Jan  1 00:00:00 2001"}))
    end_stale(note)
    assert new.alive
    for nonsense in (
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"pid": "x", "started": 1}),
        json.dumps({"pid": -1, "started": ""}),
    ):
        note.write_text(nonsense)
        end_stale(note)
    left.end()
    new.end()


def test_a_forged_note_ends_no_stranger(tmp_path):
    stranger = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL)
    elsewhere = Process(SLEEP, tmp_path / "log", {})  # a guard, but not one of this folder
    for pid in (stranger.pid, elsewhere.popen.pid):
        (tmp_path / "worker.pid").write_text(json.dumps({"pid": pid, "started": _started(pid)}))
        end_stale(tmp_path / "worker.pid")
    assert stranger.poll() is None
    assert elsewhere.alive
    stranger.kill()
    stranger.wait()
    elsewhere.end()


def test_a_log_that_leads_elsewhere_is_refused(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(ConfigError, match=rf"the log .*{name} .*; move it away"):
            Process(SLEEP, tmp_path / name, {})
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_home_with_links_and_pipes_is_refused(tmp_path):
    (tmp_path / "home" / "flower").mkdir(parents=True)
    check_home(tmp_path / "home")
    (tmp_path / "home" / "worker.log").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"worker\.log is a link to another place"):
        check_home(tmp_path / "home")
    (tmp_path / "home" / "worker.log").unlink()
    os.mkfifo(tmp_path / "home" / "flower" / "pulse.json")
    with pytest.raises(ConfigError, match=r"pulse\.json is a pipe"):
        check_home(tmp_path / "home")


def test_a_stopped_process_is_ended_too(tmp_path):
    process = Process(SLEEP, tmp_path / "log", {})
    until(lambda: "up" in (tmp_path / "log").read_text())
    os.killpg(process.popen.pid, signal.SIGSTOP)
    process.end()
    assert not process.alive


@pytest.mark.parametrize("half", ["", "worker", "node"])
def test_two_joins_do_not_share_a_home(tmp_path, monkeypatch, half):
    monkeypatch.setattr(joins, "_take_part", lambda *told: None)
    taken = pytest.raises(ConfigError, match=r"another potluck join is at work in .* a --home of its own")
    with alone(tmp_path), taken:
        join(joining(tmp_path, half))
    assert [path.name for path in tmp_path.iterdir()] == [".join.lock"]


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / ".join.lock").symlink_to(tmp_path / "there")
    with pytest.raises(ConfigError, match="cannot write"), alone(tmp_path):
        pass


def joining(home, only=""):
    """What `potluck join` is told, with nobody at the server's address."""
    own = __file__
    return Joining(
        "127.0.0.1:9", "0", f"{own}:joining", f"{own}:joining", home, Security(), only=only, socket=home / "s"
    )


def test_a_worker_imports_nothing_from_the_folder_it_was_started_in(tmp_path):
    (tmp_path / "planted.py").touch()
    *start, _ = joining(tmp_path).worker_words(tmp_path / "s")[:3]
    done = subprocess.run(
        [*start, "-m", "planted"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "No module named planted" in done.stderr


@pytest.mark.parametrize(("name", "what"), [("worker.log", "a link"), ("pulse.json", "a pipe")])
def test_join_looks_at_its_home_first(tmp_path, monkeypatch, name, what):
    monkeypatch.setattr(joins, "_take_part", lambda *told: None)
    if what == "a pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match=rf"{name} is {what}.*; a site keeps its files in its own folder"):
        join(joining(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_a_program_of_flowers_says_cannot_steer_a_terminal(tmp_path):
    said = r"print('ERROR :     \x1b]0;owned\x07\x1b[2Jall is well')"
    process = Process([sys.executable, "-c", said], tmp_path / "log", {})
    process.popen.wait(60)
    assert process.tail() == "all is well"
    process.end()


# --- a node ---------------------------------------------------------------------------------------------

HOUR = 3600.0
DATE = "Tue, 17 Nov 2026 10:00:00 GMT"
NOW = 1794909600.0


def test_a_clock_is_compared_with_the_servers():
    assert skew_of(DATE, NOW) == 0
    assert skew_of(DATE, NOW + HOUR) == HOUR
    assert skew_of(None, NOW) is skew_of("yesterday", NOW) is None
    assert skew_of(f"Mon, 01 Jan 2024 00:00:00 +{'9' * 23}", NOW) is None


@pytest.mark.parametrize(
    ("pulse", "known", "refused_for", "sentence"),
    [
        (Pulse(status=401, skew=HOUR), True, 0, "the clock of this machine is 3,600 s ahead of the server's"),
        (Pulse(status=401, skew=-HOUR), False, 0, "the clock of this machine is 3,600 s behind the server's"),
        (Pulse(status=401, skew=1.0), True, 0, "does not believe the node's signature"),
        (Pulse(status=412, skew=1.0), True, 10, "takes this node to be online still"),
        (Pulse(status=412, skew=1.0), True, 100, "another site uses this key"),
        (Pulse(status=412), False, 0, "does not know the node's key"),
        (Pulse(status=502), True, 0, ""),
    ],
)
def test_why_a_node_is_refused_is_one_sentence(pulse, known, refused_for, sentence):
    told = trouble(pulse, known, refused_for)
    assert sentence in told
    assert bool(told) == bool(sentence)


def test_a_node_notes_its_calls_and_its_heartbeats_apart(tmp_path):
    clock = SimpleNamespace(now=NOW)
    file = PulseFile(tmp_path / PULSE, lambda: clock.now)
    file.note("activate-node", 200, DATE)
    clock.now += 5
    file.note("pull-messages", 200, DATE)
    clock.now += 5
    file.note("send-node-heartbeat", 200, DATE)
    file.note("send-node-heartbeat", 0)
    found = Pulse.read(tmp_path / PULSE)
    assert found == Pulse(NOW + 5, "pull-messages", 200, 5.0, NOW, NOW + 5, beat=NOW + 10)
    known = json.loads((tmp_path / PULSE).read_text())
    wrong = [json.dumps(known | {"pulled": "x"}), json.dumps(known | {"since": float("nan")})]
    for nonsense in ("", "[]", "{}", "{", *wrong):
        (tmp_path / PULSE).write_text(nonsense)
        assert Pulse.read(tmp_path / PULSE) == Pulse()


def test_calls_that_end_at_the_same_time_are_noted_one_after_the_other(tmp_path):
    file, failed = PulseFile(tmp_path / PULSE), []

    def call():
        try:
            for _ in range(200):
                file.note("pull-messages", 200)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert Pulse.read(tmp_path / PULSE).status == 200


def test_a_call_does_not_fail_because_its_note_cannot_be_written(tmp_path):
    PulseFile(tmp_path / "none" / PULSE).note("pull-messages", 200)


def test_a_node_whose_site_trains_for_long_is_left_alone_while_its_heart_beats(tmp_path, monkeypatch):
    watch, file, now = NodeWatch(tmp_path), PulseFile(tmp_path / PULSE), time.monotonic()
    file.note("pull-messages", 200)
    assert watch.stalled(1000) == ""

    def later(seconds):
        monkeypatch.setattr(time, "monotonic", lambda: now + seconds)
        return watch.stalled(10_000)

    with file.at_work():
        for half_hour in range(1, 5):
            file.note("send-node-heartbeat", 200)
            assert later(1800 * half_hour) == ""
        assert later(9000).endswith(" 1800 s")  # none any more: the process stands still
    assert later(9001) == ""
    file.note("send-node-heartbeat", 200)
    assert later(10_000).endswith(" 999 s")  # without an order a heart alone does not count


def test_a_node_that_stands_still_and_one_that_is_refused_are_told_apart(tmp_path, monkeypatch):
    watch, file = NodeWatch(tmp_path), PulseFile(tmp_path / PULSE)
    assert watch.stalled(10) == ""
    assert watch.stalled(1000) == "no call to the server has ended for 1000 s"
    file.note("pull-messages", 0)
    assert watch.stalled(1000) == ""
    with monkeypatch.context() as changed:
        changed.setattr("time.time", lambda: 9e9)  # somebody sets the clock
        assert watch.stalled(1000) == ""
        now = time.monotonic() + 500
        changed.setattr("time.monotonic", lambda: now)
        assert watch.stalled(1000).endswith(" 500 s")
    file.note("activate-node", 412)
    assert "does not know the node's key" in watch.reason()
    file.note("activate-node", 200)
    assert watch.reason() == ""
    file.note("activate-node", 412)
    assert "online still" in watch.reason()


def test_a_node_ends_with_the_helper_that_starts_its_apps(tmp_path):
    helper = tmp_path / "flower-superexec"
    helper.write_text("#!/bin/sh\nkill -9 $$\n")
    helper.chmod(0o700)
    code = (
        "import subprocess, sys, time; from potluck.deploy.flower import node; node.GRACE = 0.1;"
        "subprocess.Popen = node.Watching; subprocess.Popen(['true']).wait();"
        f"subprocess.Popen([{str(helper)!r}]); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM
    assert "flower-superexec has ended with -9" in done.stdout


def test_a_reply_too_many_does_not_put_off_all_later_ones(tmp_path):
    node = pytest.importorskip("potluck.deploy.flower.node", exc_type=ImportError)
    internal = pytest.importorskip("flwr.supernode.start_client_internal")
    memory = pytest.importorskip("flwr.supernode.nodestate.in_memory_nodestate")
    assert callable(internal._push_messages)  # what is replaced is there
    assert memory.InMemoryNodeState(Mock()).msg_store == {}
    entries = {"old": "", "answer to old": "old", "new": ""}
    state = Mock(
        msg_store={name: Mock(**{"message.metadata.reply_to_message_id": to}) for name, to in entries.items()}
    )
    sent = []

    def push(state, **others):
        """The oldest reply goes out, with what it replies to; the newest question is answered meanwhile."""
        reply = next(name for name in state.msg_store if name.startswith("answer"))
        sent.append(reply)
        del state.msg_store[reply], state.msg_store[reply.removeprefix("answer to ")]
        if reply == "answer to old":
            state.msg_store["answer to new"] = Mock(**{"message.metadata.reply_to_message_id": "new"})

    pulse = PulseFile(tmp_path / "pulse.json")
    node.answering(push, pulse)(state=state, object_store=None)
    assert Pulse.read(pulse.path).working is None
    assert sent == ["answer to old", "answer to new"]


def test_a_node_ends_with_its_loop(tmp_path):
    """Flower's own program lives on after its loop has ended over an answer such as 500."""
    node = pytest.importorskip("potluck.deploy.flower.node", exc_type=ImportError)
    code = (
        "import sys, threading, time; from importlib import import_module;"
        "cli = import_module('flwr.supernode.cli.flower_supernode');"  # not the function of that name
        "sys.argv = ['node', 'pulse'];"
        "cli.flower_supernode = lambda: threading.Thread(target=time.sleep, args=(600,)).start();"
        "from potluck.deploy.flower.node import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, cwd=tmp_path)
    assert done.returncode == node.ENDED


# --- a worker -------------------------------------------------------------------------------------------


class Slow:
    """As much of a site as a worker needs; it answers when it is let."""

    most_bytes = 1000

    def __init__(self):
        self.go = threading.Event()

    def answer(self, order):
        self.go.wait(60)
        return order.upper()


@pytest.fixture
def worker(place):
    site, path = Slow(), place / "w"
    threading.Thread(target=work, args=(site, path), daemon=True).start()
    until(partial(takes_calls, path))  # the file is there a moment before
    yield site, path
    site.go.set()


def takes_calls(path):
    with contextlib.suppress(OSError):
        frames.connect(str(path)).close()
        return True
    return False


def ask(path, order):
    with frames.connect(str(path)) as channel:
        channel.settimeout(60)
        frames.send(channel, {}, [order])
        return frames.receive(channel)[1]


def test_a_silent_connection_holds_nobody(worker):
    site, path = worker
    site.go.set()
    silent = [frames.connect(str(path)) for _ in range(READERS - 1)]
    assert ask(path, b"order") == [b"ORDER"]
    for channel in silent:
        channel.close()


def test_a_worker_says_that_it_is_alive_while_it_works(worker):
    site, path = worker
    with frames.connect(str(path)) as channel:
        frames.send(channel, {}, [b"order"])
        time.sleep(0.2)
        assert answers(path, wait=20)
        site.go.set()
        assert frames.receive(channel)[1] == [b"ORDER"]


def test_only_a_worker_that_takes_calls_and_stays_silent_hangs(place, monkeypatch):
    path = place / "w"
    assert answers(path)  # it loads its data still
    watch = WorkerWatch(path)
    assert watch.stalled(0) == ""
    monkeypatch.setattr(watching, "ASK_EVERY", 0.0)
    monkeypatch.setattr(watching, "answers", lambda path, opened: False)
    watch._next = 0.0
    assert [watch.stalled(0), watch.stalled(0)] == ["", "it does not answer at its socket"]
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        assert not answers(path, wait=0.2)


def test_a_worker_that_takes_no_more_connections_holds_nobody(place):
    """As one that is stopped, with all that watches it: whoever looks at it must not wait in line."""
    path = place / "w"
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(path))
        door.listen(0)
        full = False
        while not full:
            channel = stack.enter_context(socket.socket(socket.AF_UNIX))
            channel.setblocking(False)
            full = channel.connect_ex(str(path)) == errno.EAGAIN
        assert watching.why_not(path) == "Resource temporarily unavailable"
        assert not answers(path, wait=0.1, opened=True)


def test_a_worker_whose_socket_was_there_and_is_gone_is_started_again(place, monkeypatch):
    path, watch = place / "w", WorkerWatch(place / "w")
    monkeypatch.setattr(watching, "ASK_EVERY", 0.0)
    watch._next = 0.0
    assert [watch.stalled(lived) for lived in (1.0, 2.0, 3.0)] == [""] * 3  # it loads its data
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        watch._next = time.monotonic() + 60  # nobody asks while it is there
        assert watch.stalled(4.0) == ""
        path.unlink()
        watch._next = 0.0
        assert [watch.stalled(5.0), watch.stalled(6.0)] == ["", "it does not answer at its socket"]
    assert [watch.stalled(lived) for lived in (0.5, 1.0, 2.0)] == [""] * 3  # a new one loads its data


def test_the_folder_of_a_socket_is_made_anew_and_nobody_elses_is_taken(tmp_path, monkeypatch):
    folder = tmp_path / "potluck-x"
    joins.make_meeting_place(folder)
    joins.make_meeting_place(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="is not this user's alone"):
        joins.make_meeting_place(folder)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not this user's alone"):
        joins.make_meeting_place(folder)


def test_a_node_that_starts_again_has_another_port(tmp_path, monkeypatch):
    """The one that it had may be taken by now, and is whenever another program listens there."""
    ports, made = [], []
    monkeypatch.setattr(joins, "check_server", lambda *given: True)
    monkeypatch.setattr(joins, "start_supernode", lambda *given: ports.append(given[-1]) or Mock())
    monkeypatch.setattr(joins, "_watch", lambda start, stack: made.append(start) or Mock())
    monkeypatch.setattr(joins.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    joining = Joining("127.0.0.1:1", "0", "", "", tmp_path, Security(), only="node", socket=tmp_path / "w")
    with pytest.raises(KeyboardInterrupt):
        joins._take_part(joining, lambda sentence: None)
    for _ in range(3):
        made[0]()
    assert len(set(ports)) > 1


def test_a_process_that_hangs_is_started_again(tmp_path):
    def start():
        return Process(SLEEP, tmp_path / "log", {}, name="the worker")

    notices = []
    watched = Watched(start, start(), time.monotonic(), pause=0.0, stalled=lambda lived: "it is silent")
    first = watched.process
    watched.look(notices.append)
    assert notices == ["the worker hangs: it is silent; it is started again"]
    assert not first.alive
    assert watched.process.alive
    watched.process.end()


def test_a_process_that_was_killed_is_told_from_one_that_gave_up(tmp_path, monkeypatch):
    notices = []
    process = Process(SLEEP, tmp_path / "log", {}, name="the worker")
    until(lambda: "up" in (tmp_path / "log").read_text())
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: None)
    os.kill(command(process), signal.SIGKILL)
    process.popen.wait(60)
    Watched(lambda: process, process, 0.0).look(notices.append)
    assert notices == ["the worker ended: killed by signal 9; it is started again"]


def test_a_guard_that_was_killed_is_told_as_that(monkeypatch):
    notices, ended = [], Mock(alive=False, popen=Mock(returncode=-signal.SIGKILL), tail=lambda: "ready")
    ended.name = "the worker"
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: None)
    Watched(lambda: ended, ended, 0.0).look(notices.append)
    assert notices == ["the worker ended: killed by signal 9; it is started again"]


def open_handles():
    return len([*Path("/dev/fd").iterdir()])


def test_a_process_for_which_there_is_no_room_now_is_tried_again_and_that_is_told_once(tmp_path, monkeypatch):
    """As on a full disk, or where the system has no memory for one more process."""
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: None)
    there, notices = Mock(alive=True), []
    full = [RunError("no room on the disk"), OSError(errno.ENOMEM, "Cannot allocate memory")] * 2
    ended = Mock(alive=False, popen=Mock(returncode=1), tail=lambda: "why")
    ended.name = "the worker"
    watched = Watched(Mock(side_effect=[*full, there]), ended, time.monotonic())
    for _ in range(7):
        watched.look(notices.append)
    assert notices == [
        "the worker ended: why; it is started again",
        "the worker cannot be started: no room on the disk; it is tried again",
    ]
    assert watched.process is there
    assert ended.end.call_count == 1  # its number may be that of another process by now


def test_a_site_tells_when_its_home_is_full_and_when_there_is_room_again(tmp_path, monkeypatch):
    now, notices = [0.0], []
    room, write = watching.DiskWatch(tmp_path, lambda: now[0]), watching.os.open

    def full(*words):
        raise OSError(errno.ENOSPC, "No space left on device")

    for opened in (write, full, full, write, write, full):
        monkeypatch.setattr(watching.os, "open", opened)
        now[0] += watching.TRY_EVERY
        room.look(notices.append)
        room.look(notices.append)
    said = f"nothing can be written into {tmp_path} (No space left on device): the site refuses orders until"
    again = f"{tmp_path} can be written into again: the site goes on"
    assert [line.partition(" that is")[0] for line in notices] == [said, again, said]
    assert not [*tmp_path.iterdir()]


def test_a_site_tells_when_its_home_was_moved_also_where_one_is_made_anew(tmp_path):
    home, notices, now = tmp_path / "home", [], [0.0]
    home.mkdir()
    with stays(home) as check_place:
        room = watching.DiskWatch(home, lambda: now[0], check_place)

        def look():
            now[0] += watching.TRY_EVERY
            room.look(notices.append)

        look()
        home.rename(tmp_path / "moved")
        look()
        home.mkdir()
        look()
        assert [line.partition(": the site")[0] for line in notices] == [
            f"nothing can be written into {home} (it was moved or removed)"
        ]
        home.rmdir()
        (tmp_path / "moved").rename(home)
        look()
    assert notices[1:] == [f"{home} can be written into again: the site goes on"]


def test_a_worker_that_has_worked_is_started_again_whatever_it_lacks_now(tmp_path, monkeypatch):
    """As room for its socket on a full disk, or its home, which `potluck prune` holds for a moment."""
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(joins, "takes_calls", lambda path: True)
    ended = Mock(alive=False, popen=Mock(returncode=watching.BAD_INPUT), tail=lambda: "error: no room")
    ended.name, there, notices = "the worker", Mock(alive=True), []
    watched = Watched(Mock(side_effect=[ended, there]), ended, time.monotonic())
    with pytest.raises(ConfigError, match=r"^no room$"):
        watched.look(notices.append)
    joins._await_worker(watched, tmp_path / "w", notices.append)
    for _ in range(3):
        watched.look(notices.append)
    assert watched.process is there
    assert notices == ["the worker ended: no room; it is started again"] * 2


def test_a_process_starts_though_its_note_cannot_be_written(tmp_path):
    process = Process(SLEEP, tmp_path / "log", {}, note=tmp_path / "none" / "worker.pid")
    assert process.alive
    process.end()


def test_a_process_that_cannot_be_started_leaves_nothing_open(tmp_path, monkeypatch):
    before = open_handles()
    monkeypatch.setattr(processes.subprocess, "Popen", Mock(side_effect=OSError(errno.EAGAIN, "no more")))
    for _ in range(3):
        with pytest.raises(OSError, match="no more"):
            Process(SLEEP, tmp_path / "log", {})
    assert open_handles() == before


def test_a_node_is_watched_though_nothing_can_be_written(tmp_path, monkeypatch):
    PulseFile(tmp_path / PULSE).note("activate-node", 200)
    monkeypatch.setattr(Path, "touch", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    node = NodeWatch(tmp_path)
    assert (node.reason(), node.stalled(1.0)) == ("", "")


def test_why_a_process_ended_is_told_whatever_became_of_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("of earlier days\n" * 100)
    process = Process([sys.executable, "-c", ""], log, {}, name="the worker")
    process.popen.wait(60)
    log.write_text("error: this is why\n")  # cut by logrotate in between
    assert process.tail() == "error: this is why"
    log.unlink()
    assert process.tail() == f"its log {log} cannot be read: No such file or directory"


# --- logs -----------------------------------------------------------------------------------------------


def test_lines_have_the_time_and_their_facts():
    told = json.loads(line("round 3: a\x07c", True, round=3, client=None))
    assert told.pop("time").startswith("20")
    assert told == {"message": "round 3: a?c", "round": 3}
    assert line("here", False, round=3).endswith(" here")
    assert printable("a\n b") == "a b"


def test_a_line_that_cannot_be_written_ends_nothing_but_a_log_that_nobody_reads():
    full = OSError(errno.ENOSPC, "No space left on device")
    Log(stream=Mock(write=Mock(side_effect=full)))("round 3: answered")
    with pytest.raises(BrokenPipeError):
        Log(stream=Mock(write=Mock(side_effect=BrokenPipeError)))("round 3: answered")


def test_an_error_sentence_cannot_steer_a_terminal(capsys):
    with pytest.raises(typer.Exit):
        _fail(RunError("made by potluck \x1b[2K\x1b[8m\x1b]0;title\x07 0.0\nand more"), debug=False)
    assert capsys.readouterr().err == "error: made by potluck ?[2K?[8m?]0;title? 0.0 and more\n"


def test_a_node_on_its_own_says_that_there_is_no_worker(tmp_path_factory):
    """The server hears that too, but nobody at the site does."""
    path, now, said = tmp_path_factory.mktemp("s") / "worker", [0.0], []
    half = watching.OtherHalf(path, lambda: now[0])

    def look(seconds):
        now[0] += seconds
        half.look(said.append)

    look(0)
    look(watching.TRY_EVERY)  # a worker that is started again needs a moment
    assert said == []
    look(watching.LASTS)
    look(watching.LASTS)
    (told,) = said
    assert f"no worker takes calls at {path} (No such file or directory)" in told
    with frames.listening(path):
        look(watching.TRY_EVERY)
        look(watching.LASTS)
        assert said[1:] == [f"the worker at {path} takes calls: orders are answered"]
    look(watching.TRY_EVERY)
    assert len(said) == 2
    look(watching.LASTS)
    assert len(said) == 3
