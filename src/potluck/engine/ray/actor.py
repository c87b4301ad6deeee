"""What Ray starts on a machine: an actor that becomes a home when it is opened.

This module loads nothing else at first, so that an actor says at once that it is there.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.version import __version__

if TYPE_CHECKING:
    import numpy as np

    from potluck.engine.ray.home import HomeProcess


class HomeActor:
    """A process of the cluster that plays clients."""

    def __init__(self) -> None:
        self.home: HomeProcess | None = None

    def hello(self) -> tuple[str, int, str, str]:
        """The name of this machine, the number of this process, Ray's name of the machine, potluck's version."""
        import ray

        return platform.node(), os.getpid(), ray.get_runtime_context().get_node_id(), __version__

    def warm(self) -> None:
        """Load the code that `open` needs."""
        import potluck.engine.ray.home  # noqa: F401

    def introduce(self, device: str, threads: int) -> tuple[str, dict[str, str]]:
        """The name of this machine, and what numbers depend on here."""
        import torch

        from potluck.engine.ray.alike import fingerprint

        return platform.node(), fingerprint(torch.device(device), threads)

    def open(
        self, code: dict[str, bytes], parcel: Any, settings: dict[str, Any], share: float
    ) -> dict[str, Any]:
        """Make the clients; gives what numbers depend on here, or `refused`, one sentence."""
        if code:
            _work_beside(code)
        from potluck.engine.ray.home import opened
        from potluck.engine.ray.parcel import unpack

        self.home, about = opened(lambda: unpack(parcel), settings, share)
        return about

    def serve(
        self, letters: Sequence[Sequence[np.ndarray]], *commons: Sequence[np.ndarray]
    ) -> Iterator[list[list[np.ndarray]]]:
        """Do errands, the replies as soon as they are there."""
        assert self.home is not None, "a home is opened before it is asked"
        yield from self.home.serve(letters, commons)

    def play(self, code: dict[str, bytes], parcel: Any, device: str) -> str | None:
        """Do a job on its own, such as a whole run; a sentence if it failed."""
        if code:
            _work_beside(code)
        from potluck.engine.ray.parcel import unpack

        sentence: str | None = unpack(parcel).play(device)
        return sentence

    def leave(self) -> None:
        """Remove what lies on this machine's disk; the process may be killed afterwards."""
        _leave()


def cpu_seconds(process: int) -> float:
    """The CPU time that a process of this machine has used so far; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work_beside(code: dict[str, bytes]) -> None:
    """Work in a folder with the user's files, which may import each other there."""
    folder = Path(tempfile.mkdtemp(prefix="potluck-home-"))
    _folders.append(folder)
    for name, content in code.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    os.chdir(folder)
    sys.path.insert(0, str(folder))


_folders: list[Path] = []


def _leave() -> None:
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)
