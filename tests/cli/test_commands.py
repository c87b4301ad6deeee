"""The command line as a user meets it: what it prints where, which files it leaves, which code it ends with."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from potluck.cli import app as command_line
from potluck.cli import demo
from potluck.cli.app import app
from potluck.cli.exits import Ended, Stopped, explained
from potluck.cli.method_examples import FOR_DEMO, explained_in_demo
from potluck.cli.views.methods import method_entry, methods_sheet
from potluck.experiment import Experiment
from potluck.methods.registry import find_method, method_names
from potluck.report.render import rich_table

SMALL = """\
name: small
data: digits
partition: {kind: dirichlet, alpha: 1.0, clients: 3}
models: [mlp-small, conv-small]
method: {name: fedmrl, d1: 16}
training: {rounds: 2, batch_size: 64}
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with one experiment file, to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POTLUCK_DATA", raising=False)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run, to be copied, not changed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.yaml").write_text(SMALL)
    result = CliRunner().invoke(app, ["run", str(folder / "small.yaml"), "--out", str(folder / "run")])
    assert result.exit_code == 0, result.output
    return folder / "run"


def potluck(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refused(*words: str) -> str:
    """The one sentence a bad input gives."""
    result = potluck(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


# --- run and resume -------------------------------------------------------------------------------------


def test_run_shows_a_table_and_where_the_report_is(place: Path) -> None:
    result = potluck("run", "small.yaml")
    assert result.exit_code == 0, result.output
    assert "conv-small" in result.stdout
    assert "report: runs/small/report.html" in result.stdout
    assert "round 2/2" in result.stderr
    assert "round 2/2" not in result.stdout
    assert Path("runs/small/report.html").exists()


def test_run_takes_the_next_free_folder_and_only_refuses_an_explicit_one(place: Path) -> None:
    for wanted in ("runs/small", "runs/small-2"):
        result = potluck("run", "small.yaml", "method=local", "training.rounds=1", "--json")
        assert json.loads(result.stdout)["folder"] == wanted
    assert "runs/small exists" in refused("run", "small.yaml", "--out", "runs/small")


def test_run_prints_its_summary_as_json_alone(place: Path) -> None:
    result = potluck("run", "small.yaml", "--json", "--out", "here")
    printed = json.loads(result.stdout)
    assert printed == json.loads(Path("here/summary.json").read_text()) | {"folder": "here"}
    assert printed.keys() >= {
        "method",
        "rounds",
        "seed",
        "clients",
        "accuracy",
        "messages",
        "seconds_per_round",
    }
    assert printed["accuracy"].keys() >= {
        "last", "best_by_validation", "best_by_test", "weighted_last", "std_over_clients", "worst_tenth",
        "per_client",
    }  # fmt: skip
    assert printed["messages"]["up"].keys() == {"scalars", "bytes"}
    assert "round 1/2" in result.stderr


def test_resuming_a_finished_run_changes_no_number(place: Path, finished: Path) -> None:
    shutil.copytree(finished, "run")
    before = Path("run/metrics.jsonl").read_bytes()
    result = potluck("resume", "run", "--json")
    assert result.exit_code == 0, result.output
    assert Path("run/metrics.jsonl").read_bytes() == before
    assert json.loads(result.stdout)["rounds"] == 2


def test_progress_lines_begin_with_the_method_after_a_resume_too(place: Path, finished: Path) -> None:
    shutil.copytree(finished, "run")
    result = potluck("resume", "run", "--rounds", "3")
    assert result.exit_code == 0, result.output
    assert "fedmrl: round 3/3" in result.stderr


def test_an_override_reaches_any_leaf(place: Path) -> None:
    result = potluck("run", "small.yaml", "training.optimizer.lr=0.5", "method=fedavg", "method.share=layers",
                     "training.rounds=1", "training.per_client.1.epochs=2", "--out", "run")  # fmt: skip
    assert result.exit_code == 0, result.output
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["training"]["optimizer"]["lr"] == 0.5
    assert config["method"]["share"] == "layers"
    assert "d1" not in config["method"]  # the option of another method is gone with it
    assert config["training"]["per_client"]["1"]["epochs"] == 2


# --- comparisons ----------------------------------------------------------------------------------------


def test_the_demo_is_a_comparison(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DEMO", place / "small.yaml")
    monkeypatch.setattr(demo, "DEMO_METHODS", ("local", "fedmrl"))
    result = potluck("demo")
    assert result.exit_code == 0, result.output
    assert "against Local" in result.stdout
    assert "report: runs/demo/comparison.html" in result.stdout
    assert Path("runs/demo/fedmrl-seed0/report.html").exists()
    again = json.loads(potluck("demo", "--json").stdout)
    assert again["folder"] == "runs/demo-2"
    assert {entry["method"] for entry in again["methods"]} == {"local", "fedmrl"}


def test_the_packaged_demo_suits_all_its_methods() -> None:
    from potluck.runs.comparisons.plan import experiments_by_method

    experiments = experiments_by_method(demo.DEMO, demo.DEMO_METHODS)
    models = {experiments["local"].build().population.label(client) for client in "01234567"}
    assert len(models) == 4
    for experiment in experiments.values():
        experiment.build()


def test_compare_lists_local_unasked(place: Path) -> None:
    result = potluck("compare", "small.yaml", "--methods", "fedavg", "training.rounds=1")
    assert result.exit_code == 0, result.output
    assert "Local" in result.stdout
    assert "report: runs/small-compare/comparison.html" in result.stdout
    words = "small.yaml", "--methods", "fedavg,fedavg", "training.rounds=1", "--json", "--csv", "d[red].csv"
    again = potluck("compare", *words)
    assert "fedavg: finished before" in again.stderr
    assert "written: d[red].csv" in again.stderr  # no name is markup
    assert [entry["method"] for entry in json.loads(again.stdout)["methods"]] == ["local", "fedavg"]


def test_compare_shows_what_a_target_costs_and_who_gains(place: Path) -> None:
    asked = ("--target", "0.001,1", "--against", "fedavg")
    result = potluck("compare", "small.yaml", "--methods", "fedavg", "training.rounds=1", *asked)
    assert result.exit_code == 0, result.output
    for part in ("against fedavg", "What a target costs", "not reached", "Clients against fedavg"):
        assert part in result.stdout, part
    again = potluck("compare", "small.yaml", "--methods", "fedavg", "training.rounds=1", "--json", *asked)
    shown = json.loads(again.stdout)
    assert shown["targets"] == [0.001, 1.0]
    assert [entry["targets"][0]["reached"] for entry in shown["methods"]] == [1, 1]


def test_compare_shows_scores_round_by_round(place: Path) -> None:
    asked = ("--rounds", "1,2", "--seeds", "0,1", "evaluate.every=1")
    result = potluck("compare", "small.yaml", "--methods", "fedavg", "training.rounds=2", *asked)
    assert result.exit_code == 0, result.output
    for part in ("Round by round", "round 1", "round 2", "after aggregation", " ± "):
        assert part in result.stdout, part
    again = potluck("compare", "small.yaml", "--methods", "fedavg", "training.rounds=2", "--json", *asked)
    shown = json.loads(again.stdout)
    assert shown["rounds"] == [1, 2]
    for entry in shown["methods"]:
        (row,) = (row for row in entry["rounds"] if row["when"] == "after_aggregation")
        assert row["scores"][-1]["mean"] == pytest.approx(entry["accuracy"]["mean"], abs=1e-5)


# --- looking without running ----------------------------------------------------------------------------


def test_methods_in_the_promised_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.cli.inspect.explained_in_demo", cache(explained_in_demo))  # shown twice
    entries = json.loads(potluck("methods", "--json").stdout)
    assert {entry["name"] for entry in entries} >= {
        "local",
        "fedavg",
        "fedprox",
        "scaffold",
        "fedproto",
        "fedmrl",
    }
    keys = ["name", "citation", "needs_public_data", "models", "sends", "receives"]
    sizes = ["up_formula", "down_formula", "up_scalars", "down_scalars"]
    for entry in entries:
        assert list(entry) == [*keys, *sizes]
    by_name = {entry["name"]: entry for entry in entries}
    assert by_name["fedproto"]["up_formula"] == "C_k·d + C_k + C_k"
    assert by_name["local"]["sends"] == []
    assert by_name["fedproto"]["sends"] == ["prototypes", "classes", "counts"]
    shown = potluck("methods").stdout
    assert "fedproto" in shown
    assert "Tan et al., AAAI 2022" in shown
    assert "C_k" not in shown
    listed = potluck("methods", "--formulas").stdout
    assert "C_k·d + C_k + C_k" in listed
    formulas = " ".join(f"{entry['up_formula']} {entry['down_formula']}" for entry in entries)
    used = {*re.findall(r"[A-Za-z_]+", re.sub(r"\|[^|]*\|", "", formulas))}
    assert used >= {"d", "C", "P_t", "known"}
    assert {symbol for symbol in used if not re.search(rf"^(.*; )?{symbol}: ", listed, re.M)} == set()


def test_the_list_of_methods_breaks_no_word_in_a_narrow_terminal() -> None:
    entries = [method_entry(find_method(name)) for name in method_names()]
    console = Console(width=100, file=io.StringIO())
    console.print(rich_table(methods_sheet(entries)))
    lines = console.file.getvalue()  # type: ignore[attr-defined]
    long = {word for entry in entries for key in ("citation", "models") for word in entry[key].split()}
    assert {word for word in long if word not in lines} == set()


def test_explain_in_the_promised_shape() -> None:
    explained = json.loads(potluck("explain", "scaffold", "--json").stdout)
    assert explained["method"] == "scaffold"
    assert explained.keys() >= {"method", "steps", "card", "report", "stays", "up_scalars", "down_scalars"}
    for step in explained["steps"]:
        for entry in [*step["up"], *step["down"]]:
            assert entry.keys() >= {"name", "shape", "scalars", "meaning"}


def test_explain_promises_what_a_run_then_sends(place: Path, finished: Path) -> None:
    explained = json.loads(potluck("explain", "fedmrl", "small.yaml", "--json").stdout)
    sent = json.loads((finished / "summary.json").read_text())["messages"]
    assert explained["up_scalars"] == sent["up"]["scalars"]
    assert explained["down_scalars"] == sent["down"]["scalars"]


def test_explain_says_which_model_is_the_small_one_and_what_is_optional(place: Path) -> None:
    (step,) = json.loads(potluck("explain", "small.yaml", "--json").stdout)["steps"]
    for entry in (*step["up"], *step["down"]):
        assert entry["meaning"].endswith("(mlp-small, the smallest of the pool)")
    named = json.loads(potluck("explain", "small.yaml", "method.small=conv-small", "--json").stdout)
    assert named["steps"][0]["down"][0]["meaning"] == "the small model's averaged parameters (conv-small)"
    shown = " ".join(potluck("explain", "fedproto").stdout.split())
    assert "optional" in shown
    assert "at most" in shown


def test_explain_says_what_never_leaves(place: Path) -> None:
    shown = potluck("explain", "fedmrl", "small.yaml").stdout
    assert "never leaves the client" in shown
    assert "projector" in shown
    assert "leaves the client" in potluck("explain", "local").stdout


def test_methods_that_do_not_fit_the_demo_as_it_is_are_explained_by_their_name() -> None:
    assert "fedin" in FOR_DEMO
    for name in FOR_DEMO:
        explained = json.loads(potluck("explain", name, "--json").stdout)
        assert explained["method"] == name


def test_explain_takes_options_without_a_file() -> None:
    def sent(*options: str) -> int:
        return int(json.loads(potluck("explain", "fedin", *options, "--json").stdout)["up_scalars"])

    narrow = sent("method.project=averaged", "method.project_out=8")
    assert (
        sent("fedin.project=averaged", "fedin.project_out=9") - narrow == 16 + 64
    )  # a row more of the map, too
    assert sent("models=mlp-small") < sent()  # features as they are, where the models need no map
    assert "of the demo, method.project=fixed" in potluck("explain", "fedin").stdout
    assert refused("explain", "fedin", "method.noise=0.5").endswith("set method.project to fixed or averaged")


def test_explain_takes_an_experiment_for_its_own_method(place: Path) -> None:
    explained = json.loads(potluck("explain", "small.yaml", "method.d1=8", "--json").stdout)
    other = json.loads(potluck("explain", "fedmrl", "small.yaml", "--json").stdout)
    assert explained["method"] == "fedmrl"
    assert explained["up_scalars"] < other["up_scalars"]


def test_split_is_a_table_and_a_picture(place: Path) -> None:
    result = potluck("split", "small.yaml")
    assert result.exit_code == 0, result.output
    assert "picture: runs/small-split.png" in result.stdout
    assert Path("runs/small-split.png").read_bytes().startswith(b"\x89PNG")
    entry = json.loads(potluck("split", "small.yaml", "--png", "new/who.png", "--json").stdout)
    assert entry["picture"] == "new/who.png"
    assert Path("new/who.png").exists()
    assert [sum(client["counts"]) for client in entry["clients"]] == [c["train"] for c in entry["clients"]]


def test_split_shows_the_split_that_runs(place: Path, finished: Path) -> None:
    entry = json.loads(potluck("split", "small.yaml", "--json").stdout)
    assert entry["hash"] == json.loads((finished / "split.json").read_text())["hash"]


MIXED = """\
federation:
- {data: digits, partition: {kind: dirichlet, alpha: 1.0, clients: 2}, models: mlp-small}
- {data: digits-attributes, partition: {kind: iid, clients: 1}, models: conv-small}
method: local
"""


def test_a_federation_of_groups_is_split_and_explained_group_by_group(place: Path) -> None:
    Path("mixed.yaml").write_text(MIXED)
    shown = potluck("split", "mixed.yaml")
    assert shown.exit_code == 0, shown.output
    assert "digits-attributes: multi-label with 4 classes" in shown.stdout
    assert Path("runs/mixed-split-1.png").exists()
    entry = json.loads(potluck("split", "mixed.yaml", "--json").stdout)
    assert [[client["id"] for client in group["clients"]] for group in entry["groups"]] == [["0", "1"], ["2"]]
    explained = json.loads(potluck("explain", "mixed.yaml", "--json").stdout)
    assert [client["model"] for client in explained["clients"]] == ["mlp-small", "conv-small"]
    said = refused("run", "mixed.yaml", "method=fedproto")
    assert said.startswith("error: fedproto learns from one class per sample; client 2 has multi-label")


def test_a_client_may_be_called_anything(place: Path) -> None:
    Path("own.json").write_text(json.dumps({"[red]": {"train": [0, 1, 2]}, "b": {"train": [3], "test": [4]}}))
    assert "[red]" in potluck("split", "small.yaml", "partition={file: own.json}").stdout


def test_the_name_of_a_class_cannot_steer_a_terminal(place: Path) -> None:
    Path("own.csv").write_text("a,y\n" + "1,k\x1b]0;p\x07\n2,l\n" * 30)
    shown = potluck("split", "small.yaml", "data={name: files, path: own.csv, target: y}").stdout
    assert ("\x1b" in shown, "k?]0;p" in shown) == (False, True)


def test_a_list_among_a_models_options_is_written_as_a_list(place: Path) -> None:
    chosen = Experiment.load("small.yaml", ["models=[{name: mlp-small, widths: [8, 4]}]"])
    assert chosen.portable
    assert yaml.safe_load(chosen.to_yaml())["models"]["pool"] == [{"name": "mlp-small", "widths": [8, 4]}]


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("method=fedmlr", ["no method 'fedmlr'", "'fedmrl'"]),
        ("method=3", ["method", "name of a method"]),
        ("method=null", ["method", "name of a method"]),
        ("models=[mlp-smal]", ["'mlp-smal'", "'mlp-small'"]),
        ("models={rep_dim: 8, models: [mlp-small]}", ["no 'pool'", "'models'", "{pool: […], rep_dim: 8}"]),
        ("models=[cnn1]", ["cnn1", "(1, 8, 8)"]),
        ("data=digit", ["'digit'", "'digits'"]),
        ("data=null", ["data", "block"]),
        ("training.round=3", ["'training.round'", "'rounds'"]),
        ("trainig.rounds=3", ["'trainig'", "'training'"]),
        ("partition.alfa=1", ["'partition.alfa'", "'alpha'"]),
        ("training.per_client.1.lrr=1", ["'training.per_client.1.lrr'", "'lr'"]),
        ("training.per_client.9.lr=1", ["client '9'"]),
        ("partition={file: x.json, fle: y}", ["'partition.fle'", "'file'"]),
        ("partition.alpha=0", ["partition.alpha", "greater than 0", "given: 0"]),
        ("partition.alpha=-1", ["partition.alpha", "greater than 0"]),
        ("training.participation=0", ["training.participation", "greater than 0"]),
        ("training.participation=2", ["training.participation", "less than or equal to 1"]),
        ("partition.clients=5000", ["1797 rows", "5000 clients", "lower clients"]),
        ("partition.clients=900", ["alpha", "clients", "min_size"]),
        ("method.d1=65", ["d1 is 65", "client 0 (mlp-small)", "64", "method.d1"]),
        ("partition.kind=iid", ["alpha has no meaning", "'partition={kind: iid, clients: 3}'"]),
        ("seed", ["'seed'", "key=value"]),
        ("training.rounds=", ["'training.rounds='", "no value"]),
        ("data={name: cifar10, dir: nowhere}", ["'cifar10'", "nowhere"]),
        ("evaluate.modes=[mix]", ["evaluate.modes", "'mix'", "mix-"]),
        ("engine.device=cpuu", ["engine.device", "'cpuu'"]),
        ("training.optimizer.nesterov=true", ["nesterov", "momentum"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_with_the_culprit(place: Path, override: str, words: list[str]) -> None:
    sentence = refused("run", "small.yaml", override)
    for word in words:
        assert word in sentence
    assert not Path("runs").exists()


def test_models_that_do_not_fit_the_method(place: Path) -> None:
    narrow = "models=[mlp-small, {name: conv-small, rep_dim: 16}]"
    assert "client 1 (conv-small)" in refused("run", "small.yaml", "method=fedproto", narrow)
    assert "method.share" in refused("run", "small.yaml", "method={name: fedavg, share: all}")


def test_yaml_that_does_not_parse_names_the_line(place: Path) -> None:
    Path("broken.yaml").write_text("name: x\ndata: [1, 2\nmodels: a\n")
    assert "broken.yaml, line 3" in refused("run", "broken.yaml")
    Path("twice.yaml").write_text("name: x\ntraining: {rounds: 1}\ntraining: {batch_size: 8}\n")
    assert "twice.yaml, line 3, column 1: the key 'training' is there twice" in refused("run", "twice.yaml")
    Path("list.yaml").write_text("- 1\n")
    assert "mapping" in refused("run", "list.yaml")
    assert "no experiment file gone.yaml" in refused("run", "gone.yaml")


def test_truncated_parquet_names_the_file(place: Path) -> None:
    folder = place / "data" / "mnist"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        (folder / f"{part}-00000-of-00001.parquet").write_bytes(b"PAR1 and then the line was cut")
    sentence = refused("run", "small.yaml", "data={name: mnist, dir: data}")
    assert "train-00000-of-00001.parquet" in sentence
    assert "again" in sentence


def test_what_would_be_passed_over_in_silence_is_told(place: Path) -> None:
    compare = ("compare", "small.yaml", "--methods")
    assert "seed=3 changes nothing beside --seeds 1,2" in refused(
        *compare, "local", "seed=3", "--seeds", "1,2"
    )
    same = refused("run", "small.yaml", "training.rounds=1", "training.rounds=2")
    assert "'training.rounds=1' and 'training.rounds=2' set the same key; keep one" in same
    undone = refused("run", "small.yaml", "method.d1=8", "method=fedmrl")
    assert "'method=fedmrl' would undo 'method.d1=8' before it; write 'method=fedmrl' first" in undone
    for both in (["fedmrl.d1=8", "method.d1=4"], ["method.d1=4", "fedmrl.d1=8"]):
        same = refused(*compare, "fedmrl", *both)
        assert "'method.d1=4' and 'fedmrl.d1=8' set the same key; keep one of them" in same
    assert "'fedmrl.d1=8': write method.d1=8" in refused("run", "small.yaml", "fedmrl.d1=8")
    idle = refused(*compare, "fedproto", "method.d1=8")
    assert "method.d1=8: fedmrl would not be compared, as only fedproto is" in idle
    told = potluck(*compare, "local,local", "--seeds", "0", "training.rounds=1")
    assert "--methods: local is named twice and run once" in told.stderr
    assert "--seeds: 0 is named twice; name each seed once" in refused(*compare, "local", "--seeds", "0,1,0")
    assert "write --methods" in potluck("compare", "small.yaml", "--method", "fedavg").stderr
    assert "plugins=[FILE.py]" in potluck("serve", "small.yaml", "--plugin", "mine.py").stderr
    assert ", data digits" in potluck("run", "small.yaml", "training.rounds=1").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "small.yaml", "--methods", "local", "--methods=fedavg"),
        ("run", "small.yaml", "--out", "a", "--out", "b"),
        ("resume", "run", "--rounds", "3", "--rounds", "3"),
    ],
)
def test_an_option_of_one_value_is_given_once(place: Path, words: tuple[str, ...]) -> None:
    result = potluck(*words)
    assert result.exit_code == 2
    assert f"{words[2]} is given twice, and only one would count" in " ".join(result.stderr.split())
    repeated = potluck("run", "small.yaml", "--json", "--json", "training.rounds=0")
    assert "given twice" not in repeated.stderr


def test_a_folder_that_cannot_be_written(place: Path) -> None:
    Path("file").write_text("")
    assert "file/run" in refused("run", "small.yaml", "--out", "file/run")
    assert "cannot make the folder file" in refused("split", "small.yaml", "--png", "file/a.png")
    assert "file/all" in refused("compare", "small.yaml", "--methods", "fedavg", "--out", "file/all")
    assert "file is a file; choose another folder" in refused("compare", "small.yaml", "--out", "file")
    deep = "d/" * 1000
    for words in (
        ("run", "small.yaml", "--out", f"{deep}run"),
        ("compare", "small.yaml", "--methods", "fedavg", "--out", f"{deep}all"),
        ("split", "small.yaml", "--png", f"{deep}a.png"),
    ):
        assert "its path has too many levels; choose another" in refused(*words)
    for option, name in (("csv", "x.csv"), ("latex", "x.tex"), ("pdf", "x.pdf")):
        assert f"cannot write /proc/{name}" in refused(
            "compare", "small.yaml", f"--{option}", f"/proc/{name}"
        )
    assert not Path("runs").exists()


def test_a_run_folder_that_is_none_or_of_another_version(place: Path, finished: Path) -> None:
    assert "no run folder gone" in refused("resume", "gone")
    Path("empty").mkdir()
    assert "empty" in refused("resume", "empty")
    shutil.copytree(finished, "old")
    about = json.loads(Path("old/environment.json").read_text())
    Path("old/environment.json").write_text(json.dumps(about | {"potluck": "0.0.9"}))
    assert "potluck 0.0.9" in refused("resume", "old")


def test_a_client_whose_loss_is_nan_is_named_and_left_out(place: Path) -> None:
    result = potluck("run", "small.yaml", "training.per_client.1.lr=1e30", "--json")
    assert result.exit_code == 0, result.output
    assert "goes on without client 1" in result.stderr
    assert json.loads(result.stdout)["failures"] == {"1": 2}


def test_when_no_client_is_left_the_run_can_be_resumed(place: Path) -> None:
    sentence = refused("run", "small.yaml", "training.optimizer.lr=1e30", "training.attempts=1")
    assert "round 1" in sentence
    assert "potluck resume runs/small" in sentence


def test_wrong_lists_of_a_comparison(place: Path) -> None:
    assert "'fedmrl'" in refused("compare", "small.yaml", "--methods", "local,fedmlr")
    assert "'x'" in refused("compare", "small.yaml", "--methods", "fedavg", "--seeds", "0,x")
    told = refused("compare", "small.yaml", "--methods", "fedavg", "--seeds", "9" * 5000)
    assert f"--seeds: '{'9' * 20}…' is not a whole number from 0" in told
    assert "fedproto" in refused("compare", "small.yaml", "--methods", "fedavg", "fedproto.weight=2")


@pytest.mark.parametrize("target", ["0", "90", "-0.1", "nan", "0.5,1.1"])
def test_a_target_that_is_no_score(place: Path, target: str) -> None:
    sentence = refused("compare", "small.yaml", "--methods", "fedavg", f"--target={target}")
    assert f"target {target.split(',')[-1]} is not a score" in sentence
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ("0", "no round 0"),
        ("9", "no round 9; choose from 1 to 4"),
        ("3", "does not evaluate round 3"),
        ("x", "'x'"),
    ],
)
def test_rounds_that_are_not_measured(place: Path, rounds: str, said: str) -> None:
    settings = ("training.rounds=4", "evaluate.every=2")
    assert said in refused(
        "compare", "small.yaml", "--methods", "fedavg", "--rounds", f"2,{rounds}", *settings
    )
    assert not Path("runs").exists()


def test_views_of_a_comparison_that_cannot_be(place: Path) -> None:
    assert "'high'" in refused("compare", "small.yaml", "--methods", "fedavg", "--target", "high")
    sentence = refused("compare", "small.yaml", "--methods", "fedavg", "--against", "fedagv")
    assert "'fedagv'" in sentence
    assert "'fedavg'" in sentence
    assert not Path("runs").exists()


def test_unknown_names_of_the_other_commands(place: Path) -> None:
    assert "'fedmrl'" in refused("explain", "fedmlr")
    assert "gone.yaml" in refused("explain", "fedmrl", "gone.yaml")
    assert potluck("rum").exit_code == 2
    assert potluck("rum").stderr.count("Did you mean") == 1
    assert potluck("run", "small.yaml", "--ot", "x").exit_code == 2


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--rounds", "training.rounds"),
        ("--batch-size", "training.batch_size"),
        ("--lr", "training.optimizer.lr"),
        ("--seed", "seed"),
    ],
)
def test_a_key_written_as_an_option_is_answered_with_the_key(place: Path, option: str, key: str) -> None:
    result = potluck("run", "small.yaml", option, "3")
    assert result.exit_code == 2
    assert f"write {key}=VALUE" in result.stderr
    assert "Did you mean" not in result.stderr


def test_debug_shows_where(place: Path) -> None:
    result = potluck("run", "small.yaml", "method=fedmlr", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "find_method" in result.stderr


def test_a_fault_of_our_own_is_one_line_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No function of this file, which would count as code of the user's.
    monkeypatch.setattr(Experiment, "load", Mock(side_effect=ZeroDivisionError("a\nb")))
    result = potluck("run", "small.yaml")
    assert result.exit_code == 1
    assert result.stderr == "internal error: ZeroDivisionError: a b; run again with --debug to see where\n"


def test_a_full_disk_is_no_internal_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(Experiment, "load", full)
    assert refused("run", "small.yaml") == (
        "error: somewhere: No space left on device; check the path, its rights and the room on the disk"
    )


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_a_stream_cannot_encode_does_not_end_a_command(
    place: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    for name in ("end_on_signals", "end_in_peace"):
        monkeypatch.setattr(command_line, name, lambda: None)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    words = ["run", "small.yaml", "training.rounds=1", "method=local", "--out", "tännchen"]
    monkeypatch.setattr(sys, "argv", ["potluck", *words, *options])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    stdout.seek(0)
    said = stdout.read()
    assert ended.value.code == 0, said
    assert json.loads(said)["folder"] == "tännchen" if options else "t?nnchen/report.html" in said


def test_stopped_before_a_run_began(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Experiment, "load", stopped)
    result = potluck("run", "small.yaml")
    assert (result.exit_code, result.stderr) == (130, "stopped\n")


def test_stopped_while_the_commands_are_loaded() -> None:
    script = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from potluck.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "stopped\n")


@pytest.mark.parametrize(("sent", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_the_signal_decides_the_exit_code_before_a_command_has_begun(sent: str, code: int) -> None:
    script = f"""
import signal, sys
from potluck.cli import app
app.app = lambda: signal.raise_signal(signal.{sent})
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from potluck.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, "stopped\n")


def test_warnings_as_errors_are_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import warnings; warnings.warn('old', DeprecationWarning)")
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-W", "error::DeprecationWarning:typer", "-m", "potluck", "methods"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=there)
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: DeprecationWarning: old; a library warns of something, and Python was told to stop at warnings: "
        "leave out PYTHONWARNINGS=error or -W error\n"
    )
    assert explained(UserWarning("x"))[1] == 2


def test_a_current_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = (
        "import os; os.chdir('gone'); os.rmdir(os.getcwd())\nfrom potluck.__main__ import main\n"
        "import sys; sys.argv[1:] = ['methods']; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: the folder where you are was removed; change to another one\n"


def test_the_signal_decides_the_exit_code() -> None:
    stopped = Stopped("potluck resume 'a b'")
    stopped.__cause__ = Ended(signal.SIGTERM)
    sentence, code = explained(stopped)
    assert (sentence, code) == ("stopped; continue with: potluck resume 'a b'", 143)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.EMFILE, "Too many open files"),
    ],
)
def test_a_limit_of_the_machine_is_no_fault_of_potluck_and_no_matter_of_a_path(error: Exception) -> None:
    sentence, code = explained(error)
    assert code == 2
    assert sentence.startswith("error: ")
    assert "ulimit -a shows what it may have" in sentence
    assert "check the path" not in sentence


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "pydantic", "matplotlib")
    script = (
        "import sys, potluck.cli.app; from potluck.cli import completion; completion.methods(''); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_what_is_not_there_is_told_before_anything_heavy_is_loaded(place: Path) -> None:
    lines = [[name, "gone.yaml"] for name in ("run", "compare", "split", "serve")] + [["resume", "gone"]]
    script = (
        "import sys\nfrom potluck.cli.app import app\n"
        f"for words in {lines}:\n try: app(words)\n except SystemExit as end: print(end.code)\n"
        "print('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["2"] * 5 + ["False"]
    assert ended.stderr.count("error: there is no experiment file gone.yaml") == 4
    assert "error: there is no run folder gone" in ended.stderr


def test_the_example_experiment_is_valid() -> None:
    experiment = Experiment.load(ROOT / "examples" / "first.yaml")
    assert (experiment.name, experiment.method.name, experiment.training.participation) == (
        "first",
        "fedmrl",
        0.1,
    )


def test_variants_that_are_left_out_are_told(place: Path) -> None:
    file = place / "small.yaml"
    file.write_text(SMALL.replace("rounds: 2", "rounds: 1") + "variants: {a: {method: fedavg}}\n")
    assert "variants ignored; potluck compare runs them" in potluck("run", str(file)).stderr
    result = potluck("compare", str(file), "--methods", "local")
    assert "variants ignored, as --methods replaces them" in result.stderr


def test_options_that_say_nothing_or_the_wrong_file_are_refused(place: Path) -> None:
    assert "--methods is empty" in refused("compare", "small.yaml", "--methods", "")
    assert "--seeds is empty" in refused("compare", "small.yaml", "--seeds", " , ")
    assert "ends in .pdf" in refused("compare", "small.yaml", "--pdf", "x.docx")
    assert "ends in .png" in refused("split", "small.yaml", "--png", "x.foo")


def test_no_file_gets_the_number_of_a_stream_that_is_closed(tmp_path: Path) -> None:
    """What a library prints would go into a log of the run."""
    code = (
        "import os; from potluck.cli.screen import fill_streams; fill_streams(); "
        "handle = os.open('number', os.O_CREAT | os.O_WRONLY); os.write(handle, str(handle).encode())"
    )
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    subprocess.run(shell, cwd=tmp_path, check=True, timeout=120)
    assert int((tmp_path / "number").read_text()) > 2


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_on_a_full_disk_is_one_sentence(word: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "potluck", word]
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: No space left on device")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "override",
    [
        "data={name: mnist, dir: ~nobody-of-this-name/x}",
        "data={name: files, path: ~nobody-of-this-name/x.csv, target: y}",
        "data={name: sst2, tokenizer: ~nobody-of-this-name/x}",
    ],
)
def test_a_home_that_nobody_has_is_one_sentence(place: Path, override: str) -> None:
    sentence = refused("run", "small.yaml", override)
    assert "~nobody-of-this-name stands for no home folder here; write the whole path" in sentence
