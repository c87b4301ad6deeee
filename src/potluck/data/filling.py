"""Missing numbers of vectors, filled by the client they belong to: with the means of its training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Filling:
    """What a client puts where a number is missing (NaN), for some columns of its samples.

    A column that it never measured is 0 in all its samples, also in one that has a value: its model saw no other.
    """

    columns: tuple[int, ...]
    mean: tuple[float, ...]  # NaN for a column that was never measured

    @classmethod
    def of(cls, x: Tensor, columns: Sequence[int]) -> Filling:
        """The filling by these samples; NaN for a column without any value."""
        return cls(tuple(columns), tuple(x[:, list(columns)].double().nanmean(0).tolist()))

    @property
    def empty(self) -> list[int]:
        """The columns that were never measured."""
        return [column for column, mean in zip(self.columns, self.mean, strict=True) if np.isnan(mean)]

    def __call__(self, x: Tensor) -> Tensor:
        """The samples without gaps."""
        x, columns = x.clone(), list(self.columns)
        x[:, columns] = torch.where(x[:, columns].isnan(), torch.tensor(self.mean), x[:, columns])
        x[:, self.empty] = 0.0
        return x

    def to_json(self) -> dict[str, Any]:
        """The filling as an index file has it."""
        return {"columns": list(self.columns), "mean": [None if np.isnan(one) else one for one in self.mean]}

    @classmethod
    def from_json(cls, value: Any) -> Filling:
        """The inverse of `to_json`; a `ValueError` says what is wrong."""
        lists = isinstance(value, Mapping) and set(value) == {"columns", "mean"}
        if not lists or not all(isinstance(one, list) for one in value.values()):
            raise ValueError("a filling has columns and mean")
        columns, mean = tuple(value["columns"]), tuple(value["mean"])
        numbers = all(one is None or (type(one) in (int, float) and np.isfinite(one)) for one in mean)
        places = all(type(one) is int and one >= 0 for one in columns)
        if len(columns) != len(mean) or not numbers or not places:
            raise ValueError("a filling has column numbers, and a mean for each")
        return cls(columns, tuple(np.nan if one is None else one for one in mean))
