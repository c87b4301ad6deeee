"""Advice before a run: settings that are allowed but often a mistake."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.core.card import ClientId
from potluck.core.task import Task
from potluck.errors import ModelError
from potluck.federation.world import World
from potluck.models.probe import attempt, sample_batch, trial_copy

ENOUGH = 8  # values per channel for a usable mean and variance in batch norm


def advice(world: World) -> Iterator[str]:
    """One sentence for each thing the user should know before this run begins."""
    single = [client for client in world.trainers if world.samples(client)["train"] == 1]
    if single:
        yield (
            f"{_count(world, single)} a single training sample (client {single[0]}), and whatever leaves such a "
            "client tells of that sample alone; partition.min_size asks for more"
        )
    uniform = [client for client in world.trainers if client not in single and _has_one_class(world, client)]
    if uniform:
        label = world.ground(uniform[0]).data.class_names[world.classes_held(uniform[0])[0]]
        yield (
            f"{_count(world, uniform)} training samples of one class alone (client {uniform[0]}: {label}), and can "
            f"learn to name it whatever they see{world.method.with_one_class}"
        )
    short = _too_small_for_batch_norm(world)
    if short:
        smallest = min(short, key=lambda client: short[client])
        yield (
            f"{len(short)} of {len(world.trainers)} clients end every epoch with a batch too small for batch norm "
            f"(client {smallest}, {world.label(smallest)}: {short[smallest]} samples), which can undo what "
            "they learned; training.last_batch: drop leaves such a batch out, wrap fills it up"
        )


def _count(world: World, some: list[ClientId]) -> str:
    return f"{len(some)} of {len(world.trainers)} clients {'has' if len(some) == 1 else 'have'}"


def _has_one_class(world: World, client: ClientId) -> bool:
    task = world.task_of(client)
    return task.single_label and task.classes > 1 and len(world.classes_held(client)) == 1


def _too_small_for_batch_norm(world: World) -> dict[ClientId, int]:
    """Clients whose last batch is too small for batch norm though a full one is not, with its number of samples."""
    left = {
        client: samples for client in world.trainers if 1 < (samples := _left_over(world, client)) < ENOUGH
    }
    positions = {
        form: _positions(world, *form) for form in dict.fromkeys(_form(world, client) for client in left)
    }
    return {
        client: samples
        for client, samples in left.items()
        if (each := positions[_form(world, client)]) is not None
        and samples * each < ENOUGH <= world.client_training(client).batch_size * each
    }


def _left_over(world: World, client: ClientId) -> int:
    """The size of a client's short last batch, 0 if there is none. Training leaves out a batch of one sample."""
    training, samples = world.client_training(client), world.samples(client)["train"]
    keeps = training.last_batch == "keep" and samples > training.batch_size
    return samples % training.batch_size if keeps else 0


def _form(world: World, client: ClientId) -> tuple[str, Task]:
    return world.architecture(client), world.task_of(client)


def _positions(world: World, architecture: str, task: Task) -> int | None:
    """The fewest values per sample and channel that a batch norm of the model sees; None without a trained one."""
    if not world.pool.has_batch_norm(architecture, task):
        return None
    with torch.random.fork_rng(devices=[]):
        return _fewest_values(world.pool.build(architecture, task), task)


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
