"""Python objects on their way to other processes: a pickle, and large arrays beside it.

Ray keeps the arrays in memory that all processes of a machine share. Pickles are read within a cluster only, whose
processes trust each other anyway.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray.cloudpickle as cloudpickle
import torch
from torch import Tensor

Parcel = tuple[bytes, list[np.ndarray]]
STDLIB = sysconfig.get_path("stdlib")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes plain tensors as NumPy arrays, whose memory stays outside the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and _is_plain(value):
            return _tensor, (value.numpy(),)
        return super().reducer_override(value)


def pack(value: Any) -> Parcel:
    """An object, and the memory of the arrays and tensors inside it."""
    file, buffers = io.BytesIO(), list[Any]()
    with _loose_by_value():
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def unpack(parcel: Parcel) -> Any:
    """The object in a parcel. Its arrays are those of the parcel, so nobody may write into them."""
    data, arrays = parcel
    return cloudpickle.loads(data, buffers=arrays)


@contextlib.contextmanager
def _loose_by_value() -> Iterator[None]:
    """What is defined in files that are not installed travels as a whole: other machines may not have them."""
    with contextlib.ExitStack() as stack:
        for module in [module for name, module in [*sys.modules.items()] if _is_loose(name, module)]:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _is_loose(name: str, module: Any) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or name.partition(".")[0] in ("potluck", "__main__") or module.__name__ != name:
        return False
    path = Path(file)
    return not path.is_relative_to(STDLIB) and not any(map(_has_packages, path.parents))


@functools.cache
def _has_packages(folder: Path) -> bool:
    """Whether packages are installed in a folder, as in site-packages and wherever pip was told to put them."""
    return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))


def _is_plain(value: Tensor) -> bool:
    known = value.dtype != torch.bfloat16 and value.layout == torch.strided
    return known and value.device.type == "cpu" and not value.requires_grad and value.is_contiguous()


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written to
        return torch.from_numpy(array)
