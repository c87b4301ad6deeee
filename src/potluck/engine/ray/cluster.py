"""A Ray cluster: one that is started on this machine for a run, or one that is there already."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from potluck.engine.ray.door import check_address, check_door, listens, why_not
from potluck.errors import ConfigError, first_line
from potluck.version import install_command

VERSIONS = (2, 55, 1), (2, 61)  # from the first, below the second
LOOPBACK = ("127.0.0.1", "localhost", "::1")
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # tell nobody
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # print nothing when a machine dies: potluck says it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # homes do the work: they are no less urgent than their driver
}
OWN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # Ray reads it once per process
UNHURRIED = {
    "worker_register_timeout_seconds": 600,  # a process that starts slowly is not ended and begun again
    "health_check_failure_threshold": 60,  # if this machine were gone, so would be the driver: it is only slow
}
ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: the one way to let Ray listen on loopback alone


@dataclass(frozen=True)
class Node:
    """A machine of a cluster."""

    id: str
    name: str
    cpus: int
    gpus: int


def check_installed() -> None:
    """Refuse to go on without Ray, or with a version that is not known to work. Call it before ray is imported."""
    os.environ.update(QUIET)
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"engine.name: ray needs Ray; install it with: {install_command('ray')}") from None
    numbers = tuple(int(word) for word in version.split(".")[:3] if word.isdigit())
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        low, high = (".".join(map(str, one)) for one in VERSIONS)
        raise ConfigError(
            f"engine.name: Ray {version} is installed, potluck works with {low} and newer, below {high}; "
            f"install it with: {install_command('ray')}"
        )


class Cluster:
    """A connection to a cluster; closing it ends what it started."""

    def __init__(self, address: str | None) -> None:
        check_installed()
        self._end = contextlib.ExitStack()
        atexit.register(self.close)
        try:
            if not _is_connected():
                self._connect(address)
        except BaseException:
            self.close()
            raise

    def nodes(self) -> list[Node]:
        """The machines that are alive, in a fixed order."""
        import ray

        alive = [one for one in ray.nodes() if one["Alive"]]
        found = [
            Node(
                one["NodeID"],
                f"{one['NodeManagerHostname']} ({one['NodeManagerAddress']})",
                int(one["Resources"].get("CPU", 0)),
                int(one["Resources"].get("GPU", 0)),
            )
            for one in alive
        ]
        return sorted(found, key=lambda node: (node.name, node.id))

    def free(self) -> dict[str, tuple[float, float]]:
        """The cores and GPUs of every machine that nobody has taken, as far as the head knows."""
        from ray._private.state import available_resources_per_node

        found = available_resources_per_node()
        return {node: (of.get("CPU", 0.0), of.get("GPU", 0.0)) for node, of in found.items()}

    def close(self) -> None:
        """Leave the cluster; one that was started here ends, and its files go."""
        self._end.close()
        atexit.unregister(self.close)

    def _connect(self, address: str | None) -> None:
        if address is None:
            os.environ.update(OWN)
            _stay_alone(True)
            folder = tempfile.mkdtemp(prefix="potluck-ray-", dir="/tmp")  # paths of sockets must be short
            self._end.callback(shutil.rmtree, folder, ignore_errors=True)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)  # what a failed start writes later
            self._start_here(folder)
            return
        check_address(address)
        alone = _is_alone(address)
        _stay_alone(alone)
        check_door(address, alone)
        try:
            self._init(address=address)
        except Exception as error:  # Ray raises errors of many kinds
            raise ConfigError(f"engine.address: {why_not(str(error), address)}") from error

    def _start_here(self, folder: str) -> None:
        import torch  # Ray's own search for GPUs misses some

        cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
        own = {"include_dashboard": False, "_temp_dir": folder, "_system_config": UNHURRIED}
        try:
            self._init(address="local", num_cpus=cores, num_gpus=gpus, **own)
        except Exception as error:  # Ray raises errors of many kinds
            raise ConfigError(
                f"engine.name: Ray could not be started on this machine ({first_line(error)}); if it is busy, try "
                "again later, or use engine.name=local"
            ) from error

    def _init(self, **options: Any) -> None:
        import ray

        from potluck.engine.ray.job import Job

        with _own_signals():
            self._end.callback(ray.shutdown)
            quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
            ray.init(job_config=Job(), **quiet, **options)


def _stay_alone(alone: bool) -> None:
    """Let Ray use the loopback address alone, or any. It read its variables when it was imported: tell it again."""
    import ray._private.ray_constants as constants
    import ray._raylet as raylet

    if alone:
        os.environ[ALONE] = "0"
    constants.ENABLE_RAY_CLUSTER = not alone
    raylet.Config.initialize("")


def _is_alone(address: str) -> bool:
    """Whether a cluster listens on loopback alone; Ray would look for it at this machine's outward address."""
    import ray

    host, _, port = address.rpartition(":")
    with _without_stderr():  # where no machine outside can be reached, that is no news
        outward = ray.util.get_node_ip_address()
    return host in LOOPBACK and (outward in LOOPBACK or not listens(outward, int(port)))


def _is_connected() -> bool:
    import ray

    return bool(ray.is_initialized())


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Ray's compiled half writes what it raises to stderr as well, past Python."""
    with contextlib.ExitStack() as stack:
        kept = os.dup(2)
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 2)
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM, which `ray.init` replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
