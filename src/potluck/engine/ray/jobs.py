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
from potluck.engine.ray.cluster import Cluster
from potluck.engine.ray.handles import in_short
from potluck.engine.ray.homes import PAUSE, START
from potluck.engine.ray.parcel import pack
from potluck.engine.ray.spots import Spot, choose_spots, home_settings
from potluck.engine.settings import EngineSettings
from potluck.errors import ConfigError, RunError

LOSSES = 3  # machines that may be lost under one job


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
        players = _Players(str(own.device), settings.deadline, told)
        stack.callback(players.close)
        players.play(jobs, spots)


class _Players:
    """Processes that play jobs."""

    def __init__(self, device: str, deadline: float, told: Callable[[str], None]) -> None:
        self.device, self.deadline, self.told = device, deadline, told
        self.busy: dict[Any, _Place] = {}
        self.losses: dict[str, int] = {}

    def play(self, jobs: Sequence[Job], spots: Sequence[Spot]) -> None:
        """Play jobs at spots until all are done."""
        waiting = deque(jobs)
        for spot in spots:
            if waiting:
                self._begin(self._place(spot), waiting.popleft())
        while self.busy:
            (ref,), _ = ray.wait(list(self.busy), num_returns=1)
            place = self.busy.pop(ref)
            assert place.job is not None
            again = self._ended(ref, place, place.job)
            if again is not None:
                waiting.appendleft(again)
                _kill(place)
                place = self._place(place.spot, anywhere=True)
            if waiting:
                self._begin(place, waiting.popleft())
            else:
                _kill(place)

    def close(self) -> None:
        """End all processes."""
        for place in self.busy.values():
            _kill(place)

    def _place(self, spot: Spot, anywhere: bool = False) -> _Place:
        """A process at a spot; elsewhere if its machine is dead, which a cluster learns late."""
        for attempt in range(LOSSES):
            options = {"max_restarts": 0, "max_task_retries": 0, **spot.options(anywhere)}
            place = _Place(ray.remote(HomeActor).options(**options).remote(), spot)
            try:
                self._greet(place)
                return place
            except RayError as error:
                _kill(place)
                gone = isinstance(error, RayActorError) and not error.actor_init_failed
                if not gone or attempt == LOSSES - 1:
                    raise ConfigError(
                        f"engine.name: no process could be started on the Ray cluster: {in_short(error)}"
                    ) from error
                anywhere = True
                time.sleep(PAUSE[0] * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _greet(self, place: _Place) -> None:
        hello = place.actor.hello.remote()
        if not ray.wait([hello], timeout=START)[0]:
            self.told(f"a process takes more than {START:g} s to start, or there is no room for it; waiting")
        place.node, *_ = ray.get(hello, timeout=self.deadline)

    def _begin(self, place: _Place, job: Job) -> None:
        place.job = job
        self.busy[place.actor.play.remote(dict(job.code()), pack(job), self.device)] = place
        self.told(f"{job.label}: on {place.node}")

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
