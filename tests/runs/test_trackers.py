"""Trackers: what they are told, once each, and that they never cost a run."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck import Experiment, Observer, PotluckError, resume, run
from potluck.experiment.track import TrackSettings
from potluck.runs.observers.base import RoundEnd
from potluck.runs.observers.trackers import check_trackers
from potluck.runs.observers.trackers.tensorboard import TensorBoardTracker

MEAN = "test/accuracy/after_aggregation/mix-large"


def experiment(track: Any, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "name": "tracked",
        "data": "digits",
        "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 2, "validation": 0.1},
        "models": ["mlp-small"],
        "method": {"name": "fedmrl", "d1": 16},
        "training": {"rounds": 3, "batch_size": 256},
        "engine": {"device": "cpu", "workers": 1},
        "track": track,
    }
    return Experiment.make(**settings | changes)


class Dies(Observer):
    """Ends a run like a fault of the machine, without a checkpoint."""

    def round(self, end: RoundEnd) -> None:
        if end.round == 2:
            raise ZeroDivisionError


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def means(folder: Path) -> list[tuple[int, float]]:
    """The mean accuracy of each round, from the log."""
    found: dict[int, list[float]] = {}
    for line in lines(folder, "metrics.jsonl"):
        if line["when"] == "after_aggregation":
            found.setdefault(line["round"], []).append(line["test"]["accuracy"])
    return [(number, sum(values) / len(values)) for number, values in found.items()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads back."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def close(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> bool:
    """The same steps, and the same values in single precision."""
    return [step for step, _ in found] == [step for step, _ in wanted] and all(
        math.isclose(one, other, rel_tol=1e-6) for (_, one), (_, other) in zip(found, wanted, strict=True)
    )


def test_tensorboard_has_the_log_and_changes_no_number(tmp_path: Path) -> None:
    plain = run(experiment([]), out=tmp_path / "plain").folder
    folder = run(experiment(["tensorboard"]), out=tmp_path / "run").folder
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (folder / name).read_bytes() == (plain / name).read_bytes()
    found = scalars(folder)
    assert close(found[MEAN], means(folder))
    own = [
        (line["round"], line["validation"]["loss"])
        for line in lines(folder, "metrics.jsonl")
        if (line["client"], line["when"]) == ("1", "after_training")
    ]
    assert close(found["clients/1/validation/loss/after_training/mix-large"], own)
    for direction in ("up", "down"):
        sent = [0.0] * 3
        for line in lines(folder, "ledger.jsonl"):
            if line["purpose"] == "train" and line["direction"] == direction:
                sent[line["round"] - 1] += line["bytes"]
        assert found[f"bytes/{direction}"] == list(enumerate(sent, start=1))
    assert [step for step, _ in found["seconds/round"]] == [1, 2, 3]


def test_a_run_that_repeats_rounds_logs_them_once(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(experiment(["tensorboard"]), out=tmp_path / "run", observers=[Dies()])
    assert not (tmp_path / "run/checkpoints/checkpoint.json").exists()
    resume(tmp_path / "run")
    assert close(scalars(tmp_path / "run")[MEAN], means(tmp_path / "run"))
    assert [step for step, _ in scalars(tmp_path / "run")["bytes/up"]] == [1, 2, 3]


def test_tensorboard_drops_the_rounds_that_a_run_went_back_behind(tmp_path: Path) -> None:
    folder = run(experiment(["tensorboard"], checkpoint={"every": 0}), out=tmp_path / "run").folder
    assert [step for step, _ in scalars(folder)[MEAN]] == [1, 2, 3]
    resume(folder, from_round=1, rounds=2)
    assert close(scalars(folder)[MEAN], means(folder))
    assert [number for number, _ in means(folder)] == [1, 2]


@pytest.mark.parametrize("kept", ["[1]", '{"tensorboard": 3}', '{"tensorboard": {"round": "x"}}'])
def test_notes_of_another_form_are_refused_in_one_sentence(kept: str, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(experiment(["tensorboard"], checkpoint={"every": 0}), out=tmp_path / "run", observers=[Dies()])
    (tmp_path / "run" / "tracking.json").write_text(kept)
    with pytest.raises(PotluckError, match=r"tracking\.json is damaged; remove it"):
        resume(tmp_path / "run")


def test_means_alone_are_logged_if_asked(tmp_path: Path) -> None:
    folder = run(experiment([{"tensorboard": {"clients": False}}]), out=tmp_path / "run").folder
    tags = scalars(folder)
    assert MEAN in tags
    assert not any(tag.startswith("clients/") for tag in tags)


class Told(Observer):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def advise(self, sentence: str) -> None:
        self.sentences.append(sentence)


def broken(self: TensorBoardTracker, step: int, numbers: Any) -> None:
    raise OSError("the disk is\nfull")


def test_a_tracker_that_fails_is_told_of_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorBoardTracker, "log", broken)
    told = Told()
    assert run(experiment(["tensorboard"]), out=tmp_path / "run", watcher=told).summary["rounds"] == 3
    (sentence,) = [one for one in told.sentences if "tensorboard" in one]
    assert sentence == "tensorboard failed and is no longer told of this run, which goes on: the disk is"


def test_a_tracker_that_cannot_start_stops_a_new_run_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_key(self: TensorBoardTracker, notes: Any) -> Any:
        raise RuntimeError("no key")

    monkeypatch.setattr(TensorBoardTracker, "open", no_key)
    with pytest.raises(PotluckError, match="track: tensorboard could not start: no key; fix that"):
        run(experiment(["tensorboard"]), out=tmp_path / "run")


def test_a_missing_package_is_named_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck.runs.observers.trackers.find_spec", lambda name: None)
    with pytest.raises(PotluckError, match=r"track: mlflow is not installed; pip install .*\[track\]"):
        run(experiment(["mlflow"]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    check_trackers(TrackSettings())


def test_settings_have_short_and_long_forms() -> None:
    short = experiment("tensorboard").track
    assert short == experiment(["tensorboard"]).track == experiment({"tensorboard": {}}).track
    mixed = experiment(["tensorboard", {"wandb": {"project": "digits", "mode": "offline"}}]).track
    assert mixed.wandb is not None
    assert (mixed.wandb.project, mixed.wandb.mode, mixed.mlflow) == ("digits", "offline", None)


@pytest.mark.parametrize(
    ("track", "sentence"),
    [
        (["tensorbord"], "unknown key 'track.tensorbord'; did you mean 'tensorboard'?"),
        (["wandb", "wandb"], "track: wandb is named twice"),
        ([{"wandb": {"projekt": "x"}}], "unknown key 'track.wandb.projekt'; did you mean 'project'?"),
        ([{"wandb": {}, "mlflow": {}}], "track: give names of trackers"),
        ([3], "track: give names of trackers"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(track: Any, sentence: str) -> None:
    with pytest.raises(PotluckError) as caught:
        experiment(track)
    assert str(caught.value).startswith(sentence)


def records(folder: Path) -> Iterator[Any]:
    """What Weights & Biases wrote, file by file: records in blocks of 32 KiB, as LevelDB writes its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, place, whole = path.read_bytes(), 7, b""
        while place < len(data):
            left = 32768 - place % 32768
            if left < 7:
                place += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, place)
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a whole record, or the last piece of one
                yield Record.FromString(whole)
                whole = b""


def wait_for_files(folder: Path, count: int) -> None:
    """Weights & Biases closes its files a moment after a run is finished."""
    for _ in range(200):
        if sum(record.HasField("exit") for record in records(folder)) == count:
            return
        time.sleep(0.1)


def history(folder: Path) -> list[tuple[int, float]]:
    found = []
    for record in records(folder):
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
        }
        if MEAN in items:
            found.append((record.history.step.num, items[MEAN]))
    return found


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_has_the_log_and_a_resumed_run_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    track = [{"wandb": {"project": "digits", "mode": "offline"}}]
    with pytest.raises(ZeroDivisionError):
        run(experiment(track), out=tmp_path / "run", observers=[Dies()])
    told = Told()
    folder = resume(tmp_path / "run", watcher=told).folder
    assert [sentence for sentence in told.sentences if "wandb" in sentence] == []
    wait_for_files(folder, 2)
    assert close(history(folder), means(folder))
    runs = [record.run for record in records(folder) if record.HasField("run")]
    kept = json.loads((folder / "tracking.json").read_text())["wandb"]["id"]
    assert {one.run_id for one in runs} == {kept}
    assert '"fedmrl"' in {item.key: item.value_json for item in runs[0].config.update}["method.name"]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_has_the_log_and_a_resumed_run_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    track = [{"mlflow": {"uri": f"sqlite:///{tmp_path}/store.db", "experiment": "digits"}}]
    with pytest.raises(ZeroDivisionError):
        run(experiment(track), out=tmp_path / "run", observers=[Dies()])
    folder = resume(tmp_path / "run").folder
    client = MlflowClient(f"sqlite:///{tmp_path}/store.db")
    (one,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (one.info.status, one.data.params["training.rounds"]) == ("FINISHED", "3")
    logged = [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, MEAN)]
    assert close(sorted(logged), means(folder))
    assert [file.path for file in client.list_artifacts(one.info.run_id)] == ["report.html"]
