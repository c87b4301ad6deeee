"""What an experiment's settings stand for: its data, split, models, public samples and federation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.core.dataset import Data, Dataset
from potluck.core.method import Method, check_tasks
from potluck.core.own_metrics import own_metrics
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.data import (
    DataConfig,
    FeatureShiftConfig,
    NaturalConfig,
    PartitionConfig,
    Split,
    from_index_file,
    join_splits,
    make_split,
)
from potluck.data.public import choose_ids
from potluck.data.views import with_views
from potluck.errors import ConfigError
from potluck.experiment.blocks import AnyData, ClientGroup, IndexFile, Sites
from potluck.experiment.settings import ExperimentSettings
from potluck.federation.federation import Federation, simulated
from potluck.federation.groups import GroupData
from potluck.methods.registry import find_method
from potluck.models import ModelPool

NUMBERED = (PartitionConfig, FeatureShiftConfig)  # splits that number their clients

# --- data and split -------------------------------------------------------------------------------------


def load_data(experiment: ExperimentSettings, labels_only: bool = False) -> Data:
    """The data set, or one for each group of a federation; groups that name the same one share it."""
    check_data_here(experiment)
    found: list[tuple[ClientGroup, Dataset]] = []
    for group in experiment.groups:
        known = next((data for other, data in found if _same_data(other, group)), None)
        loaded = known or _load(experiment, group.data, labels_only, _column(group))
        found.append((group, loaded))
    data = tuple(loaded for _, loaded in found)
    return data if experiment.federation else data[0]


def check_data_here(experiment: ExperimentSettings) -> None:
    """Refuse an experiment whose data are at sites."""
    if isinstance(experiment.partition, Sites):
        raise ConfigError("the data of this experiment are at its sites: run it with potluck serve")


def _load(
    experiment: ExperimentSettings, data: AnyData, labels_only: bool = False, by: str | None = None
) -> Dataset:
    if isinstance(data, Dataset):
        return data
    return data.load(experiment.folder, labels_only=labels_only, by=by)


def _column(group: ClientGroup) -> str | None:
    """The column that a natural split goes by."""
    return group.partition.by if isinstance(group.partition, NaturalConfig) else None


def _same_data(one: ClientGroup, other: ClientGroup) -> bool:
    """Whether two groups have the same data, prepared the same way."""
    if one.data is other.data and isinstance(one.data, Dataset):
        return True
    return isinstance(one.data, DataConfig) and one.data == other.data and _column(one) == _column(other)


def split_data(experiment: ExperimentSettings, data: Data) -> Split:
    """Which client has which rows. Depends on the data, the partition and the split seed alone."""
    tree = experiment.all_seeds().tree("split")
    if isinstance(data, Dataset):
        return with_views(_split_group(experiment, experiment.groups[0], data, tree), data)
    splits = [
        with_views(_split_group(experiment, group, part, tree.child("group", place)), part)
        for place, (group, part) in enumerate(zip(experiment.groups, data, strict=True))
    ]
    return join_splits(splits, [isinstance(group.partition, NUMBERED) for group in experiment.groups])


def _split_group(experiment: ExperimentSettings, group: ClientGroup, data: Dataset, rng: Rng) -> Split:
    if isinstance(group.partition, Sites):
        raise ConfigError(
            "the sites of this experiment split nothing, as each brings its own data; leave out the split"
        )
    if isinstance(group.partition, Split):
        return group.partition
    if isinstance(group.partition, IndexFile):
        return from_index_file(experiment.folder / group.partition.file, data)
    return make_split(data, group.partition, rng)


def public_samples(
    experiment: ExperimentSettings, method: Method, own: Dataset | None = None, task: Task | None = None
) -> tuple[Dataset, np.ndarray] | None:
    """The public data (`own`: a copy that is already here) and the ids of the samples; none if unused.

    `task` is that of a client, for advice that fits it.
    """
    if not method.needs_public_data:
        return None
    if experiment.public is None:
        raise ConfigError(
            f"{method.name} needs public data; name some, for example {_public_example(task)}, or choose a method "
            f"that needs none, such as {'local' if method.tasks == 'any' else 'fedmrl'}"
        )
    data = own if own is not None else _load(experiment, experiment.public.data)
    return data, choose_ids(
        data, experiment.public.samples, experiment.all_seeds().tree("split").child("public")
    )


def _public_example(task: Task | None) -> str:
    """Public data that a client with this task could read."""
    if task is None or len(task.input) == 3:
        return "public: {data: cifar100, samples: 5000}"
    if task.kind == "retrieval":
        return "public: {data: cifar10-captions, samples: 5000}"
    if task.vocabulary:
        return "public: {data: sst2, samples: 5000}"
    shape = ", ".join(["samples", *map(str, task.input)])
    table = "public: {data: {name: files, path: public.csv, target: …}}, or " if len(task.input) == 1 else ""
    return f'{table}in Python public={{"data": potluck.from_arrays(x, y)}} with x of shape ({shape})'


# --- models ---------------------------------------------------------------------------------------------


def model_pool(experiment: ExperimentSettings) -> ModelPool:
    """The models that the experiment names."""
    chosen = experiment.models
    return ModelPool(chosen.pool, chosen.rep_dim, order=chosen.order, adapter=chosen.adapter)


def _assigned_pool(experiment: ExperimentSettings, split: Split, groups: Sequence[GroupData]) -> ModelPool:
    """Which client brings which model; each group of a federation deals out its own among its clients."""
    settings = experiment.models
    if not experiment.federation:
        pool = model_pool(experiment)
        pool.cover(split.ids)
        return pool
    entries: dict[str, Any] = {}
    sizes = [(group.data, group.clients) for group in groups]
    for group, (_, own) in zip(experiment.groups, split.by_group(sizes), strict=True):
        dealt = ModelPool(group.models, order=settings.order)
        dealt.cover(own.ids)
        entries |= {id: dealt.entry(place, id, len(own)) for place, id in enumerate(own.ids)}
    return ModelPool(entries, settings.rep_dim, adapter=settings.adapter)


# --- the federation -------------------------------------------------------------------------------------


def build_federation(
    experiment: ExperimentSettings, data: Data | None = None, split: Split | None = None
) -> Federation:
    """The federation that the experiment is about, checked by its method."""
    data = data if data is not None else load_data(experiment)
    split = split if split is not None else split_data(experiment, data)
    groups = group_data(experiment, data, split)
    pool = _assigned_pool(experiment, split, groups)
    method = find_method(experiment.method.name)(experiment.method, pool)
    parts = split.by_group([(group.data, group.clients) for group in groups])
    firsts = {own.ids[0]: one.task for one, own in parts}
    check_tasks(method, firsts)
    return simulated(
        method,
        groups,
        split,
        pool,
        seeds=experiment.all_seeds(),
        independent_init=experiment.models.init == "per_client",
        public=public_samples(experiment, method, task=next(iter(firsts.values()))),
        training=experiment.training.for_clients(),
        overrides=experiment.training.per_client,
        participation=experiment.training.participation,
        device=experiment.engine.torch_device(),
        precision=experiment.engine.precision,
        metrics=own_metrics(experiment.metrics, firsts, experiment.folder),
    )


def group_data(experiment: ExperimentSettings, data: Data, split: Split) -> tuple[GroupData, ...]:
    """What the clients of each group work on."""
    parts = (data,) if isinstance(data, Dataset) else data
    found: list[tuple[ClientGroup, GroupData]] = []
    for group, part in zip(experiment.groups, parts, strict=True):
        known = next((other for its, other in found if _same_data(its, group)), None)
        config = group.data if isinstance(group.data, DataConfig) else DataConfig(name=part.name)
        own = GroupData(
            part,
            _group_size(experiment, group, part) if experiment.federation else len(split),
            known.prepare if known else config.preparation(part).prepare,
            isinstance(group.data, DataConfig) and bool(config.augment.operations),
        )
        found.append((group, own))
    return tuple(own for _, own in found)


def _group_size(experiment: ExperimentSettings, group: ClientGroup, data: Dataset) -> int:
    if isinstance(group.partition, NUMBERED):
        return group.partition.clients
    return len(_split_group(experiment, group, data, Rng(0)))
