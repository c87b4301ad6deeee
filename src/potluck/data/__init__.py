"""Data sets, their division among clients, and the preparation of samples."""

from potluck.data.augment import (
    AugmentConfig,
    Preparation,
    cutout,
    horizontal_flip,
    random_crop,
    random_erasing,
)
from potluck.data.config import DataConfig, Normalisation
from potluck.data.federation import ClientSplit, Split, from_index_file, make_split
from potluck.data.partition import PartitionConfig
from potluck.data.sources import Dataset, from_arrays, from_datasets, load, names, register

__all__ = [
    "AugmentConfig",
    "ClientSplit",
    "DataConfig",
    "Dataset",
    "Normalisation",
    "PartitionConfig",
    "Preparation",
    "Split",
    "cutout",
    "from_arrays",
    "from_datasets",
    "from_index_file",
    "horizontal_flip",
    "load",
    "make_split",
    "names",
    "random_crop",
    "random_erasing",
    "register",
]
