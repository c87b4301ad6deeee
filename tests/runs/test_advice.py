"""What is said before a run begins."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers import Listener
from potluck import Experiment, from_arrays
from potluck.core.dataset import Dataset
from potluck.core.task import Task
from potluck.data import ClientSplit, Split
from potluck.runs.advice import advice
from potluck.runs.api import run


def said(samples: int, models: Any = "resnet18", clients: int = 1, **training: Any) -> list[str]:
    """The sentences about some clients, without the one about a client that is alone."""
    every = advice(experiment(samples, models, clients, **training).build())
    return [one for one in every if not one.startswith("there is one client alone")]


def experiment(samples: int, models: Any, clients: int = 1, **training: Any) -> Experiment:
    x = np.zeros((clients * samples, 3, 8, 8), dtype=np.uint8)
    y = np.arange(clients * samples) % 2
    return Experiment.make(
        data=from_arrays(x, y, classes=2),
        partition={"kind": "iid", "clients": clients, "test": 0.0},
        models=models,
        method="local",
        training={"batch_size": 16, "rounds": 1} | training,
    )


def test_of_a_client_alone_it_is_said_that_nothing_is_shared() -> None:
    (sentence,) = advice(experiment(32, "mlp-small").build())
    assert "one client alone (client 0), so nothing is shared between clients" in sentence
    assert "partition.clients" in sentence
    assert [*advice(experiment(32, "mlp-small", clients=2).build())] == []


def test_a_last_batch_too_small_for_batch_norm_is_spoken_of() -> None:
    (sentence,) = said(37)
    assert sentence.startswith("1 of 1 clients end every epoch with a batch too small for batch norm")
    assert "(client 0, resnet18: 5 samples)" in sentence
    assert "training.last_batch" in sentence


@pytest.mark.parametrize("samples", [32, 33, 40, 47, 3])
def test_others_are_not(samples: int) -> None:
    assert said(samples) == []


def test_only_batch_norm_minds() -> None:
    assert said(34, "mlp-small") == []
    (sentence,) = said(34, ["mlp-small", "resnet18"], clients=4)
    assert sentence.startswith("2 of 4 clients")


def test_positions_of_a_sample_count_as_values() -> None:
    assert said(34, "conv-large") == []  # two samples, four positions each
    assert len(said(34)) == 1


class Own(nn.Module):
    """A user's model with batch norm, called as asked."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.conv = nn.Conv2d(3, 4, 8)
        kept = how != "batch alone"  # without running statistics
        self.norm = nn.BatchNorm1d(4) if how == "rows" else nn.BatchNorm2d(4, track_running_stats=kept)
        self.fc = nn.Linear(4, 2)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.how == "frozen":
            self.norm.eval()
        return self

    def forward(self, x: Any) -> Any:
        z = self.conv(x)
        if self.how == "rows":  # 64 rows of a sample go through batch norm together
            rows = self.norm(x[:, :1].expand(-1, 4, -1, -1).permute(0, 2, 3, 1).reshape(-1, 4))
            return self.fc(z.flatten(1)) + 0 * rows.sum()
        z = self.norm(input=z) if self.how == "by name" else self.norm(z)
        return self.fc(z.flatten(1))


@pytest.mark.parametrize(
    ("how", "sentences"), [("plain", 1), ("by name", 1), ("batch alone", 1), ("rows", 0), ("frozen", 0)]
)
def test_models_of_ones_own(how: str, sentences: int) -> None:
    assert len(said(34, {"model": lambda: Own(how)})) == sentences


def test_where_whole_batches_are_as_small_nothing_is_said() -> None:
    assert said(7, batch_size=4) == []


@pytest.mark.parametrize("last", ["drop", "wrap"])
def test_nothing_is_said_where_no_batch_is_short(last: str) -> None:
    assert said(34, last_batch=last) == []


def test_a_clients_own_batch_size_counts() -> None:
    assert said(34, per_client={"0": {"batch_size": 17}}) == []
    (sentence,) = said(32, per_client={"0": {"batch_size": 30}})
    assert "2 samples" in sentence


def among(labels: list[list[int]], method: str = "local", held_out: tuple[str, ...] = ()) -> list[str]:
    """What is said where clients hold these labels."""
    y = np.concatenate(labels)
    chosen = Experiment.make(
        data=from_arrays(np.zeros((len(y), 3), dtype=np.float32), y, class_names=["cat", "dog", "owl"]),
        partition={"kind": "iid", "clients": len(labels)},
        models="mlp-small",
        method={"name": method, "unheld": "accept"} if method == "fedre" else method,
    )
    rows = np.split(np.arange(len(y)), np.cumsum([len(own) for own in labels])[:-1])
    nothing = np.zeros(0, dtype=np.int64)
    split = Split.of(ClientSplit(str(number), own, nothing, nothing) for number, own in enumerate(rows))
    return [*advice(chosen.build(split=dataclasses.replace(split, held_out=held_out)))]


def test_clients_with_one_class_are_spoken_of() -> None:
    (sentence,) = among([[0, 1], [2, 2], [1, 1, 1]])
    assert sentence.startswith("2 of 3 clients have training samples of one class alone (client 1: owl)")
    assert "unmixed" not in sentence
    (sentence,) = among([[0, 1], [2, 2]], "fedre")
    assert sentence.startswith("1 of 2 clients has training samples of one class alone (client 1: owl)")
    assert sentence.endswith("; what they send is of that class, unmixed")
    assert among([[0, 1], [1, 2]], "fedre") == []
    assert among([[0, 1], [2, 2]], held_out=("1",)) == []  # who does not train


def test_clients_with_one_sample_are_spoken_of_once() -> None:
    (sentence,) = among([[0, 1], [2]])
    assert sentence.startswith("1 of 2 clients has a single training sample (client 1)")
    assert "partition.min_size" in sentence
    assert among([[0, 1], [2]], held_out=("1",)) == []


def test_a_run_says_it_once_at_its_start(tmp_path: Any) -> None:
    listener = Listener()
    run(experiment(34, "resnet18"), out=tmp_path / "run", watcher=listener)
    assert listener.notices == [*advice(experiment(34, "resnet18").build())] != []


def test_tf32_on_a_cpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # what `device: auto` asks
    data = arrays([0, 1] * 20)
    said = advised(data, engine={"precision": "tf32"})
    assert said == [
        "engine.precision: tf32 is for GPUs and changes nothing here: this run computes in float32"
    ]
    assert advised(data) == []


def test_tf32_is_for_the_machines_of_a_cluster_to_judge() -> None:
    engine = {"name": "ray", "precision": "tf32"}
    assert advised(arrays([0, 1] * 20), elsewhere=True, engine=engine) == []
    assert advised(arrays([0, 1] * 20), engine=engine) != []


@pytest.mark.parametrize("label", [0, 1])
def test_labels_that_are_all_the_same_are_told(label: int) -> None:
    said = advised(arrays([label] * 40))
    assert f"every sample of 'arrays' has the same label, {label}: there is nothing to tell apart" in said


def test_labels_that_begin_at_one_are_told() -> None:
    (said,) = advised(arrays([1, 2, 3, 2] * 10))
    assert said.startswith(
        "no sample of 'arrays' has class 0, its labels reach from 1 to 3, and models have an output"
    )


def test_labels_that_teach_nothing_are_told() -> None:
    (said,) = advised(arrays([0] * 40))
    assert "every sample of 'arrays' has the same label" in said
    x = np.zeros((40, 5), np.float32)
    (said,) = advised(from_arrays(x, np.ones(40), task="regression"))
    assert "all numbers to predict in 'arrays' are equal" in said
    (said,) = advised(from_arrays(x, np.arange(40) % 3, test=(x[:9], np.arange(9) % 3 + 5)))
    assert "3 of the classes that 'arrays' is tested on never occur in its training part (5, 6, 7)" in said


def test_public_data_that_nobody_uses_are_told(tmp_path: Any) -> None:
    listener = Listener()
    run(experiment(32, "mlp-small").variant(public="digits"), out=tmp_path / "run", watcher=listener)
    assert any("local uses no public data" in sentence for sentence in listener.notices)


def test_numbers_of_a_large_scale_are_told() -> None:
    y = torch.linspace(900, 1100, 40)
    data = Dataset("prices", Task("regression", 1, (4,)), torch.zeros(40, 4), y, 40, ("price",))
    (said,) = advised(data)
    assert said.startswith("the numbers to predict in 'prices' are large (mean 1e+03, standard deviation 60)")
    assert advised(dataclasses.replace(data, y=(y - 1000) / 60)) == []


def arrays(labels: list[int]) -> Dataset:
    classes = max(labels) + 1
    task, names = Task("classification", classes, (4,)), tuple(map(str, range(classes)))
    return Dataset("arrays", task, torch.zeros(len(labels), 4), torch.tensor(labels), len(labels), names)


def advised(data: Dataset, elsewhere: bool = False, **settings: Any) -> list[str]:
    """What is said before a run with two clients."""
    partition = {"kind": "iid", "clients": 2}
    chosen = Experiment.make(data=data, partition=partition, models="mlp-small", method="local", **settings)
    return [*advice(chosen.build(), elsewhere)]


def test_a_client_without_test_samples_is_told() -> None:
    data = from_arrays(np.zeros((40, 3)), np.arange(40) % 2)
    rows = np.arange(40).reshape(4, 10)
    parts = [ClientSplit(str(n), own[:8], own[:0], own[8:] if n else own[:0]) for n, own in enumerate(rows)]
    made = Experiment.make(data=data, partition=Split.of(parts), models="mlp-small", method="local")
    (sentence,) = advice(made.build())
    assert sentence.startswith("1 of 4 clients has no test samples (client 0)")
