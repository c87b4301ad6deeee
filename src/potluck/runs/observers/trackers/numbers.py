"""The numbers of a round under the names that trackers show them by.

test/accuracy/after_aggregation/head              the mean over clients: split, metric, moment, mode
clients/3/test/accuracy/after_aggregation/head    the same of client 3
bytes/up, bytes/down                              what crossed for training
seconds/train, seconds/evaluate, seconds/round
dropped_out                                       how many clients
observed/weight, clients/3/observed/weight        what the method noted of clients
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from potluck.engine.evaluation.examined import Examined
from potluck.runs.observers.base import RoundEnd

ASIDE = ("score", "samples")  # the score is one of the metrics beside it
Numbers = dict[str, float]


def round_numbers(end: RoundEnd, clients: bool = True) -> Numbers:
    """All numbers of a round; those of each client if `clients`."""
    found: Numbers = {}
    for examined in end.examined:
        found |= score_numbers(examined, clients)
    for direction in ("up", "down"):
        crossed = (
            line for line in end.ledger if line["purpose"] == "train" and line["direction"] == direction
        )
        found[f"bytes/{direction}"] = sum(line["bytes"] for line in crossed)
    found |= {
        f"seconds/{'round' if kind == 'seconds' else kind}": value for kind, value in end.timing.items()
    }
    observed = [(line["client"], _without(line, ("round", "client"))) for line in end.observations]
    return found | {"dropped_out": len(end.failures)} | _by_name("observed", observed, clients)


def score_numbers(found: Examined, clients: bool = True) -> Numbers:
    """What clients measured at one moment, in every split and mode."""
    numbers: Numbers = {}
    for split in ("test", "validation"):
        for mode in dict.fromkeys(line["mode"] for line in found.lines):
            parts = found.parts(split, mode).items()
            own = [(client, _without(part, ASIDE)) for client, part in parts]
            numbers |= _by_name(split, own, clients, f"/{found.when}/{mode}")
    return numbers


def _by_name(
    what: str, lines: Iterable[tuple[str, Mapping[str, float]]], clients: bool, ending: str = ""
) -> Numbers:
    """The mean of every number over clients, and the numbers of each."""
    values: dict[str, list[float]] = {}
    own: Numbers = {}
    for client, numbers in lines:
        for name, value in numbers.items():
            values.setdefault(f"{what}/{name}{ending}", []).append(value)
            own[f"clients/{client}/{what}/{name}{ending}"] = value
    means = {name: sum(listed) / len(listed) for name, listed in values.items()}
    return means | own if clients else means


def _without(line: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """The numbers of a log line, except some."""
    return {
        name: value
        for name, value in line.items()
        if name not in names and isinstance(value, int | float) and not isinstance(value, bool)
    }
