"""Whole runs on the machines of a cluster: a job each, which another machine goes on with if its own is lost."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from potluck.engine.ray.actor import HomeActor
from potluck.engine.ray.alike import Machines
from potluck.engine.ray.cluster import Cluster
from potluck.engine.ray.handles import in_short, why_none
from potluck.engine.ray.homes import PAUSE, TICK
from potluck.engine.ray.parcel import pack
from potluck.engine.ray.room import spots_with_room
from potluck.engine.ray.spots import Spot, choose_spots, home_settings
from potluck.engine.settings import EngineSettings
from potluck.errors import ConfigError, RunError

LOSSES = 3  # machines that may be lost under one job
FAILURES = 12  # processes that may not come before no more are asked for


class Job(Protocol):
    """Work of its own for one process: it can be begun again, and then goes on where it was. It is pickled."""

    @property
    def label(self) -> str:
        """What the user knows it by."""

    def code(self) -> Mapping[str, bytes]:
        """Files of the user's that must lie in the process's folder."""

    def play(self, device: str) -> str | None:
        """Do it on a device of this machine; a sentence if it failed."""


@dataclass
class _Place:
    """A process that plays one job after the other."""

    actor: Any
    spot: Spot
    node: str = ""
    job: Job | None = None


def play_jobs(settings: EngineSettings, jobs: Sequence[Job], told: Callable[[str], None]) -> None:
    """Play all jobs, as many at once as there are places; the first that fails ends the others."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(settings.address)
        stack.callback(cluster.close)
        nodes = cluster.nodes()
        own = home_settings(settings, nodes)
        spots = choose_spots(settings, str(own.device), nodes, len(jobs))
        players = _Players(settings, str(own.device), told)
        stack.callback(players.close)
        players.play(jobs, spots_with_room(spots, cluster, nodes, told))


class _Players:
    """Processes that play jobs."""

    def __init__(self, settings: EngineSettings, device: str, told: Callable[[str], None]) -> None:
        self.settings, self.device, self.told = settings, device, told
        self.machines = Machines(settings.mixed, told)
        self.busy: dict[Any, _Place] = {}
        self.idle: list[_Place] = []  # they go on with a run whose machine is lost
        self.coming: dict[Any, _Place] = {}  # by what they will say first
        self.later: list[tuple[float, Spot]] = []  # when a process is asked for again
        self.losses: dict[str, int] = {}
        self.failed = 0  # processes that did not come

    def play(self, jobs: Sequence[Job], spots: Sequence[Spot]) -> None:
        """Play jobs at spots until all are done. Who is free takes the next one; nobody waits for a lost place."""
        waiting, since = deque(jobs), time.monotonic()
        for spot in spots[: len(jobs)]:
            self._ask(spot)
        while waiting or self.busy:
            for ref in self._ready():
                place = self._arrived(ref) if ref in self.coming else self._free(ref, waiting)
                self.idle += [] if place is None else [place]
            while waiting and self.idle:
                self._begin(self.idle.pop(), waiting.popleft())
            since = time.monotonic() if self.busy else since
            if not self.busy and waiting:
                self._check_hope(waiting[0], time.monotonic() - since)

    def _ready(self) -> list[Any]:
        """Wait a moment for a process that comes, or for the end of a job."""
        self._ask_again()
        refs = [*self.busy, *self.coming]
        if not refs:
            time.sleep(TICK)
            return []
        found: list[Any] = ray.wait(refs, num_returns=1, timeout=TICK)[0]
        return found

    def _check_hope(self, job: Job, waited: float) -> None:
        """Give up if nobody plays and nobody comes."""
        if not (self.coming or self.later) or waited > self.settings.deadline:
            raise RunError(
                f"no process is left on the Ray cluster to play {job.label}; when its machines are back, give the "
                "same command again, and it goes on"
            )

    def close(self) -> None:
        """End all processes."""
        for place in [*self.busy.values(), *self.idle, *self.coming.values()]:
            _kill(place)

    # --- processes ---

    def _ask(self, spot: Spot, anywhere: bool = False) -> None:
        options = {"max_restarts": 0, "max_task_retries": 0, **spot.options(anywhere)}
        place = _Place(ray.remote(HomeActor).options(**options).remote(), spot)
        self.coming[place.actor.introduce.remote(self.device, self.settings.threads)] = place

    def _ask_again(self) -> None:
        due = [one for one in self.later if one[0] <= time.monotonic()]
        self.later = [one for one in self.later if one not in due]
        for _, spot in due:
            self._ask(spot, anywhere=True)

    def _arrived(self, ref: Any) -> _Place | None:
        """A process that is there; None if it is gone, as on a machine that died and the cluster does not know."""
        place = self.coming.pop(ref)
        try:
            place.node, found = ray.get(ref)
        except RayError as error:
            _kill(place)
            self.failed += 1
            if not isinstance(error, RayActorError) or error.actor_init_failed:
                raise ConfigError(
                    f"engine.name: no process can be started on the Ray cluster: {why_none(error)}"
                ) from error
            if self.failed <= FAILURES:
                self.later.append((time.monotonic() + min(2.0**self.failed, PAUSE[1]), place.spot))
            return None
        self.machines.check(place.node, found)
        return place

    def _begin(self, place: _Place, job: Job) -> None:
        place.job = job
        self.busy[place.actor.play.remote(dict(job.code()), pack(job), self.device)] = place
        self.told(f"{job.label}: on {place.node}")

    def _free(self, ref: Any, waiting: deque[Job]) -> _Place | None:
        """A process whose job is done; None if it was lost, and the job waits again."""
        place = self.busy.pop(ref)
        assert place.job is not None
        again = self._ended(ref, place, place.job)
        if again is None:
            return place
        waiting.appendleft(again)
        _kill(place)
        self._ask(place.spot, anywhere=True)
        return None

    def _ended(self, ref: Any, place: _Place, job: Job) -> Job | None:
        """The job, if it must be played on elsewhere; a `RunError` if it failed."""
        try:
            sentence = ray.get(ref)
        except RayTaskError:
            raise
        except RayError as error:
            self.losses[job.label] = self.losses.get(job.label, 0) + 1
            if self.losses[job.label] >= LOSSES:
                raise RunError(
                    f"{job.label}: {LOSSES} machines were lost under it: {in_short(error)}"
                ) from error
            self.told(f"{job.label}: {place.node} is lost ({in_short(error)}); it goes on elsewhere")
            return job
        if sentence is not None:
            raise RunError(f"{job.label}, on {place.node}: {sentence}")
        return None


def _kill(place: _Place) -> None:
    with contextlib.suppress(Exception):  # it may be gone, or the cluster with it
        ray.kill(place.actor, no_restart=True)
