"""What is worth a word before a run begins: nothing is wrong, but it may not do what one hopes for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.core.card import ClientId
from potluck.core.task import Task
from potluck.core.trial import attempt, sample_batch, trial_copy
from potluck.errors import ModelError
from potluck.federation.federation import Federation

ENOUGH = 8  # values per channel whose mean and variance say something of the others'


def advice(federation: Federation) -> Iterator[str]:
    """A sentence for everything one should know about this run before it begins."""
    single = [
        client
        for client in federation.population.trainers
        if federation.population.samples(client)["train"] == 1
    ]
    if single:
        yield (
            f"{_count(federation, single)} a single training sample (client {single[0]}), and whatever leaves such a "
            "client tells of that sample alone; partition.min_size asks for more"
        )
    uniform = [
        client
        for client in federation.population.trainers
        if client not in single and _has_one_class(federation, client)
    ]
    if uniform:
        label = federation.population.class_names(uniform[0])[
            federation.population.classes_held(uniform[0])[0]
        ]
        yield (
            f"{_count(federation, uniform)} training samples of one class alone (client {uniform[0]}: {label}), and can "
            f"learn to name it whatever they see{federation.method.with_one_class}"
        )
    short = _too_small_for_batch_norm(federation)
    if short:
        smallest = min(short, key=lambda client: short[client])
        yield (
            f"{len(short)} of {len(federation.population.trainers)} clients end every epoch with a batch too small for batch norm "
            f"(client {smallest}, {federation.population.label(smallest)}: {short[smallest]} samples), which can undo what "
            "they learned; training.last_batch: drop leaves such a batch out, wrap fills it up"
        )


def _count(federation: Federation, some: list[ClientId]) -> str:
    return (
        f"{len(some)} of {len(federation.population.trainers)} clients {'has' if len(some) == 1 else 'have'}"
    )


def _has_one_class(federation: Federation, client: ClientId) -> bool:
    task = federation.population.task_of(client)
    return task.single_label and task.classes > 1 and len(federation.population.classes_held(client)) == 1


def _too_small_for_batch_norm(federation: Federation) -> dict[ClientId, int]:
    """Whose last batch gives batch norm too few values, where whole ones give enough, and its number of samples."""
    left = {
        client: samples
        for client in federation.population.trainers
        if 1 < (samples := _left_over(federation, client)) < ENOUGH
    }
    positions = {
        form: _positions(federation, *form)
        for form in dict.fromkeys(_form(federation, client) for client in left)
    }
    return {
        client: samples
        for client, samples in left.items()
        if (each := positions[_form(federation, client)]) is not None
        and samples * each < ENOUGH <= federation.clients.client_training(client).batch_size * each
    }


def _left_over(federation: Federation, client: ClientId) -> int:
    """The samples of a client's short last batch, 0 where there is none; a single one is left out anyway."""
    training, samples = (
        federation.clients.client_training(client),
        federation.population.samples(client)["train"],
    )
    keeps = training.last_batch == "keep" and samples > training.batch_size
    return samples % training.batch_size if keeps else 0


def _form(federation: Federation, client: ClientId) -> tuple[str, Task]:
    return federation.population.architecture(client), federation.population.task_of(client)


def _positions(federation: Federation, architecture: str, task: Task) -> int | None:
    """Over how many values per sample the coarsest batch norm of a model averages; None if none learns."""
    if not federation.clients.models.pool.has_batch_norm(architecture, task):
        return None
    with torch.random.fork_rng(devices=[]):
        return _coarsest(federation.clients.models.pool.build(architecture, task), task)


def _coarsest(model: nn.Module, task: Task) -> int | None:
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
        return None  # advice is no reason to stop
    return min(seen, default=None)
