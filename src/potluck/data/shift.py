"""Feature shift: clients that see the same things differently, turned, in other colours, blurred or noisy.

A row belongs to one client, so a client's shift is applied once to its rows, on the host, before anything is moved
to a device. A training step knows nothing of it, and the bits do not depend on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.core.settings import Strict
from potluck.data.partition import Fraction, PartitionConfig, Source
from potluck.errors import DataError

ShiftKind = Literal["rotation", "color", "blur", "noise"]
SHIFTS: tuple[ShiftKind, ...] = get_args(ShiftKind)
USUAL: Mapping[ShiftKind, tuple[float, ...]] = {
    "rotation": (0, 90, 180, 270),  # degrees, counter-clockwise
    "color": (0, 120, 240),  # degrees on the colour wheel
    "blur": (0, 1, 2),  # standard deviation of the Gaussian, in pixels
    "noise": (0, 0.1, 0.2),  # standard deviation, on the 0..1 scale for uint8 images
}
CHUNK = 4096  # samples at a time


@dataclass(frozen=True)
class Shift:
    """What one client's samples go through; `seed` is that of noise."""

    kind: ShiftKind
    value: float
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """The shift as an index file has it."""
        return {"kind": self.kind, "value": self.value} | ({"seed": self.seed} if self.seed else {})

    @classmethod
    def from_json(cls, value: Any) -> Shift:
        """The inverse of `to_json`; a `ValueError` says what is wrong."""
        if not isinstance(value, Mapping) or value.get("kind") not in SHIFTS:
            raise ValueError(f"a shift is {{kind: …, value: …}} of kind {', '.join(SHIFTS)}")
        check_value(value["kind"], value.get("value"))
        seed = value.get("seed", 0)
        if type(seed) is not int or set(value) - {"kind", "value", "seed"}:
            raise ValueError("a shift has a kind, a value and perhaps a seed, which is a whole number")
        return cls(value["kind"], float(value["value"]), seed)

    def __call__(self, x: Tensor) -> Tensor:
        """The shifted samples, of the same shape and type."""
        if self.value == 0:
            return x
        return torch.cat([self._shifted(part) for part in torch.split(x, CHUNK)])

    def _shifted(self, x: Tensor) -> Tensor:
        if self.kind == "rotation":
            return rotated(x, self.value)
        if self.kind == "noise":
            noise = self._noise(x)
            return _in_floats(x, lambda x: x + self.value * noise)
        change = recolored if self.kind == "color" else blurred
        return _in_floats(x, lambda x: change(x, self.value))

    def _noise(self, x: Tensor) -> Tensor:
        """Noise for each sample that depends on the sample alone, wherever it stands: a model sees it again so."""
        root, noise, generator = Rng(self.seed).child("noise"), torch.empty(x.shape), torch.Generator()
        for sample, out in zip(x.contiguous().numpy(), noise, strict=True):
            content = blake2b(sample.tobytes(), digest_size=8).hexdigest()
            out.normal_(generator=root.child(content).reseed(generator))
        return noise


def check_value(kind: ShiftKind, value: Any) -> None:
    """Refuse what is no value of this shift."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a value of the shift {kind}: give a number")
    if value < 0 and kind in ("blur", "noise"):
        raise ValueError(f"{kind} cannot be {value}: give 0 or more")


def _in_floats(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change images on the 0..1 scale; uint8 ones are rounded to uint8 again."""
    if x.dtype != torch.uint8:
        return change(x)
    return (change(x.float() / 255) * 255).round().clamp(0, 255).to(torch.uint8)


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images turned counter-clockwise about their centre; what comes from outside is 0."""
    height, width = x.shape[2:]
    if degrees % 90 == 0 and (height == width or degrees % 180 == 0):
        return x.rot90(int(degrees // 90) % 4, (2, 3))
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return _in_floats(x, lambda x: F.grid_sample(x, grid, align_corners=False))


def recolored(x: Tensor, degrees: float) -> Tensor:
    """Colour images with every hue moved along the colour wheel; grey stays grey."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees)) / math.sqrt(3)
    same, after, before = (1 + 2 * cos) / 3, (1 - cos) / 3 - sin, (1 - cos) / 3 + sin
    turn = torch.tensor([[same, after, before], [before, same, after], [after, before, same]])
    return torch.einsum("oc,nchw->nohw", turn, x)


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Images under a Gaussian of that standard deviation in pixels; the border is repeated outwards."""
    reach = math.ceil(3 * sigma)
    bell = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    bell, channels = bell / bell.sum(), x.shape[1]
    padded = F.pad(x, (reach, reach, reach, reach), mode="replicate")
    down = F.conv2d(padded, bell.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
    return F.conv2d(down, bell.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)


def check_shift(data: Dataset, kind: ShiftKind) -> None:
    """Refuse data that cannot be shifted that way."""
    images = data.x.ndim == 4
    if kind == "noise" and (images or data.x.is_floating_point()) and data.task.kind != "retrieval":
        return
    if not images:
        raise DataError(f"data set {data.name!r} has no images for the shift {kind}: leave out feature_shift")
    if kind == "color" and data.x.shape[1] != 3:
        raise DataError(
            f"data set {data.name!r} has {data.x.shape[1]} channel(s), no colours to shift: "
            "choose rotation, blur or noise"
        )
    if kind == "rotation" and data.task.kind == "segmentation":
        raise DataError(
            f"data set {data.name!r} names pixels, which a rotation would move: choose color, blur or noise"
        )


class FeatureShiftConfig(Strict):
    """A split whose clients see shifted samples: `{kind: feature_shift, clients: 8, shift: rotation}`.

    `values` are dealt to the clients evenly and at random (not in turn, as models are, so that a model and a value
    do not always come together). `labels` says how the rows are dealt: an ordinary split, `iid` by default, that
    gets the other keys given here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["feature_shift"] = "feature_shift"
    clients: int = Field(ge=1)  # including held-out clients
    shift: ShiftKind
    values: tuple[float, ...] = ()  # degrees, pixels or standard deviations; (): the usual ones of the shift
    labels: dict[str, Any] = {"kind": "iid"}  # for example {kind: dirichlet, alpha: 0.5}
    min_size: int | None = Field(default=None, ge=0)  # these five: as of an ordinary split
    validation: Fraction = 0.0
    test: Fraction = 0.25
    source: Source = "auto"
    held_out: int | float = 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for value in self.values:
            check_value(self.shift, value)
        beside = next((key for key in self.labels if key in _COMMON), None)
        if beside is not None:
            raise ValueError(f"labels.{beside}: write {beside} beside labels")
        try:
            _ = self.ordinary
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(["labels", *map(str, first["loc"])])
            raise ValueError(f"{key}: {first['msg'].removeprefix('Value error, ')}") from error
        return self

    @property
    def ordinary(self) -> PartitionConfig:
        """The split of the rows."""
        return PartitionConfig(**{key: getattr(self, key) for key in _COMMON}, **self.labels)

    def deal(self, data: Dataset, rng: Rng) -> list[Shift]:
        """The shift of every client."""
        check_shift(data, self.shift)
        values, order = self.values or USUAL[self.shift], rng.numpy().permutation(self.clients)
        noisy = self.shift == "noise"
        return [
            Shift(self.shift, float(values[place % len(values)]), rng.child(client).integer if noisy else 0)
            for client, place in enumerate(order.tolist())
        ]


_COMMON = ("clients", "min_size", "validation", "test", "source", "held_out")
