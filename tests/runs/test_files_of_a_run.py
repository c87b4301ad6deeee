"""Small things that hold for all files of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from potluck.engine.store.state_files import StateFiles, is_too_long
from potluck.errors import nearest
from potluck.files import held


def test_an_error_in_a_folder_that_is_held_names_the_usual_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as lost, held(tmp_path) as place:
        (place / "round-000001").replace(place / "b")
    assert (lost.value.filename, lost.value.filename2) == (
        str(tmp_path / "round-000001"),
        str(tmp_path / "b"),
    )
    with pytest.raises(OSError, match=r"^plain$"), held(tmp_path):
        raise OSError("plain")


def test_a_file_of_a_state_that_was_made_longer_is_found_without_reading_it(tmp_path: Path) -> None:
    for state in ({}, {"a": torch.zeros(3), "b": torch.zeros(0, 2)}):
        path = StateFiles(tmp_path).write(state)
        size = path.stat().st_size
        assert not is_too_long(path)
        os.truncate(path, 1 << 40)
        assert is_too_long(path)
        for other in (size - 1, 3, 0):  # its checksum tells
            os.truncate(path, other)
            assert not is_too_long(path)
        os.truncate(path, 1 << 40)  # without a head
        assert is_too_long(path)


@pytest.mark.parametrize("end", ["NaN", "1e999", '"12"', "null"])
def test_a_head_whose_ends_are_no_numbers_is_not_believed(tmp_path: Path, end: str) -> None:
    path = tmp_path / "clients-00000001.safetensors"
    head = b'{"a": {"data_offsets": [0, %s]}}' % end.encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(12))
    assert is_too_long(path)


def test_a_long_list_of_known_names_is_cut() -> None:
    assert nearest("zzz", [f"{number:05d}" for number in range(50_000)]).endswith("00099 and 49900 more")
