"""The units of systemd and the container files: they are well formed, and what they start is there."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from potluck.cli.app import app

HERE = Path(__file__).parents[2] / "examples" / "deployment"
UNITS = sorted((HERE / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((HERE / "container" / "compose.yaml").read_text())


def parse(words):
    """Have the command line read the words of a command, as it would before it runs it."""
    group = typer.main.get_command(app)
    name, *options = words
    with group.commands[name].make_context(name, list(options)) as context:
        return context.params


def started(unit):
    return [line.partition("=")[2] for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_is_there(unit):
    (line,) = started(unit)
    program, *words = shlex.split(line)
    if Path(program).name == "potluck":
        parse(words)
    else:
        assert Path(program).name == "flower-superlink"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_a_unit(unit):
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    told = [line for line in done.stderr.splitlines() if unit.name in line and "not executable" not in line]
    assert told == []


def test_containers_start_commands_that_are_there():
    for name, service in COMPOSE["services"].items():
        if name != "prepare":
            parse(shlex.split(service["command"]))


def test_containers_refer_to_what_is_declared():
    services = COMPOSE["services"]
    for service in services.values():
        assert set(service.get("networks", ())) <= set(COMPOSE["networks"])
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (HERE / "container" / source).is_dir()
    assert {name for name, one in services.items() if "networks" in one} == {
        "server",
        "north",
        "east",
        "west",
    }


def test_the_image_runs_as_a_user_of_its_own():
    text = re.sub(r"\\\n", " ", (HERE / "container" / "Containerfile").read_text())
    lines = [
        line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")
    ]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {instruction for instruction, _ in lines} <= known
    assert [rest for instruction, rest in lines if instruction == "USER"] == ["potluck"]
    assert next(rest for instruction, rest in lines if instruction == "ENTRYPOINT").endswith('"potluck"]')
