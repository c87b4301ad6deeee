"""Feature shift: what a client's samples go through, and who gets which."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from potluck import Experiment
from potluck.cli.views.split import split_entry, split_view
from potluck.core.rng import Rng
from potluck.data import FeatureShiftConfig, Shift, Split, from_arrays, from_index_file, load, make_split
from potluck.data.shift import blurred, recolored, rotated
from potluck.data.views import client_samples
from potluck.errors import ConfigError, DataError


def pictures(rows: int = 24, channels: int = 3, side: int = 6, kind: type = np.uint8) -> Any:
    draw = np.random.default_rng(0).integers(256, size=(rows, channels, side, side))
    x = draw.astype(kind) if kind is np.uint8 else draw.astype(kind) / 255
    return from_arrays(x, np.arange(rows) % 2)


@settings(max_examples=40, deadline=None)
@given(
    clients=st.integers(1, 9),
    values=st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=1, max_size=4, unique=True),
    kind=st.sampled_from(["rotation", "color", "blur", "noise"]),
    seed=st.integers(0, 99),
)
def test_values_are_dealt_evenly_over_the_rows_of_the_ordinary_split(
    clients: int, values: list[float], kind: Any, seed: int
) -> None:
    data = pictures()
    config = FeatureShiftConfig(clients=clients, shift=kind, values=tuple(values), labels={"kind": "iid"})
    split, plain = make_split(data, config, Rng(seed)), make_split(data, config.ordinary, Rng(seed))
    assert split == make_split(data, config, Rng(seed))
    assert split != plain
    for one, other in zip(split.clients, plain.clients, strict=True):
        assert all(np.array_equal(mine, its) for mine, its in zip(one.parts, other.parts, strict=True))
    dealt = [client.shift.value for client in split.clients if client.shift]
    counts = [dealt.count(value) for value in values]
    assert sum(counts) == clients
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("kind", ["rotation", "color", "blur", "noise"])
@pytest.mark.parametrize("number", [np.uint8, np.float32])
def test_everyone_sees_their_rows_shifted_and_nobody_else_s(kind: Any, number: type) -> None:
    data = pictures(kind=number)
    split = make_split(data, FeatureShiftConfig(clients=3, shift=kind), Rng(1))
    seen = client_samples(data, split.clients)
    assert seen is not None
    assert seen.dtype == data.x.dtype
    again = client_samples(data, split.clients)
    assert again is not None
    assert torch.equal(seen, again)
    for client in split.clients:
        assert client.shift is not None
        rows = np.sort(np.concatenate(client.parts))
        same = torch.equal(seen[rows], data.x[rows])
        assert same == (client.shift.value == 0)
        assert len(client.test)


def test_quarter_turns_move_pixels_and_nothing_else() -> None:
    x = torch.arange(2 * 9.0).view(2, 1, 3, 3)
    assert torch.equal(rotated(x, 90), x.rot90(1, (2, 3)))
    assert torch.equal(rotated(x, -90), rotated(x, 270))
    assert torch.equal(rotated(x, 360), x)


def test_any_other_angle_turns_the_same_way() -> None:
    x = torch.zeros(1, 1, 21, 21)
    x[0, 0, 10, 18] = 1  # to the right of the centre: after a small turn to the left it is above
    row, column = divmod(int(rotated(x, 30).argmax()), 21)
    assert (row, column) == (6, 17)
    wide = torch.zeros(1, 1, 5, 9)
    wide[0, 0, 2, 4] = 1
    assert divmod(int(rotated(wide, 90).argmax()), 9) == (2, 4)


def test_colours_turn_around_grey() -> None:
    red, grey = torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1), torch.full((1, 3, 1, 1), 0.4)
    torch.testing.assert_close(recolored(red, 120).flatten(), torch.tensor([0.0, 1, 0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(recolored(red, 240).flatten(), torch.tensor([0.0, 0, 1]), atol=1e-6, rtol=0)
    torch.testing.assert_close(recolored(grey, 77), grey)


def test_blur_spreads_and_keeps_the_sum() -> None:
    x = torch.zeros(1, 2, 15, 15)
    x[0, 0, 7, 7] = 1
    soft = blurred(x, 1.0)
    torch.testing.assert_close(soft.sum(), torch.tensor(1.0))
    assert float(soft[0, 0, 7, 7]) < 0.2
    assert not soft[0, 1].any()
    flat = torch.full((1, 1, 4, 4), 0.3)
    torch.testing.assert_close(blurred(flat, 2.0), flat)


def test_noise_has_its_deviation_and_its_own_seed() -> None:
    x = torch.arange(200.0).view(200, 1, 1, 1).expand(200, 1, 8, 8)
    one, other = Shift("noise", 0.2, 1)(x), Shift("noise", 0.2, 2)(x)
    assert torch.equal(
        Shift("noise", 0.2, 1)(x[5:9]), one[5:9]
    )  # a sample's noise is its own, wherever it stands
    assert float((one - x).std()) == pytest.approx(0.2, rel=0.05)
    assert not torch.equal(one, other)


def test_a_split_with_shifts_survives_the_disk(tmp_path: Path) -> None:
    data = load("digits")
    for kind in ("rotation", "noise"):
        split = make_split(data, FeatureShiftConfig(clients=4, shift=kind), Rng(0))
        split.save(tmp_path / "split.json", data)
        again = from_index_file(tmp_path / "split.json", data)
        assert again == split
        assert [client.shift for client in again.clients] == [client.shift for client in split.clients]
    text = (tmp_path / "split.json").read_text().replace('"kind":"noise"', '"kind":"blur"')
    (tmp_path / "split.json").write_text(text)
    with pytest.raises(DataError, match="was changed"):
        Split.load(tmp_path / "split.json")


@pytest.mark.parametrize(
    ("shift", "sentence"),
    [
        ({"kind": "turn", "value": 1}, "of kind rotation, color, blur, noise"),
        ({"kind": "blur", "value": -1}, "blur cannot be -1"),
        ({"kind": "blur", "value": "much"}, "'much' is not a value"),
        ({"kind": "blur", "value": 1, "seed": 0.5}, "a whole number"),
        ({"kind": "color", "value": 120}, "no colours to shift"),
    ],
)
def test_a_wrong_shift_in_a_file_is_named(tmp_path: Path, shift: Any, sentence: str) -> None:
    content = {"north": {"train": [0, 1], "shift": shift}, "south": {"train": [2]}}
    (tmp_path / "split.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=sentence):
        from_index_file(tmp_path / "split.json", load("digits"))


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ({"shift": "rotate"}, "partition.shift"),
        ({"shift": "blur", "values": [-1]}, "blur cannot be -1"),
        ({"shift": "blur", "labels": {"kind": "dirichlet"}}, "labels: kind dirichlet needs alpha"),
        ({"shift": "blur", "labels": {"kind": "iid", "test": 0.1}}, "write test beside labels"),
        ({"shift": "blur", "labels": {"kind": "feature_shift"}}, "labels.kind"),
        ({"shift": "blur", "alpha": 1}, "unknown key 'partition.alpha'"),
    ],
)
def test_a_wrong_block_is_named(block: dict[str, Any], sentence: str) -> None:
    partition = {"kind": "feature_shift", "clients": 2} | block
    with pytest.raises(ConfigError, match=sentence):
        Experiment.make(data="digits", partition=partition, models="mlp-small", method="local")


def test_data_that_cannot_be_shifted_are_named() -> None:
    vectors = from_arrays(np.zeros((8, 3), np.float32), np.arange(8) % 2)
    for data, kind, sentence in (
        (vectors, "rotation", "has no images"),
        (load("digits"), "color", "no colours"),
        (load("digits-segments"), "rotation", "names pixels"),
    ):
        with pytest.raises(DataError, match=sentence):
            make_split(data, FeatureShiftConfig(clients=2, shift=kind), Rng(0))  # type: ignore[arg-type]
    split = make_split(vectors, FeatureShiftConfig(clients=2, shift="noise", values=(1.0,)), Rng(0))
    assert client_samples(vectors, split.clients) is not None


def test_a_client_trains_and_is_tested_on_what_it_sees() -> None:
    partition = {"kind": "feature_shift", "clients": 2, "shift": "rotation", "values": [180]}
    experiment = Experiment.make(data="digits", partition=partition, models="conv-small", method="local")
    federation = experiment.build()
    client, data = federation.clients.build_client("1"), load("digits")
    for part in ("train", "test"):
        rows = torch.from_numpy(client.rows[part][:5])
        batch = client.source.take(rows)
        assert torch.equal(batch.x, plain(federation, data.x[rows].rot90(2, (2, 3))))


def plain(federation: Any, x: Tensor) -> Tensor:
    """The samples with the preparation of the data set alone."""
    prepared: Tensor = federation.clients.groups[0].prepare(x, None)
    return prepared


def test_the_split_table_names_the_shifts() -> None:
    data = load("digits")
    split = make_split(data, FeatureShiftConfig(clients=2, shift="rotation", values=(0, 45)), Rng(0))
    console = Console(width=160, record=True, file=StringIO())
    console.print(split_view(split_entry(data, split)))
    text = console.export_text()
    assert "rotation 0" in text
    assert "rotation 45" in text
