"""Whose message of a round stands out, when nobody can go on after it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from potluck.core.card import ClientId
from potluck.core.message import Message

FACTOR = 10.0  # times the median of the others' messages; honest ones are nearer to each other
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NOT_FINITE = "not finite"  # what every sentence about such values says, the site's and the server's


@dataclass(frozen=True)
class Suspect:
    """A client whose message was `times` as large as the median of the others'."""

    client: ClientId
    times: float


def norm_of(message: Message) -> float:
    """The Euclidean norm of all numbers of a message."""
    squares = [value.detach().double().square().sum() for value in message.values() if value.dtype in FLOATS]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def find_suspect(norms: Mapping[ClientId, float]) -> Suspect | None:
    """The client whose message stands out most, None if all are alike or there is nobody to compare with."""
    found = None
    for client, norm in norms.items():
        others = [other for name, other in norms.items() if name != client]
        middle = median(others) if others else 0.0
        times = norm / middle if middle > 0 else 0.0
        if times > FACTOR and (found is None or times > found.times):
            found = Suspect(client, times)
    return found


def all_diverged(
    failures: Mapping[ClientId, str], asked: Collection[ClientId], aside: Collection[ClientId]
) -> bool:
    """Whether every client that was asked has failed over values that are not finite, some put `aside`."""
    honest = [client for client in asked if client not in aside]
    return bool(honest) and all(NOT_FINITE in failures.get(client, "") for client in honest)
