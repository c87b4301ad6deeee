"""The ablations and the results in `examples/` are experiments one can run: every variant in every setting."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from potluck.compare import BASELINE
from potluck.compare import check as check_experiment
from potluck.data import DataConfig, Dataset, from_arrays, sources
from potluck.experiment import Experiment, read_yaml
from potluck.models import ModelPool
from potluck.sweep import check_sweep, read_sweep
from potluck.task import Task

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(
    [*EXAMPLES.glob("ablations/*.yaml"), *EXAMPLES.glob("results/*.yaml"), *EXAMPLES.glob("mixed_*.yaml")]
)
FEDERATIONS = [file for file in FILES if "federation" in read_yaml(file)]
SHAPES = {  # classes, shape of a sample, training and test rows; all of them have equally many rows per class
    "cifar10": (10, (3, 32, 32), 50_000, 10_000),
    "cifar100": (100, (3, 32, 32), 50_000, 10_000),
    "fashion_mnist": (10, (1, 28, 28), 60_000, 10_000),
}
LIGHT = 10_000_000  # parameters of the pool; only models below that are built here


@cache
def stand_in(name: str) -> Dataset:
    """A data set with the right labels and no samples: enough to make a split and to ask a method."""
    classes, shape, train, test = SHAPES[name]
    rows = train + test
    x = torch.zeros(1, *shape).expand(rows, *shape)
    names = tuple(str(number) for number in range(classes))
    return Dataset(
        name, Task("classification", classes, shape), x, torch.arange(rows) % classes, train, names
    )


def data_of(experiment: Experiment) -> Dataset:
    assert isinstance(experiment.data, DataConfig)
    return stand_in(experiment.data.name)


def is_light(experiment: Experiment, task: Task) -> bool:
    pool = ModelPool(experiment.models.pool, experiment.models.rep_dim)
    return sum(pool.parameters(key, task) for key in pool.keys) < LIGHT


def test_there_are_ablations() -> None:
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_an_ablation_says_what_it_is(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.startswith("#")
    assert f"potluck compare {file.relative_to(EXAMPLES.parent)}" in text
    assert Experiment.load(file).name == file.stem


@pytest.mark.parametrize(
    "file",
    [file for file in FILES if file not in FEDERATIONS],
    ids=lambda file: f"{file.parent.name}/{file.stem}",
)
def test_every_variant_can_begin(file: Path) -> None:
    """Every setting has a split, and every variant suits it; in all settings but the first one variant is asked."""
    for number, experiments in enumerate(read_sweep(file).values()):
        assert len(experiments) > 1
        assert BASELINE in experiments
        first, *others = experiments.values()
        data = data_of(first)
        split = first.make_split(data)
        for experiment in others if number == 0 else others[:1]:
            if is_light(experiment, data.task):
                engine = experiment.engine.model_copy(update={"device": "cpu"})
                check_experiment(experiment.variant(engine=engine), data, split)


def pictures(name: str) -> sources.Loader:
    """What loads a data set of the right shapes without a picture in it."""

    def loader(dir: Path | None, *, labels_only: bool = False) -> Dataset:
        data = stand_in(name)
        return replace(data, x=data.x[:1].byte().expand(len(data), *data.x.shape[1:]))

    return loader


def reviews(dir: Path | None, *, vocabulary: int = 8_000, labels_only: bool = False) -> Dataset:
    y = np.arange(4_000) % 2
    data = from_arrays(np.stack([y + 2, y + 4], 1), y, test=(np.full((9, 2), 2), y[:9]), vocabulary=8)
    return replace(data, words={"a": 2, "photo": 3})


@pytest.mark.parametrize("file", FEDERATIONS, ids=lambda file: file.stem)
def test_every_federation_can_begin(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last variant of the first setting, from random weights: there are no others here."""
    loaders = {name: pictures(name) for name in SHAPES} | {"sst2": reviews, "newsgroups20": reviews}
    monkeypatch.setattr(sources, "_LOADERS", sources._LOADERS | loaders)
    copy = tmp_path / file.name
    copy.write_text(file.read_text(encoding="utf-8").replace("weights: data/weights, ", ""))
    settings = read_sweep(copy)
    assert all(BASELINE in experiments and len(experiments) > 1 for experiments in settings.values())
    first = next(iter(settings.values()))
    check_sweep({"": {label: first[label] for label in (BASELINE, [*first][-1])}})
