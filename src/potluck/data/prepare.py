"""Preparation of samples for a model: scaling, normalisation, augmentation.

Every operation works on a whole float32 batch (samples, channels, height, width) with random numbers from a
generator on the batch's device. Shapes never depend on random values and nothing is read back to the host, so a
training step with its augmentation can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator
from torch import Tensor

from potluck.errors import nearest


def horizontal_flip(x: Tensor, generator: torch.Generator, probability: float = 0.5) -> Tensor:
    """Mirror each image left to right with the given probability."""
    flip = torch.rand(len(x), 1, 1, 1, device=x.device, generator=generator) < probability
    return torch.where(flip, x.flip(-1), x)


def random_crop(x: Tensor, generator: torch.Generator, pad: int = 4) -> Tensor:
    """Pad each image with `pad` zeros and crop the original size at a random place.

    However wide the border is, no more of it is made than an image has pixels: beyond that there are only zeros.
    """
    samples, channels, height, width = x.shape
    top, left = torch.randint(2 * pad + 1, (2, samples, 1), device=x.device, generator=generator)
    rows = (top + torch.arange(height, device=x.device))[:, None, :, None]
    columns = (left + torch.arange(width, device=x.device))[:, None, None, :]
    border = min(pad, height, width)
    if border < pad:
        rows = (rows - pad + border).clamp(0, height + 2 * border - 1)
        columns = (columns - pad + border).clamp(0, width + 2 * border - 1)
    padded = F.pad(x, (border, border, border, border))
    padded = padded.gather(2, rows.expand(samples, channels, height, width + 2 * border))
    return padded.gather(3, columns.expand(samples, channels, height, width))


def random_erasing(
    x: Tensor,
    generator: torch.Generator,
    probability: float = 0.5,
    scale: tuple[float, float] = (0.04, 0.2),
    ratio: tuple[float, float] = (0.5, 2.0),
) -> Tensor:
    """Zero a rectangle of each image with the given probability.

    Its area is a fraction of the image, uniform in `scale`; its height / width is log-uniform in `ratio`. A
    side longer than the image is cut.
    """
    samples, _, height, width = x.shape
    draws = torch.rand(5, samples, device=x.device, generator=generator)
    area = height * width * (scale[0] + draws[0] * (scale[1] - scale[0]))
    aspect = torch.exp(math.log(ratio[0]) + draws[1] * math.log(ratio[1] / ratio[0]))
    tall = (area * aspect).sqrt().round().clamp(max=height)
    wide = (area / aspect).sqrt().round().clamp(max=width)
    top = (draws[2] * (height - tall + 1)).floor()
    left = (draws[3] * (width - wide + 1)).floor()
    tall = torch.where(draws[4] < probability, tall, 0)
    return x.masked_fill(_box(x, top, top + tall, left, left + wide), 0.0)


def cutout(x: Tensor, generator: torch.Generator, size: int = 16) -> Tensor:
    """Zero a square of `size` around a random pixel of each image; the part outside the image is cut off."""
    samples, _, height, width = x.shape
    row = torch.randint(height, (samples,), device=x.device, generator=generator)
    column = torch.randint(width, (samples,), device=x.device, generator=generator)
    top, left = row - size // 2, column - size // 2
    return x.masked_fill(_box(x, top, top + size, left, left + size), 0.0)


def _box(x: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Per sample, the pixels with top <= row < bottom and left <= column < right; one channel."""
    row = torch.arange(x.shape[2], device=x.device)[None, None, :, None]
    column = torch.arange(x.shape[3], device=x.device)[None, None, None, :]
    top, bottom, left, right = (side[:, None, None, None] for side in (top, bottom, left, right))
    return (row >= top) & (row < bottom) & (column >= left) & (column < right)


Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Operation(BaseModel):
    """One augmentation step, written as `name`, `{name: value}` or `{name: {field: value}}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def as_written(self) -> dict[str, Any]:
        """The operation as an experiment file writes it."""
        values = self.model_dump(mode="json")
        return {values.pop("kind"): values}

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The augmented batch."""
        raise NotImplementedError


class Normalize(_Operation):
    """Marks where normalisation happens; by default it comes first."""

    kind: Literal["normalize"] = "normalize"


class Flip(_Operation):
    """`horizontal_flip`."""

    kind: Literal["flip"] = "flip"
    probability: Probability = 0.5

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The flipped batch."""
        return horizontal_flip(x, generator, self.probability)


class Crop(_Operation):
    """`random_crop`."""

    kind: Literal["crop"] = "crop"
    pad: int = Field(default=4, ge=0)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The cropped batch."""
        return random_crop(x, generator, self.pad)


class Erasing(_Operation):
    """`random_erasing`."""

    kind: Literal["erasing"] = "erasing"
    probability: Probability = 0.5
    scale: tuple[Positive, Positive] = (0.04, 0.2)
    ratio: tuple[Positive, Positive] = (0.5, 2.0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.scale[0] > self.scale[1] or self.scale[1] > 1 or self.ratio[0] > self.ratio[1]:
            raise ValueError("erasing needs scale and ratio as (low, high), the scale at most 1")
        return self

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The batch with holes."""
        return random_erasing(x, generator, self.probability, self.scale, self.ratio)


class Cutout(_Operation):
    """`cutout`."""

    kind: Literal["cutout"] = "cutout"
    size: int = Field(default=16, ge=1)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The batch with holes."""
        return cutout(x, generator, self.size)


Operation = Annotated[Normalize | Flip | Crop | Erasing | Cutout, Field(discriminator="kind")]
# The field that a bare value sets: `{crop: 4}` is `{crop: {pad: 4}}`.
_MAIN_FIELD = {
    "normalize": "value",
    "flip": "probability",
    "crop": "pad",
    "erasing": "probability",
    "cutout": "size",
}


@dataclass(frozen=True)
class Preset:
    """The preparation of a paper: operations, and mean and std for data sets where it uses its own."""

    operations: tuple[Normalize | Flip | Crop | Erasing | Cutout, ...]
    normalisation: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "fedmrl": Preset(
        (Normalize(), Flip(), Erasing(), Crop()),
        {"cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))},
    ),
    "fedin": Preset((Crop(), Flip(), Normalize(), Cutout())),
    "fedre": Preset((), {"*": ((0.5,), (0.5,))}),
}


class AugmentConfig(BaseModel):
    """A preset by name, or operations in order: `[flip, {crop: 4}, normalize, {cutout: 16}]`.

    Operations before `normalize` see values from 0 to 1; those after it see normalised values, where a padded or
    erased pixel has the mean colour. Without `normalize` in the list, normalisation comes first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str | None = None
    operations: tuple[Operation, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in PRESETS:
                raise ValueError(f"there is no augmentation preset {value!r}: {nearest(value, PRESETS)}")
            return {"preset": value, "operations": PRESETS[value].operations}
        if isinstance(value, list | tuple):
            return {"operations": [_expand_one(entry) for entry in value]}
        if isinstance(value, cls) or value == {}:
            return value
        raise ValueError("augment is the name of a preset or a list of operations")

    @model_validator(mode="after")
    def _one_normalize(self) -> Self:
        if sum(isinstance(operation, Normalize) for operation in self.operations) > 1:
            raise ValueError("normalize stands in the augmentation twice: leave one out")
        return self

    @model_serializer
    def _as_written(self) -> str | list[dict[str, Any]]:
        return self.preset or [operation.as_written() for operation in self.operations]

    @classmethod
    def of(cls, value: str | Sequence[Any]) -> AugmentConfig:
        """The augmentation as an experiment file writes it."""
        return cls.model_validate(value)


def _expand_one(entry: Any) -> Any:
    if isinstance(entry, _Operation):
        return entry
    if not isinstance(entry, str) and not (isinstance(entry, Mapping) and len(entry) == 1):
        raise ValueError(f"{entry!r} is not an augmentation: write a name or {{name: value}}")
    name, value = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    if name not in _MAIN_FIELD:
        raise ValueError(f"there is no augmentation {name!r}: {nearest(str(name), _MAIN_FIELD)}")
    if not isinstance(value, Mapping):
        value = {_MAIN_FIELD[name]: value}
    return {"kind": name} | dict(value)


@dataclass(frozen=True)
class Preparation:
    """Turns stored samples into a model's input.

    Images become float32, uint8 ones scaled to 0..1, normalised per channel and, when a generator is given,
    augmented. Windows (channels, time) are normalised per channel. Vectors and token ids are not changed.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    # Constants cannot be copied to a GPU inside a captured graph; the warm-up step fills this cache.
    _constants: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def prepare(self, raw: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A prepared batch, augmented if a generator (on the batch's device) is given."""
        if raw.ndim != 4:
            return self._normalise(raw) if raw.ndim == 3 else raw
        x = raw.float() / 255 if raw.dtype == torch.uint8 else raw.float()
        if generator is None:
            return self._normalise(x)
        operations = self.augment.operations
        if not any(isinstance(operation, Normalize) for operation in operations):
            x = self._normalise(x)
        for operation in operations:
            x = self._normalise(x) if isinstance(operation, Normalize) else operation(x, generator)
        return x

    def _normalise(self, x: Tensor) -> Tensor:
        if not self.mean:
            return x
        if x.device not in self._constants:
            shape = (1, -1) + (1,) * (x.ndim - 2)
            mean, std = (torch.tensor(v, device=x.device).view(shape) for v in (self.mean, self.std))
            self._constants[x.device] = mean, std
        mean, std = self._constants[x.device]
        return (x - mean) / std
