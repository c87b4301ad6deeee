"""The ablations and the results in `examples/` are experiments one can run: every variant in every setting."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from potluck.core.dataset import Dataset
from potluck.core.model import Model
from potluck.core.task import Task
from potluck.core.trial import trains_body
from potluck.data import DataConfig, from_arrays, registry
from potluck.errors import ConfigError
from potluck.experiment.overrides import read_yaml
from potluck.experiment.schema import Experiment
from potluck.kit.subnetworks import SubNetworks
from potluck.models import ModelPool
from potluck.runs.comparisons.plan import check_sweep, read_sweep
from potluck.runs.comparisons.play import check as check_experiment
from potluck.runs.comparisons.references import BASELINE, is_local

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
LIGHT = 10_000_000  # parameters of the pool; models of heavier ones have shapes here, and no numbers
BUILD = ModelPool._build
SHAPES_ALONE: dict[tuple[object, ...], Model] = {}  # the models that were built without memory
BUILT: dict[tuple[object, ...], Model] = {}  # those that have numbers
TRIED: dict[tuple[object, ...], bool] = {}  # what trials of a body have told


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


def without_memory(
    pool: ModelPool, key: str, task: Task, rep_dim: int | None, who: str, check: bool
) -> Model:
    """In place of `ModelPool._build`: methods that look at names and shapes see what they always see."""
    place = (str(pool._entries[key]), pool.rep_dim, pool.adapter, task, rep_dim)
    if place not in SHAPES_ALONE:
        with torch.device("meta"):
            SHAPES_ALONE[place] = BUILD(pool, key, task, rep_dim, who, check=False)
    return SHAPES_ALONE[place]


def built_once(pool: ModelPool, key: str, task: Task, rep_dim: int | None, who: str, check: bool) -> Model:
    """In place of `ModelPool._build`: experiments that are only asked whether they can begin share their models."""
    place = (str(pool._entries[key]), pool.rep_dim, pool.adapter, task, rep_dim, check, torch.empty(0).device)
    if place not in BUILT:
        BUILT[place] = BUILD(pool, key, task, rep_dim, who, check)
    return BUILT[place]


def tried_once(model: Model, task: Task) -> bool:
    """In place of `trains_body`: one trial for all experiments with the same layers, frozen or not."""
    layers = (str(model), task, *(parameter.requires_grad for parameter in model.parameters()))
    if layers not in TRIED:
        TRIED[layers] = trains_body(model, task)
    return TRIED[layers]


def is_light(experiment: Experiment, task: Task) -> bool:
    models = experiment.models
    pool = ModelPool(models.pool, models.rep_dim, adapter=models.adapter)
    built = [without_memory(pool, key, task, None, "", check=False) for key in pool.keys]
    return sum(parameter.numel() for model in built for parameter in model.parameters()) < LIGHT


def test_there_are_ablations() -> None:
    assert FILES


def test_the_docs_list_every_ablation() -> None:
    listed = (EXAMPLES.parent / "docs" / "ablations.md").read_text(encoding="utf-8").partition("\n## ")[0]
    named = set(re.findall(r"`(fed[a-z]+_\w+)`", listed))
    assert named == {file.stem for file in EXAMPLES.glob("ablations/*.yaml")}


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
def test_every_variant_can_begin(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting has a split, and every variant is taken by its method."""
    ask_every_variant(file, monkeypatch)


@pytest.mark.parametrize(
    ("name", "old", "new", "sentence"),
    [
        (
            "fedin_project",
            "fixed: {method.project: fixed}",
            "fixed: {method.project: none}",
            "set method.project",
        ),
        (
            "fedin_table4a",
            "models: resnet18",
            "models: [resnet18, resnet10]",
            "has another model than client 0",
        ),
        (
            "fedin_table5",
            "iid-N200: {",
            "iid-N200: {models: [resnet10, fedavg-cnn], ",
            "models of one family",
        ),
        ("fedre_weights", "rep_dim: 512", "rep_dim: null", "set models.rep_dim to one width"),
        (
            "fedre_table1",
            "classes_per_client: 2, clients: 10",
            "classes_per_client: 2, clients: 4",
            "holds class",
        ),
    ],
)
def test_a_variant_that_cannot_begin_is_found(
    name: str, old: str, new: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (EXAMPLES / "ablations" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / "broken.yaml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=sentence):
        ask_every_variant(tmp_path / "broken.yaml", monkeypatch)


def ask_every_variant(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_all(monkeypatch)
    for experiments in read_sweep(file).experiments.values():
        assert len(experiments) > 1
        assert any(map(is_local, experiments.values()))
        first, *others = experiments.values()
        data = data_of(first)
        split = first.make_split(data)
        if not is_light(first, data.task):
            monkeypatch.setattr(ModelPool, "_build", without_memory)
            monkeypatch.setattr(SubNetworks, "require_slice", lambda *_: None)  # it compares scores
        for experiment in others:
            check_experiment(experiment.variant(engine=experiment.engine.on_cpu()), data, split)


def pictures(name: str) -> registry.Loader:
    """What loads a data set of the right shapes without a picture in it."""

    def loader(dir: Path | None, *, labels_only: bool = False) -> Dataset:
        data = stand_in(name)
        return replace(data, x=data.x[:1].byte().expand(len(data), *data.x.shape[1:]))

    return loader


def reviews(dir: Path | None, *, vocabulary: int = 8_000, labels_only: bool = False) -> Dataset:
    y = np.arange(4_000) % 2
    data = from_arrays(np.stack([y + 2, y + 4], 1), y, test=(np.full((9, 2), 2), y[:9]), vocabulary=8)
    return replace(data, words={"a": 2, "photo": 3})


def stand_in_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stand-in be what is read under the name of a data set, public data included."""
    loaders = {name: pictures(name) for name in SHAPES} | {"sst2": reviews, "newsgroups20": reviews}
    monkeypatch.setattr(registry, "_LOADERS", registry._LOADERS | loaders)
    monkeypatch.setattr(ModelPool, "_build", built_once)
    monkeypatch.setattr("potluck.core.population.trains_body", tried_once)


@pytest.mark.parametrize("file", FEDERATIONS, ids=lambda file: file.stem)
def test_every_federation_can_begin(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method in the first setting, from random weights: there are no others here."""
    stand_in_for_all(monkeypatch)
    copy = tmp_path / file.name
    copy.write_text(file.read_text(encoding="utf-8").replace("weights: data/weights, ", ""))
    settings = read_sweep(copy).experiments
    assert all(BASELINE in experiments and len(experiments) > 1 for experiments in settings.values())
    first = next(iter(settings.values()))
    methods = {experiment.method.name: label for label, experiment in first.items()}
    check_sweep({"": {label: first[label] for label in methods.values()}})
