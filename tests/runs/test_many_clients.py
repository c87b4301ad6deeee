"""Very many clients: a round, a checkpoint and a log cost what the cohort costs, however many do not take part."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import potluck
from potluck.core.rng import Rng
from potluck.data import PartitionConfig, Split, make_split, split_lines
from potluck.errors import DataError, RunError
from potluck.report import split_file
from potluck.runs.kept_models import outline

FEW, MANY = 200, 20_000
COHORT, ROUNDS = 8, 4
LOGS = ("metrics.jsonl", "ledger.jsonl")


class Counting(potluck.Observer):
    """Counts the calls of functions, and what a round leaves in the folder; the first round builds what stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: Counter[str] = Counter()  # in the last round but one
        self.logged: list[int] = []  # bytes of the logs after each round, the ids of clients left out

    def round(self, end: potluck.RoundEnd) -> None:
        sys.setprofile(self._count if end.round == ROUNDS - 2 else None)
        self.logged.append(sum(len(_without_ids(self.folder / name)) for name in LOGS))

    def _count(self, frame: FrameType, event: str, value: Any) -> None:
        if event == "call":
            self.calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self.calls[value.__qualname__] += 1


def _without_ids(log: Path) -> str:
    return re.sub(r'"client": "\d+"', "", log.read_text())


def play(clients: int, folder: Path) -> Counting:
    x = np.random.default_rng(0).normal(size=(4 * clients, 3)).astype(np.float32)
    counting = Counting(folder)
    try:
        potluck.run(
            data=potluck.from_arrays(x, np.arange(len(x)) % 2),
            partition={"kind": "iid", "clients": clients, "test": 0.25, "validation": 0.25},
            models=["mlp-small"],
            method="fedproto",
            training={"rounds": ROUNDS, "participation": COHORT / clients, "batch_size": 2},
            evaluate={"who": "sampled"},
            engine={"device": "cpu", "workers": 1},
            checkpoint={"every": 0},
            out=folder,
            observers=[counting],
            progress=False,
        )
    finally:
        sys.setprofile(None)
    return counting


@pytest.mark.filterwarnings("ignore::potluck.errors.PotluckAdvice")
def test_who_does_not_take_part_costs_nothing(tmp_path: Path) -> None:
    few, many = (play(clients, tmp_path / str(clients)) for clients in (FEW, MANY))
    more = {name: (few.calls[name], found) for name, found in many.calls.items()}
    # Clients that come again are found ready: at most a little per client of the cohort is new.
    assert not [(name, both) for name, both in more.items() if both[1] > both[0] + 40 * COHORT]
    assert many.calls.total() < 1.2 * few.calls.total()
    assert np.diff(many.logged).max() <= np.diff(few.logged).max() + 100
    saved = json.loads((tmp_path / str(MANY) / "checkpoints" / "checkpoint.json").read_text())
    assert len(saved["clients"]) <= COHORT * ROUNDS
    about = tmp_path / str(MANY) / "models" / f"round-{ROUNDS:06d}" / "about.json"
    assert len(json.loads(about.read_text())["outline"]["clients"]) <= COHORT * ROUNDS + 1
    page = (tmp_path / str(MANY) / "report.html").read_text()
    assert page.count("<tr") < 1100
    assert "The table has 1,000 of 20,000 clients" in page


def test_of_many_clients_those_that_trained_open_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outline of a large run lists few clients; options that are dealt out in client order are still right."""
    x = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
    opened = []
    for name, listed in (("few", outline.LISTED), ("many", 5)):
        monkeypatch.setattr(outline, "LISTED", listed)
        potluck.run(
            data=potluck.from_arrays(x, np.arange(len(x)) % 2),
            partition={"kind": "iid", "clients": 12, "test": 0.2},
            models=["mlp-small"],
            method={"name": "fedmrl", "d1": [8, 16, 32], "small": "mlp-small"},
            training={"rounds": 2, "participation": 0.25},
            evaluate={"who": "sampled"},
            engine={"device": "cpu"},
            out=tmp_path / name,
            progress=False,
        )
        opened.append(potluck.open(tmp_path / name))
    monkeypatch.setattr(split_lines, "LARGE", 0)  # from here on split.json is read line by line
    few, many = opened
    about = json.loads((tmp_path / "many" / "models" / "round-000002" / "about.json").read_text())
    kept = list(about["files"])
    assert [*about["outline"]["clients"]] == sorted({"0", *kept}, key=int)
    for client in kept:
        assert torch.equal(few.clients[client].predict(x), many.clients[client].predict(x))
        assert few.clients[client].class_names == many.clients[client].class_names
    absent = next(one for one in many.clients if one not in about["outline"]["clients"])
    for ask in (lambda one: one.predict(x), lambda one: one.task, lambda one: one.class_names):
        with pytest.raises(RunError, match=f"client {absent} was never measured"):
            ask(many.clients[absent])
    assert [*potluck.open(tmp_path / "many").clients] == [*few.clients]


def test_a_large_split_is_read_as_far_as_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [{"id": f"{place}", "train": [place], "validation": [], "test": []} for place in range(40)]
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in clients)
    about = {"hash": "h", "held_out": ["39"], "groups": [{"clients": 30}, {"clients": 10}]}
    path = tmp_path / "split.json"
    path.write_text(f'{json.dumps(about)[:-1]},\n"clients": [\n{lines}\n]}}\n')
    whole = split_file.read_split(path)
    monkeypatch.setattr(split_lines, "LARGE", 0)
    for name, value in (("FIRST", 2), ("PICTURED", 1)):
        monkeypatch.setattr(split_file, name, value)
    some = split_file.read_split(path, ["7"])
    assert some == {**about, "clients": [clients[place] for place in (0, 1, 7, 30)]} | {
        "places": [0, 1, 7, 30],
        "total": 40,
    }
    assert [(len(own), size) for _, own, size in split_file.by_group(some)] == [(3, 30), (1, 10)]
    assert split_file.read_ids(path) == tuple(one["id"] for one in whole["clients"])
    path.write_text(json.dumps(whole))  # somebody wrote it in another way
    assert split_file.read_split(path) == whole
    assert split_file.read_ids(path) is None


def test_a_large_split_is_loaded_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = potluck.from_arrays(np.zeros((60, 2), np.float32), np.arange(60) % 3)
    split = make_split(data, PartitionConfig(kind="iid", clients=9, test=0.2, held_out=2), Rng(0))
    path = tmp_path / "split.json"
    split.save(path, data)
    monkeypatch.setattr(split_lines, "LARGE", 0)
    found = split_lines.read_lines(path)
    assert found is not None
    assert np.array_equal(found[1].rows, split.clients.rows)
    again = Split.load(path)
    assert (again, again.held_out) == (split, split.held_out)
    whole = path.read_text()
    for damaged in (
        whole[:-3],
        whole.replace('"test":[', '"test":[0,', 1),
        whole.replace('"counts":[', '"counts":[1,', 1),
    ):
        path.write_text(damaged)
        with pytest.raises(DataError):
            Split.load(path)
