"""The files of kept models: a folder per kept round, with one safetensors file per client and `about.json`.

`SHA256SUMS` has a checksum of each, as the program `sha256sum` writes and checks them.

A tensor's name begins with the moment it belongs to, or with `both` if it is the same at all moments that are kept:
`both/model/fc.weight`, `after_training/prototypes`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from potluck.core.tensor_files import tensors
from potluck.errors import RunError, first_line
from potluck.files import NEW, WRITING, by_readers, held, read_bounded, sha256, size_of

ABOUT = "about.json"
SUMS = "SHA256SUMS"
BOTH = "both"
_LINE = re.compile(r"([0-9a-f]{64})  ([\w-]+\.(?:safetensors|json))")
_PREFIX = "round-"
_FOLDER = re.compile(r"\.?round-([0-9]{6,12})")  # with a point in front while it is written or removed

States = Mapping[str, Mapping[str, Tensor]]  # moment → the tensors of a client's state


def kept_rounds(home: Path) -> list[int]:
    """The rounds whose models are complete in a folder, ascending."""
    found = (_FOLDER.fullmatch(about.parent.name) for about in home.glob(f"{_PREFIX}*/{ABOUT}"))
    rounds = sorted(int(match[1]) for match in found if match)
    return [one for one in rounds if round_folder(home, one).is_dir()]


def round_folder(home: Path, round_: int) -> Path:
    """The folder of the models of a round."""
    return home / f"{_PREFIX}{round_:06d}"


def write_models(
    folder: Path, clients: Iterable[tuple[str, States]], about: Mapping[str, Any], outline: str
) -> None:
    """Write the models of a round, file by file; the folder gets its name when all of it is there.

    `outline` is JSON already: with many clients it is long, and the same in every round.
    """
    try:
        folder.parent.mkdir(exist_ok=True)
        with held(folder.parent) as home:
            _write_whole(home / folder.name, clients, {**about, "checksums": SUMS}, outline)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"cannot write {folder}: {getattr(error, 'strerror', None) or error}; {WRITING}"
        ) from error


def _write_whole(
    folder: Path, clients: Iterable[tuple[str, States]], about: Mapping[str, Any], outline: str
) -> None:
    unfinished = folder.with_name(f".{folder.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        with held(unfinished) as place:
            _write_files(place, clients, about, outline)
        if folder.exists():  # without `about.json`, so it is not whole
            shutil.rmtree(folder)
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_files(
    place: Path, clients: Iterable[tuple[str, States]], about: Mapping[str, Any], outline: str
) -> None:
    sums = {}
    for name, states in clients:
        safetensors.torch.save_file(stored_tensors(states), place / name)
        sums[name] = sha256(place / name, sync=True)
    sums[ABOUT] = _written(place / ABOUT, f'{json.dumps(about)[:-1]},\n"outline": {outline}}}\n')
    _written(place / SUMS, "".join(f"{found}  {name}\n" for name, found in sums.items()))


def _written(path: Path, text: str) -> str:
    """Write a new file of a folder that is not whole yet; its checksum. What has its name already is refused."""
    with os.fdopen(os.open(path, NEW, 0o666), "w", encoding="utf-8") as file:
        file.write(text)
    return sha256(path, sync=True)


def check_models(folder: Path) -> None:
    """Compare every file of a kept round with its checksum; a damaged, missing or unknown one is named."""
    sums = _sums(folder)
    unknown = sorted({path.name for path in folder.glob("*.safetensors")} - sums.keys())
    if unknown:
        raise RunError(
            f"{folder / unknown[0]} has no line in {SUMS}, so nothing says whether it is whole; "
            f"{models_remedy(folder)}"
        )
    looks = by_readers(lambda one, stop: _damage(folder / one[0], one[1], stop), sums.items())
    with contextlib.closing(looks) as found:
        for sentence in found:
            if sentence is not None:
                raise RunError(f"{sentence}; {models_remedy(folder)}")


def models_remedy(folder: Path) -> str:
    """What to do about a damaged file among the models of a round."""
    return (
        f"put a whole copy of it back, or remove {folder} to open the run without these models; going on with "
        "the run makes those of its last round anew"
    )


def _sums(folder: Path) -> dict[str, str]:
    """What `SHA256SUMS` says; names of files beside it only."""
    try:
        lines = read_bounded(folder / SUMS).decode().splitlines()
    except FileNotFoundError as error:
        raise RunError(
            f"{folder / SUMS} is missing, so nothing says whether the models are whole; {models_remedy(folder)}"
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RunError(f"{folder / SUMS} cannot be read: {reason}; {models_remedy(folder)}") from error
    found = [_LINE.fullmatch(line) for line in lines]
    sums = {match[2]: match[1] for match in found if match}
    if not all(found) or ABOUT not in sums:  # which has the last line
        raise RunError(
            f"{folder / SUMS} is damaged: it has lines of something else, or the last ones are gone; "
            f"{models_remedy(folder)}"
        )
    return sums


def _damage(path: Path, wanted: str, stop: Event) -> str | None:
    """What is wrong with a file, None if nothing is."""
    try:
        return (
            None
            if sha256(path, stop=stop) == wanted
            else f"{path} is damaged: its SHA-256 is not the one that was noted"
        )
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"


def remove_models(folder: Path) -> None:
    """Remove the models of a round; it loses its name first, so that no half of it is taken for the whole."""
    with held(folder.parent) as home:
        unfinished = home / f".{folder.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree((home / folder.name).replace(unfinished))


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half written, or half removed."""
    with held(folder) if folder.exists() else contextlib.nullcontext(folder) as home:
        for path in home.glob(f".{_PREFIX}*"):
            if _FOLDER.fullmatch(path.name) and path.is_dir():
                _remove_unfinished(path, folder)


def _remove_unfinished(path: Path, folder: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise RunError(
            f"cannot remove {folder / path.name}: {error.strerror or error}; check its rights"
        ) from error


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
        size_of(path)
        found = dict(tensors(path, lambda name: name.partition("/")[0] in (BOTH, moment)))
    except (OSError, ValueError) as error:
        raise RunError(f"the model in {path} cannot be read ({error}); restore it from a copy") from error
    return {name.partition("/")[2]: value for name, value in found.items()}
