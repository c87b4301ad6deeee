"""Federations whose clients differ in task, data set and model."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from helpers import Listener, StopAfter
from potluck.core.dataset import Dataset
from potluck.core.method import Method, client_step
from potluck.core.method import _registry as registry
from potluck.data import ClientSplit, Split, from_arrays, load
from potluck.engine.serial import SerialEngine
from potluck.errors import ConfigError, DataError
from potluck.experiment.schema import Experiment
from potluck.files import read_json
from potluck.report.comparison import relative_gain
from potluck.report.render import plain
from potluck.report.sheets import clients_sheet, comparison_sheet
from potluck.runs.api import resume, run
from potluck.runs.comparisons.play import compare_experiments
from potluck.runs.loop import Interrupted
from potluck.testing.bench import Played
from potluck.testing.contract import require_same_from_tape
from potluck.testing.double_precision import double_precision
from potluck.testing.faulty_engines import Taped
from potluck.training.fit import fit

PARTITION = {"kind": "iid", "clients": 2, "validation": 0.1, "test": 0.3}
KINDS = ["classification"] * 2 + ["multi-label"] * 2 + ["segmentation"] * 2 + ["text-classification"] * 2
TRAINING = {"rounds": 3, "participation": 0.8, "batch_size": 8, "optimizer": {"lr": 0.05, "momentum": 0.9}}


def few(name: str, rows: int = 60) -> Dataset:
    data = load(name)
    strata = data.strata[:rows] if data.strata is not None else None
    return replace(data, x=data.x[:rows], y=data.y[:rows], strata=strata, train_rows=rows)


def texts(rows: int = 60) -> Dataset:
    """Three words, one of which says the class."""
    y = np.arange(rows) % 3
    tokens = np.stack([y + 2, 5 + np.arange(rows) % 4, np.full(rows, 9)], 1)
    return from_arrays(tokens, y, vocabulary=10, name="words")


def groups() -> list[dict[str, Any]]:
    sets = {few("digits"): ["mlp-small", "conv-small"], few("digits-attributes"): "conv-small"}
    sets |= {few("digits-segments"): "conv-dense", texts(): "text-mean"}
    return [{"data": data, "partition": PARTITION, "models": models} for data, models in sets.items()]


def mixed(**changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "name": "mixed",
        "federation": groups(),
        "models": {"rep_dim": 16},
        "method": "local",
        "training": TRAINING,
        "engine": {"device": "cpu", "workers": 1},
        "checkpoint": {"every": 0},
    }
    return Experiment.make(**values | changes)


def metrics(folder: Path) -> str:
    return (folder / "metrics.jsonl").read_text()


def test_every_client_has_its_task_data_and_model():
    federation = mixed().build()
    assert [federation.population.task_of(client).kind for client in federation.population.ids] == KINDS
    assert [federation.population.card(client).task.kind for client in federation.population.ids] == KINDS
    assert [federation.population.label(client) for client in federation.population.ids] == (
        ["mlp-small", *["conv-small"] * 3, *["conv-dense"] * 2, *["text-mean"] * 2]
    )
    assert federation.population.ids == tuple("01234567")
    assert len({federation.clients.kind(client) for client in federation.population.ids}) == 5
    live = {client: federation.clients.build_client(client) for client in federation.population.ids}
    assert [tuple(live[client].source.x.shape[1:]) for client in "0246"] == [
        (1, 8, 8), (1, 8, 8), (1, 16, 16), (3,)
    ]  # fmt: skip
    assert {client["model"].rep_dim for client in live.values()} == {16}
    assert federation.population.classes_held("2") == (0, 1, 2, 3)
    assert federation.population.classes_held("6") == (0, 1, 2)


def test_a_run_resumes_and_does_not_depend_on_the_workers(tmp_path):
    whole = run(mixed(), out=tmp_path / "whole")
    two = run(mixed(engine={"device": "cpu", "workers": 2}), out=tmp_path / "two")
    with pytest.raises(Interrupted):
        run(mixed(), out=tmp_path / "broken", watcher=StopAfter(1))
    resumed = resume(tmp_path / "broken", experiment=mixed())
    assert metrics(whole.folder) == metrics(two.folder) == metrics(resumed.folder)
    logged = [json.loads(line) for line in metrics(whole.folder).splitlines()]
    last = {line["client"]: line["test"] for line in logged if line["round"] == 3}
    names = [last[client].get("metric", "accuracy") for client in sorted(last)]
    assert names == ["accuracy"] * 2 + ["mean_ap"] * 2 + ["mean_iou"] * 2 + ["accuracy"] * 2
    assert (whole.folder / "report.html").exists()


def test_a_client_trains_as_if_its_group_were_alone(tmp_path):
    """What a client learns follows from its id, rows and model; groups beside it play no part."""
    federation = mixed().build()
    own = federation.split["2"], federation.split["3"]
    alone = Experiment.make(
        data=few("digits-attributes"),
        partition=Split.of(own),
        models={"pool": "conv-small", "rep_dim": 16},
        method="local",
        training=TRAINING,
        engine={"device": "cpu"},
    ).build()
    together, apart = Played(federation), Played(alone)
    for ids in (federation.population.ids, ("3", "5")):
        together.round(ids)
        apart.round([client for client in ids if client in ("2", "3")])
    for client in ("2", "3"):
        left, right = together.client(client), apart.client(client)
        assert left is not None
        assert right is not None
        assert all(torch.equal(left[name], right[name]) for name in right)


def test_steps_of_all_tasks_can_be_captured():
    federation = [*groups(), {"data": few("digits-captions"), "partition": PARTITION, "models": "dual-small"}]
    make = partial(mixed, federation=federation, training=TRAINING | {"participation": 1.0})
    with double_precision():
        plain, taped = Played(make().build()), Played(make().build(), Taped)
        for played in (plain, taped):
            for _ in range(2):
                assert not played.round(played.federation.population.ids).failures
    require_same_from_tape(plain, taped)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_all_tasks_are_captured_and_start_like_on_a_cpu(tmp_path):
    federation = [*groups(), {"data": few("digits-captions"), "partition": PARTITION, "models": "dual-small"}]
    make = partial(mixed, federation=federation, training=TRAINING | {"participation": 1.0})
    heard = Listener()
    gpu = run(make(engine={"device": "cuda"}), out=tmp_path / "gpu", watcher=heard)
    cpu = run(make(), out=tmp_path / "cpu")
    assert not heard.notices
    both = zip(metrics(gpu.folder).splitlines(), metrics(cpu.folder).splitlines(), strict=True)
    for left, right in ((json.loads(one), json.loads(other)) for one, other in both):
        assert left["test"].keys() == right["test"].keys()
        if left["round"] == 1:
            assert left["test"]["loss"] == pytest.approx(right["test"]["loss"], rel=0.01)


def test_a_file_says_all_of_it_and_comparisons_know_local(tmp_path):
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "federation:\n"
        "- {data: digits, partition: {kind: iid, clients: 1}, models: mlp-small}\n"
        "- {data: digits-attributes, partition: {kind: iid, clients: 2, held_out: 1}, models: mlp-small}\n"
        "method: local\ntraining: {rounds: 1}\nengine: {workers: 1}\n"
    )
    asked = Experiment.load(file)
    assert asked.portable
    result = compare_experiments({"local": asked}, [0], tmp_path / "out")
    folder = result.folder / "local-seed0"
    assert Experiment.load(folder / "config.yaml").to_yaml() == (folder / "config.yaml").read_text()
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert not {"data", "partition"} & set(written)
    split = json.loads((folder / "split.json").read_text())
    assert [(group["data"], group["clients"]) for group in split["groups"]] == [
        ("digits", 1), ("digits-attributes", 2)
    ]  # fmt: skip
    assert split["held_out"] in (["1"], ["2"])
    assert [len(client["counts"]) for client in split["clients"]] == [10, 10, 10]
    before = metrics(folder)
    (folder / "summary.json").unlink()
    resume(folder)
    assert metrics(folder) == before


def test_groups_that_name_the_same_data_share_it_and_deal_it_anew():
    group = {"data": "digits", "partition": {"kind": "iid", "clients": 2}, "models": "mlp-small"}
    asked = mixed(federation=[group, group], method="fedavg", models={"rep_dim": 8})
    data = asked.load_data()
    assert data[0] is data[1]
    federation = asked.build(data)
    clients = [federation.clients.build_client(client) for client in ("0", "2")]
    assert clients[0].source is clients[1].source
    assert federation.clients.kind("0") != federation.clients.kind("2")
    assert not np.array_equal(federation.split["0"].train, federation.split["2"].train)
    played = Played(federation)
    assert not played.round(federation.population.ids).failures


def test_clients_of_one_kind_of_task_keep_their_data_apart():
    """Two data sets of one task under one method: whoever holds a live client reads its own rows."""
    inverted = replace(few("digits"), x=1 - few("digits").x)
    group = {"partition": PARTITION, "models": "mlp-small"}
    federation = mixed(federation=[{"data": few("digits"), **group}, {"data": inverted, **group}]).build()
    engine = SerialEngine(federation.clients)
    seen = {client: engine.seats.sit(client, None).source.x for client in ("0", "2", "1", "3")}
    assert torch.equal(seen["0"], few("digits").x)
    assert torch.equal(seen["2"], inverted.x)
    assert seen["1"] is seen["0"]
    assert seen["3"] is seen["2"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "fedavg"}, "fedavg needs clients with the same task; client 2 has multi-label"),
        ({"method": "fedproto"}, "fedproto learns from one class per sample; client 2 has multi-label"),
        (
            {"federation": [{"data": "digits", "models": "cnn1"}]},
            "the key 'federation.0.partition' is missing",
        ),
        ({"federation": [{**groups()[0], "model": 3}]}, "unknown key 'federation.0.model'; did you mean"),
        (
            {"federation": [{"partition": {"kind": "iid"}}]},
            "the key 'federation.0.partition.clients' is missing",
        ),
        ({"partition": PARTITION}, "partition cannot be used beside federation"),
        ({"data": "digits"}, "data cannot be used beside federation"),
        ({"models": {"pool": "cnn1"}}, "models cannot be used beside federation"),
        ({"models": {"rep_dims": 3}}, "unknown key 'models.rep_dims'; did you mean 'rep_dim'"),
        ({"federation": []}, "the key 'partition' is missing"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(changes, sentence):
    with pytest.raises(ConfigError) as error:
        mixed(**changes).build()
    assert str(error.value).startswith(sentence)


def test_methods_of_classes_refuse_one_task_of_another_kind():
    values = {"data": few("digits-segments"), "partition": PARTITION, "models": "conv-dense"}
    for method in ("fedproto", "fedgh", "fedre"):
        with pytest.raises(ConfigError, match=f"{method} learns from one class per sample"):
            Experiment.make(**values, method=method).build()
    for method in ("fedmrl", "fedin", "fedmd"):  # scores of pixels need more than the features
        with pytest.raises(
            ConfigError, match=f"{method} learns from scores that follow from the features alone"
        ):
            Experiment.make(**values, method=method, public={"data": few("digits")}).build()
    assert Experiment.make(**values, method="fedavg").build().population.task.kind == "segmentation"


def test_two_groups_cannot_have_a_client_of_one_name():
    nothing = np.zeros(0, dtype=np.int64)
    split = Split.of([ClientSplit("a", np.arange(9), nothing, nothing)])
    group = {"data": few("digits"), "partition": split, "models": "mlp-small"}
    with pytest.raises(DataError, match="two groups of the federation have a client 'a'"):
        mixed(federation=[group, group]).build()


class Doubling(Method):
    """Trains twice as long as Local; for a comparison in which something differs."""

    tasks = "any"

    def round(self, server, clients):
        clients.ask(self.train)

    @client_step
    def train(self, client):
        fit(client, self.loss, streams={"data": client.batches(epochs=2)})


def test_a_comparison_shows_each_client_by_its_own_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(Doubling, "name", "doubling")
    monkeypatch.setitem(registry, "doubling", Doubling)
    short = {"training": TRAINING | {"rounds": 1, "participation": 1.0}, "checkpoint": {"every": "never"}}
    experiments = {name: mixed(method=name, **short) for name in ("local", "doubling")}
    result = compare_experiments(experiments, [0, 1], tmp_path / "out")
    comparison = result.comparison
    assert list(comparison["metrics"].values()) == [
        *["accuracy"] * 2, *["mean_ap"] * 2, *["mean_iou"] * 2, *["accuracy"] * 2
    ]  # fmt: skip
    means = {
        (name, seed): read_json(result.folder / f"{name}-seed{seed}" / "summary.json")["accuracy"][
            "per_client"
        ]
        for name in experiments
        for seed in (0, 1)
    }
    gains = []
    for seed in (0, 1):
        local, other = means["local", seed], means["doubling", seed]
        gains.append(
            np.mean([100 * (other[one] - local[one]) / local[one] for one in local if local[one] > 0])
        )
    entries = {entry["method"]: entry for entry in comparison["methods"]}
    assert entries["doubling"]["gain"] == pytest.approx(np.mean(gains), abs=1e-3)
    assert entries["local"]["gain"] == 0
    both = [means["doubling", seed]["4"] for seed in (0, 1)]
    assert entries["doubling"]["per_client"]["4"] == pytest.approx(np.mean(both), abs=1e-5)
    shown = plain(comparison_sheet(comparison))
    assert "score %" in shown
    assert "Δ %" in shown
    assert "inferred, not published" in shown
    by_client = clients_sheet(comparison)
    assert by_client is not None
    assert [row[1] for row in by_client.rows][3:6] == ["mean AP", "mean IoU", "mean IoU"]
    page = (result.folder / "comparison.html").read_text()
    assert "Client by client" in page
    assert "mean IoU" in page
    report = (result.folder / "local-seed0" / "report.html").read_text()
    assert "Score over rounds" in report
    assert "mean IoU" in report


def test_the_relative_gain_by_hand():
    local = {"0": {"a": 0.5, "b": 0.2, "c": 0.0}, "1": {"a": 0.4}}
    other = {"0": {"a": 0.6, "b": 0.1, "c": 0.3}, "1": {"a": 0.5}}
    assert relative_gain(other, local) == pytest.approx(((20 - 50) / 2 + 25) / 2)
    assert relative_gain(other, {"0": {"c": 0.0}}) is None


def test_classification_alone_is_shown_as_before(tmp_path):
    values = {"data": few("digits"), "partition": PARTITION, "models": "mlp-small", "training": {"rounds": 1}}
    result = run(Experiment.make(**values, method="local"), out=tmp_path / "run")
    assert "metrics" not in result.summary["accuracy"]
    assert str(result).startswith("local: accuracy")
    report = (result.folder / "report.html").read_text()
    assert "Accuracy over rounds" in report
    assert "measured by" not in report
