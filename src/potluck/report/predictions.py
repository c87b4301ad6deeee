"""Predictions that a run has kept: reading their files, and what they show: mistakes, confusion and calibration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from potluck.data.parquet import TooLargeError, check_size
from potluck.errors import DataError, RunError
from potluck.report.log import Floats, Integers, Key, natural
from potluck.report.reading import reading

FOLDER = "predictions"
BINS = 10  # of equal width, for calibration
COLUMNS: dict[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys(("round", "row"), pa.types.is_integer),
    **dict.fromkeys(("client", "moment", "mode", "split"), pa.types.is_string),
    **dict.fromkeys(("label", "prediction"), lambda kind: kind != pa.null()),
    "scores": pa.types.is_list,
}


# --- files ----------------------------------------------------------------------------------------------


def kept_files(folder: Path) -> dict[int, Path]:
    """The files of predictions by their round, ascending; what has another name is none of them."""
    files = {file.stem.removeprefix("round-"): file for file in (folder / FOLDER).glob("round-*.parquet")}
    found = {int(name): file for name, file in files.items() if re.fullmatch("[0-9]{6,18}", name)}
    return dict(sorted(found.items()))


def read_file(file: Path) -> pa.Table:
    """One file of predictions as a table; one that is damaged, none, or too large for the memory is refused."""
    with reading(file, "put a whole copy of it back, or remove it"):
        _check_size(file)
        table = parquet.read_table(file, page_checksum_verification=True)
        if not len(table) or not all(_is_column(table, name) for name in COLUMNS):
            raise RunError(
                f"{file} is not a file of predictions: it has no rows, or not their columns; remove it"
            )
    return table


def _is_column(table: pa.Table, name: str) -> bool:
    """Whether a table has a column of predictions as they are written."""
    found = table[name] if name in table.column_names else pa.array([])
    return COLUMNS[name](found.type) and not found.null_count


def _check_size(file: Path) -> None:
    """Refuse a file that would become too large in memory, or of which nobody can say that."""
    try:
        check_size(file)
    except TooLargeError as error:
        raise RunError(str(error)) from error
    except DataError as error:
        raise error.__cause__ or error from None


# --- what they show -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """The predicted classes of the test samples in the last kept round, at one moment and in one mode."""

    round: int
    clients: tuple[str, ...]  # in natural order
    client: Integers  # an index into `clients` per sample, as all below
    row: Integers
    label: Integers
    prediction: Integers
    confidence: Floats  # the share of the predicted class in the softmax of the scores
    width: Integers  # the number of classes that the sample has a score for

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.width.max(initial=0))

    def of(self, clients: Iterable[str]) -> Answers:
        """Those of some clients."""
        places = {name: place for place, name in enumerate(self.clients)}
        wanted = np.isin(self.client, [places[name] for name in clients if name in places])
        names = ("client", "row", "label", "prediction", "confidence", "width")
        return replace(self, **{name: getattr(self, name)[wanted] for name in names})

    def confusion(self, classes: int) -> Integers:
        """How many samples of each class (rows) were taken for each class (columns)."""
        table = np.zeros((classes, classes), np.int64)
        np.add.at(table, (self.label, self.prediction), 1)
        return table

    def confused(self, most: int) -> list[tuple[int, int, int]]:
        """The pairs of classes that are mistaken most often: the true one, the predicted one, and how often.

        A matrix of ten thousand classes would take a gigabyte; only the pairs that there are take memory here.
        """
        wrong = self.label != self.prediction
        pairs, samples = np.unique(
            self.label[wrong] * self.classes + self.prediction[wrong], return_counts=True
        )
        chosen = np.argsort(-samples, kind="stable")[:most]
        return [(*divmod(int(pairs[one]), self.classes), int(samples[one])) for one in chosen]

    def calibration(self) -> list[dict[str, Any]]:
        """The mean confidence, the accuracy and the number of samples in every tenth of confidence that has any."""
        place = np.minimum((BINS * self.confidence).astype(int), BINS - 1)
        right = self.label == self.prediction
        parts = [np.flatnonzero(place == each) for each in range(BINS)]
        return [
            {
                "confidence": float(self.confidence[part].mean()),
                "accuracy": float(right[part].mean()),
                "samples": len(part),
            }
            for part in parts
            if len(part)
        ]

    def calibration_error(self) -> float:
        """The expected calibration error: how far accuracy is from confidence, weighted by samples."""
        bins = self.calibration()
        gaps = (one["samples"] * abs(one["accuracy"] - one["confidence"]) for one in bins)
        return float(sum(gaps) / max(len(self.label), 1))

    def mistakes(self, most: int) -> list[dict[str, Any]]:
        """The wrong predictions with the highest confidence."""
        wrong = np.flatnonzero(self.label != self.prediction)
        chosen = wrong[np.argsort(-self.confidence[wrong], kind="stable")][:most]
        return [
            {
                "client": self.clients[self.client[place]],
                "row": int(self.row[place]),
                "label": int(self.label[place]),
                "prediction": int(self.prediction[place]),
                "confidence": float(self.confidence[place]),
            }
            for place in chosen
        ]


@dataclass(frozen=True)
class Outputs:
    """What was predicted for test samples that have several labels, or numbers: a row each."""

    clients: tuple[str, ...]  # of every sample, as all below
    row: Integers
    label: Floats  # a column per label, or per output of a regression
    prediction: Floats

    @property
    def is_labels(self) -> bool:
        """Whether a sample has or lacks labels; otherwise these are the numbers of a regression."""
        return all(bool(np.isin(values, (0, 1)).all()) for values in (self.label, self.prediction))


@dataclass(frozen=True)
class Kept:
    """The test samples of the last kept round, at one moment and in one mode, whatever the clients' tasks."""

    round: int
    file: Path
    table: pa.Table

    def answers(self) -> Answers | None:
        """The samples that have one class each; None where there are none."""
        table = self.table.filter(self._has_class())
        with reading(self.file, "remove it"):
            return _answers(self.round, table) if len(table) else None

    def outputs(self, clients: Iterable[str]) -> Outputs | None:
        """The others, of clients whose samples have equally many labels; None where there are none."""
        table = self.table.filter(pc.invert(self._has_class()))
        table = table.filter(pc.is_in(table["client"], pa.array([*clients], pa.string())))
        with reading(self.file, "remove it"):
            return (
                Outputs(
                    tuple(table["client"].to_pylist()),
                    table["row"].to_numpy(),
                    *(_in_columns(table[name]) for name in ("label", "prediction")),
                )
                if len(table)
                else None
            )

    def _has_class(self) -> pa.ChunkedArray:
        """By sample: one label and a score for each of several classes."""
        return pc.and_(
            pc.equal(_widths(self.table["label"]), 1), pc.greater(_widths(self.table["scores"]), 1)
        )


def kept_predictions(folder: Path, key: Key) -> Kept | None:
    """The last kept predictions at a moment and in a mode; None where there are none."""
    files = kept_files(folder)
    if not files:
        return None
    round_, file = list(files.items())[-1]
    table = read_file(file)
    with reading(file, "remove it"):
        chosen = {"moment": key[0], "mode": key[1], "split": "test"}
        for name, value in chosen.items():
            table = table.filter(pc.field(name) == value)
        return Kept(round_, file, table.combine_chunks()) if len(table) else None


def _widths(column: pa.ChunkedArray) -> Any:
    """How many numbers there are by sample."""
    is_list = pa.types.is_list(column.type)
    return pc.list_value_length(column) if is_list else pa.array(np.ones(len(column), np.int32))


def _flat(column: pa.ChunkedArray) -> Any:
    values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    return values.to_numpy()


def _in_columns(column: pa.ChunkedArray) -> Floats:
    """Lists of one length as a table of numbers."""
    widths = set(_widths(column).to_pylist())
    if len(widths) > 1:
        raise ValueError("samples of one data set have different numbers of labels")
    values: Floats = _flat(column).astype(np.float64).reshape(len(column), -1)
    return values


def _answers(round_: int, table: pa.Table) -> Answers:
    numbers = {name: _flat(table[name]).astype(np.int64) for name in ("row", "label", "prediction")}
    names = table["client"].to_pylist()
    clients = tuple(sorted(set(names), key=natural))
    places = {name: place for place, name in enumerate(clients)}
    sizes = pc.list_value_length(table["scores"]).to_numpy()
    for name in ("label", "prediction"):
        if ((numbers[name] < 0) | (numbers[name] >= sizes)).any():
            raise ValueError(f"a {name} is none of the classes that have scores")
    return Answers(
        round=round_,
        clients=clients,
        client=np.array([places[name] for name in names]),
        **numbers,
        confidence=_confidence(pc.list_flatten(table["scores"]).to_numpy(), sizes),
        width=sizes,
    )


def _confidence(scores: Floats, sizes: Integers) -> Floats:
    """The largest share in the softmax of every list of scores; lists may differ in length."""
    starts = np.append(0, np.cumsum(sizes)[:-1])
    if not len(scores) or not sizes.all():
        raise ValueError("a sample has no scores")
    with np.errstate(invalid="ignore"):
        largest = np.maximum.reduceat(scores.astype(np.float64), starts)
        sums = np.add.reduceat(np.exp(scores - np.repeat(largest, sizes)), starts)
    return np.nan_to_num(1 / sums)
