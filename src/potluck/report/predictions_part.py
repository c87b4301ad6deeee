"""The part of a run's page about kept predictions: confusion matrices, calibration, labels, errors and mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from potluck.report.charts import Chart, against_truth, calibration_chart
from potluck.report.format import count, number, percent
from potluck.report.log import Floats, Integers, Key, kept_round, natural, read_mapping
from potluck.report.predictions import Answers, Kept, Outputs, kept_predictions
from potluck.report.render import Column, Sheet, words
from potluck.report.sheets import how

MOST_CLASSES = 25  # a larger matrix cannot be read; the commonest mistakes are listed instead
MOST_CELLS = 20_000  # of the matrices of single clients, to keep the page small
MOST_MISTAKES = 20
MOST_CHARTS = 4  # of the outputs of a regression


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


@dataclass(frozen=True)
class Group:
    """What is shown of clients with the same classes, labels or outputs; what a task lacks is left out."""

    matrix: Matrix | None = None
    each: Sequence[Matrix] = ()
    note: str = ""
    charts: Sequence[Chart] = ()
    sheet: Sheet | None = None
    confused: Sheet | None = None
    mistakes: Sheet | None = None


def predictions_part(folder: Path, key: Key, split: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the predictions of the last kept round show; None where a run has kept none."""
    kept = kept_predictions(folder, key)
    if kept is None:
        return None
    found, groups = kept.answers(), []
    outputs = _output_names(folder)
    for place, (about, clients) in enumerate(_groups(split, kept)):
        names = [str(name) for name in about.get("class_names") or ()]
        own = outputs[place] if place < len(outputs) else []
        parts = (
            _classes(found.of(clients), names, clients) if found else None,
            _outputs(kept, clients, own),
        )
        groups += [(about.get("data"), part) for part in parts if part]
    return {
        "lead": f"Test samples of round {kept.round:,}, {how({'when': key[0], 'mode': key[1]})}{_right(found)}.",
        "groups": groups,
        "error": percent(found.calibration_error()) if found else "",
        "chart": calibration_chart(found.calibration(), lambda share: f"{100 * share:.0f} %")
        if found
        else None,
    }


def _right(found: Answers | None) -> str:
    """How many classes are right, to end a sentence with."""
    if found is None:
        return ""
    return f": {count(int((found.label == found.prediction).sum()))} of {count(len(found.label))} are right"


def _groups(split: Mapping[str, Any], kept: Kept) -> Iterator[tuple[Mapping[str, Any], Sequence[str]]]:
    """Clients with the same classes, each group with what the split says of it."""
    clients = [str(part["id"]) for part in split.get("clients") or ()]
    if not split.get("groups"):
        known = sorted(set(kept.table["client"].to_pylist()), key=natural)
        yield {"class_names": split.get("class_names")}, known
    for group in split.get("groups") or ():
        own, clients = clients[: group["clients"]], clients[group["clients"] :]
        yield group, own


def _output_names(folder: Path) -> list[list[str]]:
    """The names of labels and outputs by group, which only kept models know: the split has those of its strata."""
    about = read_mapping(folder / "models" / f"round-{kept_round(folder) or 0:06d}" / "about.json") or {}
    groups = (about.get("outline") or {}).get("groups") or ()
    return [[str(name) for name in group.get("class_names") or ()] for group in groups]


def _named(given: Sequence[str], number: int, what: str = "") -> list[str]:
    """Names for so many classes, labels or outputs; those that have none get a number."""
    return [given[place] if place < len(given) else f"{what}{place}" for place in range(number)]


# --- one class per sample -------------------------------------------------------------------------------


def _classes(found: Answers, given: Sequence[str], clients: Sequence[str]) -> Group | None:
    """The matrices and mistakes of clients with the same classes."""
    if not len(found.label):
        return None
    names = _named(given, found.classes)
    readable = len(names) <= MOST_CLASSES
    each = readable and len(clients) > 1 and len(clients) * len(names) ** 2 <= MOST_CELLS
    return Group(
        matrix=_matrix("", names, found.confusion(len(names))) if readable else None,
        each=[_matrix(client, names, found.of([client]).confusion(len(names))) for client in clients if each],
        confused=None if readable else _confused(found, names),
        mistakes=_mistakes(found, names),
    )


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


def _confused(found: Answers, names: Sequence[str]) -> Sheet:
    """The pairs of classes that are mistaken most often."""
    entries = [
        {"label": names[true], "prediction": names[taken], "samples": samples, "share": share}
        for true, taken, samples in found.confused(MOST_MISTAKES)
        for share in [samples / int((found.label == true).sum())]
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


# --- several labels, or numbers -------------------------------------------------------------------------


def _outputs(kept: Kept, clients: Sequence[str], given: Sequence[str]) -> Group | None:
    """What is predicted for samples that have several labels, or numbers."""
    found = kept.outputs(clients)
    if found is None:
        return None
    return _labels(found, given) if found.is_labels else _numbers(found, given)


def _labels(found: Outputs, given: Sequence[str]) -> Group:
    """Which labels are found, and which are given to samples that lack them."""
    has, said = found.label > 0, found.prediction > 0
    right = has == said
    entries = [
        {
            "label": name,
            "samples": int(has[:, place].sum()),
            "predicted": int(said[:, place].sum()),
            "both": int((has & said)[:, place].sum()),
        }
        for place, name in enumerate(_named(given, has.shape[1], "label "))
    ]
    columns = (
        words("label", lambda entry: entry["label"]),
        Column("samples", lambda entry: entry["samples"], count),
        Column("predicted", lambda entry: entry["predicted"], count),
        Column("precision", lambda entry: _share(entry["both"], entry["predicted"]), percent),
        Column("recall", lambda entry: _share(entry["both"], entry["samples"]), percent),
        Column("F1", lambda entry: _share(2 * entry["both"], entry["samples"] + entry["predicted"]), percent),
    )
    note = (
        f"{count(int(right.sum()))} of {count(right.size)} labels are right, and all labels of "
        f"{count(int(right.all(1).sum()))} of {count(len(right))} samples."
    )
    return Group(note=note, sheet=Sheet("", columns, entries))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _numbers(found: Outputs, given: Sequence[str]) -> Group:
    """How far predicted numbers are from the true ones."""
    errors, names = found.prediction - found.label, _named(given, found.label.shape[1], "output ")
    spread = ((found.label - found.label.mean(0)) ** 2).sum(0)
    entries = [
        {
            "name": name,
            "mae": float(np.abs(errors[:, place]).mean()),
            "rmse": float(np.sqrt((errors[:, place] ** 2).mean())),
            "r2": float(1 - (errors[:, place] ** 2).sum() / spread[place]) if spread[place] else None,
        }
        for place, name in enumerate(names)
    ]
    columns = (
        words("output", lambda entry: entry["name"]),
        Column("mean absolute error", lambda entry: entry["mae"], number),
        Column("root mean squared error", lambda entry: entry["rmse"], number),
        Column("R²", lambda entry: entry["r2"], number),
    )
    charts = [
        against_truth(found.label[:, place], found.prediction[:, place], name)
        for place, name in enumerate(names[:MOST_CHARTS])
    ]
    return Group(charts=charts, sheet=Sheet("", columns, entries), mistakes=_errors(found, errors, names))


def _errors(found: Outputs, errors: Floats, names: Sequence[str]) -> Sheet:
    """The largest errors."""
    order = np.argsort(-np.abs(errors), axis=None, kind="stable")[:MOST_MISTAKES]
    entries = [
        {
            "client": found.clients[sample],
            "row": int(found.row[sample]),
            "output": names[place],
            "true": float(found.label[sample, place]),
            "predicted": float(found.prediction[sample, place]),
        }
        for sample, place in (divmod(int(one), len(names)) for one in order)
    ]
    columns = (
        words("client", lambda entry: entry["client"]),
        words("row", lambda entry: entry["row"]),
        *([words("output", lambda entry: entry["output"])] if len(names) > 1 else []),
        Column("true", lambda entry: entry["true"], number),
        Column("predicted", lambda entry: entry["predicted"], number),
    )
    return Sheet("The largest errors", columns, entries)
