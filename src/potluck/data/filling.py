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
    """What a client puts where a number is missing (NaN), for some columns of its samples."""

    columns: tuple[int, ...]
    mean: tuple[float, ...]

    @classmethod
    def of(cls, x: Tensor, columns: Sequence[int]) -> Filling:
        """The filling by these samples; NaN for a column without any value."""
        return cls(tuple(columns), tuple(x[:, list(columns)].double().nanmean(0).tolist()))

    @property
    def empty(self) -> list[int]:
        """The columns for which there is no mean."""
        return [column for column, mean in zip(self.columns, self.mean, strict=True) if np.isnan(mean)]

    def __call__(self, x: Tensor) -> Tensor:
        """The samples without gaps."""
        x, columns = x.clone(), list(self.columns)
        x[:, columns] = torch.where(x[:, columns].isnan(), torch.tensor(self.mean), x[:, columns])
        return x

    def to_json(self) -> dict[str, Any]:
        """The filling as an index file has it."""
        return {"columns": list(self.columns), "mean": list(self.mean)}

    @classmethod
    def from_json(cls, value: Any) -> Filling:
        """The inverse of `to_json`; a `ValueError` says what is wrong."""
        lists = isinstance(value, Mapping) and set(value) == {"columns", "mean"}
        if not lists or not all(isinstance(one, list) for one in value.values()):
            raise ValueError("a filling has columns and mean")
        columns, mean = tuple(value["columns"]), tuple(value["mean"])
        numbers = all(type(one) in (int, float) and np.isfinite(one) for one in mean)
        places = all(type(one) is int and one >= 0 for one in columns)
        if len(columns) != len(mean) or not numbers or not places:
            raise ValueError("a filling has column numbers, and a mean for each")
        return cls(columns, mean)
