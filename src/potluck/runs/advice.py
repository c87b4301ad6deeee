"""Advice before a run: settings that are allowed but often a mistake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.core.card import ClientId
from potluck.core.dataset import Dataset
from potluck.core.population import Population
from potluck.core.task import Task
from potluck.core.trial import attempt, sample_batch, trial_copy
from potluck.errors import ModelError
from potluck.federation.federation import Federation
from potluck.models import ModelPool
from potluck.runs.column_advice import column_advice

ENOUGH = 8  # values per channel for a usable mean and variance in batch norm
LARGE = 10.0  # of numbers to predict: far from what a fresh model gives, and its squared error is a hundred


def advice(federation: Federation, elsewhere: bool = False) -> Iterator[str]:
    """One sentence for each thing the user should know before this run begins.

    `elsewhere` says that clients train on the machines of a cluster, whose devices are not known here.
    """
    population, sizes = federation.population, federation.split.clients.sizes
    trained = np.array([client not in population.held_out for client in population.ids])
    if len(population) == 1:
        yield (
            f"there is one client alone (client {population.ids[0]}), so nothing is shared between clients, and "
            "no method can learn from others; ask for more with partition.clients, or give the data of several"
        )
    single = _at(population, trained & (sizes[:, 0] == 1))
    if single:
        yield (
            f"{_count(population, single)} a single training sample (client {single[0]}), and whatever leaves such "
            "a client tells of that sample alone; partition.min_size asks for more"
        )
    alike = _at(population, trained & (sizes[:, 0] > 1) & _have_one_label(federation))
    uniform = [client for client in alike if _has_one_class(population, client)]
    if uniform:
        label = population.class_names(uniform[0])[population.classes_held(uniform[0])[0]]
        yield (
            f"{_count(population, uniform)} training samples of one class alone (client {uniform[0]}: {label}), "
            f"and can learn to name it whatever they see{federation.method.with_one_class}"
        )
    if federation.precision == "tf32" and federation.device.type == "cpu" and not elsewhere:
        yield "engine.precision: tf32 is for GPUs and changes nothing here: this run computes in float32"
    yield from filter(None, (_about_labels(group.data) for group in federation.clients.groups))
    yield from column_advice(federation)
    yield from _about_tests(population, _at(population, sizes[:, 2] == 0))
    yield from federation.method.advice(population)
    short = _too_small_for_batch_norm(federation)
    if short:
        smallest = min(short, key=lambda client: short[client])
        yield (
            f"{len(short)} of {len(population.trainers)} clients end every epoch with a batch too small for "
            f"batch norm (client {smallest}, {population.label(smallest)}: {short[smallest]} samples), which can "
            "undo what they learned; training.last_batch: drop leaves such a batch out, wrap fills it up"
        )


def _at(population: Population, chosen: np.ndarray) -> list[ClientId]:
    """The clients at the places that are true: facts of a million are not looked up one by one."""
    return [population.ids[place] for place in np.flatnonzero(chosen).tolist()]


def _have_one_label(federation: Federation) -> np.ndarray:
    """Whether all training rows of a client have one label; true of those whose samples have several labels."""
    found = []
    for place, group in enumerate(federation.clients.groups):
        split = federation.clients.clients_of(place)
        sizes, labels = split.sizes[:, 0], group.data.y
        alike = np.ones(len(split), dtype=bool)
        if len(group.data) and labels.dim() == 1:
            own = labels.cpu().numpy()[split.part("train")[0]]
            starts = (np.cumsum(sizes) - sizes)[sizes > 0]
            same = own == np.repeat(own[starts], sizes[sizes > 0])
            alike[sizes > 0] = np.logical_and.reduceat(same, starts) if len(starts) else True
        found.append(alike)
    return np.concatenate(found)


def _about_tests(population: Population, untested: Sequence[ClientId]) -> Iterator[str]:
    """Clients that are not tested though others are: every mean is without them."""
    if 0 < len(untested) < len(population):
        have, them = ("has", "it") if len(untested) == 1 else ("have", "them")
        yield (
            f"{len(untested)} of {len(population)} clients {have} no test samples (client {untested[0]}), so the "
            f"mean of test scores leaves {them} out"
        )


def _count(population: Population, some: list[ClientId]) -> str:
    return f"{len(some)} of {len(population.trainers)} clients {'has' if len(some) == 1 else 'have'}"


def _has_one_class(population: Population, client: ClientId) -> bool:
    task = population.task_of(client)
    return task.single_label and task.classes > 1 and len(population.classes_held(client)) == 1


def _about_labels(data: Dataset) -> str | None:
    """Labels that are all equal or not learned, a class 0 without samples, numbers of an unusual scale."""
    if not len(data):
        return None
    if data.task.kind == "regression":
        return _about_numbers(data)
    if data.task.single_label:
        return _about_classes(data)
    return None


def _about_classes(data: Dataset) -> str | None:
    taught, every = (set(part.tolist()) for part in (data.y[: data.train_rows], data.y))
    unseen = sorted(every - taught)
    if len(every) == 1:
        return (
            f"every sample of {data.name!r} has the same label, {min(every)}: there is nothing to tell apart"
        )
    if unseen and taught:
        names = ", ".join(data.class_names[label] for label in unseen[:5])
        return (
            f"{len(unseen)} of the classes that {data.name!r} is tested on never occur in its training part "
            f"({names}), so no model can name them; check the labels of both parts"
        )
    if int(data.y.min()) > 0:
        return (
            f"no sample of {data.name!r} has class 0, its labels reach from {int(data.y.min())} to "
            f"{int(data.y.max())}, and models have an output for {data.task.counted}; number classes from 0"
        )
    return None


def _about_numbers(data: Dataset) -> str | None:
    y = data.y[: data.train_rows].double()
    if len(y) > 1 and bool((y == y[:1]).all()):
        return f"all numbers to predict in {data.name!r} are equal, so there is nothing to learn; check y"
    deviation, mean = float(y.std(0).max()), float(y.mean(0).abs().max())
    if max(deviation, mean) <= LARGE:
        return None
    return (
        f"the numbers to predict in {data.name!r} are large (mean {mean:.3g}, standard deviation {deviation:.3g}), "
        "and the loss grows with their square; subtract the mean and divide by the deviation first"
    )


def _too_small_for_batch_norm(federation: Federation) -> dict[ClientId, int]:
    """Clients whose last batch is too small for batch norm though a full one is not, with its number of samples."""
    population, clients = federation.population, federation.clients
    pool, some = clients.models.pool, population.representatives
    if not any(
        pool.has_batch_norm(population.architecture(client), population.task_of(client)) for client in some
    ):
        return {}
    left = {client: samples for client, samples in _left_over(federation) if 1 < samples < ENOUGH}
    forms = {client: (population.architecture(client), population.task_of(client)) for client in left}
    positions = {form: _positions(pool, *form) for form in dict.fromkeys(forms.values())}
    return {
        client: samples
        for client, samples in left.items()
        if (each := positions[forms[client]]) is not None
        and samples * each < ENOUGH <= clients.client_training(client).batch_size * each
    }


def _left_over(federation: Federation) -> Iterator[tuple[ClientId, int]]:
    """The size of each client's short last batch, 0 if there is none. Training leaves out a batch of one sample."""
    sizes = federation.split.clients.sizes[:, 0].tolist()
    for client, samples in zip(federation.population.ids, sizes, strict=True):
        training = federation.clients.client_training(client)
        keeps = training.last_batch == "keep" and samples > training.batch_size
        if client not in federation.population.held_out:
            yield client, samples % training.batch_size if keeps else 0


def _positions(pool: ModelPool, architecture: str, task: Task) -> int | None:
    """The fewest values per sample and channel that a batch norm of the model sees; None without a trained one."""
    if not pool.has_batch_norm(architecture, task):
        return None
    with torch.random.fork_rng(devices=[]):
        return _fewest_values(pool.build(architecture, task), task)


def _fewest_values(model: nn.Module, task: Task) -> int | None:
    tried, seen = trial_copy(model), list[int]()
    batch = sample_batch(task, tried)

    def look(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        (x,) = (*inputs, *named.values())
        seen.append(x.numel() // (x.shape[1] * len(batch)))

    for name, norm in model.train().named_modules():
        if isinstance(norm, _BatchNorm) and norm.training:
            tried.get_submodule(name).register_forward_pre_hook(look, with_kwargs=True)
    try:
        attempt(tried, tried, batch)
    except ModelError:
        return None  # advice must not stop a run
    return min(seen, default=None)
