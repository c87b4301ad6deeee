"""A user's own data: from arrays or Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from potluck.core.dataset import Dataset, Encoder
from potluck.core.task import Task
from potluck.data.columns import IMAGE_COLUMNS, LABEL_COLUMNS, TEST_SPLITS, TEXT_COLUMNS
from potluck.data.texts import text_dataset
from potluck.errors import DataError

Array = np.ndarray | Tensor | Sequence[Any]


def from_arrays(
    x: Array,
    y: Array,
    *,
    test: tuple[Array, Array] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    vocabulary: int | Encoder | None = None,
    name: str = "arrays",
) -> Dataset:
    """A data set from arrays or tensors.

    Images are (N, channels, height, width), uint8 from 0 to 255 or unscaled floats; vectors are (N, features).
    With `vocabulary`, `x` holds token ids (N, length): `vocabulary` is their number or the tokenizer they come
    from, with which clients can also read public texts. `test` is an official test part.
    """
    encoder = vocabulary if isinstance(vocabulary, Encoder) else None
    vocabulary = vocabulary.vocabulary if isinstance(vocabulary, Encoder) else vocabulary
    parts = [_part(name, x, y, vocabulary)]
    if test is not None:
        parts.append(_part(f"{name}, test part", *test, vocabulary))
        if parts[0][0].shape[1:] != parts[1][0].shape[1:] or parts[0][0].dtype != parts[1][0].dtype:
            raise DataError(f"{name}: the samples of the test part differ in shape or type from the others")
    labels = torch.cat([part[1] for part in parts])
    classes = _count_classes(name, labels, classes, class_names)
    mean, std = tuple(mean or ()), tuple(std or ())
    samples = torch.cat([part[0] for part in parts]) if test is not None else parts[0][0]
    _check_normalisation(name, samples, mean, std)
    kind: Literal["classification", "text-classification"]
    kind = "classification" if vocabulary is None else "text-classification"
    return Dataset(
        name=name,
        task=Task(kind, classes, tuple(samples.shape[1:]), vocabulary),
        x=samples,
        y=labels,
        train_rows=len(parts[0][1]),
        class_names=tuple(class_names or map(str, range(classes))),
        mean=mean,
        std=std,
        encoder=encoder,
    )


def _part(name: str, x: Array, y: Array, vocabulary: int | None) -> tuple[Tensor, Tensor]:
    samples, labels = _tensor(name, x), _tensor(name, y)
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise DataError(f"{name}: y must be one integer class per sample, not {_describe(labels)}")
    if samples.ndim < 2 or len(samples) != len(labels) or not len(labels):
        raise DataError(
            f"{name}: x is {_describe(samples)}, which does not give one sample per label ({len(labels)})"
        )
    samples = _tokens(name, samples, vocabulary) if vocabulary is not None else _features(name, samples)
    return samples, labels.long()


def _tensor(name: str, values: Array) -> Tensor:
    try:
        array = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}: cannot make a tensor of the values ({error}): give numbers of one shape"
        ) from error
    return array.detach().cpu().contiguous()


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _tokens(name: str, x: Tensor, vocabulary: int) -> Tensor:
    if x.ndim != 2 or x.is_floating_point():
        raise DataError(f"{name}: token ids must be integers (samples, length), not {_describe(x)}")
    if int(x.min()) < 0 or int(x.max()) >= vocabulary:
        raise DataError(
            f"{name}: token ids reach from {int(x.min())} to {int(x.max())}, outside 0 to {vocabulary - 1}"
        )
    return x.long()


def _features(name: str, x: Tensor) -> Tensor:
    if x.ndim not in (2, 4):
        raise DataError(
            f"{name}: x is {_describe(x)}; give (samples, features) or (samples, channels, height, width), "
            f"x[:, None] for images without a channel axis"
        )
    # Refuse only the clear case: the last axis can only be colour, and the first two cannot.
    if x.ndim == 4 and x.shape[-1] in (1, 3, 4) and min(x.shape[1:3]) > 4:
        raise DataError(
            f"{name}: x is {_describe(x)}, channels last; give channels first: x.transpose(0, 3, 1, 2)"
        )
    if x.is_floating_point():
        if not bool(torch.isfinite(x).all()):
            raise DataError(f"{name}: x holds NaN or infinite values: clean them first")
        return x.float()
    if x.dtype != torch.uint8:
        raise DataError(
            f"{name}: x is {_describe(x)}; give uint8 or float values, or `vocabulary` for token ids"
        )
    return x if x.ndim == 4 else x.float()


def _count_classes(name: str, y: Tensor, classes: int | None, class_names: Sequence[str] | None) -> int:
    low, high = int(y.min()), int(y.max())
    count = classes or (len(class_names) if class_names else high + 1)
    if low < 0 or high >= count:
        raise DataError(f"{name}: labels reach from {low} to {high}, outside 0 to {count - 1}")
    if class_names and len(class_names) != count:
        raise DataError(f"{name}: {len(class_names)} class names for {count} classes: give one for each")
    return count


def _check_normalisation(name: str, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    if not mean and not std:
        return
    if x.ndim != 4:
        raise DataError(f"{name}: mean and std belong to image channels: normalise other samples beforehand")
    if not len(mean) == len(std) == x.shape[1] or min(std) <= 0:
        raise DataError(f"{name}: give one mean and one positive std for each of the {x.shape[1]} channels")


def from_datasets(
    source: Any,
    *,
    image: str | None = None,
    text: str | None = None,
    label: str | None = None,
    vocabulary: int | None = None,
    length: int = 64,
    tokenizer: str | None = None,
    name: str = "datasets",
) -> Dataset:
    """A data set from a Hugging Face `datasets.Dataset`, or `DatasetDict` with `train` and perhaps `test`.

    Any object works that has `column_names` and yields one mapping per row. `image` names a column of Pillow
    images or channels-first arrays, `text` one of texts; by default the usual column names are tried.
    `tokenizer` is a folder or hub repository; without it the `vocabulary` most frequent words are numbered.
    """
    train, test = _parts_of(source, name)
    columns = list(train.column_names)
    label = _choose(name, "label", label, LABEL_COLUMNS, columns)
    class_names = _names_of(train, label)
    if text is None and (image is not None or any(column in columns for column in IMAGE_COLUMNS)):
        read = partial(_read_images, name, _choose(name, "image", image, IMAGE_COLUMNS, columns), label)
        held_back = None if test is None else read(test)
        return from_arrays(*read(train), test=held_back, class_names=class_names, name=name)
    text = _choose(name, "text", text, TEXT_COLUMNS, columns)
    rows = [row for part in (train, test) if part is not None for row in part]
    y = torch.tensor([_class_of(name, label, row) for row in rows])
    class_names = class_names or tuple(map(str, range(_count_classes(name, y, None, None))))
    _count_classes(name, y, None, class_names)
    texts = tuple(str(row[text]) for row in rows)
    return text_dataset(name, texts, y, len(train), class_names, vocabulary, length, tokenizer)


def _parts_of(source: Any, name: str) -> tuple[Any, Any | None]:
    if not isinstance(source, Mapping):
        return source, None
    if "train" not in source:
        raise DataError(
            f"{name}: there is no split 'train', only {', '.join(map(str, source))}: pass one split"
        )
    return source["train"], next((source[split] for split in TEST_SPLITS if split in source), None)


def _choose(name: str, what: str, given: str | None, usual: Sequence[str], columns: Sequence[str]) -> str:
    for column in usual if given is None else (given,):
        if column in columns:
            return column
    raise DataError(f"{name}: which column is the {what}? It has {', '.join(columns)}: pass {what}=")


def _names_of(part: Any, label: str) -> tuple[str, ...] | None:
    feature = (getattr(part, "features", None) or {}).get(label)
    stored = getattr(feature, "names", None)
    return tuple(stored) if stored else None


def _class_of(name: str, label: str, row: Mapping[str, Any]) -> int:
    value = row[label]
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DataError(
            f"{name}: the label {value!r} in column {label!r} is not a class number: number the classes"
        )
    return int(value)


def _read_images(
    name: str, image: str, label: str, part: Iterable[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    values, labels = [], []
    for row in part:
        values.append(row[image])
        labels.append(_class_of(name, label, row))
    grey = all(getattr(value, "mode", None) in ("1", "L") for value in values)
    pixels = [_pixels(value, grey) for value in values]
    if len({array.shape for array in pixels}) != 1:
        raise DataError(f"{name}: the images in {image!r} are not all of one size: resize them first")
    return np.stack(pixels), np.array(labels)


def _pixels(value: Any, grey: bool) -> np.ndarray:
    if not hasattr(value, "convert"):
        return np.asarray(value)
    array = np.asarray(value.convert("L" if grey else "RGB"))
    return array[None] if grey else array.transpose(2, 0, 1)
