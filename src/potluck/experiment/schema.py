"""The experiment: validated settings that are read from a file and build what a run needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np

from potluck.core.dataset import Data, Dataset
from potluck.core.method import Method, register_again
from potluck.core.validation import validated
from potluck.data import Split
from potluck.errors import ConfigError
from potluck.experiment import build, export
from potluck.experiment.overrides import Override, apply_override, as_overrides, read_yaml
from potluck.experiment.recipe import ExperimentRecipe
from potluck.experiment.settings import ExperimentSettings
from potluck.federation.federation import Federation
from potluck.front_door import front_door
from potluck.methods.registry import method_names
from potluck.models import ModelPool
from potluck.plugins import listed, load_plugin

SEVERAL = ("variants", "sweep")  # keys of a file that holds several experiments: see `runs.comparisons.plan`


class Experiment(ExperimentSettings):
    """One experiment: what is trained, on what, by whom and how.

    `Experiment.load` reads a YAML file, `Experiment.make` takes Python values, among them data sets, splits and
    models given as objects.
    """

    @classmethod
    @front_door()
    def make(cls, **values: Any) -> Self:
        """An experiment from Python values; a wrong one raises a `ConfigError` of one sentence."""
        _load_plugins(values, Path())
        return super().make(**values)

    @classmethod
    @front_door()
    def load(cls, path: Path | str, overrides: Sequence[Override] = ()) -> Self:
        """Read a YAML file and apply overrides, which reach any leaf; its variants and sweep are left out."""
        return cls.of_file(Path(path), read_yaml(Path(path)), overrides)

    @classmethod
    def of_file(cls, path: Path, content: Mapping[str, Any], overrides: Sequence[Override] = ()) -> Self:
        """The experiment of a file whose content was read before; the file is not read again."""
        values = copy.deepcopy({key: value for key, value in content.items() if key not in SEVERAL})
        for override in as_overrides(overrides):
            _refuse_several(override)
            apply_override(values, override)
        _load_plugins(values, path.resolve().parent)
        for override in as_overrides(overrides):
            _refuse_method(override)
        experiment = validated(cls, {"name": path.stem} | values)
        experiment._folder = path.resolve().parent
        return experiment

    def to_yaml(self) -> str:
        """The whole experiment with every default written out; paths become absolute."""
        return export.to_yaml(self)

    @front_door()
    def load_data(self, labels_only: bool = False) -> Data:
        """The data set, or one for each group of a federation."""
        return build.load_data(self, labels_only)

    @front_door()
    def make_split(self, data: Data) -> Split:
        """Which client has which rows of the data."""
        return build.split_data(self, data)

    def pool(self) -> ModelPool:
        """The models that the experiment names."""
        return build.model_pool(self)

    @front_door()
    def public_samples(self, method: Method, own: Dataset | None = None) -> tuple[Dataset, np.ndarray] | None:
        """The public data (`own`: a copy that is already here) and the ids of the samples; none if unused."""
        return build.public_samples(self, method, own)

    @front_door()
    def build(self, data: Data | None = None, split: Split | None = None) -> Federation:
        """The federation that the experiment is about, checked by its method."""
        federation = build.build_federation(self, data, split)
        federation.clients.recipe = lambda: ExperimentRecipe.of(self, federation, type(self).of_file)
        return federation


def _refuse_several(override: Override) -> None:
    """Refuse to change a block that only stands in a file."""
    key = override.partition("=")[0].partition(".")[0] if isinstance(override, str) else ""
    if key in SEVERAL:
        raise ConfigError(f"{override!r}: write {key} into the file; potluck compare runs them")


def _refuse_method(override: Override) -> None:
    """Refuse `fedmrl.d1=50`, which has a meaning only where several methods are compared."""
    method, _, option = override.partition(".") if isinstance(override, str) else ("", "", "")
    if option and method not in Experiment.model_fields and method in method_names():
        raise ConfigError(f"{override!r}: write method.{option}; only potluck compare has options by method")


def load_plugins(path: Path | str, overrides: Sequence[Override] = ()) -> None:
    """Load what an experiment file names under `plugins`, so that a command can name its methods."""
    _load_plugins({"plugins": _plugins_of(Path(path), overrides)}, Path(path).resolve().parent)


def with_plugins(path: Path | str, overrides: Sequence[str], plugins: Sequence[Path | str]) -> list[str]:
    """Overrides of a file that also load `plugins`, after those that the file and the overrides name.

    A relative path among `plugins` is seen from here; those in the file are seen from its folder.
    """
    if not plugins:
        return list(overrides)
    own = _plugins_of(Path(path), overrides)
    _check_plugins(own)
    names = [*map(str, own), *listed(plugins)]
    others = [override for override in overrides if not _is_about_plugins(override)]
    return [f"plugins={json.dumps(list(dict.fromkeys(names)))}", *others]


def also_loading(experiment: Experiment, plugins: Sequence[str]) -> Experiment:
    """An experiment made in Python that also loads these plugins."""
    if not plugins:
        return experiment
    _load_plugins({"plugins": plugins}, Path())
    return experiment.variant(plugins=tuple(dict.fromkeys([*experiment.plugins, *plugins])))


def _plugins_of(path: Path, overrides: Sequence[Override]) -> Any:
    """What a file names under `plugins`, as the overrides change it."""
    values = read_yaml(path)
    for override in as_overrides(overrides):
        if _is_about_plugins(override):
            apply_override(values, override)
    return values.get("plugins") or ()


def _is_about_plugins(override: Override) -> bool:
    return isinstance(override, str) and override.partition("=")[0].partition(".")[0] == "plugins"


def _check_plugins(plugins: Any) -> None:
    if not isinstance(plugins, list | tuple):
        raise ConfigError(f"plugins: give a list of files or modules, such as [mine.py] (given: {plugins!r})")


def _load_plugins(values: Mapping[str, Any], folder: Path) -> None:
    plugins = values.get("plugins") or ()
    _check_plugins(plugins)
    homes: dict[str, tuple[Any, ModuleType]] = {}
    for plugin in plugins:
        if not isinstance(plugin, str | Path):
            raise ConfigError(f"plugins: {plugin!r} is neither a .py file nor a module; check the name")
        module = load_plugin(str(plugin), folder)
        for method in sorted(register_again(module)):
            other, known = homes.setdefault(method, (plugin, module))
            if known is not module:
                raise ConfigError(
                    f"plugins: {other} and {plugin} both define the method {method!r}; give one another name"
                )
