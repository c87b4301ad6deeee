"""A user's module, split into features and head."""

from __future__ import annotations

import difflib

import torch
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.trial import kind
from potluck.errors import ModelError, nearest
from potluck.models.outputs import scores_of
from potluck.models.parts import make_adapter


class Adapted(Model):
    """A user's module, the `trunk`, with its last layer taken out and set as `head`.

    `head_path` is where the head was. `stem_paths` and `body_paths` name the layers that make up the first and
    the middle part, in order; they are empty if the module was not split that far.
    """

    def __init__(
        self, trunk: nn.Module, head_path: str, head: nn.Module, width: int, rep_dim: int, adapter: str
    ):
        super().__init__()
        self.source = kind(trunk)
        self.head_path = head_path
        self.rep_dim = rep_dim
        self.has_stem = isinstance(trunk, Model) and trunk.has_stem
        self.stem_paths: tuple[str, ...] = ()
        self.body_paths: tuple[str, ...] = ()
        if isinstance(trunk, Model) and trunk.channel_blocks is not None:
            self.channel_blocks = {f"trunk.{name}": axes for name, axes in trunk.channel_blocks.items()}
        self.trunk = replace_layer(trunk, head_path, nn.Identity())
        self.resize, self.adapter = make_adapter(adapter, width, rep_dim)
        self.head = head
        like = next(trunk.parameters(), torch.empty(0))
        self.resize.to(like.device, like.dtype)

    def stem(self, x: Tensor) -> Tensor:
        """The first part of the module."""
        if not self.stem_paths and isinstance(self.trunk, Model):
            return self.trunk.stem(x)
        return self._through(self.stem_paths, x)

    def body(self, s: Tensor) -> Tensor:
        """The middle part, from the stem's output to the features."""
        if not self.stem_paths and isinstance(self.trunk, Model):
            return self._resized(self.trunk.body(s))
        return self._resized(self._through(self.body_paths, s))

    def features(self, x: Tensor) -> Tensor:
        """The former input of the head, flattened and brought to `rep_dim`."""
        return self._resized(scores_of(self.trunk, x))

    def _resized(self, inner: Tensor) -> Tensor:
        features: Tensor = self.resize(inner.flatten(1))
        return features

    def _through(self, paths: tuple[str, ...], x: Tensor) -> Tensor:
        if not self.has_stem:
            raise ModelError(
                f"{self.source} has no stem(x) and body(s); name their layers with potluck.adapt(model, stem=…, "
                "body=…)"
            )
        for path in paths:
            x = self.trunk.get_submodule(path)(x)
        return x


class AdaptedMaps(Adapted):
    """A user's module that gives every pixel a class: its last convolution is the head.

    The features are the mean over pixels of what goes into it. An adapter changes them alone, not the scores.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The scores of every pixel, (batch, classes, height, width)."""
        scores: Tensor = self.head(scores_of(self.trunk, x))
        return scores

    def _resized(self, inner: Tensor) -> Tensor:
        features: Tensor = self.resize(inner.mean((2, 3)))
        return features


def find_layer(module: nn.Module, path: str) -> nn.Module:
    """The layer at a dotted path ("" is the module itself)."""
    layers: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if path not in layers:
        top = [name for name, _ in module.named_children()]
        hint = nearest(path, difflib.get_close_matches(path, list(layers), n=1, cutoff=0.5) or top)
        raise ModelError(f"layer {path!r} not found in {kind(module)}; {hint}")
    return layers[path]


def replace_layer(module: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    """The module with another layer at a dotted path, changed in place unless the path is ""."""
    if not path:
        return layer
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, layer)
    return module
