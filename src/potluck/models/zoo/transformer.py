"""ViT-B/16 and ViT-B/32 (Dosovitskiy et al., ICLR 2021), for images of any size, without dropout.

Where the sides are no multiple of the patch the image is padded with zeros, evenly around it: 28×28 and 32×32 are
both four patches of 16, or one of 32. Positions are learned, for the task's own size. First weights as usual for
this family: Glorot's uniform ones for queries, keys, values and the MLP, torch's own after attention, a variance of
one over the inputs for the patches, a standard deviation of 0.02 for the positions; zero for the class token and
biases (1e-6 in the MLP).

`scale` is the share of every width. There are 12 heads at every scale, and attention is divided by √64 at every
scale, so that a narrower one computes what the whole one computes on fewer channels.
`layers` (default 12) is the depth; a layer has the same names at every depth.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.model import Blocks
from potluck.core.task import Task
from potluck.models.check import check_width
from potluck.models.parts import Backbone, scaled
from potluck.models.registry import register

HEADS = 12
PER_HEAD = 64
LAYERS = 12
EPSILON = 1e-6  # of layer norm


class Attention(nn.Module):
    """Self-attention of 12 heads over all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys and values
        self.output = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.inputs.weight)
        nn.init.zeros_(self.inputs.bias)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        queries, keys, values = self.inputs(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(queries, keys, values, scale=PER_HEAD**-0.5)
        out: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return out


class EncoderLayer(nn.Module):
    """Attention, then an MLP with GELU, each after layer norm and with a shortcut."""

    def __init__(self, width: int = HEADS * PER_HEAD) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPSILON)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width, EPSILON)
        self.mlp = nn.Sequential(_linear(width, 4 * width), nn.GELU(), _linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


_HEADS_IN: Blocks = {
    "inputs.weight": {0: (3 * HEADS, 1)},
    "inputs.bias": {0: (3 * HEADS, 1)},
    "output.weight": {1: (HEADS, 1)},
}


class VisionTransformer(Backbone):
    """Patches as tokens, 768 wide at scale 1, behind a class token whose last state is the representation."""

    def __init__(
        self,
        task: Task,
        patch: int,
        rep_dim: int | None = None,
        adapter: str = "linear",
        layers: int = LAYERS,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        check_width(layers, "layers")
        width = HEADS * scaled(PER_HEAD, scale)
        colours, high, wide = task.input
        rows, columns = math.ceil(high / patch), math.ceil(wide / patch)
        padding = (*_halves(columns * patch - wide), *_halves(rows * patch - high))
        self.pad = nn.ZeroPad2d(padding) if any(padding) else nn.Identity()
        self.patches = nn.Conv2d(colours, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, rows * columns + 1, width))
        self.layers = nn.Sequential(*(EncoderLayer(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, EPSILON)
        nn.init.trunc_normal_(self.patches.weight, std=(colours * patch * patch) ** -0.5)
        nn.init.zeros_(cast(Tensor, self.patches.bias))
        self.finish(width, task, rep_dim, adapter)

        self.channel_blocks = {
            f"layers.{number}.attention.{name}": axes
            for number in range(layers)
            for name, axes in _HEADS_IN.items()
        }

    def stem(self, x: Tensor) -> Tensor:
        """The tokens with their positions, (batch, patches + 1, width)."""
        patches = self.patches(self.pad(x)).flatten(2).transpose(1, 2)
        token = self.token.expand(x.shape[0], -1, -1)  # len(x) would fix the batch in torch.export
        return torch.cat([token, patches], 1) + self.positions

    def body(self, s: Tensor) -> Tensor:
        """The layers, the class token's state after layer norm, and the adapter if there is one."""
        features: Tensor = self.resize(self.norm(self.layers(s)[:, 0]))
        return features


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.normal_(linear.bias, std=1e-6)
    return linear


def _halves(total: int) -> tuple[int, int]:
    return total // 2, total - total // 2


def _register(name: str, patch: int) -> None:
    @register(name, takes=("image",))
    def vit(
        task: Task,
        rep_dim: int | None = None,
        adapter: str = "linear",
        layers: int = LAYERS,
        scale: float = 1.0,
    ) -> VisionTransformer:
        return VisionTransformer(task, patch, rep_dim, adapter, layers, scale)


_register("vit-b16", patch=16)
_register("vit-b32", patch=32)
