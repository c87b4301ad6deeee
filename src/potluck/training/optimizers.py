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
from potluck.training.watched import is_watched

_State = dict[str, Tensor]


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


def clip_factors(
    groups: Sequence[tuple[list[nn.Parameter], float]], constants: dict[Any, tuple[Tensor, Tensor]]
) -> tuple[Tensor, ...]:
    """What shortens each group's gradient to its largest norm, 1 if it is no longer; few operations for all."""
    if not groups:
        return ()
    gradients = [[value.grad for value in values if value.grad is not None] for values, _ in groups]
    norms = torch.stack(torch._foreach_norm([gradient for group in gradients for gradient in group]))
    members, limits = _membership(
        [len(group) for group in gradients], [limit for _, limit in groups], norms, constants
    )
    return (limits / ((members @ norms.square()).sqrt() + 1e-6)).clamp(max=1.0).unbind()


def shorten_gradients(values: list[nn.Parameter], factor: Tensor) -> None:
    """Multiply gradients; the results get new memory, as two gradients may be the same tensor.

    On a CPU, where it costs nothing to look, gradients that are short enough are left as they are: the same bits.
    """
    if factor.device.type == "cpu" and not is_watched() and bool(factor == 1):
        return
    gradients = [value.grad for value in values if value.grad is not None]
    for value, shortened in zip(values, torch._foreach_mul(gradients, factor), strict=True):
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


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """Parameters with a learning rate, a tensor that captured steps read, and a weight decay of their own."""

    parameters: list[nn.Parameter]
    rate: Tensor
    weight_decay: float

    def moving(self) -> list[list[nn.Parameter]]:
        """The parameters that have a gradient, by type."""
        return _alike([value for value in self.parameters if value.grad is not None])


class Optimizer:
    """SGD, Adam or AdamW by PyTorch's fused operations, with all state made at the start.

    `torch.optim` calls the same operations. But its classes load PyTorch's compiler for the first step, a second of
    processor time, and look through all settings and tensors again in every step.
    """

    def __init__(self, settings: OptimizerSettings, groups: Sequence[ParameterGroup]) -> None:
        self.settings, self.groups = settings, groups
        everything = [value for group in groups for value in group.parameters]
        self.state: dict[nn.Parameter, _State] = {value: {} for value in everything}
        self.memory: list[
            Tensor
        ] = []  # of the state, in few pieces: zeroing it is the same as a new optimiser
        for parameters in _alike(everything):
            for key in _moving_names(settings):
                self._keep(key, parameters, *_together(parameters))
            if settings.name != "sgd":
                steps = torch.zeros(len(parameters), device=parameters[0].device)
                self._keep("step", parameters, steps, steps.unbind())

    def _keep(
        self, key: str, parameters: Sequence[nn.Parameter], piece: Tensor, parts: Sequence[Tensor]
    ) -> None:
        self.memory.append(piece)
        for parameter, part in zip(parameters, parts, strict=True):
            self.state[parameter][key] = part

    def takes_factor(self, group: ParameterGroup) -> bool:
        """Whether a factor of a group's gradient can be one of its rate, which saves a pass over all gradients.

        So it is for SGD without momentum and weight decay. Only on a GPU, as the last bits may differ.
        """
        settings = self.settings
        return group.rate.is_cuda and settings.name == "sgd" and not (settings.momentum or group.weight_decay)

    @torch.no_grad()
    def step(self, factors: Mapping[ParameterGroup, Tensor] | None = None) -> None:
        """Move every parameter that has a gradient; `factors` are of the rates of groups that take them."""
        for group in self.groups:
            factor = factors.get(group) if factors else None
            rate = group.rate if factor is None else group.rate * factor
            for parameters in group.moving():
                gradients = [value.grad for value in parameters]
                states = [self.state[value] for value in parameters]
                if self.settings.name == "sgd":
                    self._sgd(group, rate, parameters, gradients, states)
                else:
                    self._adam(group, parameters, gradients, states)

    def _sgd(
        self, group: ParameterGroup, rate: Tensor, parameters: Any, gradients: Any, states: list[_State]
    ) -> None:
        settings = self.settings
        torch._fused_sgd_(
            parameters,
            gradients,
            [state["momentum_buffer"] for state in states] if settings.momentum else [],
            weight_decay=group.weight_decay,
            momentum=settings.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=settings.nesterov,
            maximize=False,
            is_first_step=False,
        )

    def _adam(self, group: ParameterGroup, parameters: Any, gradients: Any, states: list[_State]) -> None:
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        move = torch._fused_adam_ if self.settings.name == "adam" else torch._fused_adamw_
        move(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group.rate,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            weight_decay=group.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


def _alike(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters by type: a fused operation takes those of one."""
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for value in parameters:
        found.setdefault(value.dtype, []).append(value)
    return [*found.values()]


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
    piece = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    parts = [
        part[: parameter.numel()].as_strided(parameter.shape, parameter.stride())
        for part, parameter in zip(torch.split(piece, sizes), parameters, strict=True)
    ]
    return piece, parts
