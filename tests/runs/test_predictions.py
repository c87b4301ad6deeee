"""Predictions that a run keeps, and what follows from them."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import confusion_matrix

import potluck
from potluck.errors import ConfigError, RunError
from potluck.report.log import read_metrics
from potluck.report.scores import summarise
from potluck.report.targets import check_targets, run_costs
from potluck.runs.predictions import confusion, read_predictions

COLUMNS = ["round", "client", "moment", "mode", "split", "row", "label", "prediction", "scores"]


def run(folder, predictions="last", **changes):
    settings = {
        "data": "digits",
        "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 3, "validation": 0.2},
        "models": ["mlp-small"],
        "method": "fedproto",
        "training": {"rounds": 2},
        "evaluate": {"when": ["after_aggregation"], "modes": "all", "predictions": predictions},
        "engine": {"device": "cpu", "workers": 1},
    }
    return potluck.run(**settings | changes, out=folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return run(tmp_path_factory.mktemp("kept") / "run", "all")


def test_predictions_are_the_rows_of_the_split_and_give_the_accuracy_of_the_log(kept):
    frame = kept.predictions()
    assert list(frame.columns) == COLUMNS
    assert sorted(frame["round"].unique()) == [1, 2]
    split = {part["id"]: part for part in json.loads((kept.folder / "split.json").read_text())["clients"]}
    labels = potluck.Experiment.load(kept.folder / "config.yaml").load_data().y.numpy()
    logged = [json.loads(line) for line in (kept.folder / "metrics.jsonl").read_text().splitlines()]
    for line in logged:
        for part in ("test", "validation"):
            chosen = (frame["round"] == line["round"]) & (frame["client"] == line["client"])
            own = frame[chosen & (frame["mode"] == line["mode"]) & (frame["split"] == part)]
            assert own["row"].tolist() == split[line["client"]][part]
            assert own["label"].tolist() == labels[own["row"]].tolist()
            assert round((own["label"] == own["prediction"]).mean(), 6) == line[part]["accuracy"]
            assert np.stack(own["scores"]).argmax(1).tolist() == own["prediction"].tolist()


def test_confusion_matrices_are_those_of_scikit_learn(kept):
    frame = kept.predictions(round=2)
    frame = frame[(frame["mode"] == "prototype") & (frame["split"] == "test")]
    found = kept.confusion()
    assert list(found) == ["0", "1", "2"]
    for client, table in found.items():
        own = frame[frame["client"] == client]
        wanted = confusion_matrix(own["label"], own["prediction"], labels=range(10))
        assert (table.to_numpy() == wanted).all()
    head = kept.confusion(mode="head", split="validation", round=1)
    assert not all(head[client].equals(found[client]) for client in found)


def test_classes_of_a_confusion_matrix_have_their_names(tmp_path):
    labels, x = np.arange(60) % 3, np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
    data = potluck.from_arrays(x, labels, class_names=["ill", "well", "unclear"])
    result = run(tmp_path / "run", data=data, models=["mlp-small"], partition={"kind": "iid", "clients": 2})
    table = result.confusion()["0"]
    assert list(table.index) == list(table.columns) == ["ill", "well", "unclear"]
    assert (table.index.name, table.columns.name) == ("label", "prediction")
    named = potluck.open(tmp_path / "run").confusion()["0"]
    assert named.equals(table)


def test_only_those_of_the_last_round_stay_where_nothing_else_is_said(tmp_path):
    result = run(tmp_path / "run", True)
    assert [file.name for file in (tmp_path / "run" / "predictions").iterdir()] == ["round-000002.parquet"]
    assert set(result.predictions()["round"]) == {2}


def test_a_flipped_bit_is_found(kept, tmp_path):
    (tmp_path / "predictions").mkdir()
    whole = (kept.folder / "predictions/round-000002.parquet").read_bytes()
    column = pq.ParquetFile(io.BytesIO(whole)).metadata.row_group(0).column(8)
    assert column.path_in_schema.startswith("scores")
    for place in range(column.data_page_offset + 100, column.data_page_offset + 600, 50):
        flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        (tmp_path / "predictions/round-000002.parquet").write_bytes(flipped)
        with pytest.raises(RunError, match=r"round-000002\.parquet is damaged.*put a whole copy of it back"):
            read_predictions(tmp_path)


def test_a_file_that_becomes_huge_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "predictions").mkdir()
    table = pa.table({"round": [1] * 5000, "client": ["x" * 2000] * 5000})
    pq.write_table(table, tmp_path / "predictions" / "round-000001.parquet")
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "1000000")
    with pytest.raises(RunError, match=r"round-000001\.parquet would take .* in memory"):
        read_predictions(tmp_path)


def test_what_is_not_there_is_said(kept, tmp_path):
    with pytest.raises(RunError, match="has no predictions of round 7; kept: 1, 2"):
        read_predictions(kept.folder, 7)
    with pytest.raises(RunError, match=r"for the mode 'heat'; did you mean 'head'"):
        confusion(kept.folder, mode="heat")
    with pytest.raises(RunError, match=r"has kept no predictions; run it with evaluate"):
        read_predictions(tmp_path)
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions" / "round-000001.parquet").write_text("no")
    with pytest.raises(RunError, match="is damaged, or was not written by potluck"):
        read_predictions(tmp_path)
    with pytest.raises(ConfigError, match=r"evaluate.predictions"):
        run(tmp_path / "other", "some")


# --- a metric that is better low ------------------------------------------------------------------------


def log(folder, values, higher):
    """A log of two clients judged by `mine`, one value per round and client."""
    folder.mkdir()
    facts = {"mine": {"higher_is_better": higher, "low": 0.0, "high": None}}
    (folder / "environment.json").write_text(json.dumps({"metrics": facts}))
    told = [
        {"round": at, "client": str(client), "when": "after_aggregation", "mode": "model"}
        | {
            part: {"score": one, "metric": "mine", "mine": one, "samples": 5}
            for part in ("test", "validation")
        }
        for at, ones in enumerate(values, 1)
        for client, one in enumerate(ones)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return folder


@pytest.mark.parametrize(
    ("higher", "best", "worst", "first"), [(True, 1, 1.0, 1), (False, 2, 4.0, 2)], ids=["high", "low"]
)
def test_best_worst_and_reached_follow_the_direction(tmp_path, higher, best, worst, first):
    folder = log(tmp_path / "run", [(6.0, 8.0), (1.0, 2.0), (1.0, 4.0)], higher)
    block = summarise(folder)
    assert block["rounds"] == {"last": 3, "best_by_validation": best, "best_by_test": best}
    assert block["worst_tenth"] == worst
    assert block["metric"] == "mine"
    assert block["metric_facts"]["mine"]["higher_is_better"] is higher
    [cost] = run_costs(folder, [3.0])
    assert cost["round"] == first
    assert read_metrics(folder).facts.higher_is_better is higher


def test_targets_are_checked_against_the_range_of_the_metric(tmp_path):
    facts = read_metrics(log(tmp_path / "run", [(6.0, 8.0)], higher=False)).facts
    check_targets([3.0, 0.0], facts)
    with pytest.raises(ConfigError, match=r"the target -1 is not a score; give numbers from 0 to inf"):
        check_targets([-1.0], facts)


def test_the_judge_is_the_headline_and_accuracy_a_further_measure(tmp_path):
    settings = {"when": ["after_aggregation"], "judge": "log_loss"}
    result = run(tmp_path / "run", evaluate=settings, metrics=["log_loss"])
    block = result.summary["accuracy"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = {line["client"]: line["test"]["log_loss"] for line in lines if line["round"] == 2}
    assert block["metric"] == "log_loss"
    assert block["worst_tenth"] == pytest.approx(max(last.values()), abs=1e-6)
    assert {"accuracy"} == set(block["further"])
