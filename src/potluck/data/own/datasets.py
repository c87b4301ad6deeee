"""A user's own data sets: of torch or Hugging Face, one to be split or one per client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.dataset import Dataset
from potluck.data.columns import IMAGE_COLUMNS, LABEL_COLUMNS, TEXT_COLUMNS
from potluck.data.own.arrays import (
    Modality,
    Settings,
    TaskName,
    check_class_names,
    check_classes_repeat,
    count_classes,
    from_pieces,
)
from potluck.data.own.pieces import (
    PART_NAMES,
    Piece,
    check_names,
    in_order,
    own_rows_of,
    owners_of,
    rows_of,
)
from potluck.data.texts import text_dataset
from potluck.errors import DataError, first_line
from potluck.front_door import front_door


@front_door(DataError)
def from_datasets(
    source: Any,
    *,
    task: TaskName | None = None,
    image: str | None = None,
    text: str | None = None,
    features: str | None = None,
    label: str | None = None,
    target: str | None = None,
    by: str | None = None,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    normalize: bool = False,
    modality: Modality | None = None,
    vocabulary: int | None = None,
    length: int = 64,
    tokenizer: str | None = None,
    name: str = "datasets",
) -> Dataset:
    """A data set from those of torch or Hugging Face, or from pairs of arrays (x, y).

    `source` is one of them, to be split among clients; or its parts, `{"train": …, "validation": …, "test": …}`; or
    one per client, `{"north": …, "south": {"train": …, "test": …}}`, which needs no partition. A mapping with a key
    `train` holds parts, any other one holds clients. `by` names a column of a Hugging Face data set whose value is
    the client.

    A torch data set has a length and gives pairs (sample, label); every item is read once, with its transform. Of a
    Hugging Face data set, `image` names a column of Pillow images or arrays, `text` one of texts, `features` one of
    vectors or windows (lists of numbers), and `label`, or `target`, that of the labels; by default the usual names
    are tried, then the only column of lists. A table of single numbers is read by `from_frame`. `tokenizer` is a
    folder or hub repository; without it the `vocabulary` most frequent words are numbered. The other arguments are
    those of `from_arrays`.
    """
    if label is not None and target is not None:
        raise DataError(f"{name}: label and target are two names for one thing: give one of them")
    check_class_names(name, class_names)
    columns = _Columns(image, text, features, label or target, by, task or "classification")
    read = [_read(where, one, columns, part, client) for client, part, where, one in pieces_of(source, name)]
    pieces = in_order([one.piece for one in read])
    class_names = class_names or next((one.class_names for one in read if one.class_names), None)
    if not any(one.texts for one in read):
        about = Settings(task, classes, class_names, mean, std, normalize, None, modality, name)
        return from_pieces(pieces, about, by)
    return _texts(pieces, class_names, classes, vocabulary, length, tokenizer, by, name)


def _texts(
    pieces: Sequence[Piece],
    class_names: Sequence[str] | None,
    classes: int | None,
    vocabulary: int | None,
    length: int,
    tokenizer: str | None,
    by: str | None,
    name: str,
) -> Dataset:
    y = torch.tensor([label for piece in pieces for label in piece.y])
    count = count_classes(name, y, classes, class_names)
    if classes is None and class_names is None:
        check_classes_repeat(name, y.numpy())
    texts = tuple(text for piece in pieces for text in piece.x)
    names = tuple(class_names or map(str, range(count)))
    data = text_dataset(name, texts, y, rows_of(pieces, "train"), names, vocabulary, length, tokenizer)
    validation = rows_of(pieces, "validation")
    owners, rows = owners_of(pieces, by), own_rows_of(pieces)
    return replace(data, validation_rows=validation, owners=owners, own_rows=rows)


# --- who brings what ------------------------------------------------------------------------------------

Found = tuple[str | None, str, str, Any]  # client, part, how an error names it, and the data set


def _by_client(source: Mapping[Any, Any], name: str) -> list[Found]:
    """The parts of every client in `{"north": …, "south": {"train": …, "test": …}}`."""
    if not source:
        raise DataError(f"{name}: there is no client in it: give at least one")
    check_names(name, source)
    found: list[Found] = []
    for client, own in source.items():
        where = f"{name}, client {client}"
        parts = _parts_of(own, where) if isinstance(own, Mapping) else {"train": own}
        found += [
            (str(client), part, f"{where}, {part} part" if len(parts) > 1 else where, one)
            for part, one in parts.items()
        ]
    return found


def pieces_of(source: Any, name: str) -> list[Found]:
    """Whose rows of which part are in `source`: one data set, its parts, or those of every client."""
    if not isinstance(source, Mapping):
        return [(None, "train", name, source)]
    if not any(key in PART_NAMES for key in source):
        return _by_client(source, name)
    # The splits of a hub data set may have further names; those of a plain mapping are meant as clients.
    stray = next((key for key in source if key not in PART_NAMES), None)
    if stray is not None and type(source) is dict:
        raise DataError(
            f"{name}: {stray!r} stands beside the name of a part; give parts (train, validation, test), or clients "
            'by name: {"north": {"train": …}}'
        )
    parts = _parts_of({key: source[key] for key in source if key in PART_NAMES}, name)
    return [
        (None, part, name if part == "train" else f"{name}, {part} part", one) for part, one in parts.items()
    ]


def _parts_of(source: Mapping[Any, Any], where: str) -> dict[str, Any]:
    if "train" not in source:
        raise DataError(
            f"{where}: there is no split 'train', only {', '.join(map(str, source))}: pass one split"
        )
    stray = next((key for key in source if key not in PART_NAMES), None)
    if stray is not None:
        raise DataError(f"{where}: {stray!r} is not a part: give train, validation and test")
    if len({PART_NAMES[key] for key in source}) < len(source):
        raise DataError(f"{where}: a part is there twice ({', '.join(source)}): give each once")
    return {PART_NAMES[key]: one for key, one in source.items()}


# --- reading one data set -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Columns:
    image: str | None
    text: str | None
    features: str | None
    label: str | None
    by: str | None
    task: TaskName


@dataclass(frozen=True)
class _Read:
    piece: Piece
    class_names: Sequence[str] | None = None
    texts: bool = False


def _read(where: str, source: Any, columns: _Columns, part: str, client: str | None) -> _Read:
    """The rows of one data set, whatever it is."""
    _refuse(where, source)
    if columns.by is not None and (client is not None or not hasattr(source, "column_names")):
        raise DataError(f"{where}: only the rows of a Hugging Face data set have columns: leave out by")
    if columns.task == "classification" and isinstance(source, tuple | list) and all(map(_is_part, source)):
        raise DataError(
            f'{where}: this is a list of (x, y); name the client of each: {{"north": (x, y), "south": (x, y)}}'
        )
    if isinstance(source, tuple | list) and len(source) == 2:
        return _Read(Piece(where, source[0], source[1], part, client))
    if isinstance(source, torch.utils.data.TensorDataset):
        return _read_tensors(where, source, part, client)
    if hasattr(source, "column_names"):
        return _read_rows(where, source, list(source.column_names), columns, part, client)
    items = [_item(where, source, number) for number in range(len(source))]
    if items and all(isinstance(item, Mapping) for item in items):
        return _read_rows(where, items, list(items[0]), columns, part, client)
    x, y = _pairs(where, items, columns.task)
    return _Read(Piece(where, x, y, part, client), _torch_names(source, columns.task))


def _is_part(item: Any) -> bool:
    """Whether it is (x, y) of many samples, not one sample with its class."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    x, y = item
    arrays = isinstance(x, np.ndarray | Tensor) and isinstance(y, np.ndarray | Tensor)
    return arrays and y.ndim == 1 and x.ndim > 1 and len(x) == len(y) > 1


def _item(where: str, source: Any, number: int) -> Any:
    try:
        return source[number]
    except Exception as error:
        raise DataError(
            f"{where}: item {number} cannot be read ({type(error).__name__}: {first_line(error)}): fix it"
        ) from error


def _refuse(where: str, source: Any) -> None:
    if isinstance(source, str | bytes | Path):
        raise DataError(
            f"{where}: {str(source)!r} is a name, not a data set: give it as data={str(source)!r} if it is one of "
            "potluck's own, or read files with potluck.from_files(path, target=…)"
        )
    if type(source).__module__.partition(".")[0] in ("pandas", "polars"):
        raise DataError(f"{where}: this is a table: use potluck.from_frame(frame, target=…)")
    if isinstance(source, Dataset):
        raise DataError(
            f"{where}: this is a data set of potluck already: use it as data=, or in a federation"
        )
    iterable = isinstance(source, torch.utils.data.IterableDataset)
    if iterable or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        rows = hasattr(source, "column_names") and hasattr(source, "__len__") and hasattr(source, "__iter__")
        if not rows:
            raise DataError(
                f"{where}: {type(source).__name__} objects cannot be read by row number; give a data set with "
                "a length and items, for example list(dataset), a torch Dataset, a Hugging Face Dataset, or "
                "arrays (x, y)"
            )
    if not len(source):
        raise DataError(f"{where}: there is no row in it; give samples, or leave this part out")


def _read_tensors(where: str, source: torch.utils.data.TensorDataset, part: str, client: str | None) -> _Read:
    if len(source.tensors) != 2:
        raise DataError(f"{where}: {len(source.tensors)} tensors: give two, the samples and the labels")
    return _Read(Piece(where, source.tensors[0], source.tensors[1], part, client))


def _pairs(where: str, items: Sequence[Any], task: TaskName) -> tuple[np.ndarray, np.ndarray]:
    for number, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{where}: item {number} is not a pair of a sample and a label; return (x, y) for each item"
            )
    labels = [
        _class_of(where, f"item {number}", label) if task == "classification" else _array(label)
        for number, (_, label) in enumerate(items)
    ]
    return _samples(where, [sample for sample, _ in items]), _stacked(where, "labels", labels)


def _torch_names(source: Any, task: TaskName) -> Sequence[str] | None:
    """The class names of a torchvision data set, also through `Subset`."""
    while isinstance(source, torch.utils.data.Subset):
        source = source.dataset
    names = getattr(source, "classes", None)
    named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return names if named and task == "classification" else None


def _read_rows(
    where: str,
    rows: Iterable[Mapping[str, Any]],
    names: Sequence[str],
    columns: _Columns,
    part: str,
    client: str | None,
) -> _Read:
    """The rows of a Hugging Face data set: pictures, arrays, vectors or texts."""
    label = _choose(where, "label", columns.label, LABEL_COLUMNS, names)
    class_names = _names_of(rows, label)
    if columns.by is not None and columns.by not in names:
        raise DataError(f"{where}: there is no column {columns.by!r} to split by: it has {', '.join(names)}")
    others = [name for name in names if name not in (label, columns.by)]
    what, column = _samples_column(where, rows, columns, others)
    texts = what == "text"
    if texts and columns.task != "classification":
        raise DataError(f"{where}: texts can be classified, but {columns.task} is asked for; leave out task")
    read = [
        (row[column], _label_of(where, label, row, columns.task), row.get(columns.by or "")) for row in rows
    ]
    x = [str(one) for one, _, _ in read] if texts else _samples(where, [one for one, _, _ in read], column)
    x = x.astype(np.float32) if what == "features" and not isinstance(x, list) else x
    y = [one for _, one, _ in read] if texts else _stacked(where, "labels", [one for _, one, _ in read])
    owners = None if columns.by is None else [one for _, _, one in read]
    return _Read(Piece(where, x, y, part, client, owners), class_names, texts)


def _samples_column(
    where: str, rows: Iterable[Mapping[str, Any]], columns: _Columns, names: Sequence[str]
) -> tuple[str, str]:
    """What the samples are (image, text or features), and their column."""
    for what in ("text", "image", "features"):
        given = getattr(columns, what)
        if given is not None:
            return what, _choose(where, what, given, (), names)
    first = next(iter(rows))
    for what, usual in (("image", IMAGE_COLUMNS), ("text", TEXT_COLUMNS), ("features", _lists(first, names))):
        found = [column for column in usual if column in names]
        if found and (what != "features" or len(found) == 1):
            return what, found[0]
    if names and all(isinstance(first[name], int | float | str | None) for name in names):
        raise DataError(
            f"{where}: its columns {', '.join(names)} hold one value each, as in a table: use "
            "potluck.from_frame(dataset.to_pandas(), target=…), or name a column of texts with text="
        )
    raise DataError(
        f"{where}: which column holds the samples? It has {', '.join(names)}: pass image=, text= or features="
    )


def _lists(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The columns of lists or arrays of numbers."""
    lists = [name for name in names if isinstance(row[name], list | np.ndarray | Tensor)]
    return [name for name in lists if _array(row[name]).dtype.kind in "biuf"]


def _choose(where: str, what: str, given: str | None, usual: Sequence[str], columns: Sequence[str]) -> str:
    for column in usual if given is None else (given,):
        if column in columns:
            return column
    raise DataError(
        f"{where}: which column is the {what}? It has {', '.join(columns)}: pass {what}= (for a table of numbers "
        "use from_frame)"
    )


def _names_of(part: Any, label: str) -> tuple[str, ...] | None:
    feature = (getattr(part, "features", None) or {}).get(label)
    stored = getattr(feature, "names", None)
    return tuple(stored) if stored else None


def _label_of(where: str, label: str, row: Mapping[str, Any], task: TaskName) -> Any:
    return (
        _class_of(where, f"column {label!r}", row[label]) if task == "classification" else _array(row[label])
    )


def _class_of(where: str, place: str, value: Any) -> int:
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        shown = repr(value) if isinstance(value, str | float | bool | None) else f"a {type(value).__name__}"
        hint = "number the classes" if isinstance(value, str) else "number the classes, or name another task="
        raise DataError(f"{where}: the label {shown} in {place} is not a class number: {hint}")
    return int(value)


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _samples(where: str, values: Sequence[Any], column: str | None = None) -> np.ndarray:
    grey = all(getattr(value, "mode", None) in ("1", "L") for value in values)
    pixels = [_pixels(value, grey) for value in values]
    if len({array.shape for array in pixels}) != 1:
        images = f"the images in {column!r}" if column else "the samples"
        raise DataError(f"{where}: {images} are not all of one size: resize them first")
    return np.stack(pixels)


def _stacked(where: str, what: str, values: Sequence[Any]) -> np.ndarray:
    arrays = [np.asarray(value) for value in values]
    if len({array.shape for array in arrays}) != 1:
        raise DataError(f"{where}: the {what} are not all of one shape; bring them to one first")
    return np.stack(arrays)


def _pixels(value: Any, grey: bool) -> np.ndarray:
    if not hasattr(value, "convert"):
        return _array(value)
    array = np.asarray(value.convert("L" if grey else "RGB"))
    return array[None] if grey else array.transpose(2, 0, 1)
