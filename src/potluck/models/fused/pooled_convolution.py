"""A convolution, ReLU and 2×2 max-pooling as one layer.

A small network spends more of a GPU's time between its products than in them: in bias, ReLU, pooling and their
gradients. So kernels of our own replace most of the dozen that torch would launch. They multiply as exactly as the
run asks for (`engine.precision`), float32 or tf32. Everywhere else, and where Triton does not work, the layer is
torch's own; the numbers agree within rounding.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.errors import PotluckAdvice, first_line

FEW = 128  # weights of an output channel: the convolution is a first one
LARGEST = 128 * 128, 256  # numbers in a block of a first layer's gradient, and on one of its sides
FIRST_PARTS, PARTS = 64, 16  # of a batch, for the gradients of a first layer's weights, and of any other's


def convolved_and_pooled(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """`max_pool2d(relu(layer(x)), 2)`.

    Torch's layers do it with ReLU last: the same bits and gradients, a quarter of the work for ReLU.
    """
    if _is_ours(layer, x):
        pooled: Tensor = _PooledConvolution.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
        return pooled
    return F.relu(F.max_pool2d(layer(x), 2))


def _is_ours(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether our kernels compute this: a plain layer in float32 on the current GPU that nothing watches."""
    return (
        x.is_cuda
        and x.device.index == torch.cuda.current_device()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cuda")
        and not torch._C._are_functorch_transforms_active()
        and _is_simple(layer)
        and _is_of_our_size(layer, x)
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


def _is_of_our_size(layer: nn.Conv2d, x: Tensor) -> bool:
    """Not smaller than one pooled answer, nor larger than a kernel counts."""
    most = (x.numel() // 4 + 1) * (layer.kernel_size[0] + 1) ** 2
    return x.ndim == 4 and x.shape[0] > 0 and min(x.shape[2:]) > layer.kernel_size[0] and most < 2**31


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
        back = _Backwards(x, weight, gradient.contiguous(), choice, multiplied())
        of_layer = back.of_layer() if wanted[1] or wanted[2] else (None, None)
        return back.of_input() if wanted[0] else None, *of_layer


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


@dataclass(frozen=True)
class _Backwards:
    """The way back through a layer, for the gradient of its pooled answers."""

    x: Tensor
    weight: Tensor
    gradient: Tensor
    choice: Tensor
    precision: str

    @property
    def positions(self) -> int:
        """Pooled answers of all samples, in one channel."""
        return self.gradient.numel() // self.gradient.shape[1]

    @property
    def patch(self) -> int:
        """Inputs of a pooled answer: the pixels of four answers of the convolution."""
        return int(self.weight.shape[1] * (self.weight.shape[2] + 1) ** 2)

    @property
    def sizes(self) -> dict[str, int]:
        """What kernels are built for."""
        out, channels, side, _ = self.weight.shape
        return {"CHANNELS": channels, "OUT": out, "SIDE": side}

    def of_input(self) -> Tensor:
        """The gradient of the input: that of every patch, added up where patches overlap."""
        x, pooled, count = self.x, self.gradient.shape[2:], self.x.numel()
        patches, to_x = x.new_empty(self.positions, self.patch), torch.empty_like(x)
        _ours().input_patches[(-(-self.positions // 64), -(-self.patch // 128))](
            self.gradient, self.choice, self.weight, patches, self.positions, pooled[0] * pooled[1],
            **self.sizes, BLOCK_P=64, BLOCK_O=8, BLOCK_U=128, PRECISION=self.precision,
            num_warps=4, num_stages=1,
        )  # fmt: skip
        _ours().overlapped[(-(-count // 512),)](
            patches, to_x, count, *x.shape[2:], *pooled,
            CHANNELS=x.shape[1], SIDE=self.weight.shape[2], BLOCK=512, num_warps=4,
        )  # fmt: skip
        return to_x

    def of_layer(self) -> tuple[Tensor, Tensor]:
        """Gradients of weights and bias, computed in parts of the batch that are added up."""
        both = self._of_first() if self._is_first() else self._of_any()
        return both[: self.weight.numel()].view_as(self.weight), both[self.weight.numel() :]

    def _is_first(self) -> bool:
        """Whether input channels are so few that all choices and pixels fit into one block."""
        (out, patch), (most, side) = self._block(), LARGEST
        return 4 * out * patch <= most and max(4 * out, patch) <= side

    def _block(self) -> tuple[int, int]:
        """Output channels and pixels of a patch, as powers of two."""
        return max(4, _power(self.weight.shape[0])), max(16, _power(self.patch))

    def _parts(self, most: int, block: int) -> tuple[int, int]:
        """At most so many parts of whole blocks, and the positions of each."""
        each = -(-self.positions // (most * block)) * block
        return -(-self.positions // each), each

    def _of_first(self) -> Tensor:
        weight, (parts, each), (wide, long) = self.weight, self._parts(FIRST_PARTS, 32), self._block()
        sums = weight.new_empty(parts, weight.shape[0] * (4 * self.patch + 1))
        _ours().first_weight_gradients[(parts,)](
            self.x, self.gradient, self.choice, sums, self.positions, each,
            *self.x.shape[2:], *self.gradient.shape[2:],
            **self.sizes, BLOCK_P=32, BLOCK_O=wide, BLOCK_U=long, PRECISION=self.precision,
            num_warps=4 if self.precision == "tf32" else 8, num_stages=1,
        )  # fmt: skip
        both = weight.new_empty(weight.numel() + weight.shape[0])
        _ours().folded[(-(-both.numel() // 32),)](
            sums, both, parts, **self.sizes, BLOCK_E=32, BLOCK_N=16, num_warps=4
        )
        return both

    def _of_any(self) -> Tensor:
        weight, (parts, each) = self.weight, self._parts(PARTS, 8)
        wide = max(16, min(64, _power(weight.shape[0])))
        sums = weight.new_empty(parts, weight.numel() + weight.shape[0])
        _ours().weight_gradients[(parts, -(-weight[0].numel() // 128), -(-weight.shape[0] // wide))](
            self.x, self.gradient, self.choice, sums, self.positions, each,
            *self.x.shape[2:], *self.gradient.shape[2:],
            **self.sizes, BLOCK_P=8, BLOCK_O=wide, BLOCK_U=128, PRECISION=self.precision,
            num_warps=4, num_stages=1,
        )  # fmt: skip
        return sums.sum(0)


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
