"""`potluck.plot`: what it draws of which runs, the formats it writes, and the sentence where it cannot draw."""

from __future__ import annotations

import json
import math
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.torch
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from typer.testing import CliRunner

import potluck
from helpers import TINY
from potluck.cli.app import app
from potluck.errors import ConfigError, DataError, PotluckError, RunError
from potluck.report.pictures.files import to_svg
from potluck.report.pictures.timeline import trace_picture
from potluck.runs.observers.trace import lanes_of, merged
from potluck.runs.pictures import one_run
from potluck.runs.pictures.api import KINDS, Kind
from potluck.runs.pictures.asked import RunFiles
from potluck.runs.pictures.settings import key_named, labels, varied
from potluck.runs.pictures.stages import _alignment, _kernel

SMALL = TINY | {"data": {"name": "digits", "samples": 120}, "training": {"rounds": 2, "batch_size": 64}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> potluck.Comparison:
    """Local and FedProto side by side."""
    result = potluck.compare(
        **{**SMALL, "method": "fedproto"}, methods=["fedproto"], out=tmp_path_factory.mktemp("plot") / "all"
    )
    assert isinstance(result, potluck.Comparison)
    return result


@pytest.fixture
def run(found: potluck.Comparison, tmp_path: Path) -> Path:
    """A copy of the run of FedProto, to be spoilt."""
    shutil.copytree(found.folder / "fedproto-seed0", tmp_path / "run")
    return tmp_path / "run"


def texts(figure: Figure) -> list[str]:
    """The words in a picture."""
    root = ET.fromstring(to_svg(figure))
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def remove(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_the_kinds_are_typed() -> None:
    assert get_args(Kind) == tuple(KINDS)


# --- what is drawn --------------------------------------------------------------------------------------


def test_a_file_has_the_format_of_its_name(found: potluck.Comparison, tmp_path: Path) -> None:
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    for form, start in starts.items():
        potluck.plot("wire", found.run("fedproto"), out=tmp_path / f"wire.{form}")
        assert (tmp_path / f"wire.{form}").read_bytes().startswith(start)
    svg = (tmp_path / "wire.svg").read_bytes()
    assert b">server</text>" in svg
    assert b"DejaVuSans" in (tmp_path / "wire.pdf").read_bytes()  # text, not outlines
    potluck.plot("wire", str(found.folder / "fedproto-seed0"), out=tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == svg


def test_runs_given_one_by_one_are_a_comparison(found: potluck.Comparison) -> None:
    both = [found.folder / f"{name}-seed0" for name in ("local", "fedproto")]
    for kind in ("curves", "gains"):
        assert texts(potluck.plot(kind, both)) == texts(potluck.plot(kind, found)), kind


def test_a_run_draws_its_curves_and_names_the_call_for_the_rest(found: potluck.Comparison) -> None:
    result = found.run("fedproto")
    assert texts(result.plot("curves")) == texts(result.plot())
    with pytest.raises(PotluckError, match=r"draws its curves; call potluck\.plot\('wire', result\)"):
        result.plot("wire")


def test_gains_say_how_many_clients_gain(found: potluck.Comparison) -> None:
    entry = next(one for one in found.comparison["methods"] if one["method"] == "fedproto")
    assert f"{entry['by_client']['better']} of 2 gain" in texts(potluck.plot("gains", found))


def test_confusion_comes_from_models_where_no_predictions_are_kept(run: Path) -> None:
    result = potluck.open(run)
    right = json.loads((run / "summary.json").read_text())["accuracy"]["per_client"]
    shown = texts(potluck.plot("confusion", result))
    assert {f"client {client}: {100 * value:.1f} %" for client, value in right.items()} <= set(shown)


@pytest.mark.parametrize("kind", ["tsne", "pca"])
def test_models_that_diverged_have_no_map(kind: Kind, run: Path) -> None:
    (home,) = (run / "models").iterdir()
    (home / "SHA256SUMS").unlink()
    about = json.loads((home / "about.json").read_text())
    del about["checksums"]
    (home / "about.json").write_text(json.dumps(about))
    for path in home.glob("*.safetensors"):
        state = safetensors.torch.load_file(path)
        safetensors.torch.save_file({name: value * math.nan for name, value in state.items()}, path)
    with pytest.raises(RunError, match=r"the features of client 0 are not all finite numbers.*--clients"):
        potluck.plot(kind, run)


def test_the_wire_has_names_and_sizes(run: Path) -> None:
    shown = " ".join(texts(potluck.plot("wire", run)))
    for word in ("server", "client 0", "prototypes (", "a message", "card, once", "never leaves:"):
        assert word in shown, word


def test_a_run_that_is_not_finished_is_drawn_from_its_logs(run: Path) -> None:
    remove(run, "summary.json", "models")
    for kind in ("split", "curves", "clients", "cost", "timeline", "wire"):
        potluck.plot(kind, run)  # type: ignore[arg-type]
    for kind in ("cka", "tsne", "confusion"):
        with pytest.raises(RunError, match=f"not finished; go on with it: potluck resume {run}"):
            potluck.plot(kind, run)  # type: ignore[arg-type]


def test_equal_models_are_alike(found: potluck.Comparison) -> None:
    figure = potluck.plot("cka", found.run("local"), stages=["stem", "features"], samples=20)
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes[:2]] == ["stem", "features"]
    one, other = torch.randn(9, 4).double(), torch.randn(9, 6).double()
    centre = [x - x.mean(0) for x in (one, other)]
    cross, own = (centre[1].T @ centre[0]).norm() ** 2, [(x.T @ x).norm() for x in centre]
    values = _alignment([_kernel(one), _kernel(other), _kernel(3 * one + 1)])
    assert values[0, 1] == pytest.approx(float(cross / (own[0] * own[1])))
    assert values[0, 2] == pytest.approx(1)


def test_own_data_must_be_given_and_be_the_same(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(80, 6)).astype("float32")
    data = potluck.from_arrays(x, (x[:, 0] > 0).astype("int64"))
    settings = SMALL | {"data": data, "training": {"rounds": 1}}
    potluck.run(potluck.Experiment.make(**settings), out=tmp_path / "own")
    with pytest.raises(RunError, match=r"needs the data: potluck.plot\(…, data=dataset\)"):
        potluck.plot("pca", tmp_path / "own")
    with pytest.raises(DataError, match="samples or labels differ"):
        potluck.plot("pca", tmp_path / "own", data=potluck.from_arrays(x + 1, (x[:, 0] > 0).astype("int64")))
    potluck.plot("pca", tmp_path / "own", data=data)


# --- the time line --------------------------------------------------------------------------------------


def test_a_trace_has_a_lane_per_stream() -> None:
    events = [
        ("GPU 0, stream 7", "kernels", 10.0, 10.4),
        ("GPU 0, stream 7", "copies", 10.4, 10.5),
        ("GPU 0, stream 9", "kernels", 10.2, 10.3),
        ("GPU 0, stream 9", "kernels", 10.3001, 10.6),
    ]
    lanes = lanes_of(events, 1.0)
    assert [(lane["name"][-1], lane["kind"], lane["events"]) for lane in lanes] == [
        ("7", "copies", 1), ("7", "kernels", 1), ("9", "kernels", 2),
    ]  # fmt: skip
    assert lanes[2]["spans"] == [[0.2, 0.6]]
    shown = texts(trace_picture({"round": 2, "device": "A <GPU>", "seconds": 1.0, "lanes": lanes}))
    assert {"GPU 0, stream 7", "busy 83 %", "kernels", "copies", "round 2 on A <GPU>"} <= set(shown)
    assert merged([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]


def test_without_a_trace_the_picture_says_what_was_not_recorded(run: Path) -> None:
    assert any("was not recorded" in text for text in texts(potluck.plot("timeline", run)))
    (run / "trace.json").write_text('{"lanes": 3}')
    with pytest.raises(RunError, match=r"trace.json is damaged.*record it again with potluck.RoundTrace"):
        potluck.plot("timeline", run)


# --- over settings --------------------------------------------------------------------------------------


def test_runs_are_named_by_what_they_differ_in() -> None:
    def one(method: str, lr: float, seed: int = 0, **options: Any) -> RunFiles:
        training = {"optimizer": {"lr": lr}, "rounds": 3}
        run = RunFiles(Path(method))
        config = {"method": {"name": method, **options}, "training": training, "seed": seed, "name": f"{lr}"}
        run.__dict__["config"] = config  # in place of the file
        return run

    runs = [
        one("fedmrl", 0.1, d1=8),
        one("fedmrl", 0.1, d1=16),
        one("fedmrl", 0.1, 1, d1=16),
        one("local", 0.1),
    ]
    assert varied(runs) == ["method.d1"]
    assert labels(runs) == ["fedmrl,d1=8", "fedmrl,d1=16", "fedmrl,d1=16", "local"]
    assert labels(runs, apart=["method.d1"]) == ["fedmrl", "fedmrl", "fedmrl", "local"]
    assert key_named("d1", varied(runs)) == "method.d1"
    with pytest.raises(ConfigError, match=r"do not differ in 'd2'; known: d1, method.d1"):
        key_named("d2", varied(runs))
    both = [*runs, one("local", 0.2)]
    assert varied(both) == ["method.d1", "training.optimizer.lr"]
    assert labels(both)[-1] == "local,lr=0.2"


# --- what cannot be drawn -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("cruves", {}, "no kind of picture 'cruves'; did you mean 'curves'"),
        ("curves", {"over": "d1"}, "the picture 'curves' has no option 'over'; it is for option, grid"),
        ("curves", {"out": "curves.gif"}, "curves.gif: give a name that ends in .png, .pdf or .svg"),
        ("curves", {"out": "no/where/x.png"}, "cannot write no/where/x.png"),
        (
            "gains",
            {},
            "gains sets runs against a reference .* give a comparison, or the folder of a run of Local",
        ),
        ("option", {}, "do not differ in any setting, .* give runs that do"),
        (
            "option",
            {"over": "d1"},
            "over: these runs do not differ in 'd1'; they differ in no setting; give runs that",
        ),
        ("option", {"over": ["a", "b"]}, "over: give one setting"),
        ("cka", {"clients": ["7"]}, "no client '7'; known: 0, 1"),
        ("cka", {"clients": ["1"]}, "cka sets clients side by side, .* at least 2 clients"),
        ("cka", {"stages": "steem"}, "no stage 'steem'; did you mean 'stem'"),
        ("cka", {"samples": 1}, "samples: give at least 2, not 1"),
        ("cka", {"samples": 10**6}, "samples: give at most 2,000"),
        ("tsne", {"stages": ["stem", "features"]}, "tsne shows one stage; give one, not 2"),
        ("pca", {"classes": "three"}, "no class 'three'; known: 0, 1, 2"),
        ("cka", {"classes": "3"}, "the picture 'cka' has no option 'classes'; it is for tsne, pca"),
        ("pca", {"moment": "befor"}, "of the moment 'befor' no models are kept; known: after_agg"),
        ("confusion", {"mode": "protoype"}, "no mode 'protoype'; did you mean 'prototype'"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    kind: Any, options: dict[str, Any], sentence: str, found: potluck.Comparison
) -> None:
    with pytest.raises(PotluckError, match=sentence) as raised:
        potluck.plot(kind, found.folder / "fedproto-seed0", **options)
    assert "\n" not in str(raised.value)


def test_a_run_that_lacks_something_is_told_what_to_do(run: Path, tmp_path: Path) -> None:
    remove(run, "models")
    with pytest.raises(RunError, match=r"no trained models: .*; run it again with keep: last for cka"):
        potluck.plot("cka", run)
    with pytest.raises(
        RunError, match=r"neither predictions nor models; run it with evaluate: {predictions: true}"
    ):
        potluck.plot("confusion", run)
    remove(run, "summary.json", "metrics.jsonl", "timing.jsonl", "ledger.jsonl")
    for kind, sentence in (
        ("curves", "measured nothing so far; wait"),
        ("timeline", "no finished round yet; wait"),
    ):
        with pytest.raises(RunError, match=sentence):
            potluck.plot(kind, run)  # type: ignore[arg-type]
    for kind in ("split", "wire"):
        potluck.plot(kind, run)  # type: ignore[arg-type]
    split = json.loads((run / "split.json").read_text())
    split["clients"][0]["counts"] = [[]]
    (run / "split.json").write_text(json.dumps(split))
    with pytest.raises(RunError, match=r"split\.json is damaged"):
        potluck.plot("split", run)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_no_run_is_refused(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="empty is not the folder of a run or of a comparison; give one that"):
        potluck.plot(kind, tmp_path / "empty")
    with pytest.raises(RunError, match="there is no run folder"):
        potluck.plot(kind, tmp_path / "nowhere")


# --- the command ----------------------------------------------------------------------------------------


def test_the_command_lists_the_kinds_and_ends_with_2_on_bad_input(run: Path, tmp_path: Path) -> None:
    call = CliRunner().invoke
    listed = call(app, ["plot"]).stdout
    assert all(kind in listed for kind in KINDS)
    bad = call(app, ["plot", "curves"])
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: potluck plot curves: name the folder of a run")
    out = tmp_path / "here.svg"
    done = call(app, ["plot", "clients", str(run), "--out", str(out)])
    assert done.stdout == f"picture: {out}\n"
    assert out.exists()
    assert call(app, ["plot", "gains", str(run)]).exit_code == 2
    assert call(app, ["plot", "clients", str(run), "--out", str(out), "--plugins"]).exit_code == 0
    with pytest.raises(
        ConfigError, match=r"plot\(\): too many positional arguments; it is called as plot\(kind\)"
    ):
        potluck.open(run).plot("curves", run)  # type: ignore[union-attr,call-arg]


def test_a_split_of_many_groups_takes_little_memory() -> None:
    groups, classes = 3000, 200
    split = {
        "groups": [{"clients": 1, "data": "d", "class_names": []} for _ in range(groups)],
        "clients": [{"id": str(place), "counts": [1] * classes} for place in range(groups)],
    }
    blocks = one_run._blocks(split)
    assert (len(blocks.counts), len(blocks.names)) == (100, 100)
    assert (blocks.clients, blocks.classes) == (groups, groups * classes)
    assert blocks.sizes == [classes] * 100
    assert [sum(row) for row in blocks.counts] == [100] + [0] * 99
    shown = " ".join(text.get_text() for text in blocks.picture().findobj(Text))
    assert "3000 clients" in shown.replace(",", "")


def test_groups_stand_side_by_side_in_the_picture_of_a_split() -> None:
    split = {
        "groups": [{"clients": 2, "data": "a"}, {"clients": 1, "data": "b", "class_names": ["x", "y"]}],
        "clients": [{"id": "0", "counts": [1, 2]}, {"id": "1", "counts": [3]}, {"id": "2", "counts": [4, 5]}],
    }
    blocks = one_run._blocks(split)
    assert blocks.counts == [[1, 2], [3], [0, 0, 4, 5]]
    assert blocks.names == ["0 · a", "1 · a", "x · b", "y · b"]
