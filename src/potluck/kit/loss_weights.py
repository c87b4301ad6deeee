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
        try:
            find_function(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    elif not callable(value) and not _is_weight(value):
        raise ValueError("give a number from 0, a function, or the name of one as module:function")
    return value


def _is_weight(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


Weight = Annotated[float | str | Rule, BeforeValidator(_read)]
"""A number, or a function (in a file: `module:function`) of the client's last report.

The report has the mean of each loss term, weight included, as tensors on the client's device. It is 0 before the
first round, so that a weight which is proportional to its own term stays 0. The function returns one number (or a
tensor with one) and must not read values back from the device: `lambda report: report["large"] / (report["small"] +
1)`. A negative result counts as 0.
"""


def rules(weights: Mapping[str, float | str | Rule]) -> dict[str, Rule]:
    """The functions among the weights of named terms."""
    found = {
        term: find_function(value) if isinstance(value, str) else value for term, value in weights.items()
    }
    return {term: value for term, value in found.items() if callable(value)}


def weigh(rules: Mapping[str, Rule], report: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The weight of every term that has a rule, as a tensor for `fit(scalars=…)`."""
    return {term: _weight(rule(report), term).to(device, non_blocking=True) for term, rule in rules.items()}


def _weight(value: Any, term: str) -> Tensor:
    weight = torch.as_tensor(value, dtype=torch.float32)
    if weight.numel() != 1:
        shape = "×".join(map(str, weight.shape))
        raise ConfigError(f"the function that weighs the {term} loss gives {shape} numbers; return one")
    return weight.reshape(()).clamp_min(0)


def try_rules(weights: Mapping[str, float | str | Rule], report: Mapping[str, Tensor], key: str) -> None:
    """Refuse functions that fail or give no weight for the first report or for losses of 1, and weights all 0."""
    found, first = rules(weights), dict[str, Any](weights)
    for term, rule in found.items():
        _tried(rule, {name: torch.ones_like(value) for name, value in report.items()}, f"{key}_{term}")
        first[term] = _tried(rule, report, f"{key}_{term}")
    if not any(first.values()):
        names = " and ".join(f"{key}_{term}" for term in first) + (" is" if len(first) == 1 else " are")
        when = " before the first report" if found else ""
        raise ConfigError(f"{names} 0{when}: nothing is learned; let one of them be above 0")


def _tried(rule: Rule, report: Mapping[str, Tensor], name: str) -> float:
    try:
        value = float(rule(report))
    except Exception as error:  # it is the user's, and may raise anything
        raise ConfigError(f"{name}: the function fails ({type(error).__name__}: {error}); mend it") from error
    if not _is_weight(value):
        raise ConfigError(f"{name}: the function gives {value}; return a number from 0 on")
    return value
