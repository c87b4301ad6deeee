"""The files of kept models: a folder per kept round, with one safetensors file per client and `about.json`.

A tensor's name begins with the moment it belongs to, or with `both` if it is the same at all moments that are kept:
`both/model/fc.weight`, `after_training/prototypes`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from potluck.engine.store.state_files import sync
from potluck.errors import RunError
from potluck.files import write_whole

ABOUT = "about.json"
BOTH = "both"
_PREFIX = "round-"

States = Mapping[str, Mapping[str, Tensor]]  # moment → the tensors of a client's state


def kept_rounds(home: Path) -> list[int]:
    """The rounds whose models are complete in a folder, ascending."""
    names = (about.parent.name.removeprefix(_PREFIX) for about in home.glob(f"{_PREFIX}*/{ABOUT}"))
    return sorted(int(name) for name in names if name.isdecimal())


def round_folder(home: Path, round_: int) -> Path:
    """The folder of the models of a round."""
    return home / f"{_PREFIX}{round_:06d}"


def write_models(
    folder: Path, clients: Iterable[tuple[str, States]], about: Mapping[str, Any], outline: str
) -> None:
    """Write the models of a round, file by file; the folder gets its name when all of it is there.

    `outline` is JSON already: with many clients it is long, and the same in every round.
    """
    unfinished = folder.with_name(f".{folder.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name, states in clients:
            safetensors.torch.save_file(stored_tensors(states), unfinished / name)
            sync(unfinished / name)
        write_whole(unfinished / ABOUT, f'{json.dumps(about)[:-1]},\n"outline": {outline}}}\n'.encode())
        unfinished.replace(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunError(f"cannot write {folder}: {error}") from error


def remove_unfinished(home: Path) -> None:
    """Remove what a killed process left half written."""
    for path in home.glob(f".{_PREFIX}*"):
        shutil.rmtree(path)


def stored_tensors(states: States) -> dict[str, Tensor]:
    """What a client's file holds: its tensors at every moment, and once those that are the same at all."""
    first, *others = states.values()
    both = {name for name, value in first.items() if all(_same(value, other.get(name)) for other in others)}
    found = {f"{BOTH}/{name}": first[name] for name in first if name in both}
    for moment, state in states.items():
        found |= {f"{moment}/{name}": value for name, value in state.items() if name not in both}
    return found


def _same(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and value.shape == other.shape and torch.equal(value, other)


def read_state(path: Path, moment: str) -> dict[str, Tensor]:
    """A client's state at one moment."""
    try:
        found = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the model in {path} cannot be read: {error}") from error
    parts = {name: name.partition("/") for name in found}
    return {rest: found[name] for name, (when, _, rest) in parts.items() if when in (BOTH, moment)}
