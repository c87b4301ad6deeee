"""The private key of a node, looked at before a SuperNode starts, which would end over a bad one every time."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from potluck.deploy.fingerprints import LARGEST_KEY
from potluck.errors import ConfigError
from potluck.files import read_bounded

MAKE = "make one with ssh-keygen -t ecdsa -b 384, without a passphrase"


def check_node_key(path: Path) -> None:
    """Refuse a file that holds no private ECDSA key as `ssh-keygen` writes it, or one with a passphrase."""
    try:
        key = load_ssh_private_key(read_bounded(path, LARGEST_KEY), None)
    except OSError as error:
        raise ConfigError(f"--node-key: {path} cannot be read: {error.strerror}; check its rights") from error
    except TypeError as error:
        raise ConfigError(f"--node-key: {path} has a passphrase, which nobody could type; {MAKE}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        public = " (a .pub file is the public half)" if path.suffix == ".pub" else ""
        raise ConfigError(f"--node-key: {path} is no private key of OpenSSH{public}; {MAKE}") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ConfigError(f"--node-key: {path} is no ECDSA key, and Flower takes no other; {MAKE}")
