"""The gate before a SuperLink: what it lets through, what it answers for one that is away, and its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import io
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.cli import federation
from potluck.cli.app import app
from potluck.deploy.flower.certificates import dates_told, tls_of
from potluck.deploy.flower.connections import Security, free_port
from potluck.errors import ConfigError

httpx = pytest.importorskip("httpx")
gates = pytest.importorskip("potluck.deploy.flower.gate", exc_type=ImportError)
make_keys = pytest.importorskip("potluck.deploy.trial_keys", exc_type=ImportError).make_keys

QUICK = gates.Bounds(
    head=0.5,
    idle=5,
    silence=0.5,
    body=2,
    answer=1,
    linger=0.2,
    most=1 << 20,
    head_bytes=2048,
    connections=8,
    per_host=6,
)
ROOT = Path(__file__).parents[2]


class FakeSuperlink:
    """Answers every call with the same bytes, or behaves as `broken` says; remembers what reached it."""

    def __init__(self):
        self.port, self.reached, self.broken, self.door, self.tls = free_port(), [], "", None, None
        self.start()

    def start(self):
        self.door = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.door,), daemon=True).start()

    def stop(self):
        with contextlib.suppress(OSError):
            self.door.shutdown(socket.SHUT_RDWR)
        self.door.close()

    def _accept(self, door):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._one, args=(door.accept()[0],), daemon=True).start()

    def _one(self, channel):
        with channel, contextlib.suppress(OSError):
            if self.tls is not None:
                channel = self.tls.wrap_socket(channel, server_side=True)
            data = b""
            while b"\r\n\r\n" not in data:
                data += channel.recv(65536) or b"\r\n\r\n"
            head, _, body = data.partition(b"\r\n\r\n")
            if not head:
                return
            size = re.search(rb"content-length: (\d+)", head.lower())
            while size and len(body) < int(size[1]):
                if not (more := channel.recv(65536)):
                    return
                body += more
            self.reached.append((head, body))
            if self.broken == "silent":
                time.sleep(3)
            elif self.broken == "mid-answer":
                channel.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
            elif self.broken == "nonsense":
                channel.sendall(b"no http at all\r\n\r\n")
            elif self.broken != "at once":
                told = b"HTTP/1.1 201 Created\r\nx-kind: protobuf\r\ncontent-length: 6\r\nconnection: close\r\n\r\n"
                channel.sendall(told + b"answer")


@pytest.fixture
def superlink():
    found = FakeSuperlink()
    yield found
    found.stop()


@contextlib.contextmanager
def opened(superlink, bounds=QUICK, tls=None, notices=None):
    """A gate in a thread of its own; gives its port."""
    door = gates.open_door(f"127.0.0.1:{free_port()}")
    loop = asyncio.new_event_loop()
    told = [].append if notices is None else notices.append

    async def serve():
        behind = gates.Superlink(f"127.0.0.1:{superlink.port}", None, bounds, told)
        await gates.Gate(behind, tls, bounds).serve(door)

    task = loop.create_task(serve())

    def play():
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield door.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        door.close()


def ask(port, method="POST", path="/v1/fleet/pull-messages", **options):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10) as client:
        return client.request(method, path, **options)


def raw(port, data, seconds=5.0):
    """What the gate says to some bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), seconds) as channel:
        channel.sendall(data)
        said = b""
        with contextlib.suppress(ConnectionError):
            while piece := channel.recv(65536):
                said += piece
        return said


def test_calls_to_the_fleet_api_are_passed_on(superlink):
    with opened(superlink) as port:
        answer = ask(port, content=b"call" * 50_000, headers={"flwr-signature": "abc", "te": "gzip"})
    assert (answer.status_code, answer.content, answer.headers["x-kind"]) == (201, b"answer", "protobuf")
    ((head, body),) = superlink.reached
    assert head.startswith(b"POST /v1/fleet/pull-messages HTTP/1.1")
    assert b"flwr-signature: abc" in head
    assert f"Host: 127.0.0.1:{superlink.port}".encode() in head
    assert b"te: " not in head
    assert body == b"call" * 50_000


CLOSED = [
    ("POST", "/v1/control/start-run"),
    ("POST", "/v1/runtime/pull"),
    ("POST", "/v1/fleet/"),
    ("POST", "/v1/fleet/pull-messages?x=1"),
    ("POST", "/v1/fleet/pull-messages/"),
    ("GET", "/v1/fleet/pull-messages"),
    ("GET", "/docs"),
]

RAW = [
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/../control/start-run",
    "//v1/fleet/pull-messages",
    "http://x/v1/fleet/pull-messages",
    "/V1/Fleet/pull",
]


def test_nothing_else_is_passed_on(superlink):
    with opened(superlink) as port:
        assert {ask(port, method, path).status_code for method, path in CLOSED} == {404}
        for target in RAW:
            call = f"POST {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
            assert raw(port, call.encode()).startswith(b"HTTP/1.1 404")
        head = raw(port, b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (head[:12], head.endswith(b"\r\n\r\n")) == (b"HTTP/1.1 404", True)  # no body follows it
        smuggled = b"POST /v1/fleet/pull HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
        assert raw(port, smuggled + b"transfer-encoding: chunked, x\r\n\r\n0\r\n\r\n")[9:10] in (b"4", b"5")
        both = b"POST /v1/fleet/pull HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
        assert raw(port, both + b"8\r\nabcdefgh\r\n0\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert raw(port, b"\x16\x03\x01 no http\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert raw(port, b"POST /v1/fleet/pull HTTP/1.1\r\nx: " + b"y" * 5000).startswith(b"HTTP/1.1 431")
    assert superlink.reached == []


@pytest.mark.parametrize(
    ("broken", "status"), [("at once", 502), ("mid-answer", 502), ("nonsense", 502), ("silent", 504)]
)
def test_a_superlink_that_breaks_off_gives_what_flower_retries(superlink, broken, status):
    superlink.broken = broken
    with opened(superlink) as port:
        assert ask(port, content=b"call").status_code == status


def test_who_is_refused_does_not_stay(superlink):
    with opened(superlink) as port:
        told = raw(port, b"POST /v1/control/run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 3.0)
        assert told.startswith(b"HTTP/1.1 404")
        assert b"connection: close" in told.lower()


def test_a_superlink_may_go_and_come_back(superlink):
    notices = []
    with opened(superlink, notices=notices) as port:
        assert ask(port).status_code == 201
        superlink.stop()
        assert [ask(port, content=b"x" * 500_000).status_code for _ in range(3)] == [502] * 3
        superlink.start()
        assert ask(port).status_code == 201
    assert [sentence.partition(" (")[0] for sentence in notices] == [
        f"the SuperLink at 127.0.0.1:{superlink.port} is away",
        f"the SuperLink at 127.0.0.1:{superlink.port} answers again",
    ]


def test_several_calls_use_one_connection(superlink):
    with (
        opened(superlink) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        streams = [client.post("/v1/fleet/pull").extensions["network_stream"] for _ in range(3)]
        assert len({id(stream.get_extra_info("socket")) for stream in streams}) == 1


def test_who_says_nothing_or_little_is_put_out(superlink):
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n"
    with opened(superlink) as port:
        start = time.monotonic()
        assert raw(port, b"") == b""
        assert raw(port, head) == b""  # a head without an end
        assert raw(port, head + b"\r\nsome bytes") == b""  # a body without an end
        assert time.monotonic() - start < 4
        with socket.create_connection(("127.0.0.1", port), 10) as channel:  # a byte now and then
            channel.sendall(head + b"\r\n")
            start = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - start < 8:
                    channel.sendall(b"x")
                    time.sleep(0.2)
            assert time.monotonic() - start < 6
        assert raw(port, head.replace(b"100000", b"9000000") + b"\r\n" + bytes(3 << 20)) == b""
        assert ask(port).status_code == 201


def test_silent_connections_do_not_shut_the_others_out(superlink):
    with opened(superlink) as port, contextlib.ExitStack() as stack:
        for _ in range(20):  # more than there may be, in all and from one address
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        start = time.monotonic()
        while True:
            try:
                assert ask(port).status_code == 201
                break
            except httpx.TransportError:
                assert time.monotonic() - start < 8


def test_tls_ends_at_the_gate(superlink, tmp_path):
    make_keys(tmp_path / "k", ["127.0.0.1"], [])
    keys = tmp_path / "k"
    security = Security(ca=keys / "ca.crt", certificate=keys / "server.crt", key=keys / "server.key")
    with opened(superlink, tls=tls_of(security)) as port:
        trust = ssl.create_default_context(cafile=keys / "ca.crt")
        with socket.create_connection(("127.0.0.1", port), 10) as silent:  # never shakes hands
            with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, trust_env=False) as client:
                assert client.post("/v1/fleet/pull").status_code == 201
            assert silent.recv(1) == b""
        assert raw(port, b"POST /v1/fleet/pull HTTP/1.1\r\nhost: x\r\n\r\n")[:4] != b"HTTP"


def test_new_certificates_of_both_sides_are_taken_while_the_gate_is_open(superlink, tmp_path):
    for name in ("old", "new"):
        make_keys(tmp_path / name, ["127.0.0.1"], [])
    keys, notices = tmp_path / "keys", []
    shutil.copytree(tmp_path / "old", keys)
    security = Security(ca=keys / "ca.crt", certificate=keys / "server.crt", key=keys / "server.key")
    superlink.tls = tls_of(security)

    async def ask(port, authority):
        trust = ssl.create_default_context(cafile=tmp_path / authority / "ca.crt")
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            return (await client.post(f"https://127.0.0.1:{port}/v1/fleet/pull")).status_code

    async def play(door):
        behind = gates.Superlink(f"127.0.0.1:{superlink.port}", security.ca, QUICK, notices.append)
        gate, port = gates.Gate(behind, tls_of(security), QUICK), door.getsockname()[1]
        going = asyncio.create_task(gate.serve(door))
        assert await ask(port, "old") == 201
        shutil.copy(tmp_path / "new" / "server.crt", keys)  # without its key
        gate.read_again(security)
        assert await ask(port, "old") == 201
        shutil.copytree(tmp_path / "new", keys, dirs_exist_ok=True)
        gate.read_again(security)
        superlink.tls = tls_of(security)
        assert await ask(port, "new") == 201
        going.cancel()

    with gates.open_door(f"127.0.0.1:{free_port()}") as door:
        asyncio.run(play(door))
    assert ["stay as they were" in notice for notice in notices] == [True, False]


def test_connections_of_an_earlier_authority_are_closed(tmp_path):
    """Those that no call uses at once; the others when their calls have ended."""
    channels, wait, begun = [], None, None

    async def answer(reader, writer):
        channels.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                begun.set()
                await wait.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    def closed():
        return [channel.is_closing() for channel in channels]

    async def nothing():
        return
        yield b""

    async def play():
        nonlocal wait, begun
        wait, begun = asyncio.Event(), asyncio.Event()
        wait.set()
        door = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = door.sockets[0].getsockname()[1]
        behind = gates.Superlink(f"127.0.0.1:{port}", None, gates.Bounds(), print)

        async def ask():
            return await behind.ask(b"/v1/fleet/pull", [(b"content-length", b"0")], nothing())

        for number in range(5):
            assert (await ask())[2] == b"ok"
            behind.trust()
            while not closed()[number]:
                await asyncio.sleep(0)
        wait.clear()
        begun.clear()
        under_way = asyncio.create_task(ask())
        await begun.wait()
        behind.trust()
        wait.set()
        assert (await under_way)[2] == b"ok"
        while not all(closed()):
            await asyncio.sleep(0)
        assert len(channels) == 6
        door.close()

    asyncio.run(asyncio.wait_for(play(), 30))


def test_certificates_that_are_not_valid_or_soon_not_are_told(tmp_path):
    make_keys(tmp_path / "k", ["127.0.0.1"], [], days=365)
    make_keys(tmp_path / "later", ["127.0.0.1"], [], days=400)
    keys = tmp_path / "k"
    security = Security(ca=keys / "ca.crt", certificate=keys / "server.crt", key=keys / "server.key")
    from cryptography import x509

    leaf = x509.load_pem_x509_certificate((keys / "server.crt").read_bytes())
    begin, end, day = leaf.not_valid_before_utc, leaf.not_valid_after_utc, datetime.timedelta(days=1)
    assert dates_told(security, begin + day) == dates_told(security, end - 15 * day) == []
    for moment, wanted in (
        (begin - day, "is not valid before"),
        (end - 3.5 * day, "expires on .*, in 3 days"),
        (end + day, "has expired on"),
    ):
        told = dates_told(security, moment)
        assert [re.search(f"the certificate (.*) {wanted}", one)[1] for one in told] == [
            str(keys / "server.crt"),
            str(keys / "ca.crt"),
        ]
    (keys / "ca.crt").write_bytes((keys / "ca.crt").read_bytes() + (tmp_path / "later/ca.crt").read_bytes())
    assert len(dates_told(security, end + day)) == 1  # one of two authorities is valid
    (keys / "server.crt").write_text("none")
    assert dates_told(security, end + day) == dates_told(Security(), end + day) == []


def test_the_gate_tells_of_dates_when_it_opens_and_reads_again(superlink, tmp_path, monkeypatch):
    make_keys(tmp_path / "k", ["127.0.0.1"], [], days=3)
    keys, notices = tmp_path / "k", []
    security = Security(ca=keys / "ca.crt", certificate=keys / "server.crt", key=keys / "server.key")

    async def play(door):
        opening = gates._serve(door, "here", f"127.0.0.1:{superlink.port}", security, None, notices.append)
        going = asyncio.create_task(opening)
        for _ in range(100):
            await asyncio.sleep(0)
        going.cancel()
        behind = gates.Superlink("127.0.0.1:1", security.ca, QUICK, notices.append)
        gates.Gate(behind, None, QUICK).read_again(security)

    with gates.open_door(f"127.0.0.1:{free_port()}") as door:
        asyncio.run(play(door))
    assert ["expires on" in one for one in notices] == [True, True, False, False, True, True]


def own_address():
    """An address of this machine that others reach, if there is one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect(("198.51.100.1", 9))  # nothing is sent
        return way.getsockname()[0]
    return "127.0.0.3"


def test_bad_files_and_ports_are_one_sentence(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    make_keys(tmp_path / "k", ["127.0.0.1"], [])
    make_keys(tmp_path / "other", ["127.0.0.1"], [])
    (tmp_path / "empty").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gates.asyncio, "run", lambda going: pytest.fail("it has started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        full = f"127.0.0.1:{taken.getsockname()[1]}"
        tls = ["--ca", "k/ca.crt", "--certificate", "k/server.crt", "--key"]
        wrong = {
            ("--listen", full): "somebody listens there already",
            ("--listen", "127.0.0.1:x"): "is no address",
            ("--superlink", "127.0.0.1"): "is no address",
            ("--listen", "0.0.0.0:9"): "is beyond this machine: give --ca",
            (
                "--listen",
                "127.0.0.1:8000",
            ): "--listen 127.0.0.1:8000 and --superlink 127.0.0.1:8000 are one place",
            (
                "--listen",
                "127.0.0.1:9",
                "--superlink",
                "localhost:9",
            ): "--superlink localhost:9 are one place",
            ("--listen", "0.0.0.0:9", "--superlink", "127.0.0.2:9", "--insecure"): "are one place",
            ("--listen", "0.0.0.0:9", "--superlink", "0.0.0.0:9", "--insecure"): "are one place",
            ("--listen", "0.0.0.0:9", "--superlink", f"{own_address()}:9", "--insecure"): "are one place",
            ("--listen", "127.0.0.1:9", "--superlink", "[::ffff:127.0.0.1]:9", "--insecure"): "are one place",
            ("--ca", "k/ca.crt"): "--certificate is missing",
            (*tls, "none"): "there is no file none",
            (*tls, "k"): "k is a folder; name a file",
            (*tls, "/dev/null"): "/dev/null is no plain file; name a file",
            (*tls, "empty"): "are no certificate and its key",
            (*tls, "other/server.key"): "are no certificate and its key",
            ("--ca", "empty", "--certificate", "k/server.crt", "--key", "k/server.key"): "empty is no certif",
        }
        for words, sentence in wrong.items():
            ended = CliRunner().invoke(app, ["gate", *words])
            assert (ended.exit_code, ended.stdout) == (2, ""), words
            assert sentence in ended.stderr
            assert len(ended.stderr.splitlines()) == 1


def test_what_the_gate_says_has_the_time_and_a_full_disk_under_its_log_ends_nothing(monkeypatch, capfd):
    def say(listen, superlink, security, notice):
        notice("the SuperLink is away")
        monkeypatch.setattr(sys, "stderr", Full())
        notice("the SuperLink answers again")
        monkeypatch.undo()
        said.append("all")

    said = []
    monkeypatch.setattr(gates, "gate", say)
    federation.gate()
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\S+ the SuperLink is away\n", capfd.readouterr().err)
    assert said == ["all"]


class Full(io.StringIO):
    """A stream on a disk that is full."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_address_that_is_not_ours_is_refused():
    with pytest.raises(ConfigError, match=re.escape("--listen 203.0.113.1:8443: ")):
        gates.open_door("203.0.113.1:8443")


def test_nginx_takes_the_configuration_of_the_guide(tmp_path):
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("there is no nginx")
    make_keys(tmp_path / "keys", ["localhost"], [])
    (block,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    block = block.replace("/etc/potluck/keys", str(tmp_path / "keys"))
    (tmp_path / "c").write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{block}}}\n")
    done = subprocess.run(
        [program, "-t", "-p", str(tmp_path), "-c", str(tmp_path / "c")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
