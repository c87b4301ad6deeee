"""The hospital in the north: a perceptron; its data are arrays in an .npz file."""

from pathlib import Path

import numpy as np
from torch import nn


def build(input: tuple[int, ...], classes: int) -> nn.Module:
    pixels = int(np.prod(input))
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 48), nn.ReLU(), nn.Linear(48, classes))


def load() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    with np.load(Path(__file__).parent / "data" / "digits.npz") as file:
        return {split: (file[f"x_{split}"], file[f"y_{split}"]) for split in ("train", "test")}
