"""A user's own arrays as a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from potluck.core.dataset import Dataset, Encoder
from potluck.core.task import KindName, Task
from potluck.data.own.pieces import Array, Piece, in_order, own_rows_of, owners_of, rows_of
from potluck.errors import DataError, first_twice, nearest
from potluck.front_door import front_door

TaskName = Literal["classification", "multi-label", "segmentation", "regression"]
Modality = Literal["image", "window", "vector"]
Part = tuple[Array, Array] | tuple[Array, Array, Array]  # x and y, and perhaps the client of every row
MANY_CLASSES = 20  # up to so many may be those of a small sample
FIFTHS = 5  # the ranges of a regression's target, by which label splits deal and pictures count


def _of_each_client(x: Any = None, *_: Any, **__: Any) -> str | None:
    if not isinstance(x, Mapping):
        return None
    return "from_arrays() takes one x and one y; for data of each client call from_datasets({'north': (x, y), …})"


@front_door(DataError, other=_of_each_client)
def from_arrays(
    x: Array,
    y: Array,
    *,
    task: TaskName | None = None,
    test: Part | None = None,
    validation: Part | None = None,
    clients: Array | None = None,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    mean: float | Sequence[float] | Array | None = None,
    std: float | Sequence[float] | Array | None = None,
    normalize: bool = False,
    strata: Array | None = None,
    vocabulary: int | Encoder | None = None,
    modality: Modality | None = None,
    name: str = "arrays",
) -> Dataset:
    """A data set from arrays or tensors.

    Images are (N, channels, height, width), uint8 from 0 to 255 or unscaled floats; windows of a sensor are (N,
    channels, time); vectors are (N, features). With `vocabulary`, `x` holds token ids (N, length): `vocabulary` is
    their number or the tokenizer they come from, with which clients can also read public texts.

    `y` depends on `task`: one class per sample (the default; texts are numbered in sorted order), (N, labels) of 0
    and 1 for multi-label, (N, height, width) for segmentation, (N,) or (N, outputs) numbers for regression.

    `test` and `validation` are official parts. `clients` names the client of every row, for `partition: {kind:
    natural}`; the other parts are then (x, y, clients). `mean` and `std` are one number, or one per channel;
    `normalize` computes them from the training part. `strata` is a class per row, by which splits deal rows whose
    `y` is no class.
    """
    check_class_names(name, class_names)
    pieces = [Piece(name, x, y, "train", clients=clients)]
    for part, given in (("validation", validation), ("test", test)):
        if given is not None:
            pieces.append(_official(name, part, given))
    settings = Settings(
        task, classes, class_names, mean, std, normalize, vocabulary=vocabulary, modality=modality, name=name
    )
    return from_pieces(pieces, settings, by=None, strata=strata)


def check_class_names(name: str, given: Any) -> None:
    """Refuse names of classes that are one text, or that name two classes alike."""
    if given is None:
        return
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise DataError(f"{name}: class_names: give a list of texts, not {given!r}")
    names = list(map(str, given))
    if (twice := first_twice(names)) is not None:
        raise DataError(f"{name}: class_names holds {twice!r} twice: give each class a name of its own")


def _official(name: str, part: str, given: Any) -> Piece:
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise DataError(f"{name}: give {part} as (x, y), or as (x, y, clients)")
    return Piece(
        f"{name}, {part} part", given[0], given[1], part, clients=given[2] if len(given) == 3 else None
    )


@dataclass(frozen=True)
class Settings:
    """What is said about a data set beside its rows; see `from_arrays`."""

    task: TaskName | None = None
    classes: int | None = None
    class_names: Sequence[str] | None = None
    mean: float | Sequence[float] | Array | None = None
    std: float | Sequence[float] | Array | None = None
    normalize: bool = False
    vocabulary: int | Encoder | None = None
    modality: Modality | None = None
    name: str = "arrays"
    gaps: bool = False  # whether numbers may be missing (NaN), as clients fill them

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in get_args(TaskName):
            hint = nearest(str(self.task), get_args(TaskName))
            raise DataError(f"{self.name}: there is no task {self.task!r}; {hint}")
        if self.modality is not None and self.modality not in get_args(Modality):
            hint = nearest(str(self.modality), get_args(Modality))
            raise DataError(f"{self.name}: there is no modality {self.modality!r}; {hint}")
        if self.classes is not None and not _is_whole(self.classes):
            raise DataError(f"{self.name}: classes: give a whole number, not {self.classes!r}")
        if self.vocabulary is not None and self.task not in (None, "classification"):
            raise DataError(
                f"{self.name}: texts can be classified, but {self.task} is asked for; leave out task"
            )

    @property
    def tokens(self) -> int | None:
        """How many token ids there are."""
        return self.vocabulary.vocabulary if isinstance(self.vocabulary, Encoder) else self.vocabulary


def from_pieces(
    pieces: Sequence[Piece], about: Settings, by: str | None = None, strata: Array | None = None
) -> Dataset:
    """A data set from the rows of all parts and clients."""
    pieces = in_order(pieces)
    kind: TaskName = about.task or "classification"
    samples = _joined([(piece.where, _samples(piece, about)) for piece in pieces], "samples")
    names, numbered = about.class_names, [(piece.where, piece.y) for piece in pieces]
    if kind == "classification":
        names, numbered = numbered_texts(numbered, names)
    labels = _joined([(where, _READ[kind](where, y, about)) for where, y in numbered], "labels")
    for piece, count in zip(pieces, (len(y) for _, y in numbered), strict=True):
        _check_count(piece, count)
    if kind == "classification" and about.classes is None and about.class_names is None:
        check_classes_repeat(about.name, labels.numpy())
    outputs = _outputs(about, kind, labels, samples, names)
    mean, std = _normalisation(about, samples[: rows_of(pieces, "train")])
    known = _strata(about.name, kind, labels, strata)
    return Dataset(
        name=about.name,
        task=Task(_kind_name(kind, about), outputs, tuple(samples.shape[1:]), about.tokens),
        x=samples,
        y=labels,
        train_rows=rows_of(pieces, "train"),
        class_names=tuple(names or (() if kind == "regression" else map(str, range(outputs)))),
        mean=mean,
        std=std,
        encoder=about.vocabulary if isinstance(about.vocabulary, Encoder) else None,
        validation_rows=rows_of(pieces, "validation"),
        owners=owners_of(pieces, by),
        own_rows=own_rows_of(pieces),
        strata=known[0],
        strata_names=known[1],
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _kind_name(kind: TaskName, about: Settings) -> KindName:
    return kind if about.vocabulary is None else "text-classification"


def _check_count(piece: Piece, labels: int) -> None:
    if len(piece.x) != labels or not labels:
        raise DataError(
            f"{piece.where}: x is {describe(to_tensor(piece.where, piece.x))}, which does not give one sample per "
            f"label ({labels}); give as many samples as labels"
        )


def _joined(parts: Sequence[tuple[str, Tensor]], what: str) -> Tensor:
    """All rows together; the parts must be of one shape and type."""
    first = parts[0][1]
    for where, part in parts[1:]:
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
            raise DataError(
                f"{where}: the {what} differ in shape or type from the others: they are {describe(part)}, those of "
                f"{parts[0][0]} {describe(first)}; give all the same"
            )
    return torch.cat([part for _, part in parts]) if len(parts) > 1 else first


def to_tensor(where: str, values: Array, what: str = "x") -> Tensor:
    """A tensor on the host; `what` is its name in an error."""
    try:
        array = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: cannot make a tensor of {what}, which {_oddity(values)}: give numbers of one shape"
        ) from error
    return array.detach().cpu().contiguous()


def _oddity(values: Any) -> str:
    """Why values are no numbers of one shape."""
    if values is None or isinstance(values, str):
        return f"is {values!r}"
    cells = np.array([*values] if isinstance(values, list | tuple) else values, dtype=object)
    if not cells.ndim:
        return f"is of the type {type(values).__name__}"
    odd = [one for one in cells.flat if not isinstance(one, Number)]
    if not odd:
        return "holds numbers as Python objects"
    worst = next((one for one in odd if not isinstance(one, str)), odd[0])  # texts alone can be classes
    if isinstance(worst, list | tuple | np.ndarray):
        return "has rows of unlike length"
    return f"holds {worst!r}" if isinstance(worst, str | None) else f"holds a {type(worst).__name__}"


def describe(tensor: Tensor) -> str:
    """Type and shape, for an error."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


# --- samples --------------------------------------------------------------------------------------------


def _samples(piece: Piece, about: Settings) -> Tensor:
    samples = to_tensor(piece.where, piece.x)
    if not samples.numel():
        raise DataError(
            f"{piece.where}: there is no row in it (x is {describe(samples)}); give samples, or leave this part out"
        )
    if samples.ndim < 2:
        hint = "for one feature per sample give x[:, None]" if samples.ndim else "give (samples, features)"
        raise DataError(f"{piece.where}: x is {describe(samples)}, without an axis of features; {hint}")
    if about.tokens is not None:
        return _tokens(piece.where, samples, about.tokens)
    return _features(piece.where, samples, about.modality, about.gaps)


def _tokens(where: str, x: Tensor, vocabulary: int) -> Tensor:
    if x.ndim != 2 or x.is_floating_point():
        raise DataError(f"{where}: token ids must be integers (samples, length), not {describe(x)}")
    if int(x.min()) < 0 or int(x.max()) >= vocabulary:
        raise DataError(
            f"{where}: token ids reach from {int(x.min())} to {int(x.max())}, outside 0 to {vocabulary - 1}; "
            "raise vocabulary, or correct the ids"
        )
    return x.long()


def _features(where: str, x: Tensor, modality: Modality | None, gaps: bool) -> Tensor:
    _check_shape(where, x, modality)
    if x.is_floating_point():
        fine = torch.isfinite(x) | (x.isnan() & gaps)
        if not bool(fine.all()):
            raise DataError(f"{where}: x holds NaN or infinite values, {_first_of(~fine)}: clean them first")
        return x.float()
    if x.dtype != torch.uint8:
        raise DataError(
            f"{where}: x is {describe(x)}; give uint8 or float values, or `vocabulary` for token ids"
        )
    return x if x.ndim == 4 else x.float()


def _first_of(wrong: Tensor) -> str:
    """Where the first of some values is, counted from 0, and in how many rows they are."""
    row, *place = torch.nonzero(wrong)[0].tolist()
    rows = int(wrong.flatten(1).any(1).sum()) if wrong.ndim > 1 else int(wrong.sum())
    column = f", column {place[0]}" if len(place) == 1 else f", place {tuple(place)}" if place else ""
    return f"the first in row {row}{column} (counted from 0), in {rows} of {len(wrong)} rows"


def _check_shape(where: str, x: Tensor, modality: Modality | None) -> None:
    axes = {"vector": 2, "window": 3, "image": 4}
    # A square (N, 28, 28) is more often an image without its channel axis than a window.
    unclear = x.ndim == 3 and modality is None and (x.shape[1] == x.shape[2] or x.dtype == torch.uint8)
    if x.ndim not in axes.values() or unclear or axes.get(modality or "", x.ndim) != x.ndim:
        raise DataError(
            f"{where}: x is {describe(x)}; give (samples, features), (samples, channels, height, width), "
            "x[:, None] for images without a channel axis, or (samples, channels, time) with modality='window'"
        )
    # Refuse only the clear case: the last axis can only be colour, and the first two cannot.
    if x.ndim == 4 and x.shape[-1] in (1, 3, 4) and min(x.shape[1:3]) > 4:
        raise DataError(
            f"{where}: x is {describe(x)}, channels last; give channels first: x.transpose(0, 3, 1, 2)"
        )


def _normalisation(about: Settings, x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel: those given, or those of the training part."""
    mean, std = (_per_channel(about.name, given, x.shape[1]) for given in (about.mean, about.std))
    if not mean and not std and not about.normalize:
        return (), ()
    if x.ndim not in (3, 4) or about.vocabulary is not None:
        raise DataError(
            f"{about.name}: mean, std and normalize belong to the channels of images and windows: normalise other "
            "samples beforehand"
        )
    if about.normalize and not mean:
        values = x.float().transpose(0, 1).flatten(1) / (255 if x.dtype == torch.uint8 else 1)
        return tuple(values.mean(1).tolist()), tuple(values.std(1).clamp_min(1e-6).tolist())
    if not len(mean) == len(std) == x.shape[1] or not all(np.isfinite(mean)) or not 0 < min(std) <= max(std):
        raise DataError(
            f"{about.name}: give one mean and one positive std for each of the {x.shape[1]} channels"
        )
    return mean, std


def _per_channel(name: str, given: Any, channels: int) -> tuple[float, ...]:
    """A number for each channel, where one is given for all of them; none if nothing is given."""
    try:
        values = np.asarray(() if given is None else given, dtype=float)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: mean and std are {given!r}; give numbers, one for each channel") from error
    return (float(values),) * channels if values.ndim == 0 else tuple(values.flatten().tolist())


# --- labels ---------------------------------------------------------------------------------------------


def numbered_texts(
    parts: Sequence[tuple[str, Any]], class_names: Sequence[str] | None
) -> tuple[Sequence[str] | None, list[tuple[str, Any]]]:
    """Labels that are texts as class numbers, in the order of `class_names` or sorted; others as they are."""
    arrays = [(where, y if isinstance(y, Tensor) else np.array(y)) for where, y in parts]
    texts = [not isinstance(y, Tensor) and y.ndim == 1 and y.dtype.kind in "UO" for _, y in arrays]
    if not all(texts) or not all(isinstance(one, str) for _, y in arrays for one in y.tolist()):
        return class_names, list(parts)
    names = class_names or sorted({one for _, y in arrays for one in y.tolist()})
    place = {str(name): number for number, name in enumerate(names)}
    stray = next(((where, one) for where, y in arrays for one in y.tolist() if one not in place), None)
    if stray is not None:
        raise DataError(f"{stray[0]}: the label {stray[1]!r} is none of the class names {', '.join(place)}")
    return names, [
        (where, np.array([place[one] for one in y.tolist()], dtype=np.int64)) for where, y in arrays
    ]


def _classes(where: str, y: Any, about: Settings) -> Tensor:
    labels = to_tensor(where, y, "y")
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise DataError(
            f"{where}: y must be one integer class per sample, not {describe(labels)}{_remedy(labels, about)}"
        )
    return labels.long()


def _remedy(y: Tensor, about: Settings) -> str:
    """What to do about labels that are no classes."""
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        return "; it holds NaN or infinite values: leave out these rows"
    other = {1: "regression", 2: "multi-label", 3: "segmentation"}.get(y.ndim)
    ways = [f"for another task say task={other!r}"] if other and about.task is None else []
    if y.ndim == 1 and bool((y == y.round() if y.is_floating_point() else y == y).all()):
        ways.insert(0, "if these are classes, give y.astype(int)")
    if y.ndim == 2 and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all()):
        ways.insert(0, "if these are one-hot classes, give y.argmax(1)")
    return "; " + "; ".join(ways) if ways else ""


def _label_table(where: str, y: Any, about: Settings) -> Tensor:
    labels = to_tensor(where, y, "y")
    if labels.ndim != 2 or not bool(((labels == 0) | (labels == 1)).all()):
        raise DataError(
            f"{where}: multi-label y must be (samples, labels) of 0 and 1, not {describe(labels)}"
        )
    return labels.to(torch.uint8)


def _masks(where: str, y: Any, about: Settings) -> Tensor:
    labels = to_tensor(where, y, "y")
    if labels.ndim != 3 or labels.is_floating_point():
        raise DataError(
            f"{where}: segmentation y must be a whole number per pixel, (samples, height, width), not "
            f"{describe(labels)}"
        )
    return labels.long()


def _targets(where: str, y: Any, about: Settings) -> Tensor:
    targets = to_tensor(where, y, "y")
    if targets.ndim not in (1, 2) or targets.dtype == torch.bool or targets.is_complex():
        raise DataError(
            f"{where}: regression y must be numbers (samples,) or (samples, outputs), not {describe(targets)}"
        )
    fine = torch.isfinite(targets.double())
    if not bool(fine.all()):
        raise DataError(f"{where}: y holds NaN or infinite values, {_first_of(~fine)}: clean them first")
    return targets.float()


_READ: dict[str, Callable[[str, Any, Settings], Tensor]] = {
    "classification": _classes,
    "multi-label": _label_table,
    "segmentation": _masks,
    "regression": _targets,
}


def _outputs(about: Settings, kind: TaskName, y: Tensor, x: Tensor, names: Sequence[str] | None) -> int:
    """The number of classes, labels or outputs."""
    if kind == "segmentation" and (x.ndim != 4 or y.shape[1:] != x.shape[2:]):
        raise DataError(
            f"{about.name}: segmentation needs images and a label per pixel, not x {describe(x)} and y "
            f"{describe(y)}"
        )
    if kind in ("classification", "segmentation"):
        return count_classes(about.name, y, about.classes, names)
    outputs = 1 if y.ndim == 1 else int(y.shape[1])
    for given in (about.classes, len(names) if names else None):
        if given not in (None, outputs):
            raise DataError(
                f"{about.name}: y has {outputs} columns, but {given} are named: give one for each"
            )
    return outputs


def count_classes(name: str, y: Tensor, classes: int | None, class_names: Sequence[str] | None) -> int:
    """The number of classes; where nothing says it, one more than the highest label."""
    low, high = int(y.min()), int(y.max())
    count = classes or (len(class_names) if class_names else high + 1)
    if low < 0 or high >= count:
        said = f"classes={classes}" if classes else "class_names"
        told = f", as {said} says" if classes else ", as class_names has so many" if class_names else ""
        fewer = (
            f"correct the labels, or leave out {said}"
            if classes
            else "name every class, or leave out class_names"
        )
        remedy = f"add {-low} to all labels" if low < 0 else fewer
        raise DataError(
            f"{name}: labels reach from {low} to {high}, outside 0 to {count - 1}{told}: {remedy}"
        )
    if class_names and len(class_names) != count:
        raise DataError(f"{name}: {len(class_names)} class names for {count} classes: give one for each")
    if classes is None and not class_names:
        _check_start(name, low, count)
    return count


def check_classes_repeat(name: str, labels: np.ndarray) -> None:
    """Refuse labels of which most stand in one row only, as measured numbers or names do."""
    different = len(np.unique(labels))
    if different > MANY_CLASSES and 2 * different > len(labels):
        raise DataError(
            f"{name}: {different} different classes in {len(labels)} rows cannot be learned: for numbers say "
            "task='regression', and if they are classes, name them all in class_names"
        )


def _check_start(name: str, low: int, count: int) -> None:
    """Refuse labels that do not start at 0: models would have outputs that nothing teaches."""
    if low > 0:
        raise DataError(f"{name}: labels start at {low}; subtract {low} or give classes={count}")


def _strata(
    name: str, kind: TaskName, y: Tensor, given: Array | None
) -> tuple[Tensor | None, tuple[str, ...]]:
    """The class by which a split deals each row, and the names; of a regression, fifths of its first output."""
    if given is not None:
        strata = to_tensor(name, given, "strata")
        if strata.shape != (len(y),) or strata.is_floating_point() or int(strata.min()) < 0:
            raise DataError(f"{name}: strata must be one class number per row, not {describe(strata)}")
        return strata.long(), ()
    return fifths(y if y.ndim == 1 else y[:, 0]) if kind == "regression" else (None, ())


def fifths(y: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Ranges with about equally many values, and their names; fewer where values repeat."""
    inner = np.unique(np.quantile(y.double().numpy(), np.arange(1, FIFTHS) / FIFTHS))
    inner = inner[inner > float(y.min())]
    texts = [f"{edge:.3g}" for edge in inner]
    names = [f"below {texts[0]}", *(f"from {text}" for text in texts)] if texts else ["all"]
    return torch.from_numpy(np.searchsorted(inner, y.double().numpy(), side="right")), tuple(names)
