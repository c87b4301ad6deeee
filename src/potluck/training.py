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
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.client import Client, SplitName
from potluck.errors import ConfigError, nearest
from potluck.gathering import gathered
from potluck.settings import OptimizerSettings
from potluck.state import ALIGNMENT, Holder, Moments
from potluck.streams import Source, Stream
from potluck.task import Batch

Gradients = dict[str, Tensor]
Loss = Callable[..., "Tensor | Mapping[str, Tensor]"]
Combine = Callable[[Mapping[str, Gradients]], Gradients]
Rows = Mapping[str, Tensor]
Step = Callable[[Rows], None]
Runner = Callable[["Workspace", Step, "Plan"], None]
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


def run_eagerly(workspace: Workspace, step: Step, plan: Plan) -> None:
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
    settings = optimizer or holder.training.optimizer
    request = _Request(
        None if train is None else tuple(train),
        _without_rate(settings),
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
    # Fused optimisers write without counting it, and by that count the server knows that what it sent is old.
    torch.autograd.graph.increment_version(list(workspace.parameters.values()))
    workspace.end(moments)
    losses = workspace.means(len(plan))
    holder.report.steps += len(plan)
    holder.report.losses |= losses
    return Fit(len(plan), losses)


@functools.lru_cache(maxsize=256)
def _without_rate(settings: OptimizerSettings) -> OptimizerSettings:
    """The settings that shape an optimiser; its rate is a value."""
    return settings.model_copy(update={"lr": 1.0})


@dataclass(frozen=True)
class _Request:
    """What shapes a workspace: a call that differs in any of it gets a new one. The rate is a value in it."""

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
    moving: list[Tensor]  # the memory of the optimiser's state, in few pieces
    rates: list[Tensor]
    own_rates: list[float | None]  # of the groups that have one
    clips: list[float | None]
    request: _Request
    references: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    augment: torch.Generator | None = None
    augments: bool = False
    recordings: dict[Any, Any] = field(default_factory=dict)
    alone: tuple[int, ...] | None = None  # sizes of the batch that came last without others of its size
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
        """A fresh optimiser (or the kept moments), the round's learning rate, references and scalars."""
        decay = holder.training.lr_decay ** max(holder.round - 1, 0)
        torch._foreach_zero_([*self.moving, *self.rates, *self.totals.values()])
        torch._foreach_add_(self.rates, [_first(own, lr) * decay for own in self.own_rates])
        if moments:
            self._take_over(moments)
        for name, parameter in self.parameters.items() if prox else ():
            if _closest(name, prox) is not None:
                _put(self.references, name, parameter)
        for name, value in scalars.items():
            _put(self.scalars, name, value)
        number = holder.count(f"{holder.step}:augment")
        if self.augments:
            node = holder.rng.child(holder.step, "augment", number)
            self.augment = node.reseed(self.augment or torch.Generator(holder.device))

    def _take_over(self, moments: Moments) -> None:
        kept = {name: value for name, value in self._state().items() if name in moments}
        if kept:
            torch._foreach_copy_([*kept.values()], [moments[name] for name in kept])

    @torch.no_grad()
    def end(self, moments: Moments | None) -> None:
        """Hand the optimiser's state over to the declared moments."""
        state = self._state()
        if moments is None or not state:
            return
        for name, value in state.items():
            if name not in moments:
                moments[name] = torch.empty_like(value)
        torch._foreach_copy_([moments[name] for name in state], [*state.values()])

    def _state(self) -> dict[str, Tensor]:
        """The optimiser's state by the names it has in declared moments."""
        return {
            f"{name}:{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }

    def add(self, terms: Mapping[str, Tensor]) -> None:
        """Add up the terms of the loss, on the device."""
        for name, value in terms.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros((), device=value.device)
            self.totals[name].add_(value.detach())

    def means(self, steps: int) -> dict[str, Tensor]:
        """The mean of each term of the loss over the steps done."""
        values = torch._foreach_div([*self.totals.values()], max(steps, 1)) if self.totals else ()
        return dict(zip(self.totals, values, strict=True))

    def apply(self, gradients: Gradients) -> None:
        """Clip each group and take the optimiser's step."""
        if not gradients.keys() <= self.parameters.keys():
            unknown = next(name for name in gradients if name not in self.parameters)
            raise ConfigError(f"no parameter {unknown!r} is trained; {nearest(unknown, self.parameters)}")
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else _laid_out(gradient, parameter)
        limited = [
            ([value for value in group["params"] if value.grad is not None], limit)
            for group, limit in zip(self.optimizer.param_groups, self.clips, strict=True)
            if limit is not None
        ]
        _clip([(values, limit) for values, limit in limited if values], self.constants)
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
        if self.holder.mode is not self.workspace:
            _set_modes(self.holder, self.workspace)
            self.holder.mode = self.workspace
        first, *others = batches = self._batches(rows)
        with self.holder.autocast(), _single_sample(self.holder, min(map(len, batches))), self._gathered():
            names = list(self.streams)[1:]
            value = self.loss(
                self.holder, first, **dict(zip(names, others, strict=True)), **self.workspace.scalars
            )
        terms = value if isinstance(value, Mapping) else {"loss": value}
        gradients = self._gradients(terms)
        self.workspace.apply(gradients)
        self.workspace.add(terms)

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        """On a GPU small operations are done together; on a CPU they cost nothing apart."""
        if self.holder.device.type != "cuda":
            return contextlib.nullcontext()
        trained = self.workspace.parameters.values()
        return gathered(self.holder.modules().values(), trained, self.holder.precision == "bfloat16")

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
        strengths = {name: self.prox[_closest(name, self.prox) or ""] for name in self.workspace.references}
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


def plus(one: Gradients, other: Gradients, share: float = 1.0) -> Gradients:
    """`one` + share · `other`, name by name, in few operations; a name that only one has keeps what it has."""
    both = [name for name in one if name in other]
    lone = {name: share * value for name, value in other.items() if name not in one}
    if not both:
        return one | lone
    sums = torch._foreach_add([one[name] for name in both], [other[name] for name in both], alpha=share)
    return one | dict(zip(both, sums, strict=True)) | lone


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the parameter's own memory layout: fused optimisers read both side by side, unchecked."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _clip(
    groups: Sequence[tuple[list[nn.Parameter], float]], constants: dict[Any, tuple[Tensor, Tensor]]
) -> None:
    """Shorten each group's gradient to its norm, the norms of all groups in few operations.

    Into new memory, as two gradients may be one and the same tensor.
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
    """Which gradient belongs to which group (a row per group), and the groups' limits; made once."""
    key = (tuple(sizes), tuple(limits))
    if key not in constants:
        members = np.repeat(np.eye(len(sizes)), sizes, axis=1)
        constants[key] = torch.from_numpy(members).to(like), torch.tensor(limits).to(like)
    return constants[key]


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


class Plan(Sequence[Rows]):
    """The rows of every stream in every step; they go to the device when they are asked for."""

    def __init__(self, streams: Mapping[str, Stream], steps: int | None, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._total = steps if steps is not None else len(next(iter(streams.values())))
        if self._total and not all(len(stream) for stream in streams.values()):
            empty = next(name for name, stream in streams.items() if not len(stream))
            raise ConfigError(f"the stream {empty!r} has no samples")

    def __len__(self) -> int:
        return self._total

    def order(self, number: int) -> dict[str, np.ndarray]:
        """The rows of one step, still on the host."""
        return {name: stream.order[number % len(stream)] for name, stream in self._streams.items()}

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._total:
            raise IndexError(number)
        return {name: rows_on(rows, self._device) for name, rows in self.order(number).items()}

    def blocks(self) -> Iterator[tuple[tuple[int, ...], dict[str, np.ndarray]]]:
        """Steps in a row with the same batch sizes, as one table of rows per stream."""
        orders = {
            name: [stream.order[number % len(stream)] for number in range(self._total)]
            for name, stream in self._streams.items()
        }
        start = 0
        for sizes, steps in itertools.groupby(
            zip(*(map(len, order) for order in orders.values()), strict=True)
        ):
            end = start + sum(1 for _ in steps)
            yield (
                sizes,
                {
                    name: np.concatenate(order[start:end]).reshape(-1, size)
                    for (name, order), size in zip(orders.items(), sizes, strict=True)
                },
            )
            start = end


@contextlib.contextmanager
def _single_sample(holder: Holder, samples: int) -> Iterator[None]:
    """One sample has no variance: it goes through batch norm in evaluation mode.

    Such a step can do harm, as a network's statistics lag behind it. Of a client's own data only those with a
    single one, or in batches of one, come to it: a single sample left over makes no batch.
    """
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


@contextlib.contextmanager
def still_statistics(module: nn.Module) -> Iterator[None]:
    """Batch norm uses the statistics of its batch inside, and does not remember them: for foreign features."""
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, with gradients: batch norm uses what it remembers, and dropout rests."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextlib.contextmanager
def on_the_batch(module: nn.Module) -> Iterator[None]:
    """As `evaluating`, but trained batch norm uses the statistics of its batch, and does not remember them."""
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm) and norm.training]
    with evaluating(module), still_statistics(module):
        for norm in norms:
            norm.train()
        yield


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
    chosen_optimizer, moving = _optimizer(settings, options)
    return Workspace(
        parameters,
        chosen_optimizer,
        moving,
        rates,
        [group.lr for group in chosen],
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


def _optimizer(
    settings: OptimizerSettings, groups: list[dict[str, Any]]
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """A fused optimiser whose state exists from the start, so that a fresh one is this one zeroed."""
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
    """What an optimiser keeps of every parameter, in its shape."""
    if settings.name != "sgd":
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if settings.momentum else ()


def fresh_moments(
    settings: OptimizerSettings,
    modules: Mapping[str, nn.Module],
    train: Sequence[str],
    lifetime: Literal["run", "round"] = "run",
) -> Moments:
    """Moments to declare that have their place from the start: they lie with the rest of the state, in one piece.

    `modules` are parts of the state by name and `train` is what `fit` will be given.
    """
    moments = Moments(lifetime)
    for part, module in modules.items():
        for key, value in module.named_parameters():
            name = f"{part}/{key}"
            if value.requires_grad and _closest(name, train) is not None:
                moments |= {f"{name}:{kept}": torch.zeros_like(value) for kept in _moving_names(settings)}
                moments |= {f"{name}:step": torch.zeros(())} if settings.name != "sgd" else {}
    return moments


def _together(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Zeros of the shapes of all parameters, in one piece of memory."""
    sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
    like = parameters[0] if parameters else torch.zeros(())
    piece = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
    parts = [
        part[: parameter.numel()].as_strided(parameter.shape, parameter.stride())
        for part, parameter in zip(torch.split(piece, sizes), parameters, strict=True)
    ]
    return piece, parts


@torch.no_grad()
def collect(
    holder: Client,
    function: Callable[[Batch], Any],
    split: SplitName = "train",
    batch_size: int = 512,
    rows: np.ndarray | None = None,
    source: Source | None = None,
) -> list[Any]:
    """One pass over a client's split (or the given rows) in evaluation mode, without gradients, in order.

    `source` is where the rows are if not in the client's own data: `client.public.source`.
    """
    holder.collections += 1
    origin = source if source is not None else holder.source
    wanted = holder.rows[split] if rows is None else rows
    if not len(wanted):
        return []

    def reading(taken: Tensor) -> Any:
        if holder.mode != "evaluation":
            for module in holder.modules().values():
                module.eval()
            holder.mode = "evaluation"
        with holder.autocast():
            return function(origin.take(taken))

    parts = [wanted[start : start + batch_size] for start in range(0, len(wanted), batch_size)]
    return _collector.get()(holder, reading, parts)


def collect_eagerly(
    holder: Client, function: Callable[[Tensor], Any], parts: Sequence[np.ndarray]
) -> list[Any]:
    """The reference collector: one batch after the other."""
    return [function(rows_on(part, holder.device)) for part in parts]


Collector = Callable[[Client, Callable[[Tensor], Any], Sequence[np.ndarray]], list[Any]]
_collector: contextvars.ContextVar[Collector] = contextvars.ContextVar("collector", default=collect_eagerly)


@contextlib.contextmanager
def collecting_with(collector: Collector) -> Iterator[None]:
    """Let another collector (one that captures and replays) do every `collect` inside."""
    token = _collector.set(collector)
    try:
        yield
    finally:
        _collector.reset(token)


def rows_on(rows: np.ndarray, device: torch.device) -> Tensor:
    """Row numbers on the device, without waiting for it."""
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device, non_blocking=True)
