"""The files of TLS, and whether a server's certificate is taken before anybody relies on it."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from potluck.deploy.flower.connections import Security, split_address
from potluck.deploy.flower.processes import require_files
from potluck.deploy.node_pulse import is_out_of_time, untrusted
from potluck.errors import ConfigError

PATIENCE = 10.0  # seconds a server has to answer
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
