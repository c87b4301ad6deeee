"""Python objects on their way to other processes: a pickle, and large arrays beside it.

Ray keeps the arrays in memory that all processes of a machine share. Pickles are read within a cluster only, whose
processes trust each other anyway.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import ray.cloudpickle as cloudpickle
import torch
from torch import Tensor

Parcel = tuple[bytes, list[np.ndarray]]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes plain tensors as NumPy arrays, whose memory stays outside the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and _is_plain(value):
            return _tensor, (value.numpy(),)
        return super().reducer_override(value)


def pack(value: Any) -> Parcel:
    """An object, and the memory of the arrays and tensors inside it."""
    file, buffers = io.BytesIO(), list[Any]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def unpack(parcel: Parcel) -> Any:
    """The object in a parcel. Its arrays are those of the parcel, so nobody may write into them."""
    data, arrays = parcel
    return cloudpickle.loads(data, buffers=arrays)


def _is_plain(value: Tensor) -> bool:
    known = value.dtype != torch.bfloat16 and value.layout == torch.strided
    return known and value.device.type == "cpu" and not value.requires_grad and value.is_contiguous()


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written to
        return torch.from_numpy(array)
