"""Predictions of a run, sample by sample, as Parquet files in its folder; and what follows from them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from potluck.engine.evaluation.examined import Examined
from potluck.engine.evaluation.predictions import Predictions
from potluck.errors import RunError, nearest
from potluck.files import remove, write_whole
from potluck.report.log import MOMENTS, natural
from potluck.report.predictions import FOLDER, kept_files, read_file
from potluck.report.reading import reading

if TYPE_CHECKING:
    import pandas as pd

# --- writing --------------------------------------------------------------------------------------------


def write_predictions(folder: Path, round_: int, examined: Sequence[Examined], only: bool) -> None:
    """Write the predictions of a round, if there are any, as one whole file; `only` keeps no other round."""
    parts = [_part(found, one) for found in examined for one in found.predictions]
    if not parts:
        return
    home = folder / FOLDER
    home.mkdir(exist_ok=True)
    file, buffer = home / f"round-{round_:06d}.parquet", io.BytesIO()
    parquet.write_table(
        pa.concat_tables(_alike(parts), promote_options="default"),
        buffer,
        compression="zstd",
        write_page_checksum=True,
    )
    write_whole(file, buffer.getvalue(), inner=True)
    for other in kept_files(folder).values() if only else ():
        if other != file:
            remove(other)


def drop_predictions(folder: Path, start: int) -> None:
    """Remove the predictions of a round and of all that follow it."""
    for round_, file in kept_files(folder).items():
        if round_ >= start:
            remove(file)


def _part(found: Examined, one: Predictions) -> pa.Table:
    """The predictions of one client in one mode and split."""
    size = len(one.rows)
    told = {"client": one.client, "moment": found.when, "mode": one.mode, "split": one.split}
    words = {name: pa.array([value] * size, pa.string()) for name, value in told.items()}
    labels, answers = _answers(one)
    return pa.table(
        {
            "round": pa.array(np.full(size, found.round, np.int64)),
            **words,
            "row": pa.array(np.asarray(one.rows, np.int64)),
            **({} if one.own_rows is None else {"own_row": pa.array(one.own_rows)}),
            "label": _column(labels),
            "prediction": _column(answers),
            "scores": _column(one.scores.reshape(size, -1)),
        }
    )


def _answers(one: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions: a class, 0 or 1 for each label, or the outputs of a regression."""
    if one.task.single_label:
        return one.labels.astype(np.int64), one.scores.argmax(1).astype(np.int64)
    if one.task.kind == "multi-label":
        return one.labels.astype(np.int64), (one.scores > 0).astype(np.int64)
    shape = (len(one.rows), -1) if one.task.classes > 1 else (len(one.rows),)
    return one.labels.reshape(shape), one.scores.reshape(shape)


def _column(values: np.ndarray) -> pa.Array:
    """A number per sample, or a list of them."""
    if values.ndim == 1:
        return pa.array(values)
    ends = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(ends, pa.array(values.reshape(-1)))


def _alike(parts: Sequence[pa.Table]) -> list[pa.Table]:
    """The same tables with one type per column: where tasks differ, labels and predictions are lists of numbers."""
    return [_as_lists(part) for part in parts] if len({part.schema for part in parts}) > 1 else list(parts)


def _as_lists(part: pa.Table) -> pa.Table:
    wanted = pa.list_(pa.float64())
    for name in ("label", "prediction", "scores"):
        values = part[name].to_pylist()
        listed = [value if isinstance(value, list) else [value] for value in values]
        part = part.set_column(part.schema.get_field_index(name), name, pa.array(listed, wanted))
    return part


# --- reading --------------------------------------------------------------------------------------------


def read_predictions(folder: Path | str, round: int | None = None) -> pd.DataFrame:
    """The predictions that a run has kept, a row per sample; of one round where it is given.

    The columns: round, client, moment, mode, split, row (as in split.json), label, prediction, scores; and own_row
    (in the client's own file, or in the part that `samples` was drawn from), where that is another number. Labels
    and predictions of classes are their numbers.
    """
    import pandas as pd

    kept = kept_files(Path(folder))
    if not kept:
        raise RunError(f"{folder} has kept no predictions; run it with evaluate: {{predictions: true}}")
    if round is not None and round not in kept:
        raise RunError(f"{folder} has no predictions of round {round}; kept: {', '.join(map(str, kept))}")
    chosen = kept.values() if round is None else [kept[round]]
    return pd.concat([_read(file) for file in chosen], ignore_index=True)


def _read(file: Path) -> pd.DataFrame:
    table = read_file(file)
    with reading(file, "remove it"):
        frame: pd.DataFrame = table.to_pandas(ignore_metadata=True)
    return frame


def confusion(
    folder: Path | str,
    *,
    round: int | None = None,
    moment: str | None = None,
    mode: str | None = None,
    split: str = "test",
) -> dict[str, pd.DataFrame]:
    """A confusion matrix per client: true classes as rows, predicted ones as columns, numbers of samples in cells.

    By default of the last round that was kept, at the moment and in the mode that the run is judged by.
    """
    import pandas as pd

    with reading(Path(folder) / FOLDER, "remove it"):
        frame = read_predictions(folder, round)
        frame = frame[frame["round"] == frame["round"].max()]
        frame = _chosen(frame, "moment", moment or _first(frame["moment"], MOMENTS))
        frame = _chosen(frame, "mode", mode or str(frame["mode"].iloc[0]))
        frame = _chosen(frame, "split", split)
        if not pd.api.types.is_integer_dtype(frame["label"]):
            raise RunError(
                f"{folder}: only tasks with one class per sample have a confusion matrix; choose another picture"
            )
        classes = range(max(map(len, frame["scores"])))
        tables = {
            str(client): pd.crosstab(part["label"], part["prediction"])
            for client, part in frame.groupby("client", sort=False)
        }
        return {
            client: tables[client].reindex(index=classes, columns=classes, fill_value=0)
            for client in sorted(tables, key=natural)
        }


def _first(values: Iterable[Any], order: Sequence[str]) -> str:
    there = {str(value) for value in values}
    return next((one for one in order if one in there), min(there))


def _chosen(frame: pd.DataFrame, column: str, value: str) -> pd.DataFrame:
    part = frame[frame[column] == value]
    if not len(part):
        raise RunError(
            f"no predictions were kept for the {column} {value!r}; {nearest(value, set(frame[column]))}"
        )
    return part
