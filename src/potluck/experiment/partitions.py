"""Which block a `partition` is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel

from potluck.data import FeatureShiftConfig, NaturalConfig, PartitionConfig
from potluck.data.partition import Kind
from potluck.errors import ConfigError, nearest
from potluck.experiment.blocks import IndexFile, Sites


def partition_kind(values: Mapping[str, Any]) -> type[BaseModel]:
    """The block that a `partition` is, by its keys and its kind."""
    by_key: dict[str, type[BaseModel]] = {"file": IndexFile, "sites": Sites}
    by_kind: dict[Any, type[BaseModel]] = {"feature_shift": FeatureShiftConfig, "natural": NaturalConfig}
    kind = values.get("kind")
    known = [*get_args(Kind), *by_kind]
    if isinstance(kind, str) and kind not in known:
        raise ConfigError(f"partition.kind: there is no split {kind!r}; {nearest(kind, known)}")
    found = next((by_key[key] for key in by_key if key in values), None)
    return found or (by_kind.get(kind, PartitionConfig) if isinstance(kind, str) else PartitionConfig)
