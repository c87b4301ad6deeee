"""The losses and measures of tasks, against scikit-learn and against numbers worked out by hand."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    jaccard_score,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
)

from potluck import run
from potluck.core.client import Client
from potluck.core.rng import Rng
from potluck.core.streams import Source
from potluck.core.task import Task
from potluck.core.task_kinds import macro_f1, mean_average_precision, mean_iou, recalls_at, task_kind
from potluck.data import DataConfig, load
from potluck.engine.evaluation.examined import score_of
from potluck.engine.evaluation.measuring import measure
from potluck.errors import ConfigError, DataError, ModelError
from potluck.models import build
from potluck.models.zoo.dense import MapsHead
from potluck.testing.cpu_capture import Tape
from potluck.training.collect import collect, collecting_with

MULTI = Task("multi-label", 3, (1, 8, 8))
PIXELS = Task("segmentation", 2, (1, 8, 8))
PAIRS = Task("retrieval", 4, (64 + 3,), vocabulary=9, image=(1, 8, 8))


@pytest.mark.parametrize("rounding", [1, 12])  # one digit: many scores are equal
def test_average_precision_and_f1_are_scikit_learns(rounding):
    draw = Rng(3).numpy()
    scores, labels = draw.normal(size=(40, 5)).round(rounding), draw.integers(2, size=(40, 5))
    found = mean_average_precision(torch.tensor(scores), torch.tensor(labels))
    assert float(found) == pytest.approx(average_precision_score(labels, scores, average="macro"))
    answers = torch.tensor(scores) > 0
    expected = f1_score(labels, answers.numpy(), average="macro", zero_division=0)
    assert float(macro_f1(answers, torch.tensor(labels) > 0)) == pytest.approx(expected)


def test_a_label_that_nobody_has_is_left_out_of_the_precision():
    scores, labels = torch.tensor([[0.9, 0.1], [0.2, 0.4]]), torch.tensor([[0, 0], [1, 0]])
    assert float(mean_average_precision(scores, labels)) == 0.5
    assert math.isnan(mean_average_precision(scores, torch.zeros(2, 2)))


@pytest.mark.parametrize("shift", [0.0, 4e4])  # far from zero a sum of squares keeps no digit of the variance
@pytest.mark.parametrize("outputs", [1, 3])
def test_measures_of_regression_are_scikit_learns(outputs, shift):
    draw = Rng(5).numpy()
    y = (draw.normal(size=(50, outputs)) + shift).astype(np.float32)
    scores = (y + 0.3 * draw.normal(size=y.shape)).astype(np.float32)
    task = Task("regression", outputs, (8,))
    found = task.rules.conclude(task.measure(torch.tensor(scores), torch.tensor(y)))
    assert tuple(found) == task.rules.told
    wide = scores.astype(np.float64), y.astype(np.float64)
    assert float(found["r2"]) == pytest.approx(r2_score(wide[1], wide[0]), rel=1e-9)
    assert float(found["mse"]) == pytest.approx(mean_squared_error(*wide), rel=1e-9)
    assert float(found["mae"]) == pytest.approx(mean_absolute_error(*wide), rel=1e-9)


def test_r2_is_undefined_where_nothing_varies():
    def r2(labels):
        task, y = Task("regression", len(labels[0]), (8,)), torch.tensor(labels)
        return float(task.rules.conclude(task.measure(y + 0.5, y))["r2"])

    assert math.isnan(r2([[3.0]]))
    assert math.isnan(r2([[0.1], [0.1], [0.1]]))
    assert r2([[3.0, 0.0], [3.0, 1.0]]) == 0.0  # of the output that varies: 1 − 0.5 / 0.5


def test_a_loss_of_regression_weighs_samples_and_takes_labels_of_one_column():
    task, scores = Task("regression", 1, (8,)), torch.tensor([[1.0], [2.0], [9.0]])
    y = torch.tensor([0.0, 4.0, 0.0])
    assert float(task.loss(scores, y)) == pytest.approx((1 + 4 + 81) / 3)
    assert float(task.loss(scores, y[:, None], torch.tensor([1.0, 1.0, 0.0]))) == 2.5


def test_mean_iou_is_scikit_learns_over_the_classes_that_appear():
    draw = Rng(4).numpy()
    truth, answers = draw.integers(3, size=200), draw.integers(3, size=200)
    task = Task("segmentation", 5, (1, 10, 20))
    scores = F.one_hot(torch.tensor(answers), 5).T.reshape(1, 5, 10, 20).float()
    found = task.measure(scores, torch.tensor(truth).view(1, 10, 20))
    expected = jaccard_score(truth, answers, average="macro", labels=[0, 1, 2])
    assert float(mean_iou(found["confusion"])) == pytest.approx(expected)
    assert float(task.rules.conclude(found)["pixel_accuracy"]) == pytest.approx((truth == answers).mean())


@pytest.mark.parametrize(
    ("task", "scores", "y"),
    [
        (Task("classification", 3, (2,)), torch.eye(3), torch.arange(3)),
        (MULTI, torch.eye(3), torch.eye(3)),
        (PIXELS, torch.rand(2, 2, 8, 8), torch.zeros(2, 8, 8)),
        (PAIRS, torch.rand(12, 8), torch.zeros(12)),
    ],
)
def test_a_measure_tells_what_it_says_it_tells(task, scores, y):
    assert tuple(task.rules.conclude(task.measure(scores, y))) == task.rules.told


def test_recalls_are_shares_of_ranks():
    near = torch.eye(4)
    shifted = torch.tensor([[0, 1.0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]])
    assert [float(value) for value in recalls_at(near, near, (1, 2))] == [1, 1]
    # Own answers: one of four that are equally far; twice one of three behind one; one of two that are near.
    expected = [(1 / 4 + 0 + 0 + 1 / 2) / 4, (1 / 2 + 1 / 3 + 1 / 3 + 1) / 4]
    assert [float(value) for value in recalls_at(near, shifted, (1, 2))] == pytest.approx(expected)
    alike = torch.ones(4, 3)
    assert [float(value) for value in recalls_at(alike, alike, (1, 3, 10))] == [0.25, 0.75, 1]


def test_losses_by_hand():
    scores, y = torch.tensor([[0.0, 2.0, -1.0]]), torch.tensor([[1, 0, 0]], dtype=torch.uint8)
    binary = [math.log(2), math.log(1 + math.exp(2)), math.log(1 + math.exp(-1))]
    assert float(MULTI.loss(scores, y)) == pytest.approx(sum(binary) / 3, rel=1e-5)
    pixels, ink = torch.zeros(1, 2, 8, 8), torch.ones(1, 8, 8, dtype=torch.uint8)
    assert float(PIXELS.loss(pixels, ink)) == pytest.approx(math.log(2), rel=1e-5)
    pairs = torch.tensor([[1.0, 0, 3, 0], [0, 2, 0, 1]])  # image beside caption, both of any length
    expected = math.log(1 + math.exp(-1 / 0.07))
    assert float(PAIRS.loss(pairs, torch.zeros(2))) == pytest.approx(expected, abs=1e-6)


def test_a_weight_of_zero_leaves_a_sample_out():
    scores, y = torch.randn(3, 3, generator=Rng(1).generator()), torch.eye(3)
    weighted = MULTI.loss(scores, y, torch.tensor([1.0, 0.0, 1.0]))
    assert float(weighted) == pytest.approx(float(MULTI.loss(scores[[0, 2]], y[[0, 2]])), rel=1e-5)


def test_tasks_go_through_json():
    for task in (MULTI, PIXELS, PAIRS):
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert "image" not in MULTI.to_json()
    with pytest.raises(ConfigError, match="there is no task 'guessing'"):
        task_kind("guessing")


def test_models_for_pixels_and_pairs():
    assert build("conv-dense", PIXELS)(torch.zeros(3, 1, 8, 8)).shape == (3, 2, 8, 8)
    assert build("conv-dense", PIXELS, rep_dim=5).features(torch.zeros(3, 1, 8, 8)).shape == (3, 5)
    assert build("dual-small", PAIRS, rep_dim=6)(torch.zeros(3, 67)).shape == (3, 4)
    with pytest.raises(ModelError, match="models that fit: conv-dense"):
        build("conv-small", PIXELS)
    with pytest.raises(ModelError, match="even rep_dim"):
        build("dual-small", PAIRS, rep_dim=7)


def test_the_head_of_pixels_sees_the_representation():
    model = build("conv-dense", PIXELS)
    model(torch.randn(2, 1, 8, 8, generator=Rng(2).generator())).sum().backward()
    assert all(bool(value.grad.any()) for value in (model.conv1.weight, model.fc.weight))


def test_a_head_over_maps_by_hand():
    with Rng(5).as_default():
        head = MapsHead([2, 3], 4, 5, dropout=0.5)
        fine, whole = torch.randn(6, 2, 4, 8), torch.randn(6, 3, 1, 1)
    first, last = (level.weight[:, :, 0, 0] for level in head.levels)
    levels = torch.einsum("oc,nchw->nohw", first, fine), (whole[:, :, 0, 0] @ last.T)[:, :, None, None]
    mixed = torch.einsum(
        "oc,nchw->nohw", head.mix.weight[:, :, 0, 0], torch.cat(torch.broadcast_tensors(*levels), 1)
    )
    mean, var = mixed.mean((0, 2, 3), keepdim=True), mixed.var((0, 2, 3), correction=0, keepdim=True)
    kept = ((mixed - mean) / (var + 1e-5).sqrt()).relu()
    expected = torch.einsum("oc,nchw->nohw", head.classify.weight[:, :, 0, 0], kept)
    head.dropout.eval()
    torch.testing.assert_close(head([fine, whole]), expected + head.classify.bias[:, None, None])


def test_attributes_follow_the_class():
    data = load("digits-attributes")
    assert data.y[data.labels == 7].unique(dim=0).tolist() == [[0, 1, 0, 1]]
    assert data.y[data.labels == 8].unique(dim=0).tolist() == [[1, 0, 1, 1]]


def test_segments_are_where_the_digit_is():
    data = load("digits-segments")
    ink = load("digits").x[:, 0] > 0.25
    assert torch.equal((data.y > 0).sum((1, 2)), ink.sum((1, 2)))
    assert torch.equal(data.y.amax((1, 2)), data.labels + 1)
    assert bool((data.x[:, 0][data.y > 0] > 0.25).all())
    with pytest.raises(DataError, match="leave out augment"):
        DataConfig(name="digits-segments", augment=["flip"]).preparation(data)


def test_captions_name_the_class_unless_they_are_shuffled():
    true, control = load("digits-captions"), load("digits-captions", shuffled=True)
    words = {label: set(true.x[true.labels == label][:, 64:].flatten().tolist()) for label in range(10)}
    names = [
        words[label] - set.union(*(words[other] for other in range(10) if other != label)) for label in words
    ]
    assert all(len(name) == 1 for name in names)
    told = [
        any(token in names[label] for token in row)
        for label, row in zip(control.labels.tolist(), control.x[:, 64:].tolist(), strict=True)
    ]
    assert np.mean(told) < 0.2
    assert torch.equal(true.x[:, 64:].sort(0).values, control.x[:, 64:].sort(0).values)
    assert torch.equal(true.x[:, :64], control.x[:, :64])


class Oracle:
    """A method that answers from a table, whatever the batch."""

    def __init__(self, answers):
        self.answers = answers

    def predict(self, client, batch, mode):
        return (self.answers if mode == "plain" else self.answers.roll(1, 1))[batch.id]


@pytest.mark.parametrize("data", ["digits-attributes", "digits-segments", "digits-captions"])
def test_a_split_read_in_batches_is_measured_as_a_whole(data, monkeypatch):
    client, answers = _client(data)
    whole, _ = measure(Oracle(answers), client, ("plain", "turned"), "own")
    monkeypatch.setattr("potluck.engine.evaluation.measuring.collect", partial(collect, batch_size=7))
    parts, _ = measure(Oracle(answers), client, ("plain", "turned"), "own")
    assert whole.keys() == parts.keys()
    assert whole["plain/test/" + SCORES[data]] != whole["turned/test/" + SCORES[data]]
    for name in whole:
        if data != "digits-captions" or not name.endswith("loss"):  # contrastive within a batch
            assert float(parts[name]) == pytest.approx(float(whole[name]), rel=1e-5), name
    with collecting_with(Tape().collect):
        measure(Oracle(answers), client, ("plain", "turned"), "own")
        client.enter(2, Rng(0), {})
        again, _ = measure(Oracle(answers), client, ("plain", "turned"), "own")
    assert {name: float(value) for name, value in again.items()} == {n: float(v) for n, v in parts.items()}


SCORES = {"digits-attributes": "mean_ap", "digits-segments": "mean_iou", "digits-captions": "mean_recall"}


def _client(name):
    data = load(name)
    client = Client(data.task, Source(data.x, data.y))
    client.rows = {"validation": np.arange(0), "test": np.arange(40, 80)}
    answers = torch.randn(80, *data.task.scores, generator=Rng(5).generator())
    return client, answers


def test_a_log_names_the_measure_and_classification_stays_as_it_was(tmp_path):
    common = {"method": "local", "training": {"rounds": 1}, "engine": {"device": "cpu", "workers": 1}}
    partition = {"kind": "iid", "clients": 2, "validation": 0.1}
    attributes = run(
        data="digits-attributes", partition=partition, models="mlp-small", out=tmp_path / "a", **common
    )
    line = json.loads((attributes.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert list(line["test"]) == ["score", "metric", "mean_ap", "f1", "loss", "samples"]
    assert line["test"]["metric"] == "mean_ap"
    assert (
        score_of(line["test"]) == line["test"]["mean_ap"] == attributes.summary["accuracy"]["per_client"]["1"]
    )
    plain = run(data="digits", partition=partition, models="mlp-small", out=tmp_path / "b", **common)
    line = json.loads((plain.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert list(line["test"]) == ["accuracy", "loss", "samples"]
