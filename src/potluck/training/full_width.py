"""Linear layers at the full vector width of a CPU.

PyTorch multiplies float32 matrices by MKL, which uses half the width of AVX-512 on CPUs that are not Intel's.
oneDNN, which is in PyTorch too, uses all of it there, and large products take half the time. On other CPUs nothing
changes.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from potluck.training.fused_casts import is_changed
from potluck.training.watched import is_watched

WORTH_IT = 2**21  # multiply-adds of a product; smaller ones are not faster


@contextlib.contextmanager
def full_width(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let large linear layers multiply by oneDNN in here, where MKL is the slower one."""
    if not mkl_is_narrow():
        yield
        return
    found = [layer for module in modules for layer in module.modules() if type(layer) is nn.Linear]
    found = [layer for layer in dict.fromkeys(found) if not is_changed(layer)]
    for layer in found:
        layer.forward = functools.partial(linear, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in found:
            del layer.forward


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)`, by oneDNN if that pays."""
    if _is_large(x, layer.weight):
        made: Tensor = _Linear.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
        return made
    return F.linear(x, layer.weight, layer.bias)


def _is_large(x: Tensor, weight: Tensor) -> bool:
    """Whether this is one large product of plain float32 matrices, and nothing watches."""
    return (
        x.ndim == 2
        and x.shape[0] * weight.numel() >= WORTH_IT
        and x.shape[1] == weight.shape[1]
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not is_watched()
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    """x·Wᵀ + b, with gradients that can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's answer."""
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of what needs one: the gradient of input, weights and bias."""
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        by = torch.mm if torch.is_grad_enabled() else _times
        return (
            by(gradient, weight) if for_x else None,
            by(gradient.t(), x) if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )


def _times(one: Tensor, other: Tensor) -> Tensor:
    return product(one, other.t())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b by oneDNN."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return made


@functools.cache
def mkl_is_narrow() -> bool:
    """Whether torch multiplies by MKL on a CPU with AVX-512 that MKL does not use, and has oneDNN beside it."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_maker() not in ("", "GenuineIntel")
        and has_product()
    )


@functools.cache
def cpu_maker() -> str:
    """The maker of the CPU as it names itself; empty where nobody says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return next((word for word in ("GenuineIntel", "AuthenticAMD") if word in platform.processor()), "")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def has_product() -> bool:
    """Whether this build of torch has oneDNN's linear layer, tried with a small one."""
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            one = torch.ones(2, 2, dtype=torch.float32, device="cpu")
            return bool(torch.equal(product(one, one, one[0]), one + 2))
    except (AttributeError, RuntimeError, TypeError):
        return False
