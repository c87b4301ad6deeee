"""A shared space for features of different shapes: channels through a matrix, positions onto a common grid."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.client import Client
from potluck.message import Shapes
from potluck.rng import Rng

Kind = Literal["none", "fixed", "averaged", "private"]
Features = Mapping[str, Tensor]
Shape = tuple[int, ...]
Grid = tuple[int, int]


@dataclass(frozen=True)
class SharedSpace:
    """What features look like on the wire, one row a sample; `shapes` is (channels, height, width) by name.

    `none`: as they are, flattened. Else a matrix A with a row per shared and a column per own channel takes them
    there, its transpose takes them back, and positions are averaged, or repeated, onto the other grid. Matrices are
    drawn semi-orthogonal from a seed that all know (`fixed`, and `averaged`, where they are then trained and
    averaged among clients with as many channels) or that only the client knows (`private`: no common space).
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
        return {_key(name, shape): (self.shapes[name][0], shape[0]) for name, shape in own.items()}

    def draw(self, own: Shapes, secret: Rng | None = None) -> dict[str, Tensor]:
        """The matrices as they are drawn."""
        root = secret if secret is not None and self.kind == "private" else Rng(self.seed)
        return {
            name: semi_orthogonal(root.child("project", name), *shape)
            for name, shape in self.matrices(own).items()
        }

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

    def there(self, features: Features, maps: Features) -> dict[str, Tensor]:
        """A client's features as they cross."""
        if self.kind == "none":
            return {name: value.flatten(1) for name, value in features.items()}
        return {
            name: to_shared(value, maps[_key(name, value.shape[1:])], self.shapes[name][1:])
            for name, value in features.items()
        }

    def back(self, rows: Features, maps: Features, own: Shapes) -> dict[str, Tensor]:
        """What crossed, in a client's own shapes."""
        if self.kind == "none":
            return {name: rows[name].reshape(-1, *shape) for name, shape in own.items()}
        return {
            name: from_shared(rows[name], maps[_key(name, shape)], self.shapes[name][1:], shape)
            for name, shape in own.items()
        }

    def loss(self, features: Features, maps: Features) -> Tensor:
        """What trains averaged matrices, and nothing else: the mean of (s − AᵀA·s)², summed over the features."""
        gaps = []
        for name, value in features.items():
            matrix, constant = maps[_key(name, value.shape[1:])], value.detach()
            back = _mapped(matrix.T, _mapped(matrix, constant))
            gaps.append((back - constant).square().mean())
        return torch.stack(gaps).sum()


@functools.lru_cache(maxsize=256)
def semi_orthogonal(rng: Rng, rows: int, columns: int) -> Tensor:
    """A matrix whose shorter side is orthonormal: there and back keeps as much as it can.

    >>> matrix = semi_orthogonal(Rng(0), 5, 3)
    >>> torch.allclose(matrix.T @ matrix, torch.eye(3), atol=1e-6)
    True
    """
    return nn.init.orthogonal_(torch.empty(rows, columns), generator=rng.generator())


def to_shared(features: Tensor, matrix: Tensor, grid: Grid) -> Tensor:
    """Features (n, channels, positions …) as rows of the shared space."""
    mapped = _mapped(matrix, features)
    placed = mapped.reshape(*mapped.shape[:2], *_grid(features.shape[1:]))
    return F.adaptive_avg_pool2d(placed, grid).flatten(1)


def from_shared(rows: Tensor, matrix: Tensor, grid: Grid, shape: Shape) -> Tensor:
    """Rows of the shared space as features of a shape."""
    spread = F.adaptive_avg_pool2d(rows.reshape(len(rows), -1, *grid), _grid(shape))
    return _mapped(matrix.T, spread).reshape(len(rows), *shape)


def _mapped(matrix: Tensor, features: Tensor) -> Tensor:
    return torch.einsum("wc,nc...->nw...", matrix, features)


def _key(name: str, shape: Shape) -> str:
    return f"{name}:{shape[0]}"


def _grid(shape: Shape) -> Grid:
    """The positions of one sample (channels, positions …) as height and width."""
    return shape[1] if len(shape) > 1 else 1, math.prod(shape[2:])
