"""The usual columns and splits of data sets in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from potluck.data import parquet

IMAGE_COLUMNS = ("img", "image")
TEXT_COLUMNS = ("text", "sentence")
LABEL_COLUMNS = ("label", "labels", "fine_label")


def labels_of_splits(
    train: parquet.Files, test: parquet.Files, columns: Sequence[str], classes: int
) -> tuple[Tensor, int]:
    """The labels of both splits, one after the other, and how many belong to the training split."""
    parts = [parquet.read_labels(files, columns, classes) for files in (train, test)]
    return torch.from_numpy(np.concatenate(parts)), len(parts[0])
