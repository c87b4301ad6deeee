"""Weights of loss terms: a number, or a function of what the client reported last."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import Tensor

from potluck.errors import ConfigError
from potluck.plugins import find_function

Rule = Callable[[Mapping[str, Tensor]], Any]


def _read(value: Any) -> Any:
    if isinstance(value, str):
        find_function(value)
    elif not callable(value) and not _is_weight(value):
        raise ValueError("give a number from 0, a function, or the name of one as module:function")
    return value


def _is_weight(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


Weight = Annotated[float | str | Rule, BeforeValidator(_read)]
"""A number, or a function (in a file: `module:function`) of the mean of each loss term as last reported.

The terms are tensors on the client's device, weights included, and 0 before the first report. The function returns
a tensor or a number and must not read values back: `lambda report: report["large"] / (report["small"] + 1)`.
"""


def rules(weights: Mapping[str, float | str | Rule]) -> dict[str, Rule]:
    """The functions among the weights of named terms."""
    found = {
        term: find_function(value) if isinstance(value, str) else value for term, value in weights.items()
    }
    return {term: value for term, value in found.items() if callable(value)}


def weigh(rules: Mapping[str, Rule], report: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The weight of every term that has a rule, as a tensor for `fit(scalars=…)`."""
    return {
        term: torch.as_tensor(rule(report), dtype=torch.float32).to(device, non_blocking=True)
        for term, rule in rules.items()
    }


def try_rules(rules: Mapping[str, Rule], report: Mapping[str, Tensor], key: str) -> None:
    """Refuse a function that does not give a weight, before anything runs."""
    for term, one in rules.items():
        try:
            value = float(one(report))
        except Exception as error:  # it is the user's, and may raise anything
            raise ConfigError(f"{key}_{term}: the function fails: {type(error).__name__}: {error}") from error
        if not _is_weight(value):
            raise ConfigError(f"{key}_{term}: the function gives {value}, expected a number from 0")
