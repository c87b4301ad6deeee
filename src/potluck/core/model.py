"""The model contract: features, then a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from potluck.core.task import Task
from potluck.errors import ModelError

Blocks = Mapping[str, Mapping[int, tuple[int, int]]]


class Model(nn.Module):
    """`features(x)` gives (batch, rep_dim), `head(features)` gives (batch, classes).

    A model in three parts has `has_stem` set and defines `stem` and `body` instead of `features`;
    then `features(x)` is `body(stem(x))`. `adapter` names the layer that brings the features to `rep_dim`:
    "linear" (trained), "pool" or "max-pool" (no parameters), or None where the network's own width is used.

    `channel_blocks` is for methods that cut a model by width. It names the axes of tensors that do not have one
    entry per channel: tensor → axis → (groups, each). Such an axis is laid out as groups × channels × each: the
    inputs of a linear layer on flattened images have as many entries for each channel as there are pixels, the
    outputs that give queries, keys and values of 12 heads are 36 groups of channels. None: nothing is said about
    it.

    `own_kernels` says that its layers have kernels of ours on a GPU, in float32 and tf32: they are faster than
    compiled code.
    """

    rep_dim: int
    head: nn.Module
    has_stem: bool = False
    adapter: str | None = None
    channel_blocks: Blocks | None = None
    own_kernels: bool = False

    def stem(self, x: Tensor) -> Tensor:
        """The first layers, whose output has the same shape in every model of a family."""
        raise ModelError(f"{type(self).__name__} has no stem(x) and body(s); define both in it")

    def body(self, s: Tensor) -> Tensor:
        """The layers between the stem and the features."""
        raise ModelError(f"{type(self).__name__} has no stem(x) and body(s); define both in it")

    def features(self, x: Tensor) -> Tensor:
        """The representation of a batch, (batch, rep_dim)."""
        return self.body(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        """The scores of a batch, (batch, classes)."""
        scores: Tensor = self.head(self.features(x))
        return scores


class Models(Protocol):
    """The models of an experiment, as a method sees them: it can build more of them."""

    @property
    def keys(self) -> Sequence[str]:
        """The key of every architecture."""

    def build(self, entry: Any, task: Task, rep_dim: int | None = None, *, who: str = "model") -> Model:
        """A fresh model from a key, or from an entry as in an experiment file."""

    def signature(self, key: str, task: Task, rep_dim: int | None = None) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of an architecture's tensors, without building it."""

    def smallest(self, task: Task) -> str:
        """The key of the architecture with the fewest parameters."""

    def largest(self, task: Task) -> str:
        """The key of the architecture with the most parameters."""
