"""What a finished run gives back: models with the reported accuracy, tables, pictures, and what is kept of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from matplotlib.figure import Figure
from torch import Tensor

import potluck
from helpers import Listener, StopAfter
from own_nets import Net, Other
from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.data import Split
from potluck.errors import ConfigError, DataError, RunError
from potluck.experiment.schema import Experiment
from potluck.runs.kept_models.files import kept_rounds
from potluck.runs.loop import Interrupted
from potluck.runs.observers import RoundEnd
from potluck.runs.results.export import exported
from potluck.runs.results.run_result import RunResult

SETTINGS: dict[str, Any] = {
    "data": {"name": "digits", "samples": 300},
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 3, "validation": 0.2},
    "models": ["mlp-small", "mlp-large"],
    "training": {"rounds": 2, "batch_size": 32, "optimizer": {"lr": 0.1}},
    "evaluate": {"modes": "all"},
}
BLOCKS = ("data", "partition", "training", "evaluate")
MOMENTS = ("after_training", "after_aggregation")
PUBLIC = {"public": {"data": {"name": "digits"}, "samples": 64}}


def experiment(**changes: Any) -> Experiment:
    blocks = {
        name: {**SETTINGS[name], **value} if isinstance(value, dict) and name in BLOCKS else value
        for name, value in changes.items()
    }
    return Experiment.make(**{"method": "fedavg", **SETTINGS, **blocks})


def own_test(asked: Experiment, result: RunResult, client: str) -> tuple[Tensor, Tensor]:
    data, rows = asked.load_data(), Split.load(result.folder / "split.json")[client].test
    assert isinstance(data, Dataset)
    return data.x[rows], data.y[rows]


def check_reported_scores(asked: Experiment, result: RunResult) -> int:
    """Compare every logged test value of the kept round with one recomputed from the kept models."""
    compared = 0
    for line in map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines()):
        client = result.clients[line["client"]]
        if line["round"] != client.round:
            continue
        x, y = own_test(asked, result, client.id)
        scores = client.predict(x, moment=line["when"], mode=line["mode"])
        measured = client.task.measure(scores, y)
        assert line["test"]["accuracy"] == round(measured["correct"].item() / len(y), 6)
        assert line["test"]["loss"] == round(measured["loss"].double().item() / len(y), 6)
        compared += 1
    return compared


# --- models with the reported accuracy ------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        {"name": "local"},
        {"name": "fedavg"},
        {"name": "fedproto"},
        {"name": "fedmrl", "d1": 16},
        {"name": "fedmrl", "d1": 8, "small": "mlp-small", "mrl": "full", "projector": "deep"},
        {"name": "fedre"},
        {"name": "fedin"},
        {"name": "fedmuscle", "peers": 1, "batch": 16},
        {"name": "scaffold"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_kept_models_have_the_reported_accuracy(tmp_path: Path, method: dict[str, Any]) -> None:
    public = PUBLIC if method["name"] == "fedmuscle" else {}
    models = ["mlp-small"] if method["name"] == "scaffold" else SETTINGS["models"]
    asked = experiment(method=method, models=models, **public)
    result = potluck.run(asked, out=tmp_path / "run")
    modes = len(result.clients["0"].modes)
    assert check_reported_scores(asked, result) == 3 * 2 * modes  # clients, moments, modes
    for client, accuracy in result.summary["accuracy"]["per_client"].items():
        x, y = own_test(asked, result, client)
        assert accuracy == round((result.clients[client].predict(x).argmax(1) == y).double().mean().item(), 6)


def test_the_two_moments_are_two_states(tmp_path: Path) -> None:
    asked = experiment(models=["mlp-small"])
    clients = potluck.run(asked, out=tmp_path / "run").clients
    first, second = ({when: clients[client].state_dict(moment=when) for when in MOMENTS} for client in "01")
    for name in first["after_aggregation"]:
        assert torch.equal(first["after_aggregation"][name], second["after_aggregation"][name])
        assert not torch.equal(first["after_training"][name], second["after_training"][name])


def test_clients_that_never_trained_have_models_too(tmp_path: Path) -> None:
    asked = experiment(
        partition={"clients": 5, "held_out": 1}, models=["mlp-small"], training={"participation": 0.25}
    )
    result = potluck.run(asked, out=tmp_path / "run")
    after = [
        line for line in result.frame().itertuples() if (line.round, line.moment) == (2, "after_aggregation")
    ]
    assert [line.held_out for line in after].count(True) == 1
    assert check_reported_scores(asked, result) == 5 + 1


def test_workers_keep_the_same_models(tmp_path: Path) -> None:
    runs = [potluck.run(experiment(engine={"workers": n}), out=tmp_path / str(n)) for n in (1, 2)]
    for client in runs[0].clients:
        first, second = (run.clients[client].state_dict() for run in runs)
        assert all(torch.equal(first[name], second[name]) for name in first)


# --- the user's own modules -----------------------------------------------------------------------------


def test_a_model_comes_back_as_its_author_wrote_it(tmp_path: Path) -> None:
    client = potluck.run(experiment(models=[Net, Other]), out=tmp_path / "run").clients["0"]
    model = client.model()
    assert type(model) is Net
    assert list(client.state_dict()) == list(Net().state_dict())
    fresh = Net()
    fresh.load_state_dict(safetensors.torch.load_file(client.save(tmp_path / "net.safetensors")))
    x = torch.rand(3, 1, 8, 8)
    assert torch.allclose(fresh.eval()(client.prepare(x)), client.predict(x), atol=1e-4)


def test_an_adapter_stands_where_the_head_was(tmp_path: Path) -> None:
    asked = experiment(models={"pool": [Net, Other], "rep_dim": 20}, method="fedproto")
    result = potluck.run(asked, out=tmp_path / "run")
    named = result.clients["0"].state_dict(mode="head")
    assert [*named][-4:] == ["fc.adapter.weight", "fc.adapter.bias", "fc.head.weight", "fc.head.bias"]
    fused = result.clients["0"].state_dict()
    assert {"model.fc.head.weight", "model.conv.weight", "prototypes", "known"} <= fused.keys()
    assert check_reported_scores(asked, result) == 3 * 2 * 2


def test_a_fused_predictor_is_one_module(tmp_path: Path) -> None:
    asked = experiment(models=[Net, Other], method={"name": "fedmrl", "d1": 8})
    client = potluck.run(asked, out=tmp_path / "run").clients["0"]
    module, x = client.model(), torch.rand(4, 1, 8, 8)
    assert [name for name, _ in module.named_children()] == ["model", "small", "projector"]
    assert torch.equal(module(client.prepare(x)), client.predict(x))
    assert type(client.model(mode="single-large")) is Net
    with torch.no_grad():
        next(module.parameters()).add_(1)  # a module is the caller's own
    assert not torch.equal(module(client.prepare(x)), client.predict(x))
    assert module.double()(client.prepare(x).double()).shape == (4, 10)


@pytest.mark.parametrize("rep_dim", [None, 20])
def test_what_is_saved_can_be_loaded_where_parts_predict_together(
    tmp_path: Path, rep_dim: int | None
) -> None:
    asked = experiment(
        models={"pool": [Net, Other], "rep_dim": rep_dim}, method={"name": "fedmrl", "d1": 8, "small": Other}
    )
    client = potluck.run(asked, out=tmp_path / "run").clients["0"]
    module, x = client.model(), client.prepare(torch.rand(4, 1, 8, 8))
    assert (type(module.model), type(module.small)) == (Net, Other)
    assert type(client.model(mode="single-small")) is Other
    expected = module(x)
    saved = safetensors.torch.load_file(client.save(tmp_path / "fused.safetensors"))
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.zero_()
    assert not torch.equal(module(x), expected)
    module.load_state_dict(saved)
    assert torch.equal(module(x), expected)
    alone = client.model(mode="single-large")
    assert torch.equal(module.model(x), alone(x))
    module.train()(x)  # the buffers of batch norm are those of the model that the author sees
    assert not torch.equal(module.model.norm.running_mean, alone.norm.running_mean)
    assert not torch.equal(module.eval()(x), expected)
    assert module.double()(x.double()).dtype == torch.float32


# --- programs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [{"name": "fedmrl", "d1": 8}, {"name": "fedproto"}])
def test_programs_give_the_same_scores(tmp_path: Path, method: dict[str, Any]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    asked = experiment(models={"pool": [Net], "rep_dim": 24}, method=method, training={"rounds": 1})
    client = potluck.run(asked, out=tmp_path / "run").clients["1"]
    x = torch.rand(30, 1, 8, 8)
    expected, ready = client.predict(x), client.prepare(x)
    program = client.export()
    torch.testing.assert_close(program.module()(ready), expected, rtol=1e-3, atol=1e-3)
    torch.export.save(program, tmp_path / "net.pt2")
    assert b".py" not in (tmp_path / "net.pt2").read_bytes()
    session = runtime.InferenceSession(client.to_onnx(tmp_path / "net.onnx"))
    assert (
        b"stack_trace" not in (tmp_path / "net.onnx").read_bytes()
    )  # lines of code, and paths of their files
    assert session.get_inputs()[0].shape[0] == session.get_outputs()[0].shape[0] == "batch"
    (found,) = session.run(["scores"], {"x": ready.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-3)


class Choosy(Other):
    """Its forward pass depends on values, which no program can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else x + 1)


def test_what_cannot_be_exported_says_so(tmp_path: Path) -> None:
    client = potluck.run(experiment(models=[Choosy], training={"rounds": 1}), out=tmp_path / "run").clients[
        "0"
    ]
    with pytest.raises(potluck.PotluckError, match="model of client 0 cannot be exported"):
        client.to_onnx(tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


class Counts(torch.nn.Module):
    """A batch of another size than the example's would not pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(len(x), 1)


def test_a_fixed_batch_size_is_named_as_the_reason() -> None:
    with pytest.raises(
        potluck.PotluckError, match=r"fixes the size of a batch.*x.shape\[0\].*constant \(3\)"
    ):
        exported(Counts(), torch.zeros(3, 4), "a model")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = potluck.run(experiment(training={"rounds": 1}), out=tmp_path / "run").clients["0"]
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"to_onnx needs onnxscript: pip install .*\[export\]"):
        client.to_onnx(tmp_path / "net.onnx")
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere to write net.onnx into"):
        client.to_onnx(tmp_path / "nowhere" / "net.onnx")


# --- samples and other arguments ------------------------------------------------------------------------


def test_wrong_samples_are_refused(tmp_path: Path) -> None:
    client = potluck.run(experiment(training={"rounds": 1}), out=tmp_path / "run").clients["0"]
    with pytest.raises(
        DataError, match=r"\(batch, 1, 8, 8\), not \(1, 8, 8\); for a single sample give x\[None\]"
    ):
        client.predict(torch.rand(1, 8, 8))
    with pytest.raises(DataError, match=r"give the channel an axis of its own: x\[:, None\]"):
        client.predict(torch.rand(5, 8, 8))
    with pytest.raises(DataError, match=r"put the channels first: x.transpose\(0, 3, 1, 2\)"):
        client.predict(torch.rand(5, 8, 8, 1))
    with pytest.raises(DataError, match="sample 1 holds NaN, which this run does not fill"):
        client.classify(torch.stack([torch.rand(1, 8, 8), torch.full((1, 8, 8), torch.nan)]))
    with pytest.raises(DataError, match="type float32, not uint8"):
        client.predict(torch.ones(2, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(DataError, match="cannot make a batch"):
        client.predict([[1.0], [2.0, 3.0]])
    assert client.predict(torch.rand(0, 1, 8, 8)).shape == (0, 10)
    assert set(client.classify(torch.rand(3, 1, 8, 8))) <= set(client.class_names)
    with pytest.raises(ConfigError, match="no mode 'heda'"):
        client.model(mode="heda")
    with pytest.raises(ConfigError, match="moment 'before'"):
        client.model(moment="before")
    with pytest.raises(ConfigError, match="no client '7'"):
        potluck.open(tmp_path / "run").clients["7"]


def test_images_of_pillow_are_samples(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    draw = Rng(0).numpy()
    for channels in (1, 3):
        x, y = draw.integers(0, 256, (60, channels, 8, 8), dtype="uint8"), draw.integers(0, 2, 60)
        asked = experiment(data=potluck.from_arrays(x, y), training={"rounds": 1})
        client = potluck.run(asked, out=tmp_path / str(channels)).clients["0"]
        images = [image.fromarray(one[0] if channels == 1 else one.transpose(1, 2, 0)) for one in x[:4]]
        assert torch.equal(client.predict(images), client.predict(x[:4]))


# --- what is kept ---------------------------------------------------------------------------------------


def test_nothing_is_kept_if_not_wanted(tmp_path: Path) -> None:
    result = potluck.run(experiment(keep="none"), out=tmp_path / "run")
    assert not (tmp_path / "run/models").exists()
    assert result.clients["0"].score == result.summary["accuracy"]["per_client"]["0"]
    assert "none are kept: it was run with keep: none" in repr(result)
    with pytest.raises(RunError, match=r"has no trained models: it was run with keep: none$"):
        result.clients["0"].model()


def test_models_over_the_limit_are_not_kept(tmp_path: Path) -> None:
    listener = Listener()
    result = potluck.run(
        experiment(keep={"limit": "10kB"}, evaluate={"when": ["after_aggregation"]}),
        out=tmp_path / "run", watcher=listener,
    )  # fmt: skip
    (notice,) = listener.notices
    assert "the trained models are not kept: they would take 3" in notice
    assert "the limit is 10.0 kB; raise keep.limit" in notice
    assert not (tmp_path / "run/models").exists()
    assert result.summary["rounds"] == 2


def test_the_limit_is_about_what_is_written(tmp_path: Path) -> None:
    """After FedAvg every tensor differs between the moments, so that both are written."""
    potluck.run(experiment(models=["mlp-small"]), out=tmp_path / "run")
    files = sorted((tmp_path / "run/models/round-000002").glob("*.safetensors"))
    written = sum(tensor.nbytes for file in files for tensor in safetensors.torch.load_file(file).values())
    for limit, kept in ((written, True), (written - 1, False)):
        potluck.run(experiment(models=["mlp-small"], keep={"limit": limit}), out=tmp_path / str(limit))
        assert (tmp_path / str(limit) / "models").exists() == kept


def test_the_best_round_by_validation(tmp_path: Path) -> None:
    asked = experiment(keep="best", training={"rounds": 5, "optimizer": {"lr": 2.0}})
    result = potluck.run(asked, out=tmp_path / "run")
    best = result.summary["accuracy"]["rounds"]["best_by_validation"]
    assert best < 5  # with so large a step the last round is not the best one
    assert result.clients["0"].round == best
    assert f"(round {best}, after_aggregation, model)" in repr(result.clients["0"])
    told = f"those after round {best}, the best by validation (test accuracy"
    assert told in repr(result)
    assert told in str(result)
    assert told in (tmp_path / "run" / "report.html").read_text()
    assert check_reported_scores(asked, result) == 3 * 2
    scores = [client.score for client in result.clients.values() if client.score is not None]
    assert round(sum(scores) / len(scores), 6) == result.summary["accuracy"]["best_by_validation"]


def test_best_needs_validation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep: best goes by validation samples"):
        potluck.run(experiment(keep="best", partition={"validation": 0}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_stopped_run_ends_with_the_same_models(tmp_path: Path, keep: str) -> None:
    asked = experiment(keep=keep, training={"rounds": 4, "optimizer": {"lr": 2.0}})
    whole = potluck.run(asked, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        potluck.run(asked, out=tmp_path / "broken", watcher=StopAfter(2))
    left = tmp_path / "broken/models/round-000003"  # as of a process that was killed in a later round
    left.mkdir(parents=True)
    (left / "about.json").write_text("{}")
    (tmp_path / "broken/models/.round-000004").mkdir()
    ended = potluck.resume(tmp_path / "broken")
    assert kept_rounds(tmp_path / "broken/models") == kept_rounds(tmp_path / "whole/models")
    assert len(list((tmp_path / "broken/models").iterdir())) == 1
    for client in whole.clients:
        for moment in MOMENTS:
            first, second = (run.clients[client].state_dict(moment=moment) for run in (whole, ended))
            assert all(torch.equal(first[name], second[name]) for name in first)


class StopIn(potluck.Observer):
    """Stops a run in a round: like Ctrl-C, or as asked for."""

    def __init__(self, round_: int, by: type[BaseException] = KeyboardInterrupt) -> None:
        self.stop_round, self.by = round_, by

    def round(self, end: RoundEnd) -> None:
        if end.round == self.stop_round:
            raise self.by

    def examined(self, found: Any) -> None:
        if self.by is EOFError and found.round == self.stop_round:
            raise KeyboardInterrupt  # before anything is kept of the round


BEST = {"keep": "best", "training": {"rounds": 5, "optimizer": {"lr": 2.0}}}


@pytest.mark.parametrize("by", [KeyboardInterrupt, EOFError])
def test_a_run_that_is_stopped_in_its_best_round_keeps_it(tmp_path: Path, by: type[BaseException]) -> None:
    asked = experiment(**BEST)
    whole = potluck.run(asked, out=tmp_path / "whole")
    (best,) = kept_rounds(tmp_path / "whole/models")
    assert best < 5
    with pytest.raises(Interrupted):
        potluck.run(asked, out=tmp_path / "broken", observers=[StopIn(best, by)])
    ended = potluck.resume(tmp_path / "broken")
    assert kept_rounds(tmp_path / "broken/models") == [best]
    first, second = (run.clients["0"].state_dict() for run in (whole, ended))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_longer_run_forgets_that_its_former_end_was_the_best(tmp_path: Path) -> None:
    """With `every: 4`, round 5 is only evaluated because it is the last of five."""
    asked = [
        experiment(keep="best", evaluate={"every": 4}, training={"rounds": rounds, "optimizer": {"lr": lr}})
        for rounds, lr in ((5, 0.05), (8, 0.05))
    ]
    first = potluck.run(asked[0], out=tmp_path / "run")
    assert first.clients["0"].round == 5
    assert kept_rounds(tmp_path / "run/models") == [4, 5]
    with pytest.raises(Interrupted):
        potluck.resume(tmp_path / "run", rounds=8, observers=[StopIn(6)])
    assert kept_rounds(tmp_path / "run/models") == [4]
    potluck.resume(tmp_path / "run")
    potluck.run(asked[1], out=tmp_path / "whole")
    assert kept_rounds(tmp_path / "run/models") == kept_rounds(tmp_path / "whole/models")


def test_the_best_round_cannot_be_asked_for_afterwards(tmp_path: Path) -> None:
    asked, bare = experiment(training={"rounds": 1}), experiment(partition={"validation": 0})
    potluck.run(asked, out=tmp_path / "run")
    with pytest.raises(RunError, match="was run with keep: last, so the best of its rounds may not be kept"):
        potluck.resume(tmp_path / "run", experiment=asked.variant(keep="best"), rounds=2)
    with pytest.raises(KeyboardInterrupt):
        potluck.run(bare, out=tmp_path / "bare", observers=[StopAtOnce()])
    with pytest.raises(ConfigError, match="keep: best goes by validation samples"):
        potluck.resume(tmp_path / "bare", experiment=bare.variant(keep="best"))


class StopAtOnce(potluck.Observer):
    def begin(self, *told: Any) -> None:
        raise KeyboardInterrupt


def test_a_longer_run_is_not_finished_before_its_end(tmp_path: Path) -> None:
    asked = experiment(evaluate={"every": 2, "predictions": "all"}, training={"rounds": 3})
    potluck.run(asked, out=tmp_path / "run")
    assert predicted(tmp_path / "run") == [2, 3]
    with pytest.raises(Interrupted):
        potluck.resume(tmp_path / "run", rounds=5, observers=[StopIn(4)])
    with pytest.raises(RunError, match="is not finished"):
        potluck.open(tmp_path / "run")
    potluck.resume(tmp_path / "run")
    assert potluck.open(tmp_path / "run").summary["rounds"] == 5
    assert predicted(tmp_path / "run") == [2, 4, 5]


def predicted(folder: Path) -> list[int]:
    return sorted(int(file.stem.removeprefix("round-")) for file in (folder / "predictions").iterdir())


@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_run_that_is_stopped_between_evaluations_is_measured_as_it_ends(tmp_path: Path, keep: str) -> None:
    values = {"evaluate": {"every": 2, "predictions": "last"}, "keep": keep}
    long, short = (
        experiment(**values, training={"rounds": rounds, "participation": 0.7}) for rounds in (8, 3)
    )
    ended = potluck.run(long, out=tmp_path / "run", observers=[StopIn(3, potluck.StopRun)])
    whole = potluck.run(short, out=tmp_path / "short")
    assert ended.stopped
    assert ended.clients["0"].score == whole.clients["0"].score is not None
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "short" / name).read_text()
    assert kept_rounds(tmp_path / "run/models") == kept_rounds(tmp_path / "short/models")
    assert predicted(tmp_path / "run") == [3]
    assert check_reported_scores(short, ended)
    potluck.resume(tmp_path / "run")
    potluck.run(long, out=tmp_path / "long")
    assert (tmp_path / "run/metrics.jsonl").read_text() == (tmp_path / "long/metrics.jsonl").read_text()
    assert kept_rounds(tmp_path / "run/models") == kept_rounds(tmp_path / "long/models")


class Enough(potluck.Observer):
    """Ends a run after its first round."""

    def round(self, end: Any) -> None:
        raise potluck.StopRun


def test_a_run_that_ends_early_keeps_its_last_round(tmp_path: Path) -> None:
    asked = experiment()
    result = potluck.run(asked, out=tmp_path / "run", observers=[Enough()])
    assert result.clients["0"].round == 1
    assert check_reported_scores(asked, result) == 3 * 2


# --- tables, pictures, words ----------------------------------------------------------------------------


def test_the_log_as_frames(tmp_path: Path) -> None:
    result = potluck.run(experiment(method="fedproto"), out=tmp_path / "run")
    frame = result.frame()
    assert list(frame.columns) == [
        "round", "client", "moment", "mode", "accuracy", "loss", "samples",
        "validation_accuracy", "validation_loss", "validation_samples", "held_out",
    ]  # fmt: skip
    assert frame["samples"].dtype == frame["validation_samples"].dtype == "int64"
    assert len(frame) == 2 * 3 * 2 * 2  # rounds, clients, moments, modes
    assert frame.groupby("moment")["client"].nunique().to_dict() == {
        "after_aggregation": 3,
        "after_training": 3,
    }
    curves = result.curves()
    assert list(curves.columns)[:5] == ["round", "moment", "mode", "clients", "accuracy"]
    last = curves.set_index(["round", "moment", "mode"]).loc[(2, "after_aggregation", "prototype")]
    assert round(last["accuracy"], 6) == result.accuracy
    assert isinstance(result.plot(), Figure)


def test_a_result_in_words(tmp_path: Path) -> None:
    result = potluck.run(experiment(method="fedproto"), out=tmp_path / "run")
    shown = repr(result)
    assert len(shown.splitlines()) <= 24
    for word in (
        "fedproto, 2 rounds",
        "mlp-small",
        "after aggregation",
        "prototype",
        "±",
        str(tmp_path / "run"),
    ):
        assert word in shown
    assert "<table>" in result._repr_html_()
    assert list(result.clients) == ["0", "1", "2"]
    assert result.clients["1"].id == result.clients[1].id == "1"
    assert "accuracy 0." in repr(result.clients["0"])
