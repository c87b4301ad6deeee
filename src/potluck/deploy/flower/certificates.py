"""The files of TLS, and whether a server's certificate is taken before anybody relies on it."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from potluck.deploy.flower.connections import Security, split_address
from potluck.deploy.flower.processes import require_files
from potluck.deploy.node_pulse import is_out_of_time, untrusted
from potluck.errors import ConfigError

PATIENCE = 10.0  # seconds a server has to answer
SOON = timedelta(days=14)
WRONG_NAME = (62, 64)  # OpenSSL's numbers for a certificate of another host name, or another address


class OutOfTime(ConfigError):
    """A certificate is not valid now: it, or the clock of this machine, may be set right without us."""


def trusting(ca: Path | None) -> ssl.SSLContext:
    """The caller's side of TLS, which trusts an authority; a sentence names a file that is none."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{ca} is no certificate of an authority ({error}); give its PEM file") from error


def tls_of(security: Security) -> ssl.SSLContext | None:
    """The server's side of TLS, from its files; a sentence names a file that is none."""
    if security.plain:
        return None
    require_files(security.ca, security.certificate, security.key)
    assert security.certificate is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(security.certificate, security.key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        files = f"{security.certificate} and {security.key}"
        raise ConfigError(
            f"{files} are no certificate and its key ({error}); give a PEM file of each, without a password"
        ) from error
    trusting(security.ca)
    return context


def dates_told(security: Security, now: datetime | None = None) -> list[str]:
    """A sentence for each of our certificates that is not valid now, or will not be soon."""
    now = now or datetime.now(UTC)
    chain, authorities = _certificates(security.certificate), _certificates(security.ca)
    # A chain ends with its first certificate; of several authorities, one that is valid may be enough.
    dates = (
        [(security.certificate, max(one[0] for one in chain), min(one[1] for one in chain))] if chain else []
    )
    if authorities:
        dates.append((security.ca, *max(authorities, key=lambda one: one[1])))
    told = (_of_dates(path, begin, end, now) for path, begin, end in dates)
    return [sentence for sentence in told if sentence]


def _of_dates(path: Path | None, begin: datetime, end: datetime, now: datetime) -> str:
    if now < begin:
        return (
            f"the certificate {path} is not valid before {begin:%Y-%m-%d %H:%M} UTC: nobody connects until then; "
            "check the clock of this machine, or put another one there"
        )
    if now > end:
        return (
            f"the certificate {path} has expired on {end:%Y-%m-%d %H:%M} UTC: nobody connects any more; "
            "put a new one there"
        )
    if end - now < SOON:
        return (
            f"the certificate {path} expires on {end:%Y-%m-%d %H:%M} UTC, in {(end - now).days} days: "
            "put a new one there before"
        )
    return ""


def _certificates(path: Path | None) -> list[tuple[datetime, datetime]]:
    """From when to when each certificate in a file is valid; none where only OpenSSL can read them."""
    from cryptography import x509

    if path is None:
        return []
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
        return [(one.not_valid_before_utc, one.not_valid_after_utc) for one in found]
    except Exception:  # another kind of PEM, or an older version of the format
        return []


def check_server(address: str, security: Security) -> bool:
    """Refuse a server with another TLS setting than ours, or with a certificate that is not trusted.

    Gives whether it is there: one that may come later is fine.
    """
    host, port = split_address(address)
    trust = trusting(security.ca)
    if security.plain:
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), PATIENCE) as channel:
            trust.wrap_socket(channel, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        raise _distrust(address, security.ca, error) from error
    except ssl.SSLError as error:
        if not security.plain:
            raise ConfigError(
                f"{address} does not speak TLS; leave out --ca, or start the server with TLS"
            ) from error
        return True
    except OSError:
        return False
    if security.plain:
        raise ConfigError(f"{address} speaks TLS, and this would be plain text; give --ca")
    return True


def _distrust(address: str, ca: Path | None, error: ssl.SSLCertVerificationError) -> ConfigError:
    """What is said of a certificate that is not taken, and what to do about it."""
    why = error.verify_message.rstrip(".")
    if is_out_of_time(why):
        return OutOfTime(untrusted(address, why))
    advice = (
        "reach the server by a name in its certificate"
        if error.verify_code in WRONG_NAME
        else f"give the certificate of its authority with --ca, not {ca}"
    )
    return ConfigError(f"the certificate of {address} is not to be trusted: {why}; {advice}")
