"""`fit`, the library's only training loop.

`fit` takes named streams, of which each step gets one batch, and a loss that returns a scalar or named terms.
Nothing inside a step reads a value back from the device, and everything a step touches keeps its place in
memory from round to round (parameters, optimiser, references, scalars), so a step can be captured once and
replayed. Values that change from round to round must therefore be tensors, passed through `scalars`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.settings import OptimizerSettings
from potluck.core.state import Holder, Moments
from potluck.core.streams import Stream
from potluck.core.task import Batch
from potluck.errors import ConfigError, nearest
from potluck.training.compiled import is_compiled
from potluck.training.full_width import full_width
from potluck.training.fused_casts import gathered
from potluck.training.in_context import InContext
from potluck.training.modes import set_modes, single_sample
from potluck.training.optimizers import (
    Group,
    Optimizer,
    ParameterGroup,
    clip_factors,
    shorten_gradients,
    without_rate,
)
from potluck.training.plan import Plan, Rows
from potluck.training.prefixes import check_prefixes, closest_prefix, trained_parameters

Gradients = dict[str, Tensor]
Loss = Callable[..., "Tensor | Mapping[str, Tensor]"]
Combine = Callable[[Mapping[str, Gradients]], Gradients]
Step = Callable[[Rows], None]
Runner = Callable[["Workspace", Step, "Plan"], None]
H = TypeVar("H", bound=Holder)


@dataclass(frozen=True)
class Fit:
    """The result of `fit`: the number of steps, and the mean of each loss term, still on the device."""

    steps: int
    losses: dict[str, Tensor]


def run_eagerly(workspace: Workspace, step: Step, plan: Plan) -> None:
    """The default runner: one step after the other."""
    for rows in plan:
        step(rows)


_runner: contextvars.ContextVar[Runner] = contextvars.ContextVar("runner", default=run_eagerly)


def running_with(runner: Runner) -> contextlib.AbstractContextManager[None]:
    """Use another runner, such as one that captures and replays, for every `fit` inside."""
    return InContext(_runner, runner)


def fit(
    holder: H,
    loss: Loss,
    *,
    train: Sequence[str] | None = None,
    streams: Mapping[str, Stream] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    optimizer: OptimizerSettings | None = None,
    groups: Mapping[str, Group] | None = None,
    clip: float | None = None,
    prox: Mapping[str, float] | None = None,
    combine: Combine | None = None,
    scalars: Mapping[str, Tensor] | None = None,
    moments: Moments | None = None,
) -> Fit:
    """Train parts of a client (or of the server) by gradient steps.

    - `loss`: called as `loss(holder, batch, **other_streams, **scalars)`; the first stream's batch is positional.
    - `train`: prefixes of the parameters to train (`"model"`, `"model/head"`); default: every module. Everything
      else is in evaluation mode, so its batch statistics do not change either.
    - `streams`: default: the client's private data for `epochs`. The first stream sets the number of steps
      unless `steps` is given; the others start over when they end.
    - `prox`: prefix → μ; adds the term `prox` = μ/2·‖w − w₀‖² with w₀ the values at the start of this call.
    - `combine`: gets the gradients of each named term (and of `prox`) and returns the gradient for the step;
      default: their sum.
    """
    if streams is None:
        if not isinstance(holder, Client):
            raise ConfigError("fit() on the server needs its streams named")
        streams = {"private": holder.batches(epochs=epochs)}
    elif isinstance(holder, Client):
        for name, stream in streams.items():
            holder.require_training_rows(name, stream)
    settings = optimizer or holder.training.optimizer
    request = _Request(
        None if train is None else tuple(train),
        without_rate(settings),
        dict(groups or {}),
        clip or holder.training.clip,
        dict(prox or {}),
        tuple(scalars or ()),
    )
    workspace = _workspace(holder, request)
    workspace.augments = any(stream.augment and stream.source.prepare for stream in streams.values())
    workspace.begin(holder, settings.lr, request.prox, scalars or {}, moments)
    plan = Plan(streams, steps, holder.device)
    _runner.get()(workspace, _Step(holder, loss, workspace, streams, request.prox, combine), plan)
    # Fused optimisers do not raise the version counters, by which the server knows that its cached message is old.
    torch.autograd.graph.increment_version(list(workspace.parameters.values()))
    workspace.end(moments)
    losses = workspace.means(len(plan))
    holder.report.steps += len(plan)
    holder.report.losses |= losses
    return Fit(len(plan), losses)


def learning_rate(client: Client) -> float:
    """A client's learning rate in this round."""
    training = client.training
    return training.optimizer.lr * training.lr_decay ** max(client.round - 1, 0)


@dataclass(frozen=True)
class _Request:
    """The settings a workspace is built for; a call with other ones gets a new workspace. The rate may differ."""

    train: tuple[str, ...] | None
    optimizer: OptimizerSettings
    groups: Mapping[str, Group]
    clip: float | None
    prox: Mapping[str, float]
    scalars: tuple[str, ...]


@dataclass(eq=False)
class Workspace:
    """What one `fit` call of a holder keeps between rounds, each tensor always at the same address.

    Runners that capture steps use it as the key of their graphs.
    """

    parameters: dict[str, nn.Parameter]
    optimizer: Optimizer
    own_rates: list[float | None]  # learning rates of groups that set their own
    clips: list[float | None]
    request: _Request
    references: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    sums: list[Tensor] = field(default_factory=list)  # the memory of the totals
    rates: list[float] = field(default_factory=list)  # the learning rates that are on the device
    augment: torch.Generator | None = None
    augments: bool = False
    constants: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def begin(
        self,
        holder: Holder,
        lr: float,
        prox: Mapping[str, float],
        scalars: Mapping[str, Tensor],
        moments: Moments | None,
    ) -> None:
        """Reset the optimiser (or load the moments), and set the round's learning rate, references and scalars."""
        decay = holder.training.lr_decay ** max(holder.round - 1, 0)
        self._set_rates([_first(own, lr) * decay for own in self.own_rates])
        if self.optimizer.memory or self.sums:
            torch._foreach_zero_([*self.optimizer.memory, *self.sums])
        if moments:
            self._take_over(moments)
        for name, parameter in self.parameters.items() if prox else ():
            if closest_prefix(name, prox) is not None:
                _put(self.references, name, parameter)
        for name, value in scalars.items():
            _put(self.scalars, name, value)
        number = holder.count(f"{holder.step}:augment")
        if self.augments:
            node = holder.rng.child(holder.step, "augment", number)
            self.augment = node.reseed(self.augment or torch.Generator(holder.device))

    def _set_rates(self, rates: list[float]) -> None:
        """Write the learning rates to the device, unless they are there."""
        if rates == self.rates:
            return
        places = [group.rate for group in self.optimizer.groups]
        torch._foreach_zero_(places)
        torch._foreach_add_(places, rates)
        self.rates = rates

    def _take_over(self, moments: Moments) -> None:
        kept = {name: value for name, value in self._state().items() if name in moments}
        if kept:
            torch._foreach_copy_([*kept.values()], [moments[name] for name in kept])

    @torch.no_grad()
    def end(self, moments: Moments | None) -> None:
        """Copy the optimiser's state into the declared moments."""
        if moments is None:
            return
        state = self._state()
        for name, value in state.items():
            if name not in moments:
                moments[name] = torch.empty_like(value)
        if state:
            torch._foreach_copy_([moments[name] for name in state], [*state.values()])

    def _state(self) -> dict[str, Tensor]:
        """The optimiser's state, named as in declared moments."""
        return {
            f"{name}:{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }

    def add(self, terms: Mapping[str, Tensor]) -> None:
        """Add the loss terms of a step to the totals, on the device."""
        new = [name for name in terms if name not in self.totals]
        if new:
            self.sums.append(torch.zeros(len(new), device=terms[new[0]].device))
            self.totals |= dict(zip(new, self.sums[-1].unbind(), strict=True))
        for name, value in terms.items():
            self.totals[name].add_(value.detach())

    def means(self, steps: int) -> dict[str, Tensor]:
        """The mean of each loss term over the steps."""
        values = [value for piece in self.sums for value in (piece / max(steps, 1)).unbind()]
        return dict(zip(self.totals, values, strict=True))

    def apply(self, gradients: Gradients) -> None:
        """Clip each group and take the optimiser's step."""
        if not gradients.keys() <= self.parameters.keys():
            unknown = next(name for name in gradients if name not in self.parameters)
            raise ConfigError(f"no parameter {unknown!r} is trained; {nearest(unknown, self.parameters)}")
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else _laid_out(gradient, parameter)
        limited = {
            group: ([value for value in group.parameters if value.grad is not None], limit)
            for group, limit in zip(self.optimizer.groups, self.clips, strict=True)
            if limit is not None
        }
        limited = {group: found for group, found in limited.items() if found[0]}
        factors = dict(zip(limited, clip_factors([*limited.values()], self.constants), strict=True))
        for group, (values, _) in limited.items():
            if not self.optimizer.takes_factor(group):
                shorten_gradients(values, factors.pop(group))
        self.optimizer.step(factors)


@dataclass(frozen=True)
class _Step:
    """One training step: take the batches, differentiate each term, combine, step."""

    holder: Holder
    loss: Loss
    workspace: Workspace
    streams: Mapping[str, Stream]
    prox: Mapping[str, float]
    combine: Combine | None

    def __call__(self, rows: Rows) -> None:
        if self.holder.mode is not self.workspace:
            set_modes(self.holder, self.workspace.parameters, self.workspace.request.train)
            self.holder.mode = self.workspace
        first, *others = batches = self._batches(rows)
        with self.holder.autocast(), single_sample(self.holder, min(map(len, batches))), self._quicker():
            names = list(self.streams)[1:]
            value = self.loss(
                self.holder, first, **dict(zip(names, others, strict=True)), **self.workspace.scalars
            )
        terms = value if isinstance(value, Mapping) else {"loss": value}
        _check_terms(terms)
        gradients = self._gradients(terms)
        self.workspace.apply(gradients)
        self.workspace.add(terms)

    def _quicker(self) -> contextlib.AbstractContextManager[None]:
        """Layers in the device's quicker operations. A compiled model has its own.

        On a GPU small operations are batched: each kernel costs time there.
        """
        device, modules = self.holder.device.type, self.holder.modules().values()
        if is_compiled() or device not in ("cpu", "cuda"):
            return contextlib.nullcontext()
        if device == "cpu":
            return full_width(modules)
        return gathered(modules, self.workspace.parameters.values(), self.holder.precision == "bfloat16")

    def _batches(self, rows: Rows) -> list[Batch]:
        generator = self.workspace.augment
        return [
            stream.source.take(rows[name], generator if stream.augment else None)
            for name, stream in self.streams.items()
        ]

    def _gradients(self, terms: Mapping[str, Tensor]) -> Gradients:
        if self.combine is None:
            gradients = self._differentiate(functools.reduce(operator.add, terms.values()))
            return plus(gradients, self._pull()) if self.prox else gradients
        by_term = {name: self._differentiate(term, keep=True) for name, term in terms.items()}
        if self.prox:
            by_term["prox"] = self._pull()
        return self.combine(by_term)

    def _differentiate(self, term: Tensor, keep: bool = False) -> Gradients:
        parameters = self.workspace.parameters
        if keep and not term.requires_grad:
            return {}
        values = torch.autograd.grad(term, list(parameters.values()), retain_graph=keep, allow_unused=True)
        return {name: value for name, value in zip(parameters, values, strict=True) if value is not None}

    @torch.no_grad()
    def _pull(self) -> Gradients:
        """The gradient of the proximal term, in closed form: μ·(w − w₀)."""
        strengths = {
            name: self.prox[closest_prefix(name, self.prox) or ""] for name in self.workspace.references
        }
        if not strengths:
            return {}
        parameters: list[Tensor] = [self.workspace.parameters[name] for name in strengths]
        distances = torch._foreach_sub(parameters, [*self.workspace.references.values()])
        by_strength: dict[float, list[Tensor]] = {}
        for mu, length in zip(strengths.values(), torch._foreach_norm(distances), strict=True):
            by_strength.setdefault(mu, []).append(length)
        terms = (mu / 2 * torch.stack(lengths).square().sum() for mu, lengths in by_strength.items())
        self.workspace.add({"prox": functools.reduce(operator.add, terms)})
        torch._foreach_mul_(distances, [*strengths.values()])
        return dict(zip(strengths, distances, strict=True))


def _check_terms(terms: Mapping[str, Any]) -> None:
    """Refuse what no gradient can be taken of; a fault of the method's code, so no client is left out for it."""
    if not terms:
        raise TypeError("the loss is an empty mapping; return a tensor with one number, or named ones")
    for name, value in terms.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name!r} of the loss is a {type(value).__name__}; return a tensor with one number"
            )
        if value.ndim:
            raise TypeError(f"{name!r} of the loss has shape {tuple(value.shape)}; return its mean or sum")


def plus(one: Gradients, other: Gradients, share: float = 1.0) -> Gradients:
    """`one` + share · `other`, name by name, in few operations; a missing name counts as zero."""
    both = [name for name in one if name in other]
    lone = {name: share * value for name, value in other.items() if name not in one}
    if not both:
        return one | lone
    sums = torch._foreach_add([one[name] for name in both], [other[name] for name in both], alpha=share)
    return one | dict(zip(both, sums, strict=True)) | lone


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout, which fused optimisers assume without checking."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _put(place: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Copy a value into the tensor of that name, or add one."""
    if name in place and place[name].shape == value.shape:
        place[name].copy_(value)
    else:
        place[name] = value.detach().clone()


def _workspace(holder: Holder, request: _Request) -> Workspace:
    """The workspace of the n-th `fit` of this step, kept from earlier rounds if it still fits."""
    key = (holder.step, holder.fits)
    holder.fits += 1
    workspace = holder.workspaces.get(key)
    if not isinstance(workspace, Workspace) or workspace.request != request:
        workspace = _new_workspace(holder, request)
        holder.workspaces[key] = workspace
    return workspace


def _new_workspace(holder: Holder, request: _Request) -> Workspace:
    for prefixes in (request.train or (), request.groups, request.prox):
        check_prefixes(holder, prefixes)
    parameters = trained_parameters(holder, request.train)
    settings, groups = request.optimizer, request.groups
    arranged: dict[str, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        arranged.setdefault(closest_prefix(name, groups) or "", []).append(parameter)
    chosen = [groups.get(prefix, Group()) for prefix in arranged]
    parts = [
        ParameterGroup(
            values,
            torch.tensor(0.0, device=holder.device),
            _first(group.weight_decay, settings.weight_decay),
        )
        for values, group in zip(arranged.values(), chosen, strict=True)
    ]
    return Workspace(
        parameters,
        Optimizer(settings, parts),
        [group.lr for group in chosen],
        [group.clip if group.clip is not None else request.clip for group in chosen],
        request,
    )


def _first(value: float | None, default: float) -> float:
    return default if value is None else value
