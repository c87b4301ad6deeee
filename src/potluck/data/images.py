"""Image data sets: the embedded digits, and those used in papers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from potluck.core.dataset import Dataset
from potluck.core.task import Task
from potluck.data import parquet
from potluck.data.columns import IMAGE_COLUMNS, labels_of_splits
from potluck.data.own.arrays import from_arrays
from potluck.data.registry import register


@register("digits")
def _digits(dir: Path | None) -> Dataset:
    """scikit-learn's 1,797 hand-written digits, 8x8, embedded; no official test part."""
    images, labels = _embedded_digits()
    return from_arrays(
        (images[:, None] / 16).astype(np.float32),
        labels.copy(),
        name="digits",
        mean=(0.3053,),
        std=(0.3761,),
    )


@cache
def _embedded_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """What is in scikit-learn's text file, read once, and without loading scikit-learn, which takes a second."""
    found = find_spec("sklearn")
    assert found is not None, "scikit-learn is installed with this package"
    file = Path(str(found.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.exists():
        from sklearn.datasets import load_digits

        bunch = load_digits()
        return bunch.images, bunch.target
    rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


@dataclass(frozen=True)
class _ImageSet:
    location: parquet.Location
    classes: int
    input: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: tuple[str, ...] = ("label", "labels")


def _load_images(images: _ImageSet, dir: Path | None, *, labels_only: bool = False) -> Dataset:
    train, test = parquet.find(images.location, dir)
    y, train_rows = labels_of_splits(train, test, images.labels, images.classes)
    if labels_only:
        x = torch.zeros(1, *images.input, dtype=torch.uint8).expand(len(y), *images.input)
    else:
        x = torch.from_numpy(parquet.read_images(train + test, IMAGE_COLUMNS, images.input))
    return Dataset(
        name=images.location.name,
        task=Task("classification", images.classes, images.input),
        x=x,
        y=y,
        train_rows=train_rows,
        class_names=parquet.read_class_names(train, images.labels, images.classes),
        mean=images.mean,
        std=images.std,
    )


_IMAGE_SETS = (
    _ImageSet(
        parquet.Location("cifar10", "uoft-cs/cifar10", "plain_text"),
        classes=10,
        input=(3, 32, 32),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    _ImageSet(
        parquet.Location("fashion_mnist", "zalando-datasets/fashion_mnist", "fashion_mnist"),
        classes=10,
        input=(1, 28, 28),
        mean=(0.2860,),
        std=(0.3530,),
    ),
    _ImageSet(
        parquet.Location("mnist", "ylecun/mnist", "mnist"),
        classes=10,
        input=(1, 28, 28),
        mean=(0.1307,),
        std=(0.3081,),
    ),
    _ImageSet(
        parquet.Location("svhn", "ufldl-stanford/svhn", "cropped_digits"),
        classes=10,
        input=(3, 32, 32),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
    ),
    _ImageSet(
        parquet.Location("tiny_imagenet", "zh-plus/tiny-imagenet", splits=("train", "valid")),
        classes=200,
        input=(3, 64, 64),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
    ),
)
for _set in _IMAGE_SETS:
    register(_set.location.name)(partial(_load_images, _set))


@register("cifar100")
def _cifar100(
    dir: Path | None, *, labels: Literal["fine", "coarse"] = "fine", labels_only: bool = False
) -> Dataset:
    """CIFAR-100 with its 100 fine classes or its 20 coarse ones."""
    images = _ImageSet(
        parquet.Location("cifar100", "uoft-cs/cifar100", "cifar100"),
        classes=100 if labels == "fine" else 20,
        input=(3, 32, 32),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        labels=(f"{labels}_label",),
    )
    return _load_images(images, dir, labels_only=labels_only)
