"""Data sets, splits among clients, and the preparation of samples."""

from potluck.core.dataset import Data, Dataset
from potluck.data import derived, images, texts  # noqa: F401  importing them registers their data sets
from potluck.data.client_splits import ClientSplit
from potluck.data.config import DataConfig, Normalisation
from potluck.data.natural import NaturalConfig
from potluck.data.own.arrays import from_arrays
from potluck.data.own.datasets import from_datasets
from potluck.data.own.files import from_files
from potluck.data.own.frames import from_frame
from potluck.data.partition import PartitionConfig
from potluck.data.prepare import (
    AugmentConfig,
    Preparation,
    cutout,
    horizontal_flip,
    random_crop,
    random_erasing,
)
from potluck.data.registry import load, names, register
from potluck.data.shift import FeatureShiftConfig, Shift
from potluck.data.split import AnyConfig, Split, from_index_file, join_splits, make_split

__all__ = [
    "AnyConfig",
    "AugmentConfig",
    "ClientSplit",
    "Data",
    "DataConfig",
    "Dataset",
    "FeatureShiftConfig",
    "NaturalConfig",
    "Normalisation",
    "PartitionConfig",
    "Preparation",
    "Shift",
    "Split",
    "cutout",
    "from_arrays",
    "from_datasets",
    "from_files",
    "from_frame",
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
