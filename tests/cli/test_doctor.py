"""`potluck doctor`: what it finds here, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from potluck.cli import doctor
from potluck.cli.app import app
from potluck.version import install_command


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path / "shelf"))


def examined(code: int = 0) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code, result.output
    entry = json.loads(result.stdout)
    assert entry["usable"] == (code == 0)
    return {f"{one['about']} {one['name']}": one for one in entry["findings"]}


def test_it_finds_what_is_here_and_says_how_to_get_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {"potluck": ["torch", "nowhere>=1; extra == 'far'", "torch[other]; extra == 'near'"]}
    monkeypatch.setattr(doctor, "_requirements", lambda name: required.get(name, []))
    found = examined()
    assert found["data digits"]["state"] == "ok"
    assert found["data cifar10"]["state"] == "missing"
    assert found["data cifar10"]["remedy"] == (
        "from POTLUCK_DATA/cifar10 or an experiment's data.dir, or the hub at first use"
    )
    assert found["data newsgroups20"]["remedy"] == (
        "only from POTLUCK_DATA/newsgroups20 or an experiment's data.dir"
    )
    assert found["data digits-captions"]["found"] == "embedded"
    assert found["extra far"]["found"] == "without nowhere"
    assert found["extra far"]["remedy"] == install_command("far")
    assert found["extra near"]["state"] == "ok"
    assert found["self-check run"]["state"] == "ok"
    assert "version torch" in found


def test_a_run_that_fails_ends_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("potluck.runs.api.run", broken)
    assert examined(code=1)["self-check run"]["found"] == "OSError: no room"


def test_an_extra_brings_what_the_extras_it_names_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {"potluck": ["a[b]; extra == 'c'"], "a": ["ray; extra == 'b'", "other; extra == 'd'"]}
    monkeypatch.setattr(doctor, "_requirements", lambda name: required.get(name, []))
    assert doctor._packages_by_extra() == {"c": ["a", "ray"]}


def test_data_made_from_others_is_read_from_their_folder(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    for name in ("cifar10", "cifar10-captions"):
        assert doctor._folder(name, str(tmp_path)) == tmp_path / "cifar10"
    assert doctor._folder("cifar100", str(tmp_path)) is None


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'potluck[far]'"),
        (
            {"url": "file:///a%20b/potluck-1.whl", "archive_info": {}},
            "pip install '/a b/potluck-1.whl[far]'",
        ),
        (
            {"url": "file:///src/potluck", "dir_info": {"editable": True}},
            "pip install -e '/src/potluck[far]'",
        ),
        ({"url": "file:///src/potluck", "dir_info": {}}, "pip install '/src/potluck[far]'"),
        (
            {"url": "https://host.example/potluck.git", "vcs_info": {"vcs": "git"}},
            "pip install 'potluck[far] @ git+https://host.example/potluck.git'",
        ),
        (
            {"url": "https://host.example/potluck-1.whl"},
            "pip install 'https://host.example/potluck-1.whl[far]'",
        ),
        (5, "pip install 'potluck[far]'"),
    ],
)
def test_an_extra_is_installed_from_where_potluck_came(
    monkeypatch: pytest.MonkeyPatch, origin: Any, command: str
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(
        "potluck.version.distribution", lambda name: SimpleNamespace(read_text=lambda file: text)
    )
    assert install_command("far") == command
