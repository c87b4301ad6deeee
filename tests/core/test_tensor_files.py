"""Reading safetensors: what the library writes is read back, and what nobody writes is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from potluck.core import tensor_files
from potluck.core.message import Message
from potluck.core.tensor_files import DTYPES, check_file, shapes, tensors, tensors_in
from potluck.errors import MessageError, ModelError
from potluck.models.pretrained import load_weights


def written(path: Path, head: Any, data: bytes = b"") -> Path:
    """A file with a head made by hand."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int = 0, end: int = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_kind_of_tensor_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = {f"{kind}/x": torch.arange(6).reshape(2, 3).to(kind) for kind in DTYPES.values()}
    state |= {"one": torch.tensor(2.5), "none": torch.zeros(0, 3, dtype=torch.bool), "ä/\n": torch.ones(1)}
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(state, path, {"who": "me"})
    data = path.read_bytes()
    for found in (dict(tensors(path)), tensors_in(data)[0]):
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            kept = found[name].reshape(-1).view(torch.uint8)
            assert torch.equal(kept, value.reshape(-1).view(torch.uint8))
    assert tensors_in(data)[1] == {"who": "me"}
    assert shapes(path) == {name: tuple(value.shape) for name, value in state.items()}
    assert [*dict(tensors(path, lambda name: name == "one"))] == ["one"]
    message = Message(state)
    assert len(message.encode()) == message.nbytes


def test_no_tensors_are_read_as_none(tmp_path: Path) -> None:
    safetensors.torch.save_file({}, tmp_path / "a.safetensors")
    assert dict(tensors(tmp_path / "a.safetensors")) == {}
    assert tensors_in(Message().encode({"a": "b"})) == ({}, {"a": "b"})


@pytest.mark.parametrize(
    "head",
    [
        [],
        3,
        b"{",
        b"[" * 90_000,
        b"\xff{}",
        {"a": [0, 4]},
        {"a": {"data_offsets": [0, 4]}},
        {"a": entry(dtype="F33")},
        {"a": entry(dtype=["F32"])},
        {"a": entry(shape=1)},
        {"a": entry(shape=[1.0])},
        {"a": entry(shape=[True])},
        {"a": entry(shape=[-1, -1])},
        {"a": entry(shape=[2])},
        {"a": entry(shape=[1 << 70, 0], end=0)},
        {"a": entry(shape=[1] * 65)},
        {"a": entry(shape=[1 << 62, 1 << 62, 0], end=0)},
        {"a": entry(shape=[0, 1 << 31, 1 << 31, 2], end=0)},
        {"\ud800": entry()},
        {"a": entry(), "__metadata__": {"a": "\udfff"}},
        json.dumps({"a": entry()}).encode("utf-16"),
        json.dumps({"a": entry()}).encode("utf-8-sig"),
        {"a": entry(1, 5)},
        {"a": entry(0, 8, [2])},
        {"a": entry(), "b": entry()},
        {"a": entry(4, 0)},
        {"a": {**entry(), "data_offsets": [0, 4, 8]}},
        {"a": {**entry(), "data_offsets": "04"}},
        {"__metadata__": {"a": 3}, "a": entry()},
        {"__metadata__": ["a"], "a": entry()},
        b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2),
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}',
        b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 4]}}' % (b"9" * 5000),
    ],
)
def test_a_head_that_makes_no_sense_is_refused(tmp_path: Path, head: Any) -> None:
    path = written(tmp_path / "a.safetensors", head, bytes(4))
    for read in (lambda: dict(tensors(path)), lambda: shapes(path), lambda: tensors_in(path.read_bytes())):
        with pytest.raises(ValueError):
            read()
    with pytest.raises(MessageError, match="are no message"):
        Message.decode(path.read_bytes())


@pytest.mark.parametrize("size", [0, 3, 8, 20, 69, 72, 74, 1 << 40])
def test_another_length_is_refused(tmp_path: Path, size: int) -> None:
    path = written(tmp_path / "a.safetensors", {"a": entry()}, bytes(4))
    assert path.stat().st_size == 73
    os.truncate(path, size)
    with pytest.raises(ValueError, match=r"cut|its head"):
        dict(tensors(path))


@pytest.mark.parametrize(
    "head",
    [
        b'{"a": [' + b"[]," * 10_000 + b"[]]}",
        b'{"a": ' + b"[" * 10_000,
        b'{"a": {"dtype": "F32", "shape": [' + b"1," * 40_000 + b'1], "data_offsets": [0, 4]}}',
        b'{"__metadata__": {' + b'"a": "",' * 40_000 + b'"b": ""}}',
    ],
)
def test_a_head_with_too_many_values_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """Of empty lists alone, those of a hundred megabytes would take more than two gigabytes."""
    monkeypatch.setattr(tensor_files, "MOST_TENSORS", 1000)
    monkeypatch.setattr(tensor_files, "MOST_ENTRIES", 12_000)
    monkeypatch.setattr(json, "loads", None)
    path = written(tmp_path / "a.safetensors", head, bytes(4))
    for read in (
        lambda: dict(tensors(path)),
        lambda: tensors_in(path.read_bytes()),
        lambda: check_file(path),
    ):
        with pytest.raises(ValueError, match="more than 1,000 tensors"):
            read()
    with pytest.raises(ModelError, match="more than 1,000 tensors"):
        load_weights(torch.nn.Linear(1, 1), path, "mlp")


def test_a_file_that_is_cut_after_it_was_read_takes_nothing_away(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"a": torch.ones(100_000), "b": torch.ones(100_000)}, path)
    reading = tensors(path)
    _, first = next(reading)
    os.truncate(path, 400_500)
    assert first.sum() == 100_000
    with pytest.raises(ValueError, match="cut while it was read"):
        next(reading)
