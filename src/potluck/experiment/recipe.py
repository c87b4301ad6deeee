"""The recipe of an experiment: what a process on another machine needs to make the same clients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.core.dataset import Dataset
from potluck.core.method import register_made
from potluck.data import Split
from potluck.data import registry as data_sets
from potluck.engine.registry import LOCAL
from potluck.errors import DataError
from potluck.experiment.export import to_values
from potluck.experiment.origins import registered_here
from potluck.experiment.settings import ExperimentSettings
from potluck.federation.builder import ClientBuilder
from potluck.federation.federation import Federation
from potluck.methods.registry import find_method
from potluck.models import registry as models
from potluck.plugins import imported_beside, split_name

Read = Callable[[Path, Mapping[str, Any]], Any]  # gives an `Experiment`, which is defined above this module
FILE = Path("experiment.yaml")  # as which the other process reads the settings


@dataclass(frozen=True)
class ExperimentRecipe:
    """Settings and split, and only where a file cannot say it all the objects that were given from Python.

    Data that settings name are loaded where the clients are made; their content must be the same there.
    """

    read: Read
    values: Mapping[str, Any]
    given: ExperimentSettings | None
    registered: tuple[tuple[str, str, Any], ...]
    split: Split
    fingerprints: tuple[str, ...]
    code: Mapping[str, Path]

    @classmethod
    def of(cls, experiment: ExperimentSettings, federation: Federation, read: Read) -> ExperimentRecipe:
        """The recipe of a federation that was built here."""
        plugins = (
            experiment.plugins if experiment.portable else ()
        )  # objects travel with what they are made of
        names = registered_here(experiment.method.name, experiment.groups, plugins)
        files = _code_files(experiment)
        return cls(
            read,
            _without_folders(to_values(_played_here(experiment)), files),
            None if experiment.portable else _absolute(experiment),
            tuple(map(_registered, names)),
            federation.split,
            _fingerprints(federation),
            files,
        )

    def files(self) -> Mapping[str, Path]:
        """Plugins, and the modules of the user's program."""
        return self.code

    def experiment(self, device: str) -> Any:
        """The experiment, to be played on a device of this machine."""
        for kind, name, made in self.registered:
            _register(kind, name, made)
        found = self.given if self.given is not None else self.read(FILE.absolute(), self.values)
        return _played_here(found, device)

    def clients(self, device: str) -> ClientBuilder:
        """Make the clients on a device of this machine."""
        built: Federation = self.experiment(device).build(split=self.split)
        if _fingerprints(built) != self.fingerprints:
            raise DataError(
                "its data are not those of the driver, though they have the same name; copy the driver's there"
            )
        return built.clients


def _played_here(experiment: Any, device: str = "auto") -> Any:
    """The same experiment on an engine of the machine that builds it."""
    here = experiment.engine.model_copy(
        update={"name": LOCAL, "device": device, "workers": 1, "address": None}
    )
    return experiment.variant(engine=here)


def _absolute(experiment: ExperimentSettings) -> ExperimentSettings:
    """The same experiment for a process that works in another folder."""
    other = experiment.model_copy()
    other._folder = experiment.folder.resolve()
    return other


def _fingerprints(federation: Federation) -> tuple[str, ...]:
    """Hashes of the content of all data, those that are public last."""
    data, public = federation.data, federation.population.public()
    parts = (data,) if isinstance(data, Dataset) else data
    shared = sorted(public.fingerprint.items()) if public is not None else ()
    return *(one.fingerprint for one in parts), *(f"{name} {found}" for name, found in shared)


# --- code of the user's ---------------------------------------------------------------------------------


def _code_files(experiment: ExperimentSettings) -> dict[str, Path]:
    """Plugin files, files of metrics and what they import from their folder; and the modules of the program."""
    texts = [*experiment.plugins, *(str(metric.name) for metric in experiment.metrics)]
    homes = [text if text.endswith(".py") else split_name(text)[0] for text in texts]
    named = [(experiment.folder / home).resolve() for home in homes if home.endswith(".py")]
    beside = {
        str(other.relative_to(file.parent)): other
        for file in named
        for other in imported_beside(file)
        if other.is_relative_to(file.parent)
    }
    return _program_files() | beside | {file.name: file for file in named}


def _program_files() -> dict[str, Path]:
    """The modules that lie beside the running script; installed ones are taken to be everywhere."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is None or main.__spec__ is not None:  # a notebook, or an installed module
        return {}
    folder = Path(script).resolve().parent
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] != "potluck"]
    files = {Path(file) for module in modules if (file := getattr(module, "__file__", None))}
    own = sorted(file for file in files if file.suffix == ".py" and file.is_relative_to(folder))
    return {str(file.relative_to(folder)): file for file in own if "site-packages" not in file.parts}


def _without_folders(values: Mapping[str, Any], files: Mapping[str, Path]) -> dict[str, Any]:
    """Settings in which the user's files are named as they are called in the other process's folder."""
    names = {str(file): name for name, file in files.items()}
    plugins = [names.get(plugin, plugin) for plugin in values["plugins"]]
    metrics = [_renamed(metric, names) for metric in values["metrics"]]
    return {**values, "plugins": plugins, "metrics": metrics}


def _renamed(metric: Any, names: Mapping[str, str]) -> Any:
    if isinstance(metric, Mapping):
        return {**metric, "name": _renamed(metric["name"], names)}
    home, function = split_name(str(metric))
    return f"{names[home]}:{function}" if home in names else metric


def _registered(name: str) -> tuple[str, str, Any]:
    """What this program registered under a name such as `model tiny`."""
    kind, _, key = name.partition(" ")
    finders: dict[str, Callable[[str], Any]] = {
        "method": find_method,
        "data": data_sets.find_loader,
        "model": models.lookup,
    }
    return kind, key, finders[kind](key)


def _register(kind: str, name: str, made: Any) -> None:
    """Register the same here."""
    if kind == "method":
        register_made(made)
    elif kind == "data":
        data_sets.register(name)(made)
    elif kind == "model":
        models.register(name, takes=made.takes, smallest=made.smallest)(made.builder)
