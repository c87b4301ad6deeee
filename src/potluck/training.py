"""The library's only training loop, and the whole-set pass beside it.

`fit` takes named streams whose batches meet in one step, and a loss that returns a scalar or named terms.
Nothing inside a step reads a value back from the device, and everything a step touches keeps its place in
memory from round to round (parameters, optimiser, references, scalars): a step can be captured once and
replayed. Values that change from round to round therefore come in as tensors, through `scalars`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import get_total_norm

from potluck.client import Client, SplitName
from potluck.errors import ConfigError, nearest
from potluck.settings import OptimizerSettings
from potluck.state import Holder, Moments
from potluck.streams import Stream
from potluck.task import Batch

Gradients = dict[str, Tensor]
Loss = Callable[..., "Tensor | Mapping[str, Tensor]"]
Combine = Callable[[Mapping[str, Gradients]], Gradients]
Rows = Mapping[str, Tensor]
Step = Callable[[Rows], None]
Runner = Callable[["Workspace", Step, Sequence[Rows]], None]
H = TypeVar("H", bound=Holder)


@dataclass(frozen=True)
class Group:
    """Settings of the parameters below a prefix: `groups={"small": Group(lr=0.1, clip=50)}`.

    Of several prefixes above a parameter the longest counts.
    """

    lr: float | None = None
    clip: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Fit:
    """What `fit` did: the number of steps, and the mean of each loss term, still on the device."""

    steps: int
    losses: dict[str, Tensor]


def run_eagerly(workspace: Workspace, step: Step, plan: Sequence[Rows]) -> None:
    """The reference runner: one step after the other."""
    for rows in plan:
        step(rows)


_runner: contextvars.ContextVar[Runner] = contextvars.ContextVar("runner", default=run_eagerly)


@contextlib.contextmanager
def running_with(runner: Runner) -> Iterator[None]:
    """Let another runner (one that captures and replays) do the steps of every `fit` inside."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


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

    loss: called as `loss(holder, batch, **other_streams, **scalars)`; the first stream's batch is positional.
    train: prefixes of the parameters to train (`"model"`, `"model/head"`); default: every module. What is not
        below one of them is in evaluation mode: its batch statistics do not move either.
    streams: default: the client's private data for `epochs`. The first stream sets the number of steps
        unless `steps` is given; the others start over when they end.
    prox: prefix → μ; adds the term `prox` = μ/2·‖w − w₀‖² with w₀ the values at the start of this call.
    combine: sees the gradients of each named term (and of `prox`) and returns the gradient to step along;
        default: their sum.
    """
    if streams is None:
        if not isinstance(holder, Client):
            raise ConfigError("fit() on the server needs its streams named")
        streams = {"private": holder.batches(epochs=epochs)}
    request = _Request(
        None if train is None else tuple(train),
        optimizer or holder.training.optimizer,
        dict(groups or {}),
        clip or holder.training.clip,
        dict(prox or {}),
        tuple(scalars or ()),
    )
    workspace = _workspace(holder, request)
    workspace.begin(holder, request.prox, scalars or {}, moments)
    plan = _plan(streams, steps, holder.device)
    step = _Step(holder, loss, workspace, streams, request.prox, combine)
    _set_modes(holder, workspace)
    _runner.get()(workspace, step, plan)
    workspace.end(moments)
    losses = {name: total / max(len(plan), 1) for name, total in workspace.totals.items()}
    holder.report.steps += len(plan)
    holder.report.losses |= losses
    return Fit(len(plan), losses)


@dataclass(frozen=True)
class _Request:
    """What shapes a workspace: a call that differs in any of it gets a new one."""

    train: tuple[str, ...] | None
    optimizer: OptimizerSettings
    groups: Mapping[str, Group]
    clip: float | None
    prox: Mapping[str, float]
    scalars: tuple[str, ...]


@dataclass
class Workspace:
    """What one `fit` call of a holder keeps between rounds, each tensor always at the same address."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    rates: list[Tensor]
    base_rates: list[float]
    clips: list[float | None]
    request: _Request
    references: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    augment: torch.Generator | None = None
    recordings: dict[Any, Any] = field(default_factory=dict)

    @torch.no_grad()
    def begin(
        self,
        holder: Holder,
        prox: Mapping[str, float],
        scalars: Mapping[str, Tensor],
        moments: Moments | None,
    ) -> None:
        """A fresh optimiser (or the kept moments), the round's learning rate, references and scalars."""
        decay = holder.training.lr_decay ** max(holder.round - 1, 0)
        for rate, base in zip(self.rates, self.base_rates, strict=True):
            rate.fill_(base * decay)
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                kept = moments.get(f"{name}:{key}") if moments is not None else None
                value.zero_() if kept is None else value.copy_(kept)
            if _closest(name, prox) is not None:
                _put(self.references, name, parameter)
        for name, value in scalars.items():
            _put(self.scalars, name, value)
        for total in self.totals.values():
            total.zero_()
        node = holder.rng.child(holder.step, "augment", holder.count(f"{holder.step}:augment"))
        self.augment = node.reseed(self.augment or torch.Generator(holder.device))

    def end(self, moments: Moments | None) -> None:
        """Hand the optimiser's state over to the declared moments."""
        if moments is None:
            return
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                _put(moments, f"{name}:{key}", value)

    def add(self, terms: Mapping[str, Tensor]) -> None:
        """Add up the terms of the loss, on the device."""
        for name, value in terms.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros((), device=value.device)
            self.totals[name].add_(value.detach())

    def apply(self, gradients: Gradients) -> None:
        """Clip each group and take the optimiser's step."""
        if not gradients.keys() <= self.parameters.keys():
            unknown = next(name for name in gradients if name not in self.parameters)
            raise ConfigError(f"no parameter {unknown!r} is trained; {nearest(unknown, self.parameters)}")
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else _laid_out(gradient, parameter)
        for group, limit in zip(self.optimizer.param_groups, self.clips, strict=True):
            if limit is not None:
                _clip(group["params"], limit)
        self.optimizer.step()


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
        first, *others = batches = self._batches(rows)
        with self.holder.autocast(), _single_sample(self.holder, min(map(len, batches))):
            names = list(self.streams)[1:]
            value = self.loss(
                self.holder, first, **dict(zip(names, others, strict=True)), **self.workspace.scalars
            )
        terms = value if isinstance(value, Mapping) else {"loss": value}
        gradients = self._gradients(terms)
        self.workspace.apply(gradients)
        self.workspace.add(terms)

    def _batches(self, rows: Rows) -> list[Batch]:
        generator = self.workspace.augment
        return [
            stream.source.take(rows[name], generator if stream.augment else None)
            for name, stream in self.streams.items()
        ]

    def _gradients(self, terms: Mapping[str, Tensor]) -> Gradients:
        if self.combine is None:
            gradients = self._differentiate(functools.reduce(operator.add, terms.values()))
            for name, pull in self._pull().items():
                gradients[name] = gradients[name] + pull if name in gradients else pull
            return gradients
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
        pulls, value = {}, None
        for name, reference in self.workspace.references.items():
            strength = self.prox[_closest(name, self.prox) or ""]
            pulls[name] = strength * (self.workspace.parameters[name] - reference)
            size = pulls[name].square().sum() / (2 * strength) if strength else pulls[name].sum()
            value = size if value is None else value + size
        if value is not None:
            self.workspace.add({"prox": value})
        return pulls


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the parameter's own memory layout: fused optimisers read both side by side, unchecked."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _clip(parameters: Sequence[nn.Parameter], limit: float) -> None:
    """Shorten a group's gradient to a norm; into new memory, as two gradients may be one and the same tensor."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    if not gradients:
        return
    factor = (limit / (get_total_norm(gradients, foreach=True) + 1e-6)).clamp(max=1.0)
    for parameter, shortened in zip(held, torch._foreach_mul(gradients, factor), strict=True):
        parameter.grad = shortened


def _below(name: str, prefix: str) -> bool:
    """Whether a parameter or module is what the prefix names, or a part of it."""
    return name == prefix or name.startswith((f"{prefix}/", f"{prefix}."))


def _closest(name: str, prefixes: Iterable[str]) -> str | None:
    """The longest of the prefixes that a name lies below."""
    return max((prefix for prefix in prefixes if _below(name, prefix)), key=len, default=None)


def _set_modes(holder: Holder, workspace: Workspace) -> None:
    """Training mode for what is trained, evaluation mode for the rest."""
    prefixes = workspace.request.train
    for name, module in holder.modules().items():
        module.train(any(_below(key, name) for key in workspace.parameters))
        for key, inner in module.named_modules() if prefixes is not None else ():
            path = f"{name}/{key}" if key else name
            if not any(_below(path, prefix) or _below(prefix, path) for prefix in prefixes or ()):
                inner.eval()


def _put(place: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Copy a value to where it was last time."""
    if name in place and place[name].shape == value.shape:
        place[name].copy_(value)
    else:
        place[name] = value.detach().clone()


def _plan(streams: Mapping[str, Stream], steps: int | None, device: torch.device) -> list[Rows]:
    """The rows of every stream in every step, already where they are needed."""
    total = steps if steps is not None else len(next(iter(streams.values())))
    if total and not all(len(stream) for stream in streams.values()):
        empty = next(name for name, stream in streams.items() if not len(stream))
        raise ConfigError(f"the stream {empty!r} has no samples")
    return [
        {
            name: torch.from_numpy(np.ascontiguousarray(stream.order[i % len(stream)])).to(
                device, non_blocking=True
            )
            for name, stream in streams.items()
        }
        for i in range(total)
    ]


@contextlib.contextmanager
def _single_sample(holder: Holder, samples: int) -> Iterator[None]:
    """One sample has no variance: it goes through batch norm in evaluation mode."""
    norms = [
        norm
        for module in (holder.modules().values() if samples == 1 else ())
        for norm in module.modules()
        if isinstance(norm, _BatchNorm) and norm.training
    ]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def _workspace(holder: Holder, request: _Request) -> Workspace:
    """The workspace of this call: the n-th `fit` of this step, as it was in earlier rounds."""
    key = (holder.step, holder.fits)
    holder.fits += 1
    workspace = holder.workspaces.get(key)
    if not isinstance(workspace, Workspace) or workspace.request != request:
        workspace = _new_workspace(holder, request)
        holder.workspaces[key] = workspace
    return workspace


def _new_workspace(holder: Holder, request: _Request) -> Workspace:
    for prefixes in (request.train or (), request.groups, request.prox):
        _check_prefixes(holder, prefixes)
    parameters = _trained(holder, request.train)
    settings, groups = request.optimizer, request.groups
    arranged: dict[str, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        arranged.setdefault(_closest(name, groups) or "", []).append(parameter)
    chosen = [groups.get(prefix, Group()) for prefix in arranged]
    rates = [torch.tensor(0.0, device=holder.device) for _ in chosen]
    options = [
        {"params": values, "lr": rate, "weight_decay": _first(group.weight_decay, settings.weight_decay)}
        for values, rate, group in zip(arranged.values(), rates, chosen, strict=True)
    ]
    return Workspace(
        parameters,
        _optimizer(settings, options),
        rates,
        [_first(group.lr, settings.lr) for group in chosen],
        [group.clip if group.clip is not None else request.clip for group in chosen],
        request,
    )


def _check_prefixes(holder: Holder, prefixes: Iterable[str]) -> None:
    """One sentence about a prefix that names nothing, instead of training the wrong things."""
    names = [
        f"{name}/{key}" for name, module in holder.modules().items() for key, _ in module.named_parameters()
    ]
    for prefix in prefixes:
        if not any(_below(name, prefix) for name in names):
            raise ConfigError(f"fit() finds no parameters under {prefix!r}; {nearest(prefix, holder.parts)}")


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


def _trained(holder: Holder, train: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """The parameters to train, by their full names."""
    everything = {
        f"{name}/{key}": value
        for name, part in holder.parts.items()
        for key, value in part.trainable().items()
    }
    if train is None:
        return everything
    chosen = {name: value for name, value in everything.items() if _closest(name, train) is not None}
    if not chosen:
        raise ConfigError(f"nothing to train under {', '.join(train)}; there is {', '.join(holder.parts)}")
    return chosen


def _optimizer(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A fused optimiser whose state exists from the start, so that a fresh one is this one zeroed."""
    if settings.name == "sgd":
        sgd = torch.optim.SGD(groups, momentum=settings.momentum, nesterov=settings.nesterov, fused=True)
        if settings.momentum:
            for parameter in (value for group in groups for value in group["params"]):
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    adam: torch.optim.Optimizer = kind(groups, betas=settings.betas, fused=True)
    for parameter in (value for group in groups for value in group["params"]):
        adam.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return adam


@torch.no_grad()
def collect(
    holder: Client,
    function: Callable[[Batch], Any],
    split: SplitName = "train",
    batch_size: int = 512,
) -> list[Any]:
    """One pass over a client's split in evaluation mode, without gradients, in the order of its rows."""
    for module in holder.modules().values():
        module.eval()
    rows = torch.from_numpy(np.ascontiguousarray(holder.rows[split])).to(holder.device)
    with holder.autocast():
        return (
            [function(holder.source.take(part)) for part in torch.split(rows, batch_size)]
            if len(rows)
            else []
        )
