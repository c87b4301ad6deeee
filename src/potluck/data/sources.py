"""Data sets: an embedded one, those of the papers, and a user's own.

A new data set is one function:

    @register("my_set")
    def my_set(dir: Path | None) -> Dataset:
        return from_arrays(x, y, name="my_set")
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from torch import Tensor

from potluck.data import parquet
from potluck.data.tokenizer import RESERVED, Encoder, count_vocabulary, encode
from potluck.data.tokenizer import strip_headers as without_headers
from potluck.data.tokenizer import words as split_words
from potluck.errors import DataError, ModelError, nearest
from potluck.pieces import Pieces
from potluck.rng import Rng
from potluck.task import Task

IMAGE_COLUMNS = ("img", "image")
TEXT_COLUMNS = ("text", "sentence")
LABEL_COLUMNS = ("label", "labels", "fine_label")
TEST_SPLITS = ("test", "validation", "valid")
VOCABULARY = 8_000  # words that get a number of their own


@dataclass(frozen=True)
class Dataset:
    """All rows of a data set, the official training part first.

    `x` is uint8 or float32 (N, channels, height, width) for images, float32 (N, features) for vectors, int64
    (N, length) for text. It may be shared with other users of the same data set: never write into it. `y` is one
    class per row, or what else the task learns: (N, labels) for multi-label, (N, height, width) for segmentation.
    """

    name: str
    task: Task
    x: Tensor
    y: Tensor
    train_rows: int  # rows [0, train_rows) are the official training part; all rows where there is no other
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = ()  # per channel on the 0..1 scale; () means no normalisation
    std: tuple[float, ...] = ()
    strata: Tensor | None = None  # the class of a row by which partitions deal it, where y is something else
    words: Mapping[str, int] | None = None  # text: the number of every word that has one
    encoder: Encoder | None = None  # text: what makes token ids where it is not `words`
    images: Tensor | None = None  # of pairs: the images as they were; x holds them prepared
    texts: tuple[str, ...] | None = None  # as written, or the captions of pairs; empty where a row has none

    def __len__(self) -> int:
        return int(self.y.shape[0])

    @property
    def labels(self) -> Tensor:
        """The class of every row for a partition; all rows alike where neither y nor strata says one."""
        if self.strata is not None:
            return self.strata
        return self.y if self.y.ndim == 1 else torch.zeros(len(self), dtype=torch.long)

    @property
    def label_count(self) -> int:
        """How many classes `labels` may have."""
        return self.task.classes if self.task.single_label else int(self.labels.max()) + 1

    @property
    def label_names(self) -> tuple[str, ...]:
        """What the classes of `labels` are called."""
        return self.class_names if self.task.single_label else tuple(map(str, range(self.label_count)))


Data = Dataset | tuple[Dataset, ...]  # of an experiment: one data set, or that of each group of clients

Loader = Callable[..., Dataset]
LoaderType = TypeVar("LoaderType", bound=Loader)
_LOADERS: dict[str, Loader] = {}


def register(name: str) -> Callable[[LoaderType], LoaderType]:
    """Make `load(name)` call the decorated function with the folder and the data set's own options."""

    def add(loader: LoaderType) -> LoaderType:
        if name in _LOADERS:
            raise DataError(f"a data set called {name!r} is already registered: choose another name")
        _LOADERS[name] = loader
        return loader

    return add


def names() -> tuple[str, ...]:
    """The data sets `load` knows."""
    return tuple(sorted(_LOADERS))


def load(name: str, dir: Path | str | None = None, *, labels_only: bool = False, **options: Any) -> Dataset:
    """A data set by name, from `dir`, else from the folder in POTLUCK_DATA, else from the hub.

    `dir` is the folder that contains `<name>/`, or that folder itself. With `labels_only` the inputs may be
    zeros of the right shape that cost no time or memory: enough to make and look at a split.
    """
    if name not in _LOADERS:
        raise DataError(f"there is no data set {name!r}: {nearest(name, _LOADERS)}")
    loader = _LOADERS[name]
    accepted = _parameters(loader)
    _check_options(name, accepted, options)
    if labels_only and "labels_only" in accepted:
        options["labels_only"] = True
    return loader(None if dir is None else Path(dir).expanduser(), **options)


def _check_options(name: str, accepted: Mapping[str, inspect.Parameter], options: Mapping[str, Any]) -> None:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    known = [
        key for key, value in accepted.items() if value.kind is value.KEYWORD_ONLY and key != "labels_only"
    ]
    for option in options:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise DataError(f"data set {name!r} has no option {option!r}: {takes}")
        kind = accepted[option].annotation
        if not _fits(options[option], kind):
            raise DataError(
                f"data set {name!r}: option {option!r} is {options[option]!r}, expected {_in_words(kind)}"
            )


def _parameters(loader: Loader) -> Mapping[str, inspect.Parameter]:
    """What a loader takes, with types where they can be found."""
    try:
        return inspect.signature(loader, eval_str=True).parameters
    except (NameError, AttributeError, TypeError):  # a type that is there for a type checker alone
        return inspect.signature(loader).parameters


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value, from a file or from Python, is of a type; a type that cannot be checked takes any."""
    if kind is inspect.Parameter.empty or isinstance(kind, str):
        return True
    try:
        check = TypeAdapter(kind)
    except PydanticUserError:
        return True
    value = value.item() if isinstance(value, np.generic) else value
    for form in (
        check.validate_python,
        lambda value, strict: check.validate_json(json.dumps(value), strict=strict),
    ):
        with contextlib.suppress(ValidationError, TypeError, ValueError):
            form(value, strict=True)
            return True
    return False


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return " or ".join(map(_in_words, get_args(kind)))
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        NoneType: "nothing",
    }
    return words.get(kind) or (kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind))


def fewer(data: Dataset, samples: int) -> Dataset:
    """So many training rows, and at most as many test rows, drawn once and for all: the same whatever the seeds."""
    if samples > data.train_rows:
        raise DataError(f"data set {data.name!r} has {data.train_rows} training samples, not {samples}")
    draw, tests = Rng(0).child("fewer", data.name).numpy(), len(data) - data.train_rows
    chosen = [
        np.sort(draw.choice(data.train_rows, samples, replace=False)),
        data.train_rows + np.sort(draw.choice(tests, min(samples, tests), replace=False)),
    ]
    rows = torch.from_numpy(np.concatenate(chosen))
    return replace(
        data,
        x=data.x[rows],
        y=data.y[rows],
        train_rows=samples,
        strata=None if data.strata is None else data.strata[rows],
        images=None if data.images is None else data.images[rows],
        texts=None if data.texts is None else tuple(data.texts[row] for row in rows.tolist()),
    )


@register("digits")
def _digits(dir: Path | None) -> Dataset:
    """scikit-learn's 1,797 hand-written digits, 8x8, embedded; no official test part."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return from_arrays(
        (bunch.images[:, None] / 16).astype(np.float32),
        bunch.target,
        name="digits",
        mean=(0.3053,),
        std=(0.3761,),
    )


@dataclass(frozen=True)
class _ImageSet:
    location: parquet.Location
    classes: int
    input: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: tuple[str, ...] = ("label", "labels")


def _load_images(images: _ImageSet, dir: Path | None, *, labels_only: bool = False) -> Dataset:
    train, test = parquet.find(images.location, dir)
    y, train_rows = _labels(train, test, images.labels, images.classes)
    if labels_only:
        x = torch.zeros(1, *images.input, dtype=torch.uint8).expand(len(y), *images.input)
    else:
        x = torch.from_numpy(parquet.read_images(train + test, IMAGE_COLUMNS, images.input))
    return Dataset(
        name=images.location.name,
        task=Task("classification", images.classes, images.input),
        x=x,
        y=y,
        train_rows=train_rows,
        class_names=parquet.read_class_names(train, images.labels, images.classes),
        mean=images.mean,
        std=images.std,
    )


def _labels(
    train: parquet.Files, test: parquet.Files, columns: Sequence[str], classes: int
) -> tuple[Tensor, int]:
    parts = [parquet.read_labels(files, columns, classes) for files in (train, test)]
    return torch.from_numpy(np.concatenate(parts)), len(parts[0])


_IMAGE_SETS = (
    _ImageSet(
        parquet.Location("cifar10", "uoft-cs/cifar10", "plain_text"),
        classes=10,
        input=(3, 32, 32),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    _ImageSet(
        parquet.Location("fashion_mnist", "zalando-datasets/fashion_mnist", "fashion_mnist"),
        classes=10,
        input=(1, 28, 28),
        mean=(0.2860,),
        std=(0.3530,),
    ),
    _ImageSet(
        parquet.Location("mnist", "ylecun/mnist", "mnist"),
        classes=10,
        input=(1, 28, 28),
        mean=(0.1307,),
        std=(0.3081,),
    ),
    _ImageSet(
        parquet.Location("svhn", "ufldl-stanford/svhn", "cropped_digits"),
        classes=10,
        input=(3, 32, 32),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
    ),
    _ImageSet(
        parquet.Location("tiny_imagenet", "zh-plus/tiny-imagenet", splits=("train", "valid")),
        classes=200,
        input=(3, 64, 64),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
    ),
)
for _set in _IMAGE_SETS:
    register(_set.location.name)(partial(_load_images, _set))


@register("cifar100")
def _cifar100(
    dir: Path | None, *, labels: Literal["fine", "coarse"] = "fine", labels_only: bool = False
) -> Dataset:
    """CIFAR-100 with its 100 fine classes or its 20 coarse ones."""
    images = _ImageSet(
        parquet.Location("cifar100", "uoft-cs/cifar100", "cifar100"),
        classes=100 if labels == "fine" else 20,
        input=(3, 32, 32),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        labels=(f"{labels}_label",),
    )
    return _load_images(images, dir, labels_only=labels_only)


@register("sst2")
def _sst2(
    dir: Path | None,
    *,
    vocabulary: int | None = None,
    length: int = 64,
    tokenizer: str | None = None,
    labels_only: bool = False,
) -> Dataset:
    """SST-2. The validation split is the test part: the hub's copy hides the labels of the test split."""
    location = parquet.Location("sst2", "stanfordnlp/sst2", splits=("train", "validation"))
    train, test = parquet.find(location, dir)
    y, train_rows = _labels(train, test, LABEL_COLUMNS, 2)
    texts = () if labels_only else parquet.read_texts(train + test, TEXT_COLUMNS)
    class_names = parquet.read_class_names(train, LABEL_COLUMNS, 2)
    return _text_dataset("sst2", texts, y, train_rows, class_names, vocabulary, length, tokenizer)


@register("newsgroups20")
def _newsgroups20(
    dir: Path | None,
    *,
    vocabulary: int | None = None,
    length: int = 256,
    strip_headers: bool = True,
    tokenizer: str | None = None,
    labels_only: bool = False,
) -> Dataset:
    """The 20 newsgroups, split by date. From a folder only: the hub's copies have other texts."""
    train, test = parquet.find(parquet.Location("newsgroups20", None), dir)
    y, train_rows = _labels(train, test, LABEL_COLUMNS, 20)
    texts = () if labels_only else parquet.read_texts(train + test, TEXT_COLUMNS)
    # A header names the sender, his institution and sometimes the newsgroup itself: a model that sees it
    # learns who writes where, not what the text is about.
    if strip_headers:
        texts = tuple(without_headers(posting) for posting in texts)
    class_names = parquet.read_class_names(train, LABEL_COLUMNS, 20)
    return _text_dataset("newsgroups20", texts, y, train_rows, class_names, vocabulary, length, tokenizer)


def _text_dataset(
    name: str,
    texts: tuple[str, ...],
    y: Tensor,
    train_rows: int,
    class_names: tuple[str, ...],
    vocabulary: int | None,
    length: int,
    tokenizer: str | None,
) -> Dataset:
    if length < 1 or (vocabulary is not None and vocabulary < 1):
        raise DataError(
            f"data set {name!r} needs vocabulary and length of at least 1, not {vocabulary}, {length}"
        )
    if tokenizer is not None and vocabulary is not None:
        raise DataError(f"data set {name!r}: the tokenizer has a vocabulary of its own: leave out vocabulary")
    words: Mapping[str, int] | None
    x, words, encoder = torch.zeros(1, length, dtype=torch.long).expand(len(y), length), {}, None
    if tokenizer is not None:
        pieces, encoder = encode_pieces(name, tokenizer, texts, length)
        x, words, tokens = pieces if texts else x, None, encoder.vocabulary
    elif texts:
        x, words = _encode(texts, train_rows, vocabulary or VOCABULARY, length)
        tokens = len(words) + RESERVED
    else:
        tokens = (vocabulary or VOCABULARY) + RESERVED
    task = Task("text-classification", len(class_names), (length,), tokens)
    return Dataset(
        name, task, x, y, train_rows, class_names, words=words, encoder=encoder, texts=texts or None
    )


def encode_pieces(name: str, source: str, texts: tuple[str, ...], length: int) -> tuple[Tensor, Pieces]:
    """The token ids of a data set's texts from the tokenizer of a folder or hub repository, and that tokenizer."""
    try:
        pieces = Pieces.of(source)
        return _encode_pieces(pieces, texts, length), pieces
    except ModelError as error:
        raise DataError(f"data set {name!r}, tokenizer: {error}") from error


@lru_cache(maxsize=4)
def _encode_pieces(pieces: Pieces, texts: tuple[str, ...], length: int) -> Tensor:
    return torch.from_numpy(pieces.encode(texts, length))


@lru_cache(maxsize=4)
def _encode(
    texts: tuple[str, ...], train_rows: int, vocabulary: int, length: int
) -> tuple[Tensor, dict[str, int]]:
    split = [split_words(text) for text in texts]
    numbers = count_vocabulary(split[:train_rows], vocabulary)
    return torch.from_numpy(encode(split, numbers, length)), numbers


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

    Images are (N, channels, height, width), uint8 from 0 to 255 or float as they are; vectors are
    (N, features); with `vocabulary`, `x` holds token ids (N, length): it says how many there are, or is the
    tokenizer they come from, with which clients can read public texts, too. `test` is an official test part.
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
    # Only the clear case is refused: a last axis that can only be colour after two that cannot.
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

    Any object will do that has `column_names` and yields one mapping per row. `image` names a column of
    Pillow images or channels-first arrays, `text` one of texts; else the usual column names are tried. `tokenizer`
    is the folder or hub repository of one for texts; without it the words are numbered, `vocabulary` of them.
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
    return _text_dataset(name, texts, y, len(train), class_names, vocabulary, length, tokenizer)


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
