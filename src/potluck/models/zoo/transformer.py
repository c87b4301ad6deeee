"""ViT-B/16 and ViT-B/32 (Dosovitskiy et al., ICLR 2021), for images of any size, without dropout.

Where the sides are no multiple of the patch the image is padded with zeros, evenly around it: 28×28 and 32×32 are
both four patches of 16, or one of 32. Positions are learned, for the task's own size. First weights as usual for
this family: Glorot's uniform ones for queries, keys, values and the MLP, torch's own after attention, a variance of
one over the inputs for the patches, a standard deviation of 0.02 for the positions; zero for the class token and
biases (1e-6 in the MLP). `layers` (default 12) is the depth; a layer has the same names at every depth.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.task import Task
from potluck.models.check import check_width
from potluck.models.parts import Backbone
from potluck.models.registry import register

WIDTH = 768
HEADS = 12
HIDDEN = 3072
LAYERS = 12
EPSILON = 1e-6  # of layer norm


class Attention(nn.Module):
    """Self-attention of 12 heads over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)  # queries, keys and values
        self.output = nn.Linear(WIDTH, WIDTH)
        nn.init.xavier_uniform_(self.inputs.weight)
        nn.init.zeros_(self.inputs.bias)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        queries, keys, values = self.inputs(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(queries, keys, values)
        out: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return out


class EncoderLayer(nn.Module):
    """Attention, then an MLP with GELU, each after layer norm and with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, EPSILON)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH, EPSILON)
        self.mlp = nn.Sequential(_linear(WIDTH, HIDDEN), nn.GELU(), _linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(Backbone):
    """Patches as tokens, 768 wide, behind a class token whose last state is the representation."""

    def __init__(
        self,
        task: Task,
        patch: int,
        rep_dim: int | None = None,
        adapter: str = "linear",
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        check_width(layers, "layers")
        colours, height, width = task.input
        rows, columns = math.ceil(height / patch), math.ceil(width / patch)
        padding = (*_halves(columns * patch - width), *_halves(rows * patch - height))
        self.pad = nn.ZeroPad2d(padding) if any(padding) else nn.Identity()
        self.patches = nn.Conv2d(colours, WIDTH, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, rows * columns + 1, WIDTH))
        self.layers = nn.Sequential(*(EncoderLayer() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        nn.init.trunc_normal_(self.patches.weight, std=(colours * patch * patch) ** -0.5)
        nn.init.zeros_(cast(Tensor, self.patches.bias))
        self.finish(WIDTH, task, rep_dim, adapter)

    def stem(self, x: Tensor) -> Tensor:
        """The tokens with their positions, (batch, patches + 1, 768)."""
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
        task: Task, rep_dim: int | None = None, adapter: str = "linear", layers: int = LAYERS
    ) -> VisionTransformer:
        return VisionTransformer(task, patch, rep_dim, adapter, layers)


_register("vit-b16", patch=16)
_register("vit-b32", patch=32)
