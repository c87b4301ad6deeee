"""Data sets for other tasks, derived from image data sets: attributes, segmentation, images with captions.

They are deterministic: the same rows in every run, whatever the seeds. `strata` holds the original classes, by
which partitions distribute the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from potluck.core.dataset import Dataset, Encoder
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.data.own.arrays import from_arrays
from potluck.data.prepare import Preparation
from potluck.data.registry import load, register
from potluck.data.texts import encode_pieces
from potluck.data.words import RESERVED, count_vocabulary, encode, words
from potluck.errors import DataError

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = {
    "even": (0, 2, 4, 6, 8),
    "prime": (2, 3, 5, 7),
    "has a loop": (0, 6, 8, 9),
    "above four": (5, 6, 7, 8, 9),
}
CIFAR10 = {  # classes in alphabetical order: airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck
    "animal": (2, 3, 4, 5, 6, 7),
    "can fly": (0, 2),
    "goes on water": (6, 8),
    "has wheels": (0, 1, 9),
    "has hooves": (4, 7),
    "is a pet": (3, 5),
}
DIGIT_CAPTIONS = (
    "a hand-written {}",
    "the digit {}",
    "a small picture of the number {}",
    "{} written by hand",
)
PHOTO_CAPTIONS = ("a photo of a {}", "a small picture of a {}", "this is a {}", "one {} and nothing else")
SIDE = 16  # of the images that digits are placed in
INK = 0.25  # a pixel darker than that belongs to the digit
EMBEDDING = 64  # width of an image's or a caption's embedding
LENGTH = 8  # number of words read from a caption
PIECES = 16  # the same with a tokenizer: special tokens and word pieces need more


def with_attributes(base: Dataset, attributes: Mapping[str, Sequence[int]], name: str) -> Dataset:
    """A multi-label data set: each attribute lists the classes that have it."""
    table = torch.zeros(base.task.classes, len(attributes), dtype=torch.uint8)
    for column, classes in enumerate(attributes.values()):
        table[list(classes), column] = 1
    return replace(
        base,
        name=name,
        task=Task("multi-label", len(attributes), base.task.input),
        y=table[base.y],
        class_names=tuple(attributes),
        strata=base.y,
    )


@register("digits-attributes")
def _digits_attributes(dir: Path | None) -> Dataset:
    """The embedded digits as a multi-label data set: even, prime, has a loop, above four."""
    return with_attributes(load("digits"), DIGITS, "digits-attributes")


@register("cifar10-attributes")
def _cifar10_attributes(dir: Path | None, *, labels_only: bool = False) -> Dataset:
    """CIFAR-10 as a multi-label set of six attributes."""
    return with_attributes(load("cifar10", dir, labels_only=labels_only), CIFAR10, "cifar10-attributes")


@register("digits-segments")
def _digits_segments(dir: Path | None) -> Dataset:
    """The embedded digits at random places of a textured 16×16 background; each pixel is background or a digit."""
    digits, draw = load("digits"), Rng(0).child("digits-segments").numpy()
    grounds = _textures(len(digits), draw)
    ink = np.zeros_like(grounds)
    corners = draw.integers(SIDE - digits.task.input[1] + 1, size=(len(digits), 2))
    for row, (top, left) in enumerate(corners):
        ink[row, top : top + 8, left : left + 8] = digits.x[row, 0].numpy()
    pictures = torch.from_numpy(grounds * (1 - ink) + ink)[:, None]
    return replace(
        digits,
        name="digits-segments",
        task=Task("segmentation", 11, (1, SIDE, SIDE)),
        x=pictures,
        y=torch.where(torch.from_numpy(ink) > INK, digits.y[:, None, None] + 1, 0),
        class_names=("ground", *digits.class_names),
        mean=(round(float(pictures.mean()), 4),),
        std=(round(float(pictures.std()), 4),),
        strata=digits.y,
    )


def _textures(count: int, draw: np.random.Generator) -> np.ndarray:
    """Gratings in random directions with some noise, with values from 0 to about 0.5."""
    axis = np.arange(SIDE)
    angle, wave, phase = draw.uniform([0, 0.5, 0], [np.pi, 2, 6], size=(count, 3)).T[:, :, None, None]
    grating = np.sin(wave * (np.cos(angle) * axis[:, None] + np.sin(angle) * axis) + phase)
    noise = draw.uniform(size=(count, SIDE, SIDE))
    textures: np.ndarray = (0.2 + 0.15 * grating + 0.15 * noise).clip(0, 1).astype(np.float32)
    return textures


def with_captions(
    base: Dataset,
    names: Sequence[str],
    templates: Sequence[str],
    name: str,
    shuffled: bool = False,
    length: int | None = None,
    tokenizer: str | None = None,
) -> Dataset:
    """A retrieval data set: every image with a caption that names its class, in one of several wordings.

    `shuffled` is the control: the same captions, assigned to other images. `tokenizer` is a folder or hub
    repository; without it words are numbered. `length` tokens of a caption are read.
    """
    length = length or (LENGTH if tokenizer is None else PIECES)
    draw = Rng(0).child(name).numpy()
    wording = draw.integers(len(templates), size=len(base))
    texts = [
        templates[form].format(names[label]) for form, label in zip(wording, base.y.tolist(), strict=True)
    ]
    if shuffled:
        texts = [texts[row] for row in draw.permutation(len(texts))]
    numbers: Mapping[str, int] | None = None
    encoder: Encoder | None = None
    if tokenizer is not None:
        tokens, encoder = encode_pieces(name, tokenizer, tuple(texts), length)
        vocabulary = encoder.vocabulary
    else:
        split = [words(text) for text in texts]
        numbers = count_vocabulary(split, 1_000)
        tokens, vocabulary = torch.from_numpy(encode(split, numbers, length)), len(numbers) + RESERVED
    inputs = (int(np.prod(base.task.input)) + length,)
    task = Task("retrieval", 2 * EMBEDDING, inputs, vocabulary, base.task.input)
    return replace(
        base,
        name=name,
        task=task,
        x=_paired(base, tokens),
        class_names=(),
        strata=base.y,
        words=numbers,
        encoder=encoder,
        images=base.x,
        texts=tuple(texts),
    )


def _paired(base: Dataset, tokens: Tensor) -> Tensor:
    """The normalised image and the token ids in one row; float32 holds the ids exactly."""
    images = Preparation(base.mean, base.std).prepare(base.x)
    return torch.cat([images.flatten(1), tokens.float()], 1)


@register("noise")
def _noise(dir: Path | None, *, samples: int = 5_000, side: int = 32, channels: int = 3) -> Dataset:
    """Random pixels without classes: uninformative public data, as a control."""
    if min(samples, side, channels) < 1:
        raise DataError("data set 'noise' needs samples, side and channels of at least 1")
    draw = Rng(0).child("noise").numpy()
    pixels = draw.integers(256, size=(samples, channels, side, side), dtype=np.uint8)
    return from_arrays(pixels, np.zeros(samples, dtype=np.int64), classes=2, name="noise")


@register("digits-captions")
def _digits_captions(
    dir: Path | None, *, shuffled: bool = False, length: int | None = None, tokenizer: str | None = None
) -> Dataset:
    """The embedded digits with captions; if `shuffled`, with captions of other digits."""
    base, name = load("digits"), "digits-captions"
    return with_captions(base, DIGIT_NAMES, DIGIT_CAPTIONS, name, shuffled, length, tokenizer)


@register("cifar10-captions")
def _cifar10_captions(
    dir: Path | None,
    *,
    samples: int = 5_000,
    shuffled: bool = False,
    length: int | None = None,
    tokenizer: str | None = None,
    labels_only: bool = False,
) -> Dataset:
    """CIFAR-10 images with captions: the first `samples` of the training part, a fifth as many of the test part."""
    base = load("cifar10", dir, labels_only=labels_only)
    if not 5 <= samples <= base.train_rows:
        raise DataError(f"data set 'cifar10-captions' has 5 to {base.train_rows} samples, not {samples}")
    rows = torch.cat([torch.arange(samples), base.train_rows + torch.arange(samples // 5)])
    few = replace(base, x=base.x[rows], y=base.y[rows], train_rows=samples)
    name = "cifar10-captions"
    return with_captions(few, base.class_names, PHOTO_CAPTIONS, name, shuffled, length, tokenizer)
