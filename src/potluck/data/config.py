"""The `data` section of an experiment: which data set, from where, and how its samples are prepared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from potluck.core.dataset import Dataset
from potluck.core.settings import Strict
from potluck.data import registry
from potluck.data.own.arrays import TaskName
from potluck.data.own.encoding import Missing
from potluck.data.own.frames import Standardize
from potluck.data.prepare import PRESETS, AugmentConfig, Preparation
from potluck.errors import DataError
from potluck.files import in_home


class Normalisation(BaseModel):
    """Mean and standard deviation on the 0..1 scale: one number for all channels, or one for each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]


class FileOptions(Strict):
    """The keys of `data: {name: files, …}`; see `from_files`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | list[str] | dict[str, Any] | None = None  # a pattern, a list, or files by client
    target: str | list[str] | None = None  # the column to predict, or several
    task: TaskName | None = None  # none: from the target
    features: list[str] | None = None  # columns to learn from; none: all others
    categorical: str | list[str] | dict[str, list[Any]] | None = None  # none: all texts
    by: str | None = None  # the column that names the client
    missing: Missing | None = None  # none: refuse
    standardize: Standardize | None = None  # none: client
    class_names: list[str] | None = None  # in the order of their numbers; none: sorted


PREPARATION = ("samples", "normalize", "augment")  # keys that are for any data set


class DataConfig(FileOptions):
    """A data set by name, and its preparation."""

    name: str = "digits"
    dir: Path | None = None  # relative to the experiment file; none: POTLUCK_DATA, else the hub
    # Rows of the training part to use, and at most as many of the test part.
    samples: int | None = Field(default=None, ge=1)
    normalize: bool | Normalisation = True  # true: the preset's mean and std, else the data set's own
    augment: AugmentConfig = AugmentConfig()
    labels: Literal["fine", "coarse"] | None = None  # cifar100; none: fine
    vocabulary: int | None = Field(default=None, ge=1)  # text: size of the vocabulary of words
    length: int | None = Field(default=None, ge=1)  # text: number of words read from a sample
    strip_headers: bool | None = None  # newsgroups20; none: true
    tokenizer: str | None = None  # text: a folder (from the experiment file), or hub repository; none: words
    options: dict[str, Any] = {}  # further options of a registered data set

    def load(
        self, base_dir: Path | str | None = None, *, labels_only: bool = False, by: str | None = None
    ) -> Dataset:
        """The data set, with the mean and std to use; `dir` is relative to `base_dir`."""
        folder = in_home(self.dir) if self.dir is not None else None
        if base_dir is not None and (folder is not None or self.path is not None):
            folder = Path(base_dir) / (folder or "")
        if self.dir is not None and self.name in EMBEDDED:
            raise DataError(f"data set {self.name!r} is read from no folder: leave out dir")
        named = {key: getattr(self, key) for key in (*_TEXT_KEYS, *FileOptions.model_fields)}
        named["by"] = self.by or (by if self.path is not None else None)
        named["tokenizer"] = self.tokenizer_from(base_dir)
        options = {key: value for key, value in named.items() if value is not None} | self.options
        for key in ("path", "target") if self.name == "files" else ():
            if key not in options:
                raise DataError(f"data: the files need the key {key!r}")
        if self.name in registry.names():
            registry.check_options(self.name, options, PREPARATION)
        dataset = registry.load(self.name, folder, labels_only=labels_only, **options)
        if self.samples is not None:
            dataset = registry.fewer(dataset, self.samples)
        mean, std = self._normalisation(dataset)
        return replace(dataset, mean=mean, std=std)

    @property
    def by_client(self) -> bool:
        """Whether the data come client by client and need no partition."""
        return self.name == "files"

    def tokenizer_from(self, base_dir: Path | str | None) -> str | None:
        """The tokenizer's folder relative to `base_dir` if it exists, else the name as given."""
        if self.tokenizer is None:
            return None
        folder = Path(base_dir or ".") / in_home(self.tokenizer)
        return str(folder.resolve()) if folder.is_dir() else self.tokenizer

    def preparation(self, dataset: Dataset) -> Preparation:
        """The preparation for batches of a data set from `load`."""
        if self.augment.operations and len(dataset.task.input) != 3:
            raise DataError(f"data set {dataset.name!r} has no images to augment: leave out augment")
        if self.augment.operations and dataset.task.kind == "segmentation":
            raise DataError(
                f"data set {dataset.name!r} names pixels, which augmentation would move: leave out augment"
            )
        return Preparation(dataset.mean, dataset.std, self.augment)

    def _normalisation(self, dataset: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.normalize is False:
            if dataset.task.kind == "retrieval":
                raise DataError(
                    f"data set {dataset.name!r} is made of normalised images: leave out normalize"
                )
            return (), ()
        mean, std = dataset.mean, dataset.std
        if isinstance(self.normalize, Normalisation):
            mean, std = _channels(dataset, self.normalize.mean), _channels(dataset, self.normalize.std)
        elif self.augment.preset is not None and len(dataset.task.input) == 3:
            table = PRESETS[self.augment.preset].normalisation
            own = table.get(dataset.name, table.get("*", (mean, std)))
            mean, std = _channels(dataset, own[0]), _channels(dataset, own[1])
        if std and min(std) <= 0:
            raise DataError(
                f"data set {dataset.name!r} cannot be normalised with the std {min(std)}: give a positive one"
            )
        return mean, std


EMBEDDED = ("digits", "digits-attributes", "digits-segments", "digits-captions", "noise")
_TEXT_KEYS = ("labels", "vocabulary", "length", "strip_headers")


def _channels(dataset: Dataset, values: float | tuple[float, ...]) -> tuple[float, ...]:
    if len(dataset.task.input) not in (2, 3):
        raise DataError(f"data set {dataset.name!r} has no channels to normalise: leave out normalize")
    channels = dataset.task.input[0]
    values = values if isinstance(values, tuple) else (values,)
    if len(values) == 1:
        return values * channels
    if len(values) not in (0, channels):
        raise DataError(
            f"data set {dataset.name!r} has {channels} channels, but normalize gives {len(values)} values"
        )
    return values
