"""Whole runs on a Ray cluster: whoever is free goes on with a run whose machine was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.engine.settings import EngineSettings
from potluck.errors import ConfigError, RunError
from potluck.version import __version__

ray = pytest.importorskip("ray")

from potluck.engine.ray import jobs  # noqa: E402
from potluck.engine.ray.spots import Spot  # noqa: E402

SPOTS = [Spot("01" * 28, 1, 0, 1), Spot("02" * 28, 1, 0, 1)]
GONE = ray.exceptions.ActorUnavailableError("it is gone", None)


class Named:
    """A job that does nothing."""

    def __init__(self, label: str) -> None:
        self.label = label

    def code(self) -> Mapping[str, bytes]:
        return {}

    def play(self, device: str) -> str | None:
        return None


class FakeRay:
    """Processes are numbered as they are asked for; what they say and what becomes of jobs is given."""

    def __init__(self, greetings: Mapping[int, Any], plays: Mapping[tuple[int, str], Any]) -> None:
        self.greetings, self.plays = greetings, plays
        self.asked = 0
        self.played: list[tuple[int, str]] = []

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._actor))

    def _actor(self) -> Any:
        number, self.asked = self.asked, self.asked + 1
        return SimpleNamespace(
            introduce=SimpleNamespace(remote=lambda device, threads: ("hello", number)),
            play=SimpleNamespace(remote=lambda code, parcel, device: ("play", number, parcel)),
        )

    def wait(self, refs: Sequence[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        known = [ref for ref in refs if ref[0] == "play" or ref[1] in self.greetings]
        return sorted(known)[:1], []  # greetings first

    def get(self, ref: Any) -> Any:
        found = self.greetings[ref[1]] if ref[0] == "hello" else self.plays.get(ref[1:])
        if isinstance(found, Exception):
            raise found
        if ref[0] == "play":
            self.played.append(ref[1:])
        return found

    def kill(self, actor: Any, no_restart: bool) -> None:
        pass


class Clock:
    """Seconds pass as others sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.1
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def play(monkeypatch: pytest.MonkeyPatch, fake: FakeRay, labels: str = "abc") -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(jobs, "ray", fake)
    monkeypatch.setattr(jobs, "time", Clock())
    monkeypatch.setattr(jobs, "pack", lambda job: job.label)
    settings = EngineSettings(name="ray", deadline=60.0)
    jobs._Players(settings, "cpu", told.append).play([Named(label) for label in labels], SPOTS)
    return told


def home(number: int, torch: str = "2.13") -> tuple[str, dict[str, str]]:
    return f"node-{number}", {"potluck": __version__, "torch": torch}


def test_runs_of_one_comparison_are_not_played_on_unlike_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^engine.mixed: node-0 has torch 2.13, node-1 has 2.12"):
        play(monkeypatch, FakeRay({0: home(0), 1: home(1, "2.12")}, {}))


def test_whoever_is_free_goes_on_with_a_lost_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for another process, and nobody waits for one."""
    fake = FakeRay({0: home(0), 1: home(1)}, {(1, "b"): GONE})
    told = play(monkeypatch, fake)
    assert fake.played == [(0, "a"), (0, "c"), (0, "b")]
    assert "b: node-1 is lost (it cannot be reached); it goes on elsewhere" in told


def test_a_process_on_a_machine_that_just_died_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay({0: GONE, 1: GONE, 2: home(2)}, {})
    play(monkeypatch, fake)
    assert [label for _, label in fake.played] == ["a", "b", "c"]
    assert {number for number, _ in fake.played} == {2}


def test_nobody_left_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RunError, match=r"^no process is left on the Ray cluster to play a; .*same command again"
    ):
        play(monkeypatch, FakeRay({}, {}))
    with pytest.raises(RunError, match="no process is left"):
        play(monkeypatch, FakeRay(dict.fromkeys(range(100), GONE), {}))


def test_a_run_under_which_machines_die_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(
        {number: home(number) for number in range(9)}, {(number, "b"): GONE for number in range(9)}
    )
    with pytest.raises(RunError, match=r"^b: 3 machines were lost under it"):
        play(monkeypatch, fake)


def test_failures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"^b, on node-1: there is no folder$"):
        play(monkeypatch, FakeRay({0: home(0), 1: home(1)}, {(1, "b"): "there is no folder"}))
    failed = ray.exceptions.ActorDiedError()
    monkeypatch.setattr(failed, "_actor_init_failed", True)
    with pytest.raises(ConfigError, match=r"^engine.name: no process can be started on the Ray cluster: "):
        play(monkeypatch, FakeRay({0: home(0), 1: failed}, {}))
