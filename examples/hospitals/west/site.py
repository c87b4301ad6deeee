"""The hospital in the west: a gated network with few samples; its data are arrays in an .npz file."""

from pathlib import Path

import numpy as np
from torch import Tensor, nn

import potluck


class Gated(potluck.Model):
    """A model that says itself what its representation is: `features` of width `rep_dim`, then `head`."""

    def __init__(self, pixels: int, classes: int) -> None:
        super().__init__()
        self.rep_dim = 32
        self.value, self.gate = nn.Linear(pixels, self.rep_dim), nn.Linear(pixels, self.rep_dim)
        self.head = nn.Linear(self.rep_dim, classes)

    def features(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.value(flat) * self.gate(flat).sigmoid()


def build(input: tuple[int, ...], classes: int) -> potluck.Model:
    return Gated(int(np.prod(input)), classes)


def load() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    with np.load(Path(__file__).parent / "data" / "digits.npz") as file:
        return {split: (file[f"x_{split}"], file[f"y_{split}"]) for split in ("train", "test")}
