"""`potluck doctor`: what is installed and found here, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from potluck.cli.options import RUNS, AsJson, Debug
from potluck.cli.screen import Screen
from potluck.version import __version__, install_command

State = Literal["ok", "missing", "broken"]

_EXTRA = re.compile(r"extra == ['\"]([^'\"]+)['\"]")
_NAME = re.compile(r"([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; what is broken makes potluck unusable here, what is missing does not."""

    about: str
    name: str
    state: State
    found: str
    remedy: str = ""


def doctor(json: AsJson = False, debug: Debug = False) -> None:
    """Show versions, devices, data and extras, and whether a run works here."""
    from potluck.cli.views.doctor import doctor_sheet

    screen = Screen(json)
    findings = [*_versions(), *_devices(), *_extras(), *_data(), _runs_folder(), _trial()]
    usable = all(one.state != "broken" for one in findings)
    if json:
        screen.data({"usable": usable, "findings": [asdict(one) for one in findings]})
    else:
        screen.sheet(doctor_sheet(findings, usable))
    if not usable:
        raise typer.Exit(1)


def _versions() -> Iterator[Finding]:
    import torch

    yield Finding("version", "potluck", "ok", __version__)
    yield Finding("version", "python", "ok", platform.python_version())
    yield Finding("version", "torch", "ok", str(torch.__version__))


def _devices() -> Iterator[Finding]:
    import torch

    yield Finding("device", "cpu", "ok", f"{os.cpu_count()} cores")
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        yield Finding("device", f"cuda:{number}", "ok", f"{about.name}, {about.total_memory / 2**30:.1f} GiB")
    if not torch.cuda.is_available():
        built = "none is found" if torch.version.cuda else "this torch is built without CUDA"
        yield Finding(
            "device", "cuda", "missing", built, "runs use the CPU; a GPU needs a CUDA build of torch"
        )


def _extras() -> Iterator[Finding]:
    """Every extra of the package, with the packages of it that are not installed."""
    for extra, packages in _packages_by_extra().items():
        missing = [package for package in packages if not _installed(package)]
        if missing:
            found = f"without {', '.join(missing)}"
            yield Finding("extra", extra, "missing", found, install_command(extra))
        else:
            yield Finding("extra", extra, "ok", ", ".join(packages))


def _packages_by_extra() -> dict[str, list[str]]:
    """The packages of each extra but `dev`; none for a source tree that was never installed."""
    lines = _requirements("potluck")
    extras = dict.fromkeys(found[1] for line in lines if (found := _EXTRA.search(line)))
    return {extra: [*dict.fromkeys(_packages("potluck", extra))] for extra in extras if extra != "dev"}


def _packages(distribution: str, extra: str) -> Iterator[str]:
    """What an extra of a package brings, and what the extras that it names bring: `flwr[simulation]`, ray."""
    for line in _requirements(distribution):
        found = _EXTRA.search(line)
        if found is not None and found[1] == extra:
            name, inner = _NAME.match(line).groups()  # type: ignore[union-attr]
            yield name
            for more in (inner or "").split(","):
                yield from _packages(name, more.strip())


def _requirements(distribution: str) -> list[str]:
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _data() -> Iterator[Finding]:
    """Every data set that is known by name: whether it can be read here without a network."""
    from potluck.data import load, names
    from potluck.data.registry import needed
    from potluck.errors import DataError, first_line

    shelf = os.environ.get("POTLUCK_DATA")
    yield Finding("data", "POTLUCK_DATA", "ok" if shelf else "missing", shelf or "not set", _ABOUT_DATA)
    with _without_hub():
        for name in (one for one in names() if not needed(one)):
            folder = _folder(name, shelf)
            try:
                load(name, labels_only=True)
            except DataError as error:
                found = first_line(error) if folder is not None else "not here"
                yield Finding("data", name, "missing", found, _how_to_get(name, str(error)))
            else:
                cached = "embedded" if _source(name) in ("digits", "noise") else "in the hub's cache"
                yield Finding("data", name, "ok", str(folder) if folder is not None else cached)


_ABOUT_DATA = (
    "set it to a folder with NAME/*.parquet for each data set, or name such a folder in an experiment (data.dir); "
    "else the hub fetches most at first use"
)


def _source(name: str) -> str:
    """The data set whose files are read: `cifar10` for `cifar10-captions`, which is made from it."""
    return name.partition("-")[0]


def _folder(name: str, shelf: str | None) -> Path | None:
    """The folder that the data set is read from, if it is there."""
    places = [Path(shelf, one) for one in (name, _source(name))] if shelf else []
    return next((place for place in places if place.exists()), None)


def _how_to_get(name: str, why: str) -> str:
    """What to do for a data set that is not here; some are read from a folder only."""
    place = f"POTLUCK_DATA/{_source(name)}"
    places = f"from {place} or an experiment's data.dir"
    return f"only {places}" if "the hub has no copy" in why else f"{places}, or the hub at first use"


@contextmanager
def _without_hub() -> Iterator[None]:
    """Look into the cache of the hub alone, and fetch nothing."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _runs_folder() -> Finding:
    """Whether results can be written where they go by default."""
    place = next(one for one in (RUNS, Path()) if one.exists())
    remedy = "go to a folder you may write to, or give --out"

    def write() -> str:
        with tempfile.TemporaryFile(dir=place):
            return str(RUNS.resolve())

    return _tried("results", "runs", write, remedy)


def _trial() -> Finding:
    """One round of two clients on the embedded digits, in a folder that is removed again."""

    def play() -> str:
        from potluck.experiment import Experiment
        from potluck.runs.api import run

        experiment = Experiment.make(
            data={"name": "digits", "samples": 60},
            partition={"kind": "iid", "clients": 2},
            models="mlp-small",
            method="fedavg",
            training={"rounds": 1},
            engine={"device": "cpu"},
        )
        with tempfile.TemporaryDirectory() as folder:
            run(experiment, out=Path(folder) / "run")
        return "a round of two clients works"

    return _tried(
        "self-check",
        "run",
        play,
        "install potluck again in a fresh environment",
    )


def _tried(about: str, name: str, work: Callable[[], str], remedy: str) -> Finding:
    try:
        return Finding(about, name, "ok", work())
    except Exception as error:  # whatever it is, it is a finding
        return Finding(about, name, "broken", f"{type(error).__name__}: {error}", remedy)
