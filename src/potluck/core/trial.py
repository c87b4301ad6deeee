"""Running a module on a made-up batch without changing the module, its buffers or the random state."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.errors import ModelError, first_line

_Module = TypeVar("_Module", bound=nn.Module)
Trials = list[Callable[[], None]]
# Words of errors about the shape of a tensor.
_SHAPES = re.compile(r"shape|size|\bmat[12]\b|\bdim|\dD\b|channel|broadcast", re.IGNORECASE)
_waiting: ContextVar[Trials | None] = ContextVar("waiting", default=None)


@contextmanager
def postponed() -> Iterator[Trials]:
    """Collect trials of models that are built inside: to run a model takes time, to refuse it does not."""
    trials: Trials = []
    token = _waiting.set(trials)
    try:
        yield trials
    finally:
        _waiting.reset(token)


def now_or_later(trial: Callable[[], None]) -> None:
    """Run a trial, or have it run later where trials are postponed."""
    trials = _waiting.get()
    if trials is None:
        trial()
    else:
        trials.append(trial)


@contextmanager
def blame(who: str) -> Iterator[None]:
    """Put a client's name in front of every `ModelError` raised inside."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"{who}: {error}") from error


def duplicate(module: _Module) -> _Module:
    """A deep copy; a `ModelError` that says why, if there can be none."""
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{kind(module)} cannot be copied ({first_line(error)}); give a function that builds it"
        ) from error


def trial_copy(module: _Module) -> _Module:
    """A throwaway copy in evaluation mode, so that forward passes do not change the original."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        raise ModelError(f"{kind(module)} has lazy layers; pass a batch through it first")
    return duplicate(module).eval()


def sample_batch(task: Task, module: nn.Module, samples: int = 2) -> Tensor:
    """A batch of the task's shape on the module's device, with a different value at every place.

    Zeros would hide too much: many layers do not change them, and to a text model they are padding.
    """
    blank = task.example(samples)
    place = torch.arange(blank.numel(), device=blank.device).view(blank.shape)
    values = torch.sin(0.7 * place) if blank.is_floating_point() else place % (task.vocabulary or 2)
    parameter = next(module.parameters(), blank)
    return values.to(device=parameter.device, dtype=blank.dtype)


def attempt(module: nn.Module, function: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """Call `function(x)`, which runs parts of `module`; an error names the layer and the shape.

    Every attempt starts from the same random state, so that random layers draw the same numbers each time.
    """
    with _entered_layers(module) as entered, torch.no_grad(), torch.random.fork_rng(_cuda_devices(module)):
        try:
            result = function(x)
        except ModelError:
            raise
        except Exception as error:  # a user's forward pass may raise anything
            layer = f"layer {entered[-1]!r} of {kind(module)}" if entered and entered[-1] else kind(module)
            raise ModelError(
                f"{layer} failed on a batch of shape {tuple(x.shape)}: {_told(error)}; {_remedy(error, x)}"
            ) from error
    if not isinstance(result, Tensor):
        raise ModelError(
            f"{kind(module)} gave a {kind(result)}, expected one tensor (batch, classes), or an object that has it "
            "as .logits; return that from forward(x)"
        )
    return result


def _told(error: Exception) -> str:
    """What an error says; torch's own errors need no type in front."""
    return first_line(error) if isinstance(error, RuntimeError) else f"{kind(error)}: {first_line(error)}"


def _remedy(error: Exception, x: Tensor) -> str:
    """What to do about a module that fails on a batch: it is built for another shape, or has a fault of its own."""
    if not _SHAPES.search(str(error)):
        return "correct its forward(x), which gets one tensor with a batch of samples"
    shape = tuple(x.shape[1:])
    return f"build it for samples of shape {shape}, which a class or function gets as its parameter input"


def agree(left: Tensor, right: Tensor) -> bool:
    """Whether two results are equal up to rounding."""
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)


def kind(value: object) -> str:
    """The class name of a value, for error messages."""
    return type(value).__name__


def _cuda_devices(module: nn.Module) -> list[int]:
    return sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})


@contextmanager
def _entered_layers(module: nn.Module) -> Iterator[list[str]]:
    """The names of the layers being run; after an exception the last one is where it happened."""
    stack: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leave(*_: object) -> None:
        stack.pop()

    handles = []
    for name, part in module.named_modules():
        handles += [part.register_forward_pre_hook(enter(name)), part.register_forward_hook(leave)]
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


_stems: weakref.WeakKeyDictionary[Model, tuple[int, ...]] = weakref.WeakKeyDictionary()


def stem_shape(model: Model, task: Task) -> tuple[int, ...]:
    """The shape of one sample after a model's stem; a trial in evaluation mode finds it, once per model."""
    if model not in _stems:
        _stems[model] = _tried_stem(model, task)
    return _stems[model]


def _tried_stem(model: Model, task: Task) -> tuple[int, ...]:
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        return tuple(attempt(model, model.stem, sample_batch(task, model)).shape[1:])
    finally:
        for part, training in modes.items():
            part.training = training


def trains_body(model: Model, task: Task) -> bool:
    """Whether the gradient of the body's output reaches any parameter, found in a trial on a copy."""
    trial = trial_copy(model)
    s = attempt(trial, trial.stem, sample_batch(task, trial))  # without gradients
    return trial.body(s).requires_grad
