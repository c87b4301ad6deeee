"""Data sets, their division among clients, and the preparation of samples."""

from potluck.data import derived  # noqa: F401  importing it registers its data sets
from potluck.data.augment import (
    AugmentConfig,
    Preparation,
    cutout,
    horizontal_flip,
    random_crop,
    random_erasing,
)
from potluck.data.config import DataConfig, Normalisation
from potluck.data.federation import ClientSplit, Split, from_index_file, join_splits, make_split
from potluck.data.partition import PartitionConfig
from potluck.data.sources import Data, Dataset, from_arrays, from_datasets, load, names, register

__all__ = [
    "AugmentConfig",
    "ClientSplit",
    "Data",
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
    "join_splits",
    "load",
    "make_split",
    "names",
    "random_crop",
    "random_erasing",
    "register",
]
