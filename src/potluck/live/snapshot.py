"""A run as it stands now: what its process tells, and what its logs say, in one `Snapshot`."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from potluck.core.metrics import MetricFacts, common_facts, metric_facts
from potluck.core.plain_values import printable
from potluck.errors import RunError, first_line
from potluck.files import read_json
from potluck.live.board import ClientStatus
from potluck.live.log_tails import FAULTS, Evaluations, RunLogs, round_of, thinned
from potluck.live.status_file import FILES, FORMS, read_status, status_file
from potluck.report.format import measured, rounded
from potluck.report.measures import Measure

STALE = 30.0  # seconds without news after which a process is taken to be gone
ENDED = ("finished", "stopped")
POINTS = 200  # of a curve
RESCAN = 5.0  # seconds between two searches for runs that have begun
MOST_RUNS = 200  # watched at once, the newest
DEEPEST = 3  # folders below the one that is named: a sweep has comparisons, and those have runs
SIGNS = ("config.yaml", "environment.json", *FILES.values())  # of a run, or a site's home
COMPARED = ("experiment.yaml", "comparison.json", "sweep.json")  # of a comparison, also before its first run
RESULTS = ("comparison.json", "sweep.json")
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """The mean over clients, round by round; a long one is thinned."""

    rounds: tuple[int, ...] = ()
    score: tuple[float | None, ...] = ()
    loss: tuple[float | None, ...] = ()


@dataclass
class ClientView(ClientStatus):
    """A client on the board, with its score when it was last measured."""

    score: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """A run, a server or a site at one moment; times are seconds since 1970."""

    folder: str
    label: str = ""  # a short name, different from those of the other runs that are watched
    kind: str = "run"  # or server, or site
    state: str = (
        "unfinished"  # starting, waiting, running, writing, finished, stopped, gone; at a site, in words
    )
    why: str = ""  # it was stopped
    problem: str = ""  # what cannot be read
    alive: bool = False  # whether its process still tells of itself
    run: str = ""
    name: str = ""
    method: str = ""
    round: int = 0
    rounds: int = 0
    started: float | None = None
    updated: float | None = None  # its process told of itself; of one that tells nothing, a round ended
    round_ended: float | None = None  # the last one
    measure: Measure = field(default_factory=Measure)
    score: float | None = None  # the mean over clients, when they were last measured
    best: float | None = None
    loss: float | None = None
    curve: Curve = Curve()
    seconds_per_round: float | None = None
    seconds_left: float | None = None  # from the end of the last round on
    messages: Mapping[str, int] = field(default_factory=dict)  # bytes up and down, as the ledger has them
    sent: int | None = None  # bytes of a federation with envelopes, since its server was started
    received: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    disk_free: float | None = None
    clients: Mapping[str, ClientView] = field(default_factory=dict)
    strangers: Mapping[str, str] = field(default_factory=dict)
    notices: Sequence[tuple[float, str]] = ()
    potluck: str = ""
    flower: str | None = None
    pid: int | None = None
    site: Facts = field(default_factory=dict)  # what else a site tells

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.state in ENDED or not self.alive

    def left(self, now: float) -> float | None:
        """Seconds until the run ends; a round that takes longer than others does not count against the rest."""
        if self.seconds_left is None or self.seconds_per_round is None or self.round_ended is None:
            return None
        passed = min(max(now - self.round_ended, 0.0), self.seconds_per_round)
        return max(self.seconds_left - passed, 0.0)

    def to_json(self) -> dict[str, Any]:
        """The snapshot as plain values; of a site, what it tells."""
        if self.kind == "site":
            told = {name: value for name, value in self.site.items() if name in FORMS["site"].model_fields}
            return {**told, "folder": self.folder, "label": self.label, "alive": self.alive}
        return {name: value for name, value in asdict(self).items() if name != "site"}


class Follower:
    """Follows one folder. `facts` are those of this very process; by default they are read from the folder."""

    def __init__(self, folder: Path, label: str = "", facts: Callable[[], Facts] | None = None) -> None:
        self.folder, self.label = folder, label or folder.resolve().name
        self._facts = facts if facts is not None else lambda: read_status(folder)
        self._logs = RunLogs(folder)
        self._read: dict[str, tuple[float, Any]] = {}  # small files, each with the time it was changed
        self._alone = threading.Lock()  # pages and Prometheus ask from several threads

    def look(self, now: float | None = None) -> Snapshot:
        """The folder as it stands now. What is wrong with it is an error where there is nothing else to show."""
        moment, facts = time.time() if now is None else now, self._facts()
        try:
            with self._alone:
                return self._site(facts, moment) if facts.get("kind") == "site" else self._run(facts, moment)
        except FAULTS as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            raise RunError(f"{self.folder} is damaged ({said}); copy it again, or remove it") from error

    def look_kindly(self, now: float | None = None) -> Snapshot:
        """The same, where whatever is wrong is told in the snapshot: others are watched beside it."""
        try:
            return self.look(now)
        except (RunError, OSError) as error:
            return Snapshot(str(self.folder), self.label, state="unreadable", problem=printable(str(error)))

    def _site(self, facts: Facts, now: float) -> Snapshot:
        alive = facts["state"] not in ENDED and self._is_heard_of(facts, now)
        return Snapshot(
            str(self.folder),
            self.label,
            "site",
            facts["state"] if alive or facts["state"] in ENDED else "gone",
            alive=alive,
            name=facts["client"],
            started=facts["started"],
            updated=facts["updated"],
            round=facts.get("round") or 0,
            sent=facts.get("sent"),
            received=facts.get("received"),
            memory=facts.get("memory", {}),
            disk_free=self._disk_free(facts, alive),
            potluck=facts["potluck"],
            flower=facts["flower"],
            pid=facts["pid"],
            notices=[(facts["noticed"], facts["notice"])] if facts["notice"] else [],
            site=dict(facts),
        )

    def _run(self, facts: Facts, now: float) -> Snapshot:
        self._logs.read()
        told, logs = self._told(facts, now), self._logs
        evaluations, times = logs.evaluations, logs.times
        settings, damage = self._small("environment.json", _settings)
        summary, more = self._small("summary.json", lambda value: {"stopped": value["stopped"]})
        told |= {
            "why": told.get("why") or printable(str(summary.get("stopped") or "")),
            "name": facts.get("name") or settings.get("name", ""),
            "method": facts.get("method") or settings.get("method", ""),
            "rounds": facts.get("rounds") or settings.get("rounds", 0),
            "round": times.round or facts.get("round", 0),
        }
        if told.get("kind", "run") == "run" and not settings.get("flower"):
            told["flower"] = None  # installed, but no part of this run
        ended = _changed(self.folder / "timing.jsonl") if times.round else None
        means, measure = _means(evaluations), _measure(evaluations, settings.get("metrics"))
        scores = [mean.score for _, mean in means if mean.score is not None]
        losses = [mean.loss for _, mean in means if mean.loss is not None]
        return Snapshot(
            str(self.folder),
            self.label,
            problem=logs.problem or damage or more,
            updated=facts.get("updated", ended),
            round_ended=ended,
            measure=measure,
            score=rounded(scores[-1]) if scores else None,
            best=rounded((max if measure.higher_is_better else min)(scores)) if scores else None,
            loss=rounded(losses[-1]) if losses else None,
            curve=_curve(means),
            seconds_per_round=times.seconds_per_round,
            seconds_left=_left(told, times.seconds_per_round),
            messages=dict(logs.traffic.bytes),
            clients=_clients(facts.get("clients", {}), evaluations),
            **told,
        )

    def _told(self, facts: Facts, now: float) -> dict[str, Any]:
        """What the process of a run tells of itself; of one that tells nothing, what its files say."""
        if not facts:
            return {"state": "finished" if _has(self.folder, "summary.json") else "unfinished"}
        ended = facts["state"] in ENDED
        alive = not ended and self._is_heard_of(facts, now)
        names = (
            "kind",
            "run",
            "why",
            "started",
            "sent",
            "received",
            "memory",
            "strangers",
            "notices",
        )
        about = ("potluck", "flower", "pid")
        return {name: facts[name] for name in (*names, *about)} | {
            "state": facts["state"] if alive or ended else "gone",
            "alive": alive,
            "disk_free": self._disk_free(facts, alive),
        }

    def _disk_free(self, facts: Facts, alive: bool) -> float:
        """The room on the disk: as its process told, or as it is now, where a full one may keep it from telling."""
        if not alive:
            with contextlib.suppress(OSError):
                return shutil.disk_usage(self.folder).free
        return float(facts["disk_free"])

    def _is_heard_of(self, facts: Facts, now: float) -> bool:
        """Whether a process told of itself just now. News from ahead of the clock is as old as its file is."""
        age: float = now - facts["updated"]
        if age < -STALE:  # a clock was set back, or another machine's is ahead
            file = status_file(self.folder)
            age = abs(now - ((file and _changed(file)) or 0.0))
        return age < STALE

    def _small(self, name: str, reads: Callable[[Any], dict[str, Any]]) -> tuple[dict[str, Any], str]:
        """What a small file says, and what is wrong with it; it is read again when it has changed."""
        path = self.folder / name
        changed = _changed(path)
        if changed is None:
            return {}, ""
        if self._read.get(name, (0.0, None))[0] != changed:
            try:
                self._read[name] = changed, (reads(read_json(path, follow=False)), "")
            except (RunError, *FAULTS) as error:
                self._read[name] = changed, ({}, printable(f"{path} is damaged: {error}", 300))
        values, problem = self._read[name][1]
        return values, problem


def _settings(about: Facts) -> dict[str, Any]:
    settings, metrics = about["settings"], about.get("metrics") or {}
    for name, facts in metrics.items():
        MetricFacts.from_json(name, facts)
    return {
        "name": printable(str(settings["name"])),
        "method": printable(str(settings["method"]["name"])),
        "rounds": round_of(settings["training"]["rounds"]),
        "flower": str((settings.get("engine") or {}).get("name", "")).startswith("flower"),
        "metrics": metrics,
    }


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _means(evaluations: Evaluations) -> list[tuple[int, Any]]:
    key = evaluations.headline
    return [] if key is None else [*evaluations.rounds[key].items()]


def _measure(evaluations: Evaluations, stored: Any) -> Measure:
    """What the clients are measured by, and which way is better."""
    names = sorted(evaluations.metrics) or ["accuracy"]
    facts = common_facts([metric_facts(name, stored or {}) for name in names])
    return Measure(measured({name: name for name in names}), facts.is_share, facts.higher_is_better)


def _curve(means: Sequence[tuple[int, Any]]) -> Curve:
    kept = thinned(means, POINTS)
    return Curve(
        tuple(round_ for round_, _ in kept),
        tuple(rounded(mean.score) for _, mean in kept),
        tuple(rounded(mean.loss) for _, mean in kept),
    )


def _left(told: Facts, per_round: float | None) -> float | None:
    """Seconds from the end of the last round to that of the run, if rounds take as long as the last ones did."""
    rest = int(told["rounds"]) - int(told["round"])
    if not told.get("alive") or told["state"] != "running" or per_round is None or rest <= 0:
        return None
    return round(per_round * rest, 3)


def _clients(board: Facts, evaluations: Evaluations) -> dict[str, ClientView]:
    """Who is on the board and who was measured, in the order of the board."""
    key = evaluations.headline
    scores = evaluations.last[key][1] if key in evaluations.last else {}
    known = {name: ClientView(**entry, score=rounded(scores.get(name))) for name, entry in board.items()}
    others = {name: ClientView(score=rounded(score)) for name, score in scores.items() if name not in known}
    return known | dict([*others.items()][:POINTS])


# --- several runs ---------------------------------------------------------------------------------------


class Watch:
    """Follows all runs in some folders; runs that begin later are found, too."""

    def __init__(
        self, folders: Sequence[Path], facts: Callable[[], Facts] | None = None, patient: bool = False
    ) -> None:
        """`facts` are those of this very process, where it watches itself.

        A `patient` watch also takes folders in which nothing is so far, or that are not there yet.
        """
        self.folders, self._own = folders, facts
        self._followers: dict[Path, Follower] = {}
        self._found: list[Path] = []
        self._searched = -RESCAN
        self._alone = threading.Lock()  # the page is asked from several threads
        for folder in folders:
            if facts is None and not is_watchable(folder) and not (patient and is_to_come(folder)):
                raise self.refusal(folder)

    def look(self) -> list[Snapshot]:
        """Every run as it stands now, in the order of the folders."""
        with self._alone:
            if time.monotonic() - self._searched >= RESCAN:
                self._search()
            return [self._followers[run].look_kindly() for run in self._found]

    def _search(self) -> None:
        """Find the runs that there are now."""
        own = self._own is not None
        each = [[folder] if own else find_runs(folder) for folder in self.folders]
        below = {
            run: len(run.parts) - len(folder.parts)
            for folder, runs in zip(self.folders, each, strict=True)
            for run in runs
        }
        self._found, self._searched = [*below], time.monotonic()
        labels = _labels(below)
        for run in self._found:
            self._followers.setdefault(run, Follower(run, facts=self._own)).label = labels[run]

    @property
    def absent(self) -> list[Path]:
        """The folders that are not there."""
        return [one for one in self.folders if not os.path.exists(one)]  # noqa: PTH110  (Path.exists raises)

    @staticmethod
    def refusal(folder: Path) -> RunError:
        """Why a folder cannot be watched."""
        return RunError(_refusal(folder))

    @property
    def may_grow(self) -> bool:
        """Whether further runs may begin in the folders: not where each is a run itself."""
        return not all(map(is_run, self.folders))

    @property
    def expects_more(self) -> bool:
        """Whether further runs are to be expected: not in runs, nor in comparisons that have a result."""
        return not all(is_run(one) or _has(one, *RESULTS) for one in self.folders)


def _refusal(folder: Path) -> str:
    if not folder.is_dir():
        remedy = "it is a file; name the folder of a run" if folder.exists() else "name that of a run"
        return f"there is no folder {folder}: {remedy}"
    return (
        f"there is no run in {folder}: give the folder of a run, a comparison or a federation, a folder with some "
        "of them, or the home of potluck join"
    )


def _has(folder: Path, *names: str) -> bool:
    """Whether one of these files can be seen in a folder: in one that may not be entered there is none."""
    return any(os.path.exists(folder / name) for name in names)  # noqa: PTH110  (Path.exists raises)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, also of one that is just beginning, or the home of a site."""
    return _has(folder, *SIGNS)


def is_watchable(folder: Path) -> bool:
    """Whether there is something to watch in a folder, or will be."""
    return bool(find_runs(folder)) or _has(folder, *COMPARED)


def is_to_come(folder: Path) -> bool:
    """Whether a folder is not there so far, or empty: a run may begin in it."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in it, by name; of very many, those begun last."""
    if is_run(folder):
        return [folder]
    found = [*_below(folder, DEEPEST)]
    if len(found) > MOST_RUNS:
        found.sort(key=lambda run: _changed(run) or 0.0)
    return sorted(found[-MOST_RUNS:])


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Runs inside a folder; links are not followed, and a run is not searched."""
    try:
        with os.scandir(folder) as entries:
            inner = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for path in inner:
        if is_run(path):
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from _below(path, depth - 1)


def _labels(below: Mapping[Path, int]) -> dict[Path, str]:
    """Short names by which the runs differ: the path below the folder that was named, and more where needed."""
    parts, more = {run: run.resolve().parts for run in below}, 0

    def named(run: Path) -> str:
        return printable("/".join(parts[run][-max(below[run], 1) - more :]))

    while more < 10 and len({named(run) for run in below}) < len(below):
        more += 1
    return {run: named(run) for run in below}
