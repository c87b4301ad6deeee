"""Flower's command `flwr`, run to its end; what it says is in a log, and an error is one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from potluck.core.plain_values import printable
from potluck.deploy.flower.processes import DIRECT, START, TOO_SLOW, environment, program
from potluck.errors import RunError

NAME = "potluck"  # of the SuperLink in Flower's configuration
BOX = re.compile(r"[\u2500-\u257f]+")  # the signs Flower draws boxes with


def flwr(home: Path, log: str, what: str, *words: str) -> dict[str, Any]:
    """Run one of Flower's commands on the SuperLink; what it gives as JSON, or a sentence on what it refused.

    It runs in an empty folder: where a folder called like the SuperLink lies in the current one, and holds a
    `pyproject.toml`, Flower would take it for an app.
    """
    file, told = home / log, [program("flwr"), *words, NAME, "--format", "json"]
    try:
        with tempfile.TemporaryDirectory(prefix="potluck-") as empty:
            done = subprocess.run(
                told,
                cwd=empty,
                env=environment(home) | DIRECT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=START,
                check=False,
            )
        said, failed = f"{decoded(done.stderr)}\n{decoded(done.stdout)}", done.returncode != 0
    except subprocess.TimeoutExpired:
        said, failed = TOO_SLOW, True
    with file.open("a", encoding="utf-8") as record:
        record.write(said)
    answer = answered(said)
    if failed or answer.get("success") is False:
        raise RunError(f"Flower does not take {what}: {told_by(said, answer)} (see {file})")
    return answer


def decoded(data: bytes) -> str:
    """What a program has written, whatever it was."""
    return data.decode(errors="replace")


def answered(said: str) -> dict[str, Any]:
    """The JSON object in what Flower says, if there is one."""
    start, end = said.find("{"), said.rfind("}")
    try:
        found = json.loads(said[start : end + 1])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def told_by(said: str, answer: dict[str, Any]) -> str:
    """Why a command failed, in one printable line without the box that Flower draws around it."""
    why = str(answer.get("error-message") or answer.get("error") or "") or said
    lines = [" ".join(line.split()) for line in BOX.sub(" ", why).splitlines()]
    told = [line for line in lines if line and line not in ("Error", "{", "}")]
    return printable(" ".join(told[-4:])) or "it wrote nothing"
