"""A convolution, ReLU and 2×2 max-pooling as one layer.

A small network spends more of a GPU's time between its products than in them: in bias, ReLU, pooling and their
gradients. So kernels of our own replace most of the dozen that torch would launch. They multiply as exactly as the
run asks for (`engine.precision`), float32 or tf32. Gradients of a layer with many input channels are left to cuDNN,
which is faster there. Everywhere else, and where Triton does not work, the layer is torch's own; the numbers agree
within rounding.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.errors import PotluckAdvice, first_line

FEW = 128  # weights of an output channel: the convolution is a first one
LARGEST = 128 * 128, 256  # numbers in a block of our gradient of the weights, and on one of its sides
PARTS = 32  # into which the positions of a batch are divided for that gradient


def convolved_and_pooled(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """`max_pool2d(relu(layer(x)), 2)`."""
    if _is_ours(layer, x):
        pooled: Tensor = _PooledConvolution.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
        return pooled
    return F.max_pool2d(F.relu(layer(x)), 2)


def _is_ours(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether our kernels compute this: a plain layer in float32 on the current GPU that nothing watches."""
    return (
        x.is_cuda
        and x.device.index == torch.cuda.current_device()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cuda")
        and not torch._C._are_functorch_transforms_active()
        and _is_simple(layer)
        and _is_large_enough(layer, x)
        and all(_is_plain(value) for value in (x, layer.weight, layer.bias))
        and kernels() is not None
    )


def _is_simple(layer: nn.Conv2d) -> bool:
    return (
        layer.bias is not None
        and layer.stride == layer.dilation == (1, 1)
        and layer.padding == (0, 0)
        and layer.groups == 1
        and layer.kernel_size[0] == layer.kernel_size[1]
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
        and "forward" not in vars(layer)
    )


def _is_large_enough(layer: nn.Conv2d, x: Tensor) -> bool:
    return x.ndim == 4 and x.shape[0] > 0 and min(x.shape[2:]) > layer.kernel_size[0] and x.numel() < 2**31


def _is_plain(value: Tensor | None) -> bool:
    return value is not None and value.dtype == torch.float32 and value.is_contiguous()


@functools.cache
def kernels() -> ModuleType | None:
    """Our kernels; None where Triton is missing or cannot build one."""
    try:
        ours = importlib.import_module("potluck.models.fused.kernels")
        _try_out(ours)
    except Exception as error:  # whatever stops Triton, torch's own layers do
        warnings.warn(
            f"small convolutions run on torch's slower kernels: Triton does not work ({first_line(error)})",
            PotluckAdvice,
            stacklevel=2,
        )
        return None
    return ours


def _try_out(ours: ModuleType) -> None:
    """Build and launch a small one: a missing compiler or driver shows here, and a GPU without tf32."""
    value = torch.ones(1, 1, 2, 2, device="cuda")
    pooled_answers(ours, value, value[:, :, :1, :1], value.new_zeros(1), "tf32")


class _PooledConvolution(torch.autograd.Function):
    """The layer with gradients of its own; asked for gradients of gradients, it goes back to torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Pooled answers."""
        y, choice = pooled_answers(_ours(), x, weight, bias, multiplied())
        ctx.save_for_backward(x, weight, bias, choice)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of what needs one: the gradient of input, weights and bias."""
        x, weight, bias, choice = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _differentiable(x, weight, bias, gradient, wanted)
        gradient = gradient.contiguous()
        if wanted[0] or not _fits(weight):
            return spread_gradients(_ours(), x, weight, gradient, choice, wanted)
        return (None, *weight_gradients(_ours(), x, weight, gradient, choice, multiplied()))


def _ours() -> ModuleType:
    ours = kernels()
    assert ours is not None, "asked before"
    return ours


def multiplied() -> str:
    """How tensor cores multiply: as exactly as convolutions do now."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


def pooled_answers(
    ours: ModuleType, x: Tensor, weight: Tensor, bias: Tensor, precision: str
) -> tuple[Tensor, Tensor]:
    """Pooled answers, and which of four each of them is."""
    out, channels, side, _ = weight.shape
    height, width = x.shape[2:]
    pooled = (height - side + 1) // 2, (width - side + 1) // 2
    y = x.new_empty(x.shape[0], out, *pooled)
    choice = torch.empty_like(y, dtype=torch.int8)
    positions = x.shape[0] * pooled[0] * pooled[1]
    block, step = (32, 16) if weight[0].numel() <= FEW else (16, 64)
    wide = max(16, min(64, _power(out)))
    ours.forward[(-(-positions // block), -(-out // wide))](
        x, weight, bias, y, choice, positions, height, width, *pooled,
        CHANNELS=channels, OUT=out, SIDE=side,
        BLOCK_P=block, BLOCK_O=wide, BLOCK_K=step, PRECISION=precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, choice


def _block(weight: Tensor) -> tuple[int, int]:
    """Output channels and pixels of a patch in one block of `weight_gradients`."""
    out, channels, side, _ = weight.shape
    return max(4, _power(out)), max(16, _power(channels * (side + 1) ** 2))


def _fits(weight: Tensor) -> bool:
    """Whether a block of `weight_gradients` fits into registers and shared memory."""
    out, patch = _block(weight)
    most, side = LARGEST
    return 4 * out * patch <= most and max(4 * out, patch) <= side


def weight_gradients(
    ours: ModuleType, x: Tensor, weight: Tensor, gradient: Tensor, choice: Tensor, precision: str
) -> tuple[Tensor, Tensor]:
    """Gradients of weights and bias, where both are few."""
    out, channels, side, _ = weight.shape
    pooled = gradient.shape[2:]
    positions = gradient.shape[0] * pooled[0] * pooled[1]
    block = 32
    each = -(-positions // (PARTS * block)) * block
    parts = -(-positions // each)
    patch = channels * (side + 1) ** 2
    sums = x.new_empty(parts, out * (4 * patch + 1))
    sizes = {"CHANNELS": channels, "OUT": out, "SIDE": side}
    wide, long = _block(weight)
    ours.weight_gradients[(parts,)](
        x, gradient, choice, sums, positions, each, *x.shape[2:], *pooled, **sizes,
        BLOCK_P=block, BLOCK_O=wide, BLOCK_U=long, PRECISION=precision,
        num_warps=4 if precision == "tf32" else 8, num_stages=1,
    )  # fmt: skip
    both = x.new_empty(weight.numel() + out)
    ours.folded[(-(-both.numel() // 32),)](sums, both, parts, **sizes, BLOCK_E=32, BLOCK_N=16, num_warps=4)
    return both[: weight.numel()].view_as(weight), both[weight.numel() :]


def spread_gradients(
    ours: ModuleType, x: Tensor, weight: Tensor, gradient: Tensor, choice: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Gradients of input, weights and bias: through pooling by our kernel, through the convolution by cuDNN."""
    side = weight.shape[2]
    samples, out, *pooled = gradient.shape
    answers = [size - side + 1 for size in x.shape[2:]]
    make = x.new_zeros if answers[0] % 2 or answers[1] % 2 else x.new_empty  # pooling leaves the last row out
    spread, biases = make(samples, out, *answers), x.new_empty(out)
    ours.spread_gradients[(out,)](
        gradient, choice, spread, biases, samples, out, *answers, *pooled, BLOCK=256, num_warps=8
    )
    to_x, to_weight, _ = torch.ops.aten.convolution_backward(
        spread, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [wanted[0], wanted[1], False]
    )
    return to_x, to_weight, biases


def _differentiable(
    x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    y = F.max_pool2d(F.relu(F.conv2d(x, weight, bias)), 2)
    values = [value for value, needed in zip((x, weight, bias), wanted, strict=True) if needed]
    found = iter(torch.autograd.grad(y, values, gradient, create_graph=True))
    first, second, third = (next(found) if needed else None for needed in wanted)
    return first, second, third


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
