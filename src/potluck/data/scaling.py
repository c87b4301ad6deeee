"""Standardisation of vectors by the client they belong to: with the mean and deviation of its training rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """What a client subtracts from some columns of its samples, and what it divides them by."""

    columns: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, x: Tensor, columns: tuple[int, ...]) -> Scaling:
        """The scaling by these samples; a column without spread is only centred."""
        values = x[:, list(columns)].double()
        std = values.std(0, correction=0)
        std = torch.where(std > 1e-12, std, 1.0)
        return cls(columns, tuple(values.mean(0).tolist()), tuple(std.tolist()))

    def __call__(self, x: Tensor) -> Tensor:
        """The standardised samples."""
        x, columns = x.clone(), list(self.columns)
        x[:, columns] = (x[:, columns] - torch.tensor(self.mean)) / torch.tensor(self.std)
        return x

    def to_json(self) -> dict[str, Any]:
        """The scaling as an index file has it."""
        return {"columns": list(self.columns), "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_json(cls, value: Any) -> Scaling:
        """The inverse of `to_json`; a `ValueError` says what is wrong."""
        keys = ("columns", "mean", "std")
        if not isinstance(value, Mapping) or set(value) != set(keys):
            raise ValueError("a scaling has columns, mean and std")
        columns, mean, std = (tuple(value[key]) if isinstance(value[key], list) else () for key in keys)
        numbers = all(type(one) in (int, float) and np.isfinite(one) for one in (*mean, *std))
        if not len(columns) == len(mean) == len(std) or not numbers or min(std, default=0) <= 0:
            raise ValueError("a scaling has a mean and a positive std for each of its columns")
        if not all(type(one) is int and one >= 0 for one in columns):
            raise ValueError("the columns of a scaling are column numbers")
        return cls(columns, mean, std)
