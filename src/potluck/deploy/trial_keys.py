"""Keys for trying out a federation: an authority, a server certificate and a key for every client.

The formats are those `flower-superlink` and `flower-supernode` take: certificates and the server's key in PEM, the
clients' keys on the curve P-384 in OpenSSH's format, as `ssh-keygen -t ecdsa -b 384` makes them.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.errors import ConfigError
from potluck.files import UNFINISHED, sync_folder

CA, SERVER, CLIENTS = "ca", "server", "clients"  # ca.crt, server.crt, clients/NAME
MARK = f"{CA}.crt"  # the last file that comes into a folder
WRITTEN, MOVED = f".keys{UNFINISHED}", ".keys.complete"  # folders inside, while files are written and moved
LOST = "lost+found"  # what a file system has in its first folder
HERE = ("localhost", "127.0.0.1")  # where `potluck serve` calls the SuperLink, whatever names others use
DAYS = 30  # validity of the certificates
MOST_DAYS = 3650
LONGEST_CLIENT = 200  # letters; with .pub it must be the name of a file
LONGEST_HOST = 253
EARLIER = datetime.timedelta(minutes=5)  # certificates are valid from a little before now, as clocks differ
CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST_NAME = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")

ADVICE = """\
These keys are for trying things out: they were all made in one place, and whoever has ca.key can be the server.
In production
- let your own authority sign the server's certificate; a site needs ca.crt alone, never ca.key;
- keep certificates short-lived, and replace them before they end (these hold {days} days);
- make each client's key at its site (ssh-keygen -t ecdsa -b 384 -N "" -f NAME) and send NAME.pub alone to the
  operator, who compares its fingerprint by another way and registers it (flwr supernode register NAME.pub);
- a key that may have been seen by others is unregistered (flwr supernode unregister) and made anew.
"""


def make_keys(folder: Path, servers: Sequence[str], clients: Sequence[str], days: int = DAYS) -> list[Path]:
    """Write all keys into a new folder, or an empty one, and return the files; one that is there stays what it is.

    The server's certificate is valid for the names and addresses in `servers` and on its own machine, nowhere else.
    `MARK` comes last: a folder that has it has all keys. What a killed call has left is removed by the next one, or
    moved where it belongs.
    """
    _check(servers, clients, days)
    try:
        with _made(folder), _held_alone(folder) as alone:
            if alone and _tidy(folder):
                raise ConfigError(
                    f"{folder} has the keys of an earlier call that was killed, and they are whole now: use them, "
                    "or choose another folder"
                )
            taken = min((path for path in folder.iterdir() if path.name != LOST), default=None)
            if taken is not None:
                raise ConfigError(f"{taken} exists; keys are never overwritten, choose another folder")
            files = _make(servers, clients, days)
            (folder / WRITTEN).mkdir(mode=0o700)
            try:
                _write_all(folder / WRITTEN, files)
                (folder / WRITTEN).rename(folder / MOVED)
            except BaseException:
                shutil.rmtree(folder / WRITTEN)
                raise
            _move(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot make keys in {folder}: {error.strerror or error}; choose another folder"
        ) from error
    return [folder / name for name in files]


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder if there is none; one in which nothing is in the end is removed again."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o755)  # whatever the umask: others may not replace a file
    except FileExistsError:
        yield
        return
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
    sync_folder(folder.parent)


@contextlib.contextmanager
def _held_alone(folder: Path) -> Iterator[bool]:
    """Hold a folder, so that no other call writes keys into it; False where the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError as error:
            raise ConfigError(
                f"another call makes keys in {folder}; wait, or choose another folder"
            ) from error
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(handle)


def _write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    (folder / CLIENTS).mkdir(mode=0o700)
    for name, content in files.items():
        _write(folder / name, content, mode=0o600 if b"PRIVATE KEY" in content else 0o644)
    for place in (folder / CLIENTS, folder):
        sync_folder(place)


def _move(folder: Path) -> None:
    """Move all files, which are written, where they belong, the mark last."""
    for name in (CLIENTS, f"{SERVER}.key", f"{SERVER}.crt", f"{CA}.key", MARK):
        if (folder / MOVED / name).exists():
            (folder / MOVED / name).rename(folder / name)
            sync_folder(folder)
    (folder / MOVED).rmdir()


def _tidy(folder: Path) -> bool:
    """Remove what a killed call was writing; where it had written all files, move them, but over no other.

    True if they were moved.
    """
    written, moved = folder / WRITTEN, folder / MOVED
    if written.is_dir() and not written.is_symlink():
        shutil.rmtree(written)
    whole = moved.is_dir() and not moved.is_symlink()
    if not whole or any((folder / path.name).exists() for path in moved.iterdir()):
        return False
    _move(folder)
    return True


def _check(servers: Sequence[str], clients: Sequence[str], days: int) -> None:
    if not servers:
        raise ConfigError("--server: name the host, or hosts, under which clients reach the server")
    if not 1 <= days <= MOST_DAYS:
        raise ConfigError(f"--days: {days} is out of range; give 1 to {MOST_DAYS:,}")
    for server in servers:
        if not (_address(server) or (HOST_NAME.fullmatch(server) and len(server) <= LONGEST_HOST)):
            raise ConfigError(
                f"--server: {server!r} is neither a host name nor an IP address; give one, without a port"
            )
    for client in clients:
        if not CLIENT_NAME.fullmatch(client) or client.endswith(".pub"):
            raise ConfigError(
                f"--clients: {client!r} cannot name a key file; use letters, digits and . _ -, no .pub at its end"
            )
        if len(client) > LONGEST_CLIENT:
            raise ConfigError(
                f"--clients: {client[:20]}… has {len(client):,} letters; choose a name of at most "
                f"{LONGEST_CLIENT}"
            )
        if clients.count(client) > 1:
            raise ConfigError(f"--clients: {client!r} is named twice; name each client once")


def _make(servers: Sequence[str], clients: Sequence[str], days: int) -> dict[str, bytes]:
    """File name → content."""
    authority, server = (generate_private_key(SECP384R1()) for _ in range(2))
    root = _authority_certificate(authority, days)
    leaf = _server_certificate(server, servers, root, authority, days)
    files = {
        f"{CA}.crt": root.public_bytes(Encoding.PEM),
        f"{CA}.key": _pem(authority),
        f"{SERVER}.crt": leaf.public_bytes(Encoding.PEM),
        f"{SERVER}.key": _pem(server),
    }
    for client in clients:
        key = generate_private_key(SECP384R1())
        files[f"{CLIENTS}/{client}"], files[f"{CLIENTS}/{client}.pub"] = _ssh(key, client)
    return files


def _authority_certificate(key: EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    name = _named("Potluck test authority")
    builder = _builder(name, name, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return builder.sign(key, SHA384())


def _server_certificate(
    key: EllipticCurvePrivateKey,
    servers: Sequence[str],
    root: x509.Certificate,
    authority: EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = _builder(_named("Potluck test server"), root.subject, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(
        x509.SubjectAlternativeName(list(map(_reached_as, dict.fromkeys((*servers, *HERE))))), critical=False
    )
    return builder.add_extension(issuer, critical=False).sign(authority, SHA384())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    start = datetime.datetime.now(datetime.UTC) - EARLIER
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=days))
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return builder.add_extension(identifier, critical=False)


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _reached_as(server: str) -> x509.GeneralName:
    address = _address(server)
    return x509.DNSName(server) if address is None else x509.IPAddress(address)


def _address(server: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(server)
    except ValueError:
        return None


def _pem(key: EllipticCurvePrivateKey) -> bytes:
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def _ssh(key: EllipticCurvePrivateKey, comment: str) -> tuple[bytes, bytes]:
    """The private and the public half, as `ssh-keygen` writes them."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private, public + f" {comment}\n".encode()


def _write(path: Path, content: bytes, mode: int) -> None:
    """Create a new file with its final permissions, so that a private key is never readable by others."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, mode)
        file.write(content)
        file.flush()
        os.fsync(handle)
