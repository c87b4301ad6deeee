"""The part of a run's page about kept predictions: confusion matrices, calibration, and mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from potluck.report.charts import calibration_chart
from potluck.report.format import count, percent
from potluck.report.log import Integers, Key
from potluck.report.predictions import Answers, answers
from potluck.report.render import Column, Sheet, words
from potluck.report.sheets import how

MOST_CLASSES = 25  # a larger matrix cannot be read; the commonest mistakes are listed instead
MOST_CELLS = 20_000  # of the matrices of single clients, to keep the page small
MOST_MISTAKES = 20


@dataclass(frozen=True)
class Cell:
    """A number of samples, its share of those of the class, and how it is marked."""

    samples: int
    share: float
    kind: str


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: a row per true class, a column per predicted one."""

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def predictions_part(folder: Path, key: Key, split: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the predictions of the last kept round show; None where a run has kept none of classes."""
    found = answers(folder, key)
    if found is None:
        return None
    groups = [_group(part, found.of(clients), clients) for part, clients in _groups(split, found)]
    return {
        "lead": f"Test samples of round {found.round:,}, {how({'when': key[0], 'mode': key[1]})}: "
        f"{count(int((found.label == found.prediction).sum()))} of {count(len(found.label))} are right.",
        "groups": [group for group in groups if group],
        "error": percent(found.calibration_error()),
        "chart": calibration_chart(found.calibration(), lambda share: f"{100 * share:.0f} %"),
    }


def _groups(split: Mapping[str, Any], found: Answers) -> Iterator[tuple[Mapping[str, Any], Sequence[str]]]:
    """Clients with the same classes, each group with what the split says of it."""
    clients = [str(part["id"]) for part in split.get("clients") or ()]
    if not split.get("groups"):
        yield {"class_names": split.get("class_names")}, found.clients
    for group in split.get("groups") or ():
        own, clients = clients[: group["clients"]], clients[group["clients"] :]
        yield group, own


def _group(about: Mapping[str, Any], found: Answers, clients: Sequence[str]) -> dict[str, Any] | None:
    """The matrices and mistakes of clients with the same classes."""
    if not len(found.label):
        return None
    given = [str(name) for name in about.get("class_names") or ()]
    names = [given[place] if place < len(given) else str(place) for place in range(found.classes)]
    table, readable = found.confusion(len(names)), len(names) <= MOST_CLASSES
    each = readable and len(clients) > 1 and len(clients) * len(names) ** 2 <= MOST_CELLS
    return {
        "data": about.get("data"),
        "matrix": _matrix("", names, table) if readable else None,
        "each": [
            _matrix(client, names, found.of([client]).confusion(len(names))) for client in clients if each
        ],
        "confused": None if readable else _confused(table, names),
        "mistakes": _mistakes(found, names),
    }


def _matrix(title: str, names: Sequence[str], table: Integers) -> Matrix:
    totals = np.maximum(table.sum(1), 1)
    rows = [
        [
            Cell(samples, samples / int(totals[true]), "right" if true == predicted else "wrong")
            for predicted, samples in enumerate(row)
        ]
        for true, row in enumerate(table.tolist())
    ]
    return Matrix(title, names, rows)


def _confused(table: Integers, names: Sequence[str]) -> Sheet:
    """The pairs of classes that are mistaken most often."""
    wrong = table.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_MISTAKES]
    pairs = [divmod(int(place), len(wrong)) for place in order if wrong.flat[place]]
    entries = [
        {"label": names[true], "prediction": names[taken], "samples": int(wrong[true, taken]), "share": share}
        for true, taken in pairs
        for share in [float(wrong[true, taken] / table[true].sum())]
    ]
    columns = (
        words("class", lambda entry: entry["label"]),
        words("taken for", lambda entry: entry["prediction"]),
        Column("samples", lambda entry: entry["samples"], count),
        Column("of the class", lambda entry: entry["share"], percent),
    )
    return Sheet("The classes that are mistaken most often", columns, entries)


def _mistakes(found: Answers, names: Sequence[str]) -> Sheet | None:
    """The wrong predictions with the highest confidence."""
    entries = found.mistakes(MOST_MISTAKES)
    columns = (
        words("client", lambda entry: entry["client"]),
        words("row", lambda entry: entry["row"]),
        words("class", lambda entry: names[entry["label"]]),
        words("taken for", lambda entry: names[entry["prediction"]]),
        Column("confidence", lambda entry: entry["confidence"], percent),
    )
    return Sheet("The mistakes made with the highest confidence", columns, entries) if entries else None
