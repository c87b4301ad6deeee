"""Comparisons and sweeps from Python, and what they become: frames, LaTeX, figures, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import potluck
import potluck.core.method
import potluck.methods
from helpers import StopAfter
from potluck.cli.app import app
from potluck.errors import ConfigError, RunError
from potluck.report.pictures.files import to_pdf
from potluck.runs.comparisons.comparison import open_comparison
from potluck.runs.comparisons.play import compare_experiments
from potluck.runs.loop import Interrupted
from potluck.runs.pages import write_pages

PARTITION = {"kind": "iid", "clients": 2}
TRAINING = {"rounds": 2, "batch_size": 32}


def arrays(shift: float = 0.0) -> potluck.Dataset:
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = rng.normal(size=(90, 6)).astype(np.float32) + y[:, None] + shift
    return potluck.from_arrays(x, y, name="mine")


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def own(shift: float = 0.0, **more: Any) -> potluck.Experiment:
    values = {"data": arrays(shift), "partition": PARTITION, "models": small, "method": "fedproto"}
    return potluck.Experiment.make(**(values | {"training": TRAINING} | more))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> potluck.Comparison:
    folder = tmp_path_factory.mktemp("objects") / "all"
    experiment = own(evaluate={"modes": "all"})
    result = potluck.compare(experiment, methods=["fedproto", "fedavg"], seeds=[0, 1], out=folder)
    assert isinstance(result, potluck.Comparison)
    return result


# --- runs that are taken again --------------------------------------------------------------------------


def test_other_data_of_the_same_name_are_refused(tmp_path: Path) -> None:
    potluck.compare(own(), methods=["fedavg"], out=tmp_path / "all")
    before = {path: path.read_bytes() for path in (tmp_path / "all").glob("*/metrics.jsonl")}
    with pytest.raises(RunError, match=r"local-seed0 was run with other data"):
        potluck.compare(own(shift=1.0), methods=["fedavg"], out=tmp_path / "all")
    assert {path: path.read_bytes() for path in before} == before
    potluck.compare(own(), methods=["fedavg"], out=tmp_path / "all")


def test_other_models_of_the_same_class_are_refused(tmp_path: Path) -> None:
    first, second = small(), small()
    potluck.compare(own(models=first), methods=["local"], out=tmp_path / "all")
    potluck.compare(own(models=first), methods=["local"], out=tmp_path / "all")
    with pytest.raises(RunError, match=r"local-seed0 was run with other models"):
        potluck.compare(own(models=second), methods=["local"], out=tmp_path / "all")


def test_a_comparison_of_own_models_and_data_goes_on(tmp_path: Path) -> None:
    made = {"local": own(method="local"), "fedavg": own(method="fedavg")}
    whole = compare_experiments(made, [0], tmp_path / "whole")
    with pytest.raises(Interrupted):
        compare_experiments(made, [0], tmp_path / "parts", lambda label: StopAfter(1))
    parts = compare_experiments(made, [0], tmp_path / "parts")
    assert whole.frame().equals(parts.frame())


@pytest.mark.parametrize("partition", [None, {"kind": "natural", "test": 0.5}])
def test_data_of_each_client_are_compared_without_a_partition(tmp_path: Path, partition: Any) -> None:
    whole = arrays()
    data = potluck.from_datasets(dict.fromkeys(("north", "south"), (whole.x[:60], whole.y[:60])))
    more = {"partition": partition} if partition else {}
    values = {"data": data, "models": small, "training": TRAINING, "out": tmp_path / "all"} | more
    found = potluck.compare(**values, methods=["fd"])
    assert set(found.frame()["client"]) == {"north", "south"}


# --- objects --------------------------------------------------------------------------------------------


def test_the_frame_has_every_client_moment_and_mode(found: potluck.Comparison) -> None:
    frame = found.frame()
    assert list(frame.columns)[:6] == ["method", "seed", "client", "moment", "mode", "round"]
    assert len(frame) == 2 * 2 * 2 * (1 + 2 + 1)  # seeds, clients, moments; modes of Local, FedProto, FedAvg
    assert set(frame[frame["method"] == "fedproto"]["mode"]) == {"prototype", "head"}
    assert set(frame["round"]) == {2}
    lines = (found.folder / "fedproto-seed1" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    wanted = (2, "1", "after_training", "head")
    (line,) = (one for one in logged if (one["round"], one["client"], one["when"], one["mode"]) == wanted)
    row = frame.query("method == 'fedproto' and seed == 1 and client == '1' and moment == 'after_training'")
    assert row[row["mode"] == "head"]["accuracy"].item() == line["test"]["accuracy"]


def test_every_mode_has_a_row_wherever_methods_are_shown(found: potluck.Comparison) -> None:
    rows = [row[:2] for row in found.sheet.rows]
    assert {("fedproto", "prototype *"), ("fedproto", "head"), ("Local", "model")} <= set(rows)
    page = (found.folder / "comparison.html").read_text()
    for text in (found.latex(), found._repr_html_(), repr(found), page):
        assert "prototype" in text
        assert "head" in text
        assert "after aggregation" in text
    labels = [name for text in _texts(found.plot()) for name in text.split(" = ")]
    assert {"fedproto (prototype)", "fedproto (head)"} <= set(labels)
    report = (found.folder / "fedproto-seed0" / "report.html").read_text()
    assert "after aggregation, by prototype" in report
    assert "after training, by head = after aggregation, by head" in report
    summary = json.loads((found.folder / "fedproto-seed0" / "summary.json").read_text())["accuracy"]
    assert {(one["when"], one["mode"]) for one in summary["measured"]} == {
        (when, mode) for when in ("after_training", "after_aggregation") for mode in ("prototype", "head")
    }


def _texts(figure: Any) -> list[str]:
    return [text.get_text().partition("  ")[2] for text in figure.axes[0].texts]


def test_a_mode_that_was_not_measured_is_named(tmp_path: Path) -> None:
    shown = repr(potluck.compare(own(), out=tmp_path / "all"))
    assert "Not measured: fedproto by head" in shown
    assert shown.endswith(f"\nreport: {tmp_path / 'all' / 'comparison.html'}")
    variants = {"method.weights": ["uniform", "count"]}
    assert "Not measured: weights=uniform, weights=count by head (" in repr(
        potluck.compare(own(), variants=variants, out=tmp_path / "two")
    )


def test_the_page_links_to_runs_and_shows_split_bytes_and_clients(found: potluck.Comparison) -> None:
    page = (found.folder / "comparison.html").read_text()
    for part in (
        'href="local-seed0/report.html"', "Who has which labels", "Accuracy against bytes",
        "Clients against Local", "worst tenth", "spread", "Settings",
    ):  # fmt: skip
        assert part in page, part
    assert all((found.folder / name / "report.html").exists() for name in ("local-seed1", "fedavg-seed0"))


def test_latex_is_a_booktabs_table_with_the_best_in_bold(found: potluck.Comparison) -> None:
    text = found.latex()
    assert text.count(r"\textbf{") >= 1
    for part in (r"\toprule", r"\bottomrule", r"$\pm$", "last round", "after aggregation", "[", "seeds"):
        assert part in text, part
    best = max(entry["accuracy"]["mean"] for row in found.comparison["methods"] for entry in row["measured"]
               if entry["when"] == "after_aggregation")  # fmt: skip
    assert rf"\textbf{{{100 * best:.2f}" in text
    assert text.count("{") == text.count("}")


def test_pictures_of_all_kinds(found: potluck.Comparison) -> None:
    for kind in ("curves", "differences", "cost", "gains"):
        assert to_pdf(found.plot(kind)).startswith(b"%PDF")
    assert to_pdf(found.plot()) == to_pdf(found.plot())
    with pytest.raises(RunError, match="'grid'; it has curves, differences, cost, gains"):
        found.plot("grid")
    with pytest.raises(ConfigError, match="did you mean 'curves'"):
        found.plot("curve")  # type: ignore[arg-type]


def test_a_folder_is_opened_without_running_anything(
    found: potluck.Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(potluck.Experiment, "build", None)
    again = open_comparison(found.folder)
    assert isinstance(again, potluck.Comparison)
    assert again.frame().equals(found.frame())
    assert again.latex() == found.latex()
    assert repr(again) == repr(found)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"methods": [{"method": "x"}]}'])
def test_a_folder_that_is_no_comparison_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RunError, match=r"no comparison\.json"):
        open_comparison(tmp_path)
    (tmp_path / "comparison.json").write_text(text)
    with pytest.raises(RunError, match=r"comparison\.json"):
        open_comparison(tmp_path)


def test_wrong_arguments_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"methods: give a list"):
        potluck.compare(own(), methods="fedavg")
    with pytest.raises(ConfigError, match=r"methods: 3 names no method"):
        potluck.compare(own(), methods=[3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="overrides are for experiment files"):
        potluck.compare(own(), overrides=["training.rounds=1"])
    with pytest.raises(ConfigError, match=r"no 'observers'; .*potluck\.run"):
        potluck.compare(data=arrays(), observers=[])
    with pytest.raises(ConfigError, match=r"no 'target'; give a list, targets="):
        potluck.compare(data=arrays(), target=0.3)
    with pytest.raises(ConfigError, match="the views are last, best_by_validation"):
        potluck.compare(own(), view="best", out=tmp_path / "all")  # type: ignore[arg-type]
    assert not (tmp_path / "all").exists()
    with pytest.raises(ConfigError, match="takes no 'training'"):
        potluck.compare(own(), training={})
    for wrong, sentence in (
        ({"seeds": 3}, r"seeds: give a list, seeds=\[3\], or for 3 seeds seeds=\[0, 1, 2\]"),
        ({"seeds": ["a"]}, "seeds: 'a' is not a whole number"),
        ({"targets": 0.5}, r"targets: give a list, targets=\[0\.5\]"),
        ({"view": "worst"}, "there is no view 'worst'; the views are last"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            potluck.compare(own(), methods=["fedavg"], out=tmp_path / "none", **wrong)
    with pytest.raises(ConfigError, match=r"seeds: give a list, seeds=\[0, 1\]"):
        potluck.compare(own(), seeds="0,1")  # type: ignore[arg-type]
    variants = {"a": {"method": "fedavg"}, "b": {"method": "local"}}
    with pytest.raises(ConfigError, match="fedmrl would not be compared, as only fedavg, local are"):
        potluck.compare(
            data="digits",
            partition={"kind": "iid", "clients": 2},
            models=["mlp-small"],
            method="fedmrl",
            variants=variants,
        )
    with pytest.raises(ConfigError, match=r"compare\(\*\*values\)"):
        potluck.compare({"data": "digits"})  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()


def test_runs_targets_rounds_and_gains_can_be_had_in_python(found: potluck.Comparison) -> None:
    asked: dict[str, Any] = {"methods": ["fedproto"], "seeds": [0, 1], "targets": [0.1], "rounds": [1, 2]}
    again = potluck.compare(own(evaluate={"modes": "all"}), out=found.folder, against="fedproto", **asked)
    assert isinstance(again, potluck.Comparison)
    assert set(again.targets()["round"]) == {1}
    assert set(again.rounds()["round"]) == {1, 2}
    assert again.gains()[["better", "equal", "worse"]].to_numpy().sum() == 4
    shown = repr(again)
    for part in ("What a target costs", "Round by round", "against fedproto (prototype)", "prototype *"):
        assert part in shown, part
    assert "not shown: fedavg-seed0, fedavg-seed1" in shown
    assert r"$^*$" in again.latex()
    again.folder.rename(home := again.folder.with_name("my tables_2-compare"))
    assert r"\label{tab:my-tables-2}" in potluck.open(home).latex()
    home.rename(again.folder)
    assert "iid split, 2 clients, 2 rounds" in again.latex()
    for result in (found.run("fedproto", seed=1), again.run("fedproto", seed=1)):
        assert result.clients["0"].predict(np.zeros((2, 6), np.float32)).shape == (2, 3)
    with pytest.raises(ConfigError, match="its seeds: 0, 1"):
        again.run("fedproto", seed=7)
    with pytest.raises(RunError, match="compared without targets"):
        found.targets()


def test_equal_scores_have_equal_intervals(found: potluck.Comparison) -> None:
    (local,) = (one for one in found.comparison["methods"] if one["method"] == "local")
    assert {one["clients"] for one in local["measured"]} == {2}
    frame = found.frame()
    for entry in found.comparison["methods"]:
        own = frame[frame["method"] == entry["method"]]
        seen: dict[str, Any] = {}
        for one in entry["measured"]:
            rows = own[(own["moment"] == one["when"]) & (own["mode"] == one["mode"])]
            key = str(rows["difference"].round(9).tolist())
            assert seen.setdefault(key, one["difference"]) == one["difference"]


# --- grids and sweeps -----------------------------------------------------------------------------------


def test_a_sweep_over_two_keys_is_a_frame_a_table_and_a_heat_map(tmp_path: Path) -> None:
    grid = {"grid": {"training.optimizer.lr": [0.1, 0.01], "training.batch_size": [16, 32]}}
    experiment = own(training={"rounds": 1})
    swept = potluck.compare(experiment, methods=["fedavg"], sweep=grid, out=tmp_path / "all")
    assert isinstance(swept, potluck.Sweep)
    assert list(swept.comparisons) == [
        f"lr={lr},batch_size={size}" for lr in (0.1, 0.01) for size in (16, 32)
    ]
    frame = swept.frame()
    assert {"setting", "training.optimizer.lr", "training.batch_size", "method", "moment"} <= set(
        frame.columns
    )
    assert len(frame) == 4 * 2 * 2 * 2  # settings, methods, clients, moments
    assert set(swept.summary()["training.batch_size"]) == {16, 32}
    assert swept.latex().count(r"\textbf{") >= 4
    assert [axes.get_title(loc="left") for axes in swept.plot().axes] == ["Local", "fedavg"]
    page = (tmp_path / "all" / "sweep.html").read_text()
    assert 'href="lr%3D0.1%2Cbatch_size%3D16/comparison.html"' in page
    assert '<th scope="colgroup" colspan="2">training.batch_size</th>' in page
    (tmp_path / "all" / "sweep.html").unlink()
    anew = CliRunner().invoke(app, ["report", str(tmp_path / "all"), "--json"])
    assert len(json.loads(anew.stdout)["pages"]) == 1 + 4 * (
        1 + 2
    )  # the sweep, its comparisons and their runs
    assert (tmp_path / "all" / "sweep.html").read_text() == page
    again = open_comparison(tmp_path / "all")
    assert isinstance(again, potluck.Sweep)
    assert write_pages(tmp_path / "all")[0] == tmp_path / "all/sweep.html"
    assert (tmp_path / "all" / "sweep.html").read_text() == page
    assert again.frame().equals(frame)
    assert repr(again) == repr(swept)
    with pytest.raises(ConfigError, match="no setting 'lr=1'"):
        again["lr=1"]


def test_variants_can_be_a_grid(tmp_path: Path) -> None:
    grid = {"grid": {"method.weight": [1.0, 5.0], "training.optimizer.lr": [0.1, 0.01]}}
    more = {**grid, "fedavg": {"method": "fedavg"}}
    found = potluck.compare(own(training={"rounds": 1}), variants=more, out=tmp_path / "all")
    assert isinstance(found, potluck.Comparison)
    labels = {entry["method"] for entry in found.comparison["methods"]}
    assert {"local", "local,lr=0.1", "weight=1.0,lr=0.1", "fedavg"} <= labels
    assert len(found.plot("grid").axes) == 1
    for frame in (found.frame(), found.summary(), found.gains()):
        rows = frame.drop_duplicates("method").set_index("method")
        chosen = rows.loc[["weight=5.0,lr=0.1", "fedavg"], ["method.name", "training.optimizer.lr"]]
        assert chosen.to_numpy().tolist() == [["fedproto", 0.1], ["fedavg", 0.01]]
        assert rows.loc["weight=5.0,lr=0.1", "method.weight"] == 5.0


# --- the command line -----------------------------------------------------------------------------------

FILE = """\
name: small
data: {name: digits, samples: 120}
partition: {kind: iid, clients: 2}
models: mlp-small
method: fedavg
training: {rounds: 1, batch_size: 32}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(FILE)
    return tmp_path


def test_csv_latex_and_pdf_are_written(place: Path) -> None:
    files = ["--csv", "all.csv", "--latex", "all.tex", "--pdf", "all.pdf"]
    result = CliRunner().invoke(app, ["compare", "small.yaml", "--methods", "fedavg", *files])
    assert result.exit_code == 0, result.output
    assert "Every moment and mode" in result.stdout
    assert Path("all.csv").read_text().startswith("method,seed,client,moment,mode,round,metric,accuracy")
    assert r"\begin{tabular}" in Path("all.tex").read_text()
    assert Path("all.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("option", ["csv", "latex", "pdf"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_trains(place: Path, option: str) -> None:
    for target, sentence in (("gone/all.x", "there is no folder gone"), (".", "is a folder")):
        result = CliRunner().invoke(app, ["compare", "small.yaml", f"--{option}", target])
        assert result.exit_code == 2
        assert sentence in result.stderr
    assert not Path("runs").exists()


def test_no_table_is_written_over_another_kind_of_file(place: Path) -> None:
    before = (place / "small.yaml").read_text()
    for option, name, ending in (("csv", "small.yaml", ".csv"), ("latex", "./t.csv", ".tex")):
        result = CliRunner().invoke(app, ["compare", "small.yaml", f"--{option}", name])
        assert result.exit_code == 2
        assert f"give a name that ends in {ending}" in result.stderr
    assert (place / "small.yaml").read_text() == before
    assert not Path("runs").exists()


def test_no_table_is_written_into_a_run_folder(place: Path) -> None:
    (place / "mine" / "models").mkdir(parents=True)
    (place / "mine" / "environment.json").write_text("{}")
    for name in ("mine/all.csv", "mine/models/all.csv"):
        result = CliRunner().invoke(app, ["compare", "small.yaml", "--csv", name])
        assert result.exit_code == 2
        assert "is in the run folder" in result.stderr


def test_clients_whose_names_look_like_formulas(place: Path) -> None:
    clients = {f"{sign}north": "-" for sign in ("=1+", "-", "@")}
    rows = [f"{client},{n % 5},{n % 2}" for client in clients for n in range(20)]
    (place / "own.csv").write_text("\n".join(["site,x,y", *rows]))
    (place / "own.yaml").write_text(
        "data: {name: files, path: own.csv, target: y, by: site, task: classification}\n"
        "models: mlp-small\nmethod: fedavg\ntraining: {rounds: 1}\n"
    )
    words = ["compare", "own.yaml", "--methods", "fedavg", "--out", "all", "--csv", "all.csv"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert {*potluck.open(place / "all").frame()["client"]} == {*clients}
    cells = {line.split(",")[2] for line in (place / "all.csv").read_text().splitlines()[1:]}
    assert cells == {f"'{client}" for client in clients}


def test_options_in_a_block_of_a_method_are_columns_too(tmp_path: Path) -> None:
    variants = {
        "wide": {"method": {"name": "fedmrl", "d1": 8}},
        "narrow": {"method": {"name": "fedmrl", "d1": 4}},
    }
    found = potluck.compare(own(), variants=variants, out=tmp_path / "all", progress=False)
    frame = found.frame()
    assert dict(zip(frame["method"], frame["method.d1"], strict=True))["narrow"] == 4
    (tmp_path / "all" / "wide-seed0" / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match=r"metrics\.jsonl has lost lines"):
        potluck.open(tmp_path / "all" / "wide-seed0")
    with pytest.raises(RunError, match=r"metrics\.jsonl has lost lines"):
        found.run("wide").frame()


def test_a_setting_that_is_half_named_is_told_in_whole(tmp_path: Path) -> None:
    labels = ("alpha=1.0,lr=0.1", "alpha=0.1,lr=0.02", "alpha=0.1,lr=0.1")
    one = potluck.Comparison(tmp_path, {})
    sweep = potluck.Sweep(tmp_path, "s", {}, dict.fromkeys(labels, one))
    with pytest.raises(ConfigError, match=r"did you mean 'alpha=0\.1,lr=0\.02' or 'alpha=0\.1,lr=0\.1'\?"):
        sweep["alpha=0.1"]


def test_methods_of_a_plug_in_can_be_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(potluck.core.method, "_registry", dict(potluck.core.method._registry))
    Path("mine.py").write_text(
        "from potluck.methods.fedavg import FedAvg\n\n\nclass Plugged(FedAvg):\n"
        '    """FedAvg under another name."""\n\n    name = "plugged"\n'
    )
    Path("small.yaml").write_text(FILE + "plugins: [mine.py]\n")
    command = ["compare", "small.yaml", "--methods", "plugged", "--json", "plugged.weights=uniform"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    assert [entry["method"] for entry in json.loads(done.stdout)["methods"]] == ["local", "plugged"]
    assert "weights: uniform" in Path("runs/small-compare/plugged-seed0/config.yaml").read_text()
