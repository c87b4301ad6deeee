"""Folders of runs that nobody played, of any size."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import yaml

HEADLINE = {"when": "after_aggregation", "mode": "model"}


def make_run(folder, clients=3, rounds=3, predictions=False, evaluated=True, classes=10):
    """The files of a run with made-up scores; without a summary it is still running."""
    folder.mkdir(parents=True)
    rng, names = np.random.default_rng(0), [str(each) for each in range(clients)]
    config = {
        "data": {"name": "digits"},
        "method": {"name": "fedavg"},
        "training": {"rounds": rounds},
        "seed": 1,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    parts = [{"id": name, "train": [1, 2], "test": [3], "counts": [9] * classes} for name in names]
    split = {
        "hash": "e4ea" * 16,
        "class_names": [f"class {each}" for each in range(classes)],
        "clients": parts,
    }
    (folder / "split.json").write_text(json.dumps(split))
    with (folder / "metrics.jsonl").open("w") as log:
        for number in range(1, rounds * evaluated + 1):
            for name, score in zip(names, rng.random(clients).round(4).tolist(), strict=True):
                test = {"accuracy": score, "loss": 1.0, "samples": 20}
                log.write(json.dumps({"round": number, "client": name, **HEADLINE, "test": test}) + "\n")
    timings = (json.dumps({"round": number, "seconds": 0.1}) + "\n" for number in range(1, rounds + 1))
    (folder / "timing.jsonl").write_text("".join(timings))
    if predictions:
        write_predictions(folder, names, rounds, classes)
    return folder


def write_predictions(folder, names, round_, classes, label=None):
    """Predictions of 20 test samples per client, the first half of them right."""
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(20 * len(names), classes)).astype(np.float32)
    found = scores.argmax(1)
    wrong = np.arange(len(found)) % 20 >= 10
    size = len(found)
    told = {"moment": HEADLINE["when"], "mode": HEADLINE["mode"], "split": "test"}
    table = {
        "round": np.full(size, round_),
        "client": np.repeat(names, 20).tolist(),
        **{name: [value] * size for name, value in told.items()},
        "row": np.arange(size),
        "label": np.where(wrong, (found + 1) % classes, found) if label is None else np.full(size, label),
        "prediction": found,
        "scores": scores.tolist(),
    }
    write_table(folder, round_, table)


def write_outputs(folder, round_, labels, predictions):
    """Predictions of one sample per client that has several labels, or numbers."""
    size = len(labels)
    told = {"moment": HEADLINE["when"], "mode": HEADLINE["mode"], "split": "test"}
    scores = [one if isinstance(one, list) else [one] for one in predictions]
    table = {
        "round": [round_] * size,
        "client": [str(each) for each in range(size)],
        **{name: [value] * size for name, value in told.items()},
        "row": [*range(size)],
        **{"label": labels, "prediction": predictions, "scores": scores},
    }
    write_table(folder, round_, table)


def write_table(folder, round_, table):
    """Predictions as a file of a run."""
    (folder / "predictions").mkdir(exist_ok=True)
    parquet.write_table(pa.table(table), folder / "predictions" / f"round-{round_:06d}.parquet")
