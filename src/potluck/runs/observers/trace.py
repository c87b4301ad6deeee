"""What the device did in one round, kernel by kernel, for the picture of its time line."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from potluck.errors import ConfigError
from potluck.files import write_json
from potluck.runs.observers.base import Observer, RoundEnd

TRACE = "trace.json"
FINEST = 2000  # spans of a lane at most: pauses shorter than this part of the round are closed
COPIES = ("Memcpy", "Memset")
Span = tuple[float, float]  # start and end, in seconds


class RoundTrace(Observer):
    """Records when the device worked in one round, and writes `trace.json` for `potluck plot timeline`.

    On a GPU there is a lane for every stream, with kernels and copies apart; on a CPU one for every thread of this
    process. What worker processes and real sites do is not seen. Torch's profiler makes later rounds of the same
    process slower, so trace a run of its own. The first round is no good example: graphs are captured in it.

    >>> import json, tempfile, potluck
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = potluck.run(
    ...         data="digits", partition={"kind": "iid", "clients": 2}, models=["mlp-small"], method="fedavg",
    ...         training={"rounds": 2}, engine={"device": "cpu"}, out=f"{folder}/run",
    ...         observers=[potluck.RoundTrace(2)],
    ...     )
    ...     trace = json.loads((result.folder / "trace.json").read_text())
    >>> trace["round"], {lane["kind"] for lane in trace["lanes"]}
    (2, {'operators'})
    """

    def __init__(self, round: int = 2) -> None:
        """`round` is the number of the round to record."""
        if isinstance(round, bool) or not isinstance(round, int) or round < 1:
            raise ConfigError(f"round: give the number of a round, from 1, not {round!r}")
        self.wanted = round
        self._profile: profile | None = None
        self._began = 0.0
        self._trace: dict[str, Any] | None = None

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Start at once if the first round to be played is the one to trace."""
        if done + 1 == self.wanted:
            self._start()

    def round(self, end: RoundEnd) -> None:
        """Start after the round before the one to trace, and stop after that one."""
        if end.round + 1 == self.wanted:
            self._start()
        elif end.round == self.wanted and self._profile is not None:
            self._trace = self._stop(end)

    def end(self, folder: Path) -> None:
        """Write the trace into the folder of the run."""
        if self._trace is not None:
            write_json(folder / TRACE, self._trace)

    def _start(self) -> None:
        cuda = torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
        self._profile.start()
        _finish()
        self._began = time.time()

    def _stop(self, end: RoundEnd) -> dict[str, Any]:
        assert self._profile is not None
        _finish()
        seconds = time.time() - self._began
        self._profile.stop()
        events = list(_events(self._profile))
        self._profile = None
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        lanes = lanes_of(events, seconds)
        timing = {name: round(value, 6) for name, value in end.timing.items()}
        return {
            "round": end.round,
            "device": device,
            "seconds": round(seconds, 6),
            "timing": timing,
            "lanes": lanes,
        }


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _events(watched: profile) -> Iterator[tuple[str, str, float, float]]:
    """Lane, kind, start and end of everything that was recorded, in seconds."""
    inner = watched.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    for event in inner.kineto_results.events():
        on_gpu = event.device_type().name == "CUDA"
        if event.is_user_annotation() or (not on_gpu and torch.cuda.is_available()):
            continue
        kind = "operators"
        lane = f"thread {event.start_thread_id()}"
        if on_gpu:
            kind = "copies" if event.name().startswith(COPIES) else "kernels"
            lane = f"GPU {event.device_index()}, stream {event.device_resource_id()}"
        yield lane, kind, event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9


def lanes_of(events: Sequence[tuple[str, str, float, float]], seconds: float) -> list[dict[str, Any]]:
    """The lanes of a trace with their spans, from the first event on; spans that nearly touch are one."""
    first = min((start for _, _, start, _ in events), default=0.0)
    ordered = sorted(events)
    lanes = []
    for (lane, kind), group in itertools.groupby(ordered, key=lambda event: event[:2]):
        own = [(start - first, end - first) for _, _, start, end in group]
        spans = [[round(start, 6), round(end, 6)] for start, end in merged(own, seconds / FINEST)]
        lanes.append({"name": lane, "kind": kind, "spans": spans, "events": len(own)})
    return lanes


def merged(spans: Iterable[Span], pause: float = 0.0) -> list[Span]:
    """The union of spans in order; those that are less than a `pause` apart become one."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + pause:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
