"""Training and evaluation modes of modules, above all for batch norm, and which kernels they use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.core.state import Holder
from potluck.training.prefixes import is_below


def set_modes(holder: Holder, parameters: Iterable[str], prefixes: Sequence[str] | None) -> None:
    """Put what is trained into training mode, and the rest into evaluation mode."""
    for name, module in holder.modules().items():
        module.train(any(is_below(key, name) for key in parameters))
        for key, inner in module.named_modules() if prefixes is not None else ():
            path = f"{name}/{key}" if key else name
            if not any(is_below(path, prefix) or is_below(prefix, path) for prefix in prefixes or ()):
                inner.eval()


@contextlib.contextmanager
def still_statistics(module: nn.Module) -> Iterator[None]:
    """Batch norm uses the batch's statistics without updating its running ones: for other clients' features."""
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
    """Evaluation mode with gradients: batch norm uses its running statistics, dropout is off."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextlib.contextmanager
def on_the_batch(module: nn.Module) -> Iterator[None]:
    """As `evaluating`, but trained batch norm uses the batch's statistics, without updating its running ones."""
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm) and norm.training]
    with evaluating(module), still_statistics(module):
        for norm in norms:
            norm.train()
        yield


@contextlib.contextmanager
def single_sample(holder: Holder, samples: int) -> Iterator[None]:
    """Batch norm in evaluation mode for a batch of one sample, which has no variance.

    Such a step can do harm, as running statistics lag behind the weights. It happens only to clients with a single
    sample or a batch size of 1: elsewhere a single sample left over is dropped.
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
def twice_differentiable(module: nn.Module) -> Iterator[None]:
    """Leave out the fused kernels that have no second derivative: those of attention and cuDNN's recurrent ones."""
    recurrent = any(isinstance(layer, nn.RNNBase) for layer in module.modules())
    plain = torch.backends.cudnn.flags(enabled=False) if recurrent else contextlib.nullcontext()
    with sdpa_kernel(SDPBackend.MATH), plain:
        yield


@contextlib.contextmanager
def batch_statistics(module: nn.Module, samples: int) -> Iterator[None]:
    """A module in evaluation mode, but batch norm on the batch's statistics, unless there is one sample only."""
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)] if samples > 1 else []
    for norm in norms:
        norm.train()
    try:
        with still_statistics(module):
            yield
    finally:
        for norm in norms:
            norm.eval()
