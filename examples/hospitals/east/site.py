"""The hospital in the east: a convolutional network; its data are Parquet files behind a data set of its own."""

from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Images(nn.Module):
    """Any module will do: its last linear layer is taken as the head."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(24 * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.conv2(self.conv1(x).relu()).relu()).flatten(1))


class Scans(Dataset[tuple[Tensor, int]]):
    """One sample at a time, as they lie in the archive."""

    def __init__(self, split: str) -> None:
        self.table = pq.read_table(Path(__file__).parent / "data" / f"{split}.parquet").to_pydict()

    def __len__(self) -> int:
        return len(self.table["digit"])

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.tensor(self.table["pixels"][row]).view(1, 8, 8), self.table["digit"][row]


def build(input: tuple[int, ...], classes: int) -> nn.Module:
    return Images(input[0], classes)


def load() -> dict[str, Scans]:
    return {split: Scans(split) for split in ("train", "test")}
