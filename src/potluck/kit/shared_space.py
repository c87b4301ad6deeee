"""A shared space for features of different shapes: a matrix maps channels, a common grid takes the places.

The channels of a sample are the first axis of (channels, height, width) and of (channels,), and the last axis of
(tokens, width), where the tokens are places in a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.contract import Shapes
from potluck.core.rng import Rng

Kind = Literal["none", "fixed", "averaged", "private"]
Features = Mapping[str, Tensor]
Shape = tuple[int, ...]
Grid = tuple[int, int]


@dataclass(frozen=True)
class SharedSpace:
    """What features look like on the wire, one row a sample; `shapes` is (channels, height, width) by name.

    `none`: features cross as they are, flattened. Otherwise a matrix A, with a row per shared and a column per own
    channel, maps them there and its transpose maps them back; places are averaged or repeated to fit the other grid
    (tokens along its rows). The matrices come from a seed that all know (`fixed`; and `averaged`, where they are
    then trained, and averaged among clients with as many channels) or that only the client knows (`private`, a
    control: there is no common space).

    A client with no more channels than the space uses the first columns of one orthogonal matrix: no channel is
    lost, and what one client sends as its n-th channel another receives as its n-th. With more channels than the
    space a part of each is lost, and only clients with equally many channels share a matrix.
    """

    kind: Kind
    shapes: Mapping[str, tuple[int, int, int]]
    seed: int = 0

    def sizes(self, own: Shapes) -> dict[str, int]:
        """How many numbers a sample has on the wire, by the name of the features."""
        return {
            name: math.prod(shape if self.kind == "none" else self.shapes[name])
            for name, shape in own.items()
        }

    def matrices(self, own: Shapes) -> dict[str, Shape]:
        """The shape of each matrix; its name is the same for clients with as many channels."""
        if self.kind == "none":
            return {}
        return {_key(name, shape): (self.shapes[name][0], _channels(shape)) for name, shape in own.items()}

    def draw(self, own: Shapes, secret: Rng | None = None) -> dict[str, Tensor]:
        """The matrices drawn from the seed, or from a client's secret."""
        root = secret if secret is not None and self.kind == "private" else Rng(self.seed)
        found = {}
        for key, (there, here) in self.matrices(own).items():
            name, _, _ = key.partition(":")
            whole = semi_orthogonal(root.child("project", name), there, max(there, here))
            found[key] = whole[:, :here]
        return found

    def trained(self, own: Shapes) -> dict[str, nn.Module]:
        """The part of a client's state that holds the matrices, where they are trained."""
        drawn = {name: matrix.clone() for name, matrix in self.draw(own).items()}
        return {"maps": nn.ParameterDict(drawn)} if self.kind == "averaged" else {}

    def maps(self, client: Client, own: Shapes) -> Features:
        """A client's matrices."""
        if self.kind == "averaged":
            return client["maps"].tensors()
        drawn = self.draw(own, client.secret)
        return {name: matrix.to(client.device, non_blocking=True) for name, matrix in drawn.items()}

    def to_wire(self, features: Features, maps: Features) -> dict[str, Tensor]:
        """A client's features in the form in which they cross."""
        if self.kind == "none":
            return {name: value.flatten(1) for name, value in features.items()}
        return {
            name: to_shared(value, maps[_key(name, value.shape[1:])], self.shapes[name][1:])
            for name, value in features.items()
        }

    def from_wire(self, rows: Features, maps: Features, own: Shapes) -> dict[str, Tensor]:
        """Features that crossed, in a client's own shapes."""
        if self.kind == "none":
            return {name: rows[name].reshape(-1, *shape) for name, shape in own.items()}
        return {
            name: from_shared(rows[name], maps[_key(name, shape)], self.shapes[name][1:], shape)
            for name, shape in own.items()
        }

    def loss(self, features: Features, maps: Features) -> Tensor:
        """The loss that keeps trained matrices from losing anything: mean (s − AᵀA·s)², summed over features."""
        gaps = []
        for name, value in features.items():
            matrix, constant = maps[_key(name, value.shape[1:])], _channels_first(value.detach())
            back = _mapped(matrix.T, _mapped(matrix, constant))
            gaps.append((back - constant).square().mean())
        return torch.stack(gaps).sum()


def semi_orthogonal(rng: Rng, rows: int, columns: int) -> Tensor:
    """A random matrix whose shorter side is orthonormal, so that mapping there and back keeps all it can.

    >>> matrix = semi_orthogonal(Rng(0), 5, 3)
    >>> torch.allclose(matrix.T @ matrix, torch.eye(3), atol=1e-6)
    True
    """
    return _drawn(rng, rows, columns, torch.get_default_dtype())


@functools.lru_cache(maxsize=256)
def _drawn(rng: Rng, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns, dtype=dtype), generator=rng.generator())


def channel_axis(batch: Tensor) -> int:
    """The axis of a batch of features that holds the channels."""
    return 2 if batch.dim() == 3 else 1


def to_shared(features: Tensor, matrix: Tensor, grid: Grid) -> Tensor:
    """A batch of features as rows of the shared space."""
    mapped = _mapped(matrix, _channels_first(features))
    own, shared = _grids(features.shape[1:], grid)
    return _moved(mapped.reshape(*mapped.shape[:2], *own), shared).flatten(1)


def from_shared(rows: Tensor, matrix: Tensor, grid: Grid, shape: Shape) -> Tensor:
    """Rows of the shared space as features of a shape."""
    own, shared = _grids(shape, grid)
    spread = _mapped(matrix.T, _moved(rows.reshape(len(rows), -1, *shared), own))
    return (spread.flatten(2).transpose(1, 2) if len(shape) == 2 else spread).reshape(len(rows), *shape)


def _mapped(matrix: Tensor, features: Tensor) -> Tensor:
    return torch.einsum("wc,nc...->nw...", matrix, features)


def _moved(placed: Tensor, grid: Grid) -> Tensor:
    """Features (n, channels, height, width) on another grid."""
    down, across = (_places(old, new, placed) for old, new in zip(placed.shape[2:], grid, strict=True))
    return torch.einsum("ih,nchw,jw->ncij", down, placed, across)


def _places(old: int, new: int, like: Tensor) -> Tensor:
    """The matrix from `old` places to `new`: more repeat each place, fewer average neighbours.

    Going to more places and back loses nothing; going to fewer loses what differs within an average.
    """
    few, many = sorted((old, new))
    numbers = torch.arange(many, device=like.device) * few // many
    repeated = (numbers[:, None] == torch.arange(few, device=like.device)).to(like.dtype)
    return repeated if new == many else repeated.T / repeated.sum(0)[:, None]


def _key(name: str, shape: Shape) -> str:
    return f"{name}:{_channels(shape)}"


def _channels(shape: Shape) -> int:
    return shape[1] if len(shape) == 2 else shape[0]


def _channels_first(batch: Tensor) -> Tensor:
    return batch.movedim(channel_axis(batch), 1)


def _grids(shape: Shape, grid: Grid) -> tuple[Grid, Grid]:
    """The places of a sample and those of the shared space, as height and width."""
    if len(shape) == 2:
        return (1, shape[0]), (1, math.prod(grid))
    return (shape[1] if len(shape) > 1 else 1, math.prod(shape[2:])), grid
