"""A home as its driver sees it: what it was asked, what it answered, and whether it is still at work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from potluck.engine.ray.actor import cpu_seconds
from potluck.engine.ray.alike import SAME
from potluck.engine.ray.owed import AnyRequest
from potluck.engine.ray.spots import Spot, at_machine
from potluck.engine.wire import TensorFrame

PATIENCE = 120.0  # seconds in which a machine must say how its home is doing
AT_WORK = 0.02  # share of a core that a process uses at least while it works; one that waits uses far less


class Lost(Exception):
    """A home is gone, or does not answer; the message is why."""


@dataclass
class Call:
    """What a home is busy with: replies as they come, and the requests that have none yet, in order."""

    replies: Any
    waiting: deque[AnyRequest]
    since: float  # when the last reply came, or the home was seen at work
    pulse: Any = None  # what will say how much CPU time the home has used, once it is overdue


@dataclass(eq=False)
class Home:
    """A home, and what it has to do."""

    actor: Any
    spot: Spot
    node: str = ""  # the name of its machine
    process: int = 0  # its number on that machine
    machine: str = ""  # Ray's name of the machine
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    opening: Any = None  # what its opening will say, while it is under way
    call: Call | None = None
    share: deque[AnyRequest] = field(default_factory=deque)
    seconds: float = 0.0  # at work
    used: float = 0.0  # seconds of CPU time when that was last known
    answers: int = 0
    sent: int = 0  # bytes, but for common downlinks
    received: int = 0
    lost: bool = False

    def begin(
        self, requests: Sequence[AnyRequest], letters: Sequence[list[np.ndarray]], commons: Sequence[Any]
    ) -> None:
        """Send letters; their replies come one by one."""
        replies = self.actor.serve.options(num_returns="streaming").remote(letters, *commons)
        self.call = Call(replies, deque(requests), time.monotonic())
        self.sent += sum(array.nbytes for letter in letters for array in letter)

    def next_replies(self) -> list[tuple[AnyRequest, TensorFrame]]:
        """The replies that have just come."""
        assert self.call is not None
        try:
            bundle = ray.get(next(self.call.replies))
        except StopIteration:
            raise Lost("its process ended in the middle of a call") from None
        except RayTaskError:
            raise
        except RayError as error:
            raise Lost(in_short(error)) from error
        self.call.since = time.monotonic()
        requests = [self.call.waiting.popleft() for _ in bundle]
        if not self.call.waiting:
            self.call = None
        self.answers += len(bundle)
        self.received += sum(array.nbytes for arrays in bundle for array in arrays)
        frames = [TensorFrame.unpack(arrays) for arrays in bundle]
        self.used = frames[-1].note.get("used", self.used)
        return [*zip(requests, frames, strict=True)]

    def is_hung(self, deadline: float) -> bool:
        """Whether a home is overdue, and has not worked meanwhile: a slow machine has time."""
        assert self.call is not None
        waited = time.monotonic() - self.call.since
        if waited <= deadline:
            return False
        if self.call.pulse is None:
            self.call.pulse = _pulse(self)
        if not ray.wait([self.call.pulse], timeout=0)[0]:
            return waited > deadline + PATIENCE
        used, before = _cpu_seconds(self.call.pulse), self.used
        self.used, self.call.pulse, self.call.since = used, None, time.monotonic()
        return used - before < AT_WORK * waited


def _pulse(home: Home) -> Any:
    """Ask the machine of a home, in another process, how much CPU time the home has used."""
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": at_machine(home.machine)}
    return ray.remote(cpu_seconds).options(**options).remote(home.process)


def _cpu_seconds(pulse: Any) -> float:
    try:
        return float(ray.get(pulse))
    except RayError:
        return 0.0


def why_none(error: Exception) -> str:
    """Why no process came, and what to do where a machine lacks potluck."""
    why = in_short(error)
    return f"{why}; {SAME}" if "No module named" in why else why


def in_short(error: Exception) -> str:
    """Ray's reason in one line; it writes many."""
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = [line for line in lines if "Error:" in line]
    return (cause or lines or [type(error).__name__])[-1 if cause else 0].rstrip(".")
