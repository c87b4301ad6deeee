"""What a client says of itself must be possible: bounds before work, metrics in range, norms like others'."""

import json
import resource

import pytest
import sites
import torch
from test_sites import SAME_MODEL, Courier, play

from potluck.core.message import Message
from potluck.core.metrics import MetricFacts
from potluck.core.state import Report
from potluck.core.task import Task
from potluck.deploy import wire
from potluck.deploy.engine import FlowerEngine
from potluck.deploy.enrolled import enrolled_federation
from potluck.deploy.plausible import implausible
from potluck.deploy.run import open_folder
from potluck.engine.evaluation.log_lines import split_parts
from potluck.engine.norms import LARGEST_RATIO, largest_ratio
from potluck.engine.protocol import Answer, Examination, Failure, Request, Stamp
from potluck.engine.settings import EngineSettings
from potluck.runs.observers import Observer

TASK = {"kind": "classification", "classes": 10, "input": [1, 8, 8]}


def card(client, samples=10, task=TASK):
    sizes = dict.fromkeys(("train", "validation", "test"), samples)
    note = {"reply": "card", "client": client, "samples": sizes, "task": task, "extra": {}}
    return wire.unpack_reply(Message().encode({wire.KEY: json.dumps(note)}))


def test_a_card_of_300_bytes_costs_no_memory(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    enrolled = {client: card(client, wire.MOST_SAMPLES) for client in sites.IDS}
    federation = enrolled_federation(sites.federated("local"), enrolled)
    federation.save_split(tmp_path / "split.json")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB; it was gigabytes
    kept = json.loads((tmp_path / "split.json").read_text())["clients"]
    assert [one["train"] for one in kept] == [wire.MOST_SAMPLES] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "x"},
        {"classes": 10**7},
        {"classes": True},
        {"input": [1 << 40]},
        {"vocabulary": -1},
        {"spy": 1},
    ],
)
def test_a_task_is_checked_before_it_is_taken(change):
    assert Task.from_json(TASK) == Task("classification", 10, (1, 8, 8))
    with pytest.raises(ValueError):
        Task.from_json(TASK | change)


def reported(**metrics):
    values = {f"model/{split}/{name}": torch.tensor(value, dtype=torch.float64)
              for split in ("validation", "test") for name, value in metrics.items()}  # fmt: skip
    return Answer("0", Message(), Report(0, {}, values))


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"correct": 7.0, "loss": 3.0}, ""),
        ({"correct": 10.0, "loss": float("nan")}, ""),  # a model that has diverged: null in the log
        (
            {"correct": 11.0, "loss": 3.0},
            "its correct of model/validation is 11, which cannot be with 10 samples",
        ),
        ({"correct": -1.0, "loss": 3.0}, "is -1, which cannot be"),
        ({"correct": 0.5, "loss": 3.0}, "is 0.5, which cannot be"),
        ({"correct": float("nan"), "loss": 3.0}, "is nan, which cannot be"),
        ({"correct": 7.0, "loss": -1.0}, "its loss of model/validation is -1"),
        ({"correct": 7.0}, "did not answer with the metrics asked for"),
    ],
)
def test_a_metric_must_be_possible(metrics, sentence):
    order = Examination("0", None, Stamp("r", 1, 1, 1, 0), ("model",))
    found = implausible(order, reported(**metrics), card("0"))
    assert sentence in found if sentence else found == ""


def test_a_metric_of_ones_own_has_its_own_range():
    order = Examination("0", None, Stamp("r", 1, 1, 1, 0), ("model",), metrics=("hours",))
    answer, facts = reported(correct=1.0, loss=1.0, hours=20.0), {"hours": MetricFacts("hours", high=24.0)}
    assert implausible(order, answer, card("0"), facts) == ""
    assert "its hours of model/validation is 20" in implausible(order, answer, card("0"))


def test_a_client_does_not_choose_what_it_is_judged_by():
    """The order of the numbers in its reply is not that of the log."""
    told = Task("regression", 1, (4,)).rules.told
    sent = {f"model/test/{name}": 0.5 for name in ("hours", *reversed(told))}
    line = split_parts("model", sent, {"test": 10}, None, told, ("hours",))["test"]
    assert line["metric"] == "r2"
    assert [*line] == ["score", "metric", "r2", "mse", "mae", "hours", "loss", "samples"]


def engine(*ids):
    return FlowerEngine(None, ids, EngineSettings(device="cpu"), (), {})


def test_a_client_does_not_speak_in_the_name_of_another():
    order = Examination("1", None, Stamp("r", 1, 1, 1, 0), ("model",))
    for said, heard in {"client 12: it is away": "client 1: client 12: it is away",
                        "client 1: no": "client 1: no"}.items():  # fmt: skip
        found = engine("1", "12")._outcome(order, wire.pack_reply(Failure("1", said)))
        assert found == Failure("1", heard)


def test_who_was_turned_away_and_comes_with_another_card_is_as_any_other():
    server = engine("0")
    bad, good = (wire.pack_reply(card("0", samples)) for samples in (10, 20))
    assert server._enrol(7, bad) == ""
    server.turn_away("0", "it does not fit")
    assert (server._enrol(8, bad), [*server.turned_away]) == ("it does not fit", ["0"])
    assert (server._enrol(9, good), [*server.turned_away]) == ("", [])


def test_norms_are_compared_with_strangers_and_not_in_a_simulation():
    assert (largest_ratio(None, strangers=True), largest_ratio(None)) == (LARGEST_RATIO, None)
    assert (largest_ratio("none", strangers=True), largest_ratio("auto")) == (None, LARGEST_RATIO)
    assert sites.simulated("local", training={"max_norm": 20}).training.max_norm == 20


@pytest.mark.parametrize(("max_norm", "refused"), [(None, True), ("none", False), (1e31, False), (50, True)])
def test_an_enlarged_update_is_refused_by_its_norm(tmp_path, max_norm, refused):
    def enlarge(order, data):
        if not (isinstance(order, Request) and order.client == "1" and order.steps == ("train",)):
            return data
        answer = wire.unpack_reply(data)
        large = {name: value * 1e6 for name, value in answer.up.items()}
        return wire.pack_reply(Answer("1", Message(large), answer.report))

    courier, notices, watcher = Courier(tmp_path, model="conv-small"), [], Observer()
    courier.tamper, watcher.notice = enlarge, notices.append
    training = {"rounds": 1, "batch_size": 64, "optimizer": {"lr": 0.05}, "max_norm": max_norm}
    play(
        sites.federated("fedavg", training=training, **SAME_MODEL),
        courier,
        open_folder(tmp_path / "run"),
        watcher,
    )
    told = [notice for notice in notices if "(training.max_norm)" in notice]
    assert bool(told) == refused
    assert all("goes on without client 1, step train: the norm of 'model' is" in one for one in told)
