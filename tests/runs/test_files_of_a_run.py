"""Small things that hold for all files of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from potluck.engine.store.state_files import StateFiles
from potluck.errors import nearest
from potluck.files import held, sha256


def test_an_error_in_a_folder_that_is_held_names_the_usual_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as lost, held(tmp_path) as place:
        (place / "round-000001").replace(place / "b")
    assert (lost.value.filename, lost.value.filename2) == (
        str(tmp_path / "round-000001"),
        str(tmp_path / "b"),
    )
    with pytest.raises(OSError, match=r"^plain$"), held(tmp_path):
        raise OSError("plain")


def test_a_file_that_is_hardly_on_the_disk_is_refused_unread(tmp_path: Path) -> None:
    path = StateFiles(tmp_path).write({"a": torch.zeros(3)})
    whole = sha256(path)
    os.truncate(path, 1 << 20)
    assert sha256(path) != whole
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="it has 1,099,511,627,776 bytes, of which") as refused:
        sha256(path)
    assert refused.value.filename == str(path)


def test_a_long_list_of_known_names_is_cut() -> None:
    assert nearest("zzz", [f"{number:05d}" for number in range(50_000)]).endswith("00099 and 49900 more")
