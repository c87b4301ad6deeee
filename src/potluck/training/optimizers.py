"""Optimisers, parameter groups, gradient clipping and moments."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from potluck.core.packed import ALIGNMENT
from potluck.core.settings import OptimizerSettings
from potluck.core.state import Moments
from potluck.training.prefixes import closest_prefix


@dataclass(frozen=True)
class Group:
    """Settings of the parameters below a prefix: `groups={"small": Group(lr=0.1, clip=50)}`.

    If several prefixes match a parameter, the longest one counts.
    """

    lr: float | None = None
    clip: float | None = None
    weight_decay: float | None = None


@functools.lru_cache(maxsize=256)
def without_rate(settings: OptimizerSettings) -> OptimizerSettings:
    """The settings with the learning rate left out: it can change without a new optimiser."""
    return settings.model_copy(update={"lr": 1.0})


def clip_gradients(
    groups: Sequence[tuple[list[nn.Parameter], float]], constants: dict[Any, tuple[Tensor, Tensor]]
) -> None:
    """Clip each group's gradient to a largest norm; the norms of all groups take few operations.

    The results get new memory, as two gradients may be the same tensor.
    """
    if not groups:
        return
    gradients = [[value.grad for value in values if value.grad is not None] for values, _ in groups]
    norms = torch.stack(torch._foreach_norm([gradient for group in gradients for gradient in group]))
    members, limits = _membership(
        [len(group) for group in gradients], [limit for _, limit in groups], norms, constants
    )
    factors = (limits / ((members @ norms.square()).sqrt() + 1e-6)).clamp(max=1.0)
    for (values, _), group, factor in zip(groups, gradients, factors.unbind(), strict=True):
        for value, shortened in zip(values, torch._foreach_mul(group, factor), strict=True):
            value.grad = shortened


def _membership(
    sizes: Sequence[int], limits: Sequence[float], like: Tensor, constants: dict[Any, tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """A 0/1 matrix of groups by gradients, and the groups' limits; cached."""
    key = (tuple(sizes), tuple(limits))
    if key not in constants:
        members = np.repeat(np.eye(len(sizes)), sizes, axis=1)
        constants[key] = torch.from_numpy(members).to(like), torch.tensor(limits).to(like)
    return constants[key]


def build_optimizer(
    settings: OptimizerSettings, groups: list[dict[str, Any]]
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """A fused optimiser, and the memory of its state: zeroing that is the same as a new optimiser."""
    parameters = [value for group in groups for value in group["params"]]
    if settings.name == "sgd":
        options = {"momentum": settings.momentum, "nesterov": settings.nesterov}
        made: torch.optim.Optimizer = torch.optim.SGD(groups, **options, fused=True)  # type: ignore[arg-type]
    else:
        kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
        on_gpu = any(parameter.is_cuda for parameter in parameters)
        made = kind(groups, betas=settings.betas, fused=True, capturable=on_gpu)
    moving = []
    for key in _moving_names(settings):
        piece, parts = _together(parameters)
        moving.append(piece)
        for parameter, part in zip(parameters, parts, strict=True):
            made.state[parameter][key] = part
    if settings.name != "sgd" and parameters:
        steps = torch.zeros(len(parameters), dtype=torch.float32, device=parameters[0].device)
        moving.append(steps)
        for number, parameter in enumerate(parameters):
            made.state[parameter]["step"] = steps[number]
    return made, moving


def _moving_names(settings: OptimizerSettings) -> tuple[str, ...]:
    """The names of what an optimiser keeps per parameter, in its shape."""
    if settings.name != "sgd":
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if settings.momentum else ()


def fresh_moments(
    settings: OptimizerSettings,
    modules: Mapping[str, nn.Module],
    train: Sequence[str],
    lifetime: Literal["run", "round"] = "run",
) -> Moments:
    """Zero moments to declare, so that they are packed with the rest of the state from the start.

    `modules` are parts of the state by name; `train` is what `fit` will get.
    """
    moments = Moments(lifetime)
    for part, module in modules.items():
        for key, value in module.named_parameters():
            name = f"{part}/{key}"
            if value.requires_grad and closest_prefix(name, train) is not None:
                moments |= {f"{name}:{kept}": torch.zeros_like(value) for kept in _moving_names(settings)}
                moments |= {f"{name}:step": torch.zeros(())} if settings.name != "sgd" else {}
    return moments


def _together(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Zeros shaped like the parameters: one flat tensor, and its parts."""
    sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
    like = parameters[0] if parameters else torch.zeros(())
    piece = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
    parts = [
        part[: parameter.numel()].as_strided(parameter.shape, parameter.stride())
        for part, parameter in zip(torch.split(piece, sizes), parameters, strict=True)
    ]
    return piece, parts
