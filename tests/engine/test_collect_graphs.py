"""What the GPU engine keeps for `collect`, with stand-ins for the device; needs no GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from potluck.engine.cuda import graphs
from potluck.engine.cuda.graphs import CollectGraph, RowsOnDevice


@pytest.fixture
def collection(monkeypatch: pytest.MonkeyPatch) -> CollectGraph:
    """A captured collection of rows 0 and 1 that gives twice the row numbers."""
    monkeypatch.setattr(graphs, "new_graph", SimpleNamespace)
    monkeypatch.setattr(graphs, "_capturing", lambda *given: contextlib.nullcontext())
    made = CollectGraph(lambda rows: 2 * rows, torch.tensor([0, 1]), None)
    made.graph = SimpleNamespace(replay=lambda: torch.mul(made.rows, 2, out=made.outputs))  # type: ignore[assignment]
    return made


def test_a_replay_reads_the_rows_it_is_given_and_its_result_stays(collection: CollectGraph) -> None:
    first = collection.replay(collection.given)
    second = collection.replay(torch.tensor([5, 6]))
    third = collection.replay(torch.tensor([5, 7]))
    assert [found.tolist() for found in (first, second, third)] == [[0, 2], [10, 12], [10, 14]]


def test_the_rows_of_a_client_that_comes_back_are_not_copied_again(collection: CollectGraph) -> None:
    rows = torch.tensor([5, 6])
    collection.replay(rows)
    written = collection.rows._version
    collection.replay(rows)
    assert collection.rows._version == written


def test_rows_of_a_client_are_kept_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    event = SimpleNamespace(query=lambda: True)
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    kept, own = RowsOnDevice(torch.device("cpu")), np.arange(10)
    client: Any = SimpleNamespace(rows={"test": own[2:6]})

    def rows(asked: np.ndarray) -> Tensor:
        return kept(client, asked)

    assert rows(own[2:4]) is rows(own[2:4])
    assert rows(own[2:4]).tolist() == [2, 3]
    assert rows(own[2:6:2]).tolist() == [2, 4]
    drawn = np.arange(3)
    assert rows(drawn) is not rows(drawn)
