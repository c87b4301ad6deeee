"""The installed version of potluck."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("potluck")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.1.0"
