"""Metrics beside those of the task: the numbers of scikit-learn, and nothing wrong without a word."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import potluck
from potluck.core import own_metrics as own_metrics_module
from potluck.core.metrics import MetricFacts, common_facts, metric_facts
from potluck.core.own_metrics import PLAIN, MetricSettings, own_metrics
from potluck.core.task import Task
from potluck.errors import ConfigError, RunError
from potluck.testing.cpu_capture import Tape
from potluck.training.collect import collecting_with

THREE = Task("classification", 3, (4,))
TWO = Task("classification", 2, (4,))
SCORES = torch.tensor(
    [[2.0, 0.5, 0.1], [0.2, 1.5, 0.3], [0.1, 0.9, 0.8], [1.0, 0.2, 0.4], [0.3, 0.1, 2.2], [0.6, 0.7, 0.2]]
)
LABELS = torch.tensor([0, 1, 2, 0, 2, 0])
ANSWERS = SCORES.argmax(1).numpy()
SHARES = SCORES.double().softmax(1).numpy()


def value(name, scores=SCORES, labels=LABELS, task=THREE, **settings):
    return made(name, task, **settings).value(scores, labels, task)


def made(name, task=THREE, **settings):
    [metric] = own_metrics([MetricSettings(name=name, **settings)], {"0": task}, Path()).values()
    return metric


def run(folder, **changes):
    settings = {
        "data": "digits",
        "partition": {"kind": "iid", "clients": 3, "validation": 0.2},
        "models": ["mlp-small"],
        "method": "fedavg",
        "training": {"rounds": 2},
        "metrics": ["macro_f1", "auroc"],
        "evaluate": {"when": ["after_aggregation"]},
        "engine": {"device": "cpu", "workers": 1},
    }
    return potluck.run(**settings | changes, out=folder)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- the numbers of scikit-learn and torchmetrics -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("macro_f1", sk.f1_score(LABELS, ANSWERS, average="macro")),
        ("micro_f1", sk.f1_score(LABELS, ANSWERS, average="micro")),
        ("weighted_f1", sk.f1_score(LABELS, ANSWERS, average="weighted")),
        ("macro_precision", sk.precision_score(LABELS, ANSWERS, average="macro")),
        ("macro_recall", sk.recall_score(LABELS, ANSWERS, average="macro")),
        ("macro_jaccard", sk.jaccard_score(LABELS, ANSWERS, average="macro")),
        ("balanced_accuracy", sk.balanced_accuracy_score(LABELS, ANSWERS)),
        ("cohen_kappa", sk.cohen_kappa_score(LABELS, ANSWERS)),
        ("matthews_corrcoef", sk.matthews_corrcoef(LABELS, ANSWERS)),
        ("auroc", sk.roc_auc_score(LABELS, SHARES, multi_class="ovr")),
        ("log_loss", sk.log_loss(LABELS, SHARES)),
        ("top2_accuracy", sk.top_k_accuracy_score(LABELS, SCORES, k=2)),
        ("sklearn:hamming_loss", sk.hamming_loss(LABELS, ANSWERS)),
    ],
)
def test_names_give_the_numbers_of_scikit_learn(name, wanted):
    assert value(name) == pytest.approx(float(wanted), rel=1e-12)


def test_two_classes_are_ranked_by_the_second_as_scikit_learn_does():
    scores, labels = SCORES[:, :2], torch.tensor([0, 1, 1, 0, 1, 0])
    shares = scores.double().softmax(1)[:, 1].numpy()
    assert value("auroc", scores, labels, TWO) == pytest.approx(sk.roc_auc_score(labels, shares))
    wanted = sk.average_precision_score(labels, shares)
    assert value("average_precision", scores, labels, TWO) == pytest.approx(wanted)


def test_a_class_that_a_client_lacks_is_left_out_of_a_mean_over_classes():
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    wanted = np.mean([sk.roc_auc_score(labels == one, SHARES[:, one]) for one in (0, 1)])
    assert value("auroc", labels=labels) == pytest.approx(wanted)
    assert value("log_loss", labels=labels) == pytest.approx(sk.log_loss(labels, SHARES, labels=[0, 1, 2]))


def test_labels_that_come_several_at_a_time():
    task, labels = Task("multi-label", 3, (4,)), torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]])
    scores = torch.tensor([[1.0, -1.0, 0.2], [0.3, 0.9, 0.5], [-0.1, 0.2, -2.0]])
    answers = (scores > 0).int()
    assert value("macro_f1", scores, labels, task) == pytest.approx(
        sk.f1_score(labels, answers, average="macro")
    )
    assert value("auroc", scores, labels, task) == pytest.approx(sk.roc_auc_score(labels, scores))


def test_pixels_are_counted_one_by_one():
    task = Task("segmentation", 2, (1, 1, 3))
    scores = torch.tensor([[[[2.0, 0.0, 0.0]], [[0.0, 1.0, 1.0]]], [[[0.0, 3.0, 0.0]], [[1.0, 0.0, 1.0]]]])
    labels = torch.tensor([[[0, 1, 0]], [[1, 0, 1]]])
    flat = labels.flatten(), scores.argmax(1).flatten()
    assert value("macro_f1", scores, labels, task) == pytest.approx(sk.f1_score(*flat, average="macro"))


def test_metrics_of_torchmetrics_know_the_classes():
    pytest.importorskip("torchmetrics")
    f1 = value("torchmetrics:MulticlassF1Score")
    assert f1 == pytest.approx(sk.f1_score(LABELS, ANSWERS, average="macro"), rel=1e-6)
    assert value("torchmetrics:F1Score", options={"average": "micro"}) == pytest.approx(
        sk.f1_score(LABELS, ANSWERS, average="micro"), rel=1e-6
    )
    assert made("torchmetrics:F1Score").facts == MetricFacts("F1Score")
    sure, right = torch.tensor([[20.0, 0.0], [20.0, 0.0]]), torch.tensor([0, 1])
    assert value("expected_calibration_error", sure, right, TWO) == pytest.approx(0.5, abs=1e-6)


# --- what is undefined, and what cannot work ------------------------------------------------------------


@pytest.mark.parametrize("name", ["auroc", "average_precision", "cohen_kappa", "matthews_corrcoef"])
def test_one_class_among_the_labels_leaves_a_metric_undefined(name):
    assert math.isnan(value(name, labels=torch.zeros(6, dtype=torch.long)))


def test_an_own_function_says_undefined_by_none_or_an_error_of_values():
    assert math.isnan(value(lambda scores, labels: None))
    own = made(lambda scores, labels: 1 / (len(labels) - 6), called="own")
    assert math.isnan(own.value(SCORES, LABELS, THREE))
    broken = made(lambda scores, labels: {12: 1.0}[len(labels)], called="own")
    with pytest.raises(RunError, match="KeyError: 6"):
        broken.value(SCORES, LABELS, THREE)


def test_an_undefined_metric_is_null_for_that_client_and_said_once(tmp_path):
    class Heard(potluck.Observer):
        def __init__(self):
            self.notices = []

        def notice(self, sentence):
            self.notices.append(sentence)

    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y = np.array([0] * 20 + [0, 1] * 20)
    split = {"0": range(20), "1": range(20, 60)}
    rows = {c: {"train": [*r][:10], "validation": [], "test": [*r][10:]} for c, r in split.items()}
    (tmp_path / "split.json").write_text(json.dumps({"clients": [{"id": c} | r for c, r in rows.items()]}))
    heard = Heard()
    run(
        tmp_path / "run",
        data=potluck.from_arrays(x, y),
        partition={"file": tmp_path / "split.json"},
        observers=[heard],
    )
    tests = {(line["round"], line["client"]): line["test"] for line in lines(tmp_path / "run")}
    assert [tests[at, "0"]["auroc"] for at in (1, 2)] == [None, None]
    assert all(isinstance(tests[at, "1"]["auroc"], float) for at in (1, 2))
    assert [one for one in heard.notices if "auroc" in one] == [
        "the metric auroc is undefined for some clients and null in the log: 0"
    ]


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (["macro_f2"], "there is no metric 'macro_f2'; did you mean 'macro_f1'?"),
        (["rmse"], "metrics: rmse does not fit the task of client 0: classification with 10 classes"),
        (["f1"], "; these fit: macro_f1, micro_f1, weighted_f1"),
        (["mean_iou"], "metrics: mean_iou does not fit the task of client 0"),
        (["top10_accuracy"], "top10_accuracy, which needs more than 10 classes, does not fit"),
        (["sklearn:f1_scores"], "scikit-learn has no metric 'f1_scores'; did you mean 'f1_score'?"),
        (["sklearn:f1_score"], "sklearn:f1_score fails on answers"),
        (["nowhere_at_all:mine"], "nowhere_at_all cannot be imported"),
        ([lambda scores: 1.0], "TypeError"),
        ([lambda scores, labels: "much"], "ValueError"),
        (["macro_f1", {"name": "sklearn:f1_score", "called": "macro_f1"}], "two are called 'macro_f1'"),
        ([{"name": "macro_f1", "options": {"average": "micro"}}], "options go with sklearn"),
        ([3], "give the name of a metric"),
        (["sklearn:zzzz"], "scikit-learn has no metric 'zzzz'; the nearest are "),
        (["nowhere.py:mine"], "nowhere.py; check the path of nowhere.py:mine"),
        ([{"name": lambda scores, labels: 1.0, "called": "correct"}], "'correct' has a meaning in the log"),
    ],
)
def test_a_metric_that_cannot_work_is_refused_in_one_sentence_before_the_run(tmp_path, metrics, sentence):
    with pytest.raises(ConfigError) as error:
        run(tmp_path / "run", metrics=metrics)
    assert sentence in str(error.value)
    assert len(str(error.value)) < 300
    assert "Errno" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "task",
    [Task("classification", 20_000, (4,)), Task("segmentation", 1000, (3, 500, 500))],
    ids=["classes", "pixels"],
)
def test_a_strangers_task_costs_no_memory_when_a_metric_is_tried(monkeypatch, task):
    monkeypatch.setattr(own_metrics_module, "_made_up", lambda *given: pytest.fail("gigabytes are made"))
    made("macro_f1", task)


def test_a_metric_is_tried_on_the_task_of_most_clients_with_all_its_classes():
    seen = []

    def look(scores, labels):
        seen.append((scores.shape, len(np.unique(labels))))
        return 0.5

    liar, honest = Task("classification", 90, (4,)), Task("segmentation", 21, (3, 5, 8))
    own_metrics([MetricSettings(name=look)], {"0": liar, "1": honest, "2": honest}, Path())
    assert seen == [((3, 21, 5, 8), 21)]


def test_a_package_that_is_missing_is_named_with_the_metric(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    for name in ("torchmetrics:F1Score", "expected_calibration_error"):
        with pytest.raises(ConfigError, match=f"metrics: {name} needs the package torchmetrics"):
            made(name)
    assert made("macro_f1")


def test_a_judge_that_nobody_is_measured_by_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluate.judge: no client is measured by 'macro_f2'.*'macro_f1'"):
        run(tmp_path / "run", evaluate={"judge": "macro_f2"})


# --- facts ----------------------------------------------------------------------------------------------


def test_facts_come_from_the_decorator_and_the_file_has_the_last_word(tmp_path):
    @potluck.metric(higher_is_better=False, low=0, high=float("inf"), takes="answers")
    def mistakes(answers, labels):
        return (answers != labels).sum()

    assert value(mistakes) == (LABELS.numpy() != ANSWERS).sum()
    assert made(mistakes).facts == MetricFacts("mistakes", False, 0, math.inf)
    assert made(mistakes, high=9).facts.high == 9
    stored = {"mistakes": made(mistakes).facts.to_json()}
    assert metric_facts("mistakes", stored) == MetricFacts("mistakes", False, 0, math.inf)


def test_every_plain_name_has_facts_of_its_own_name():
    assert all(metric.facts.name == name for name, metric in PLAIN.items())
    assert not metric_facts("log_loss").higher_is_better
    assert metric_facts("macro_f1").is_share
    assert not metric_facts("cohen_kappa").is_share


def test_a_mean_over_metrics_that_are_better_low_is_better_low():
    low = [metric_facts("mse"), metric_facts("mae")]
    assert not common_facts(low).higher_is_better
    assert common_facts([metric_facts("accuracy"), metric_facts("f1")]).is_share


# --- in a run -------------------------------------------------------------------------------------------


def test_metrics_change_nothing_else_in_the_log(tmp_path):
    whole = {"when": ["after_aggregation"], "predictions": True}
    run(tmp_path / "with", evaluate=whole)
    run(tmp_path / "without", metrics=[])
    more, less = lines(tmp_path / "with"), lines(tmp_path / "without")
    for line in more:
        for part in (line["test"], line["validation"]):
            assert 0 < part.pop("macro_f1") < 1
            assert 0 < part.pop("auroc") < 1
    assert more == less


def test_workers_and_resuming_give_the_same_bytes(tmp_path):
    class Stop(potluck.Observer):
        def round(self, end):
            raise KeyboardInterrupt

    extra = {"evaluate": {"judge": "auroc", "predictions": "all"}, "checkpoint": {"every": 0}}
    run(tmp_path / "one", **extra)
    run(tmp_path / "two", **extra | {"engine": {"device": "cpu", "workers": 2}})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "three", **extra, observers=[Stop()])
    potluck.resume(tmp_path / "three")
    for name in ("metrics.jsonl", "predictions/round-000001.parquet", "predictions/round-000002.parquet"):
        first = (tmp_path / "one" / name).read_bytes()
        assert first == (tmp_path / "two" / name).read_bytes()
        assert first == (tmp_path / "three" / name).read_bytes()


def test_captured_evaluation_gathers_the_same_scores(tmp_path):
    run(tmp_path / "eager", training={"rounds": 3})
    with collecting_with(Tape().collect):
        run(tmp_path / "captured", training={"rounds": 3})
    assert lines(tmp_path / "eager") == lines(tmp_path / "captured")


def test_a_function_named_by_file_is_portable_and_one_given_is_not(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(scores, labels):\n    return float((scores.argmax(1) == labels).mean())\n"
    )
    (tmp_path / "e.yaml").write_text(
        "data: digits\npartition: {kind: iid, clients: 2}\nmodels: mlp-small\nmethod: fedavg\n"
        "training: {rounds: 1}\nengine: {device: cpu, workers: 1}\n"
        "metrics: [macro_f1, {name: 'mine.py:mine', higher_is_better: false, high: .inf}]\n"
    )
    experiment = potluck.Experiment.load(tmp_path / "e.yaml")
    result = potluck.run(experiment, out=tmp_path / "run")
    assert experiment.portable
    again = potluck.Experiment.load(tmp_path / "run" / "config.yaml")
    assert again.metrics[1].high == math.inf
    assert again.metrics[0] == experiment.metrics[0]
    for line in lines(tmp_path / "run"):
        assert line["test"]["mine"] == pytest.approx(line["test"]["accuracy"], abs=1e-5)
    about = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert about["metrics"]["mine"] == {"higher_is_better": False, "low": 0.0, "high": None}
    assert result.summary["accuracy"]["metric_facts"]["mine"]["high"] is None
    given = experiment.variant(metrics=[lambda scores, labels: 0.5])
    assert not given.portable


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_metrics_on_a_gpu_are_those_of_the_predictions_kept(tmp_path):
    evaluate = {"when": ["after_aggregation"], "predictions": "all"}
    result = run(tmp_path / "run", training={"rounds": 4}, evaluate=evaluate, engine={"device": "cuda"})
    frame = result.predictions()
    for line in lines(tmp_path / "run"):
        for part in ("test", "validation"):
            at = (frame["round"] == line["round"]) & (frame["client"] == line["client"])
            own = frame[at & (frame["split"] == part)]
            found = sk.f1_score(own["label"], own["prediction"], average="macro", zero_division=0)
            assert line[part]["macro_f1"] == pytest.approx(found, rel=1e-7)
            assert line[part]["accuracy"] == pytest.approx(
                (own["label"] == own["prediction"]).mean(), abs=1e-6
            )
