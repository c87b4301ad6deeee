"""Loading pretrained weights from a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from potluck.core.tensor_files import check_file
from potluck.errors import ModelError
from potluck.files import in_home

OWN_PARTS = ("head.", "resize.")  # they belong to the task, not to the pretrained network


def load_weights(model: nn.Module, source: str | Path, name: str) -> None:
    """Fill a model with the values of a file, or of `<name>.safetensors` in a folder.

    Every parameter and buffer must be in the file with its shape, except those of the adapter and the head:
    they are loaded where they fit and keep their initial values otherwise.
    """
    path = find_weights(source, name)
    found, own = _read(path), model.state_dict()
    for key, value in own.items():
        if key.startswith(OWN_PARTS):
            continue
        if key not in found:
            raise ModelError(
                f"the weights {path} do not fit {name}: {key!r} is missing; give weights of that model"
            )
        if found[key].shape != value.shape:
            shapes = f"{tuple(found[key].shape)}, expected {tuple(value.shape)}"
            raise ModelError(
                f"the weights {path} do not fit {name}: {key!r} has shape {shapes}; give weights of that model"
            )
    with torch.no_grad():
        for key in _taken(own, found):
            own[key].copy_(found[key])


def find_weights(source: str | Path, name: str) -> Path:
    """The file itself, or the one of that name in a folder."""
    path = in_home(source)
    if path.is_dir():
        path = path / f"{name}.safetensors"
    if not path.is_file():
        raise ModelError(f"the weights of {name} are not at {path}; docs/models.md says how to get them")
    return path


def _read(path: Path) -> dict[str, Tensor]:
    try:
        check_file(path)
        found: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"the weights {path} are not a safetensors file ({error}); save them as one"
        ) from error
    return found


def _taken(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """The names to load; adapter and head are loaded as a whole or not at all."""
    fits = {key: key in found and found[key].shape == value.shape for key, value in own.items()}
    parts = {prefix: all(fits[key] for key in own if key.startswith(prefix)) for prefix in OWN_PARTS}
    return [key for key in own if all(parts[prefix] or not key.startswith(prefix) for prefix in OWN_PARTS)]
