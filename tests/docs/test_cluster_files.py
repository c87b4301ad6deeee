"""The files for clusters are well formed, and the commands in them exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from potluck.cli.app import app
from potluck.experiment.schema import Experiment

ROOT = Path(__file__).parents[2]
HERE = ROOT / "examples" / "cluster"
COMMAND = re.compile(r"potluck (?:run|resume) [^\n]*")


@pytest.mark.parametrize("path", sorted(HERE.iterdir()), ids=lambda path: path.name)
def test_commands_parse_and_name_settings_that_exist(path: Path) -> None:
    group = typer.main.get_command(app)
    lines = COMMAND.findall(path.read_text(encoding="utf-8"))
    assert lines
    for line in lines:
        _, name, *words = shlex.split(line)
        with group.commands[name].make_context(name, words) as context:  # type: ignore[attr-defined]
            overrides = context.params["overrides"]
        values = Experiment.make(
            data="digits",
            partition={"kind": "iid", "clients": 2},
            models=["mlp-small"],
            method="local",
            engine=dict(override.removeprefix("engine.").split("=", 1) for override in overrides),
        )
        assert values.engine.name == "ray"


def test_the_script_for_slurm_is_bash_and_keeps_its_token_to_itself() -> None:
    subprocess.run(["bash", "-n", str(HERE / "slurm.sh")], check=True)
    text = (HERE / "slurm.sh").read_text(encoding="utf-8")
    assert text.index("umask 077") < text.index("secrets.token_hex") < text.index("ray start")


STAND_INS = {
    "scontrol": "echo n1",
    "srun": 'case "$*" in *hostname*) ;; *) exit 3 ;; esac',  # no address, and Ray does not start
    "python": 'case "$2" in *secrets*) echo token ;; *) exit 1 ;; esac',  # nobody listens
}


@pytest.mark.parametrize(
    ("head", "sentence"), [("", "n1 has no address"), ("127.0.0.1", "no head of a Ray cluster came up")]
)
def test_the_script_for_slurm_ends_at_once_without_a_head(tmp_path: Path, head: str, sentence: str) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    command = ["bash", str(HERE / "slurm.sh"), "experiment.yaml"]
    done = subprocess.run(
        command, env={**env, "HEAD_IP": head}, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode
    assert sentence in done.stderr
    assert not (tmp_path / ".ray-token-7").exists()


def test_the_manifest_has_a_token_for_every_pod_and_a_closed_door() -> None:
    cluster, policy = yaml.safe_load_all((HERE / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (cluster["kind"], policy["kind"]) == ("RayCluster", "NetworkPolicy")
    spec = cluster["spec"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        env = {one["name"]: one for one in container["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "ray-token", "key": "token"}
        port = int(group["rayStartParams"].get("node-manager-port", 6379))  # those of plain Ray
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["tcpSocket"] == {"port": port}
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    (door,) = policy["spec"]["ingress"]
    assert door["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
