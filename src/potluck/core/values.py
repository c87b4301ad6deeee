"""What a wire contract says of values: ranges, whole numbers, numbers that differ. Types come before it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from potluck.core.contract import Contract, Field
from potluck.core.formulas import formula_value
from potluck.core.low_rank import FACTORS
from potluck.core.message import Message

SLACK = 1e-4  # by how much rounding may take a value out of its range
SKEW = 0.05  # by how much rounding may make a product of factors longer than its singular values


def excess(message: Message, contract: Contract, symbols: Mapping[str, int]) -> Tensor | None:
    """How far the worst number is outside its declared range, on the device; 0 if all are inside.

    The message has passed `contract.check`. None where the contract says nothing of values. A result that is not
    a number comes from values that are not finite.
    """
    found = [
        _excess(message[name], field, symbols)
        for name, field in contract.items()
        if field.ranged and name in message and message[name].numel()
    ]
    for name in (name for name, field in contract.items() if field.low_rank):
        sent = message.group(name)
        found += [_factor_excess(key, value) for key, value in sent.items() if _is_factor(key)]
        found += [_product_excess(sent, key) for key in sent if _is_factor(key) and key.endswith(":s")]
    return torch.stack(found).max() if found else None


def said_of(field: Field, symbols: Mapping[str, int]) -> str:
    """What a contract says of a field's values, in words: `whole numbers from 0 to 9, each once`.

    >>> said_of(Field("…", at_least=0, at_most="C-1", whole=True), {"C": 10})
    'whole numbers from 0 to 9'
    """
    if field.low_rank:
        return "factors u and v from -1 to 1, and s from 0 on, whose product is no longer than s"
    what = "whole numbers" if field.whole else "numbers"
    low = "" if field.at_least is None else f" from {field.at_least:g}"
    high = f" to {formula_value(field.at_most, symbols)}" if field.at_most else " on" if low else ""
    return f"{what}{low}{high}{', each once' if field.distinct else ''}"


def _is_factor(key: str) -> bool:
    name, _, factor = key.rpartition(":")
    return bool(name) and factor in FACTORS


def _factor_excess(key: str, value: Tensor) -> Tensor:
    """How far a factor is outside: columns of u and rows of v have length 1, singular values are not negative."""
    if key.endswith(":s"):
        return (-value.double().min() - SLACK).clamp_min(0)
    return (value.double().abs().max() - 1 - SLACK).clamp_min(0)


def _product_excess(sent: Mapping[str, Tensor], key: str) -> Tensor:
    """How far the product of factors is longer than its singular values, which norms are compared by.

    So columns of u and rows of v that are no unit vectors, or all the same one, get nobody around that.
    """
    u, s, v = (sent[f"{key.removesuffix(':s')}:{factor}"].double() for factor in FACTORS)
    scaled = s / s.abs().max().clamp_min(torch.finfo(s.dtype).tiny)  # its squares may be too large
    square = scaled @ ((u.T @ u) * (v @ v.T)) @ scaled
    return (square - (1 + SKEW) * scaled.square().sum()).clamp_min(0)


def _excess(value: Tensor, field: Field, symbols: Mapping[str, int]) -> Tensor:
    """How far one tensor is outside, as a single float64."""
    flat = value.reshape(-1).double()
    slack = SLACK if value.is_floating_point() and not field.whole else 0.0
    beyond = flat.new_zeros(())
    if field.at_least is not None:
        beyond = torch.maximum(beyond, field.at_least - slack - flat.min())
    if field.at_most:
        beyond = torch.maximum(beyond, flat.max() - formula_value(field.at_most, symbols) - slack)
    if field.whole and value.is_floating_point():
        beyond = torch.maximum(beyond, (flat - flat.round()).abs().max())
    if field.distinct:
        ordered = flat.sort().values
        beyond = torch.maximum(beyond, (ordered[1:] == ordered[:-1]).sum().double())
    return beyond
