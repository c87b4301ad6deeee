"""The keys of a trial federation, read back as Flower reads them."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import shutil
import ssl
import stat
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from socket import socketpair

import pytest
from typer.testing import CliRunner, Result

from kills import Kill
from potluck.cli.app import app

CLIENTS = ("north", "south-2")


def potluck(*words: str) -> Result:
    return CliRunner().invoke(app, ["keys", *words])


def refused(*words: str) -> str:
    result = potluck(*words)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


def test_without_cryptography_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "potluck.deploy.trial_keys", raising=False)
    sentence = refused(str(tmp_path / "keys"), "--server", "localhost", "--clients", "a")
    assert "needs the package cryptography" in sentence
    assert not (tmp_path / "keys").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cryptography")
    folder, before = tmp_path_factory.mktemp("federation") / "keys", os.umask(0)
    try:
        result = potluck(
            str(folder), "--server", "fl.example.org,localhost,127.0.0.1,::1", "--clients", ",".join(CLIENTS)
        )
    finally:
        os.umask(before)
    assert result.exit_code == 0, result.output
    assert "make each client's key at its site" in result.stdout
    assert all(str(path) in result.stdout for path in folder.rglob("*") if path.is_file())
    return folder


def test_private_files_are_the_owners_alone(folder: Path) -> None:
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o022  # nor can others put files in their place
    modes = {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert modes == {
        "ca.crt": 0o644,
        "ca.key": 0o600,
        "server.crt": 0o644,
        "server.key": 0o600,
        **{f"clients/{client}": 0o600 for client in CLIENTS},
        **{f"clients/{client}.pub": 0o644 for client in CLIENTS},
    }


def test_the_chain_verifies_and_names_every_host(folder: Path) -> None:
    from cryptography import x509
    from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

    root, leaf = (
        x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.crt", "server.crt")
    )
    policy = PolicyBuilder().store(Store([root]))
    for name in (
        x509.DNSName("fl.example.org"),
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(ipaddress.ip_address("::1")),
    ):
        assert policy.build_server_verifier(name).verify(leaf, []) == [leaf, root]
    with pytest.raises(VerificationError):
        policy.build_server_verifier(x509.DNSName("other.example.org")).verify(leaf, [])


def test_certificates_are_short_lived(folder: Path) -> None:
    from cryptography import x509

    for name in ("ca.crt", "server.crt"):
        certificate = x509.load_pem_x509_certificate((folder / name).read_bytes())
        lives = certificate.not_valid_after_utc - certificate.not_valid_before_utc
        assert lives == timedelta(days=30)
        assert certificate.not_valid_before_utc < datetime.now(UTC)


def shake_hands(folder: Path, authority: Path, name: str) -> str | None:
    """A TLS connection over a pair of sockets; the version, or None where the client refuses."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    ours, theirs = socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        context = ssl.create_default_context(cafile=authority)
        with context.wrap_socket(ours, server_hostname=name) as connection:
            return connection.version()
    except ssl.SSLCertVerificationError:
        return None
    finally:
        ours.close()
        thread.join()


def test_tls_works_with_these_names_and_this_authority_alone(folder: Path, tmp_path: Path) -> None:
    assert shake_hands(folder, folder / "ca.crt", "127.0.0.1") == "TLSv1.3"
    assert shake_hands(folder, folder / "ca.crt", "127.0.0.2") is None
    other = tmp_path / "other"
    assert potluck(str(other), "--server", "fl.example.org", "--clients", "a").exit_code == 0
    assert shake_hands(folder, other / "ca.crt", "127.0.0.1") is None
    assert shake_hands(other, other / "ca.crt", "127.0.0.1") == "TLSv1.3"  # as serve does on its own machine


def test_client_keys_are_as_flower_takes_them(folder: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    numbers = set()
    for client in CLIENTS:
        private = load_ssh_private_key((folder / "clients" / client).read_bytes(), None)
        public = load_ssh_public_key((folder / "clients" / f"{client}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
        assert (folder / "clients" / f"{client}.pub").read_text().endswith(f" {client}\n")
        numbers.add(private.private_numbers().private_value)
    assert len(numbers) == len(CLIENTS)


def test_the_servers_key_belongs_to_its_certificate_and_the_authoritys_to_the_other(folder: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    for name in ("ca", "server"):
        key = load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())
        assert certificate.public_key() == key.public_key()


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert "ca.crt exists; keys are never overwritten" in refused(
        str(folder), "--server", "localhost", "--clients", "new"
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("server", "clients", "sentence"),
    [
        ("", "a", "--server: name the host"),
        ("fl.example.org:8000", "a", "'fl.example.org:8000' is neither a host name nor an IP address"),
        ("localhost", ",", "--clients: name the clients, at least one"),
        ("localhost", "a,../b", "'../b' cannot name a key file"),
        ("localhost", "a,a.pub", "'a.pub' cannot name a key file"),
        ("localhost", "a,b,a", "'a' is named twice"),
        ("localhost", "a," + 300 * "b", "bbb… has 300 letters"),
        (64 * "h" + ".org", "a", "is neither a host name nor an IP address"),
        ("localhost", "a --days 99999999", "99999999 is out of range; give 1 to 3,650"),
    ],
)
def test_bad_names_are_one_sentence(tmp_path: Path, server: str, clients: str, sentence: str) -> None:
    pytest.importorskip("cryptography")
    assert sentence in refused(str(tmp_path / "keys"), "--server", server, "--clients", *clients.split())
    assert not (tmp_path / "keys").exists()


def test_a_full_disk_leaves_no_half_of_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    words = (str(tmp_path / "keys"), "--server", "localhost", "--clients", "a")
    opened, full = os.open, OSError(errno.ENOSPC, "No space left on device")

    def open_(path: Path, *options: int, **others: int) -> int:
        if Path(path).name == "a" and options[0] & os.O_CREAT:
            raise full
        return opened(path, *options, **others)

    with monkeypatch.context() as patched:
        patched.setattr("potluck.deploy.trial_keys.os.open", open_)
        assert "No space left" in refused(*words)
    assert not [*tmp_path.iterdir()]
    assert potluck(*words).exit_code == 0


@pytest.mark.parametrize("new", [True, False])
def test_after_a_kill_the_next_call_finds_or_makes_all_keys(tmp_path: Path, new: bool) -> None:
    pytest.importorskip("cryptography")
    from potluck.deploy.trial_keys import make_keys

    folder, words, codes = tmp_path / "keys", ("--server", "localhost", "--clients", "a"), set()
    if not new:
        (tmp_path / "counted").mkdir()
    with Kill() as counted:
        make_keys(tmp_path / "counted", ["localhost"], ["a"])
    for operation in range(1, counted.operations + 1, 3):
        if not new:
            folder.mkdir()
        with Kill(operation) as kill:
            make_keys(folder, ["localhost"], ["a"])
        assert kill.dead
        marked = (folder / "ca.crt").exists()
        assert not marked or len([path for path in folder.rglob("*") if path.is_file()]) == 6
        half = (folder / ".keys.complete").exists()
        again = potluck(str(folder), *words)
        assert ("keys of an earlier call that was killed, and they are whole now" in again.output) is half
        codes.add(again.exit_code)
        names = {path.name for path in folder.rglob("*") if path.is_dir() or path.stat().st_size}
        assert names == {"clients", "a", "a.pub", "ca.crt", "ca.key", "server.crt", "server.key"}
        shutil.rmtree(folder)
    assert codes == {0, 2}


def test_a_folder_that_is_there_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    from potluck.deploy.trial_keys import _held_alone

    folder = tmp_path / "keys"
    (folder / "lost+found").mkdir(parents=True)
    folder.chmod(0o2700)
    before = folder.stat()
    monkeypatch.chdir(folder)
    with _held_alone(folder):
        assert "another call makes keys in" in refused(".", "--server", "localhost", "--clients", "a")
    for name in (".keys.complete", "clients"):  # the one left by a killed call, the other put there since
        (folder / name / "clients").mkdir(parents=True)
    assert "keys are never overwritten" in refused(".", "--server", "localhost", "--clients", "a")
    assert (folder / "clients/clients").exists()
    for name in (".keys.complete", "clients"):
        shutil.rmtree(folder / name)
    assert potluck(".", "--server", "localhost", "--clients", "a").exit_code == 0
    assert Path("ca.crt").exists()  # the folder we stand in
    after = folder.stat()
    assert (after.st_ino, after.st_mode, after.st_uid) == (before.st_ino, before.st_mode, before.st_uid)


def test_json_names_the_files(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    result = potluck(str(tmp_path), "--server", "localhost", "--clients", "a", "--days", "1", "--json")
    files = json.loads(result.stdout)["files"]
    assert [Path(file).name for file in files] == [
        "ca.crt",
        "ca.key",
        "server.crt",
        "server.key",
        "a",
        "a.pub",
    ]
    assert all(Path(file).exists() for file in files)
