"""The units of systemd and the container files: they are well formed, and what they start is there."""

import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from potluck.cli.app import app

HERE = Path(__file__).parents[2] / "examples" / "deployment"
UNITS = sorted((HERE / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((HERE / "container" / "compose.yaml").read_text())
COMMANDS = {  # of `prepare`; keys are never overwritten
    "python": ":",
    "potluck": "test ! -e keys/ca.crt || exit 2\nmkdir -p keys\ntouch keys/ca.crt",
    "chown": ":",
}


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


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_bounded_and_shut_in(unit):
    settings = [line.partition("=") for line in unit.read_text().splitlines() if "=" in line]
    said = {key: value for key, _, value in settings}
    assert {"MemoryMax", "LimitCORE", "CapabilityBoundingSet", "SystemCallFilter", "UMask"} <= said.keys()
    worker = "worker" in unit.name
    assert said["RestrictAddressFamilies"] == ("AF_UNIX" if worker else "AF_INET AF_INET6 AF_UNIX")
    assert said.get("PrivateNetwork") == ("yes" if worker else None)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_to_stop_a_unit_is_no_failure_and_others_signals_have_it_started_again(unit):
    said = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line)
    if "superlink" in unit.name:  # Flower ends by the signal itself, which systemd takes for success
        return
    assert said["SuccessExitStatus"] == str(128 + signal.SIGTERM)
    assert said["Restart"] == "always" or said["RestartForceExitStatus"] == said["SuccessExitStatus"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_little_that_a_unit_could_do(unit):
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(unit)]  # of 100
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "unrecognized option" in done.stderr, done.stdout[-200:]


def test_the_relay_finds_the_servers_socket():
    """The SuperLink and the server have a /tmp each, and the relay of the one connects to a socket of the other."""
    server = (HERE / "systemd" / "potluck-serve.service").read_text()
    (folder,) = re.findall(r"^RuntimeDirectory=(.+)$", server, re.MULTILINE)
    assert f"Environment=TMPDIR=/run/{folder}\n" in server
    users = {re.search(r"^User=(.+)$", unit.read_text(), re.MULTILINE)[1] for unit in UNITS[2:4]}
    assert [unit.stem for unit in UNITS[2:4]] == ["potluck-serve", "potluck-superlink"]
    assert users == {"potluck"}


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


@pytest.mark.parametrize("ended", ["python", "potluck", "chown"])
def test_what_a_trial_prepares_is_done_anew_after_it_was_ended(tmp_path, ended):
    """The commands are stubs: each notes that it ran, and `ended` fails once, with half of its work done."""
    (tmp_path / "bin").mkdir()
    for name, words in COMMANDS.items():
        fails = "test -e ended || { touch ended; exit 1; }" if name == ended else ":"
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{words}\n{fails}\necho {name} >> done\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for folder in ("trial", "hospitals"):
        (tmp_path / folder).mkdir()
    (tmp_path / "hospitals" / "experiment.yaml").touch()
    (script,) = COMPOSE["services"]["prepare"]["command"]
    script = script.replace("/trial", f"{tmp_path}/trial").replace("/hospitals", f"{tmp_path}/hospitals")
    path = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    codes = [
        subprocess.run(
            [*COMPOSE["services"]["prepare"]["entrypoint"], script], env=path, check=False
        ).returncode
        for _ in range(3)
    ]
    assert codes == [1, 0, 0]
    done = (tmp_path / "trial" / "done").read_text().split()
    assert done[-3:] == ["python", "potluck", "chown"]
    assert done.count("chown") == 1  # the third time there is nothing to do
    assert (tmp_path / "trial" / "experiment.yaml").exists()


def test_the_image_runs_as_a_user_of_its_own():
    text = re.sub(r"\\\n", " ", (HERE / "container" / "Containerfile").read_text())
    lines = [
        line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")
    ]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {instruction for instruction, _ in lines} <= known
    assert [rest for instruction, rest in lines if instruction == "USER"] == ["potluck"]
    assert next(rest for instruction, rest in lines if instruction == "ENTRYPOINT").endswith('"potluck"]')
