"""`potluck join` before it meets anybody: what would leave, and options that do not go together."""

from __future__ import annotations

import base64
import json
import runpy
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from typer.testing import CliRunner, Result

import potluck.core.method
import potluck.methods  # registers them, before a test keeps its own to itself
from potluck.cli.app import app
from potluck.deploy.flower import watching, worker
from potluck.deploy.node_keys import check_node_key
from potluck.errors import ConfigError

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals"


def join(*words: str) -> Result:
    return CliRunner().invoke(app, ["join", "--client", "north", *words])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "--server is missing"),
        ("--server 127.0.0.1:1", "--model and --data are missing"),
        ("--server 127.0.0.1:1 --only node", "--only needs --socket"),
        (f"--server 127.0.0.1:1 --only node --socket {'s' * 101}", "a socket has at most 100 bytes"),
        ('--server 127.0.0.1:1 --only node --socket w"', "has signs that Flower does not take in a path"),
        ("--server 127.0.0.1:1 --only half", "'half' is no half of a site; give worker or node"),
        ("--check none.yaml --model a.py:f --data a.py:g", "there is no experiment file none.yaml"),
        ("--server 127.0.0.1:1 --write contract.json", "--write goes with --check"),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = join(*words.split())
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_check_joins_nobody_and_writes_what_it_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shutil.copytree(HOSPITALS, tmp_path / "h")
    monkeypatch.chdir(here)
    runpy.run_path("make_data.py", run_name="__main__")
    site = ["--model", "north/site.py:build", "--data", "north/site.py:load"]
    done = join("--check", "experiment.yaml", *site, "--write", "contract.json", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)
    assert json.loads((here / "contract.json").read_text())["method"] == "fedmrl"
    (here / "contract.json").write_text("edited")
    again = join("--check", "experiment.yaml", *site, "--write", "contract.json")
    assert (again.exit_code, (here / "contract.json").read_text()) == (2, "edited")
    assert "contract.json exists; move it away, or write the agreement to another file" in again.stderr


OFFER = """
partition: {sites: [north, east], classes: 10}
models: {pool: {north: conv-small, east: conv-small}, rep_dim: 16}
"""
THEIRS = "from potluck.methods import Local\n\n\nclass Theirs(Local):\n    name = 'theirs'\n"
OWN = "def build():\n    pass\n\n\ndef load():\n    raise ValueError('the offer is taken')\n"


@pytest.mark.parametrize(
    ("offer", "own", "sentence"),
    [
        (
            "plugins: [evil.py]\nmethod: theirs",
            OWN,
            "then import a copy of it in the file of --model",
        ),
        ("plugins: [evil.py]\nmethod: theirs", f"import theirs\n\n\n{OWN}", "the offer is taken"),
        ("plugins: [evil.py]\nmethod: fedmrl", OWN, "the offer is taken"),
        (
            "method: {name: fedmrl, weight_small: 'evil:weigh'}",
            OWN,
            "a site runs no code but its own",
        ),
    ],
    ids=["unknown", "brought", "idle", "option"],
)
def test_a_check_runs_no_code_that_the_operator_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offer: str, own: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(potluck.core.method, "_registry", dict(potluck.core.method._registry))
    files = {"experiment.yaml": OFFER + offer, "evil.py": "open('ran', 'w').close()", "theirs.py": THEIRS}
    for name, text in {**files, "own.py": own}.items():
        Path(name).write_text(text)
    site = ["--client", "north", "--model", "own.py:build", "--data", "own.py:load"]
    done = CliRunner().invoke(app, ["join", *site, "--check", "experiment.yaml"])
    assert not Path("ran").exists()
    assert done.exit_code == 2
    assert sentence in done.output


def _locked(public: bytes) -> bytes:
    """A key with a passphrase as `ssh-keygen` writes it; what is locked in is of no account."""

    def text(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    salt = text(text(bytes(16)) + (16).to_bytes(4, "big"))
    head = b"openssh-key-v1\0" + text(b"aes256-ctr") + text(b"bcrypt") + salt + (1).to_bytes(4, "big")
    body = base64.encodebytes(head + text(base64.b64decode(public.split()[1])) + text(bytes(256)))
    begin, end = (b"-----%s OPENSSH PRIVATE KEY-----\n" % word for word in (b"BEGIN", b"END"))
    return begin + body + end


def _keys(folder: Path) -> dict[str, Path]:
    """Files that are no key for a node, and one that is."""
    curve, other = ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)
    plain = (Encoding.PEM, PrivateFormat.OpenSSH)
    made = {
        "good": curve.private_bytes(*plain, NoEncryption()),
        "locked": _locked(curve.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)),
        "rsa": other.private_bytes(*plain, NoEncryption()),
        "half.pub": curve.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH),
        "pem": curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "empty": b"",
    }
    for name, data in made.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in made}


def test_a_node_key_that_flower_would_end_over_is_refused_first(tmp_path: Path) -> None:
    keys = _keys(tmp_path)
    check_node_key(keys["good"])
    for name, sentence in {
        "locked": "has a passphrase",
        "rsa": "is no ECDSA key",
        "half.pub": r"is no private key of OpenSSH \(a .pub file is the public half\)",
        "pem": "is no private key of OpenSSH",
        "empty": "is no private key of OpenSSH",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            check_node_key(keys[name])
    done = join("--server", "127.0.0.1:1", "--only", "node", "--socket", "w", "--node-key", str(keys["rsa"]))
    assert done.exit_code == 2
    assert "is no ECDSA key" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"--device": "banana"}, "--device: there is no device 'banana'"),
        ({"--device": "cuda:77"}, "--device: cuda:77 is not there"),
        ({"--device": "meta"}, "--device: 'meta' does not compute here"),
        ({"--model": "site.py"}, "give site.py:FUNCTION"),
        ({"--model": "resnet17"}, "unknown model 'resnet17'"),
        ({"--accept": "deep.json"}, "is no agreement: it is nested too deeply"),
    ],
)
def test_a_worker_that_cannot_start_says_so_and_is_not_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: dict[str, str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.json").write_text("[" * 90_000 + "]" * 90_000)
    Path("s.py").write_text("def load():\n    pass\n")
    given = {"--client": "0", "--model": "mlp-small", "--data": "s.py:load", "--home": "h", "--socket": "w"}
    code = worker.main([word for pair in (given | words).items() for word in pair])
    assert code == watching.BAD_INPUT
    assert sentence in capsys.readouterr().err
