"""Comparisons: what is held equal, what is skipped, what goes on, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import potluck
from helpers import StopAfter
from kills import Kill
from potluck.errors import ConfigError, RunError
from potluck.runs.comparisons.comparison import Comparison
from potluck.runs.comparisons.plan import experiments_by_method, read_sweep
from potluck.runs.comparisons.play import compare_experiments
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Interrupted
from potluck.runs.observers import Observer

SMALL = """\
name: small
data: digits
partition: {kind: dirichlet, alpha: 1.0, clients: 3, min_size: 20}
models: [mlp-small, conv-small]
method: {name: fedmrl, d1: 16}
training: {rounds: 2, batch_size: 64, participation: 0.7}
"""
LOGS = ("metrics.jsonl", "ledger.jsonl")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def logs(folder: Path) -> dict[str, bytes]:
    return {f"{run.name}/{log}": (run / log).read_bytes() for run in folder.glob("*-seed*") for log in LOGS}


def test_local_is_always_compared(file: Path) -> None:
    assert [*read_sweep(file, ["fedavg", "fedmrl"]).experiments[""]] == ["local", "fedavg", "fedmrl"]
    assert [*read_sweep(file, ["fedavg", "local", "fedavg"]).experiments[""]] == ["fedavg", "local"]
    with pytest.raises(ConfigError, match="'fedavg'"):
        read_sweep(file, ["fedavgg"])


def test_each_method_has_its_own_options(file: Path) -> None:
    methods = ["local", "fedmrl", "fedproto"]
    made = experiments_by_method(file, methods, ["fedproto.weight=3", "training.rounds=9", "method.d1=8"])
    assert made["fedmrl"].method.d1 == 8  # type: ignore[attr-defined]
    assert made["fedproto"].method.weight == 3  # type: ignore[attr-defined]
    assert {experiment.training.rounds for experiment in made.values()} == {9}
    assert {name: experiment.method.name for name, experiment in made.items()} == dict(
        zip(methods, methods, strict=True)
    )


def test_options_for_a_method_that_is_not_compared_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"fedproto\.weight=3"):
        experiments_by_method(file, ["local"], ["fedproto.weight=3"])


def test_methods_meet_on_equal_terms(file: Path, tmp_path: Path) -> None:
    made = experiments_by_method(file, ["local", "fedavg", "fedmrl"], ["training.rounds=1"])
    compare_experiments(made, [0, 1], tmp_path / "all")
    for seed in (0, 1):
        folders = [tmp_path / "all" / f"{method}-seed{seed}" for method in made]
        assert len({json.loads((folder / "split.json").read_text())["hash"] for folder in folders}) == 1
        assert len({_cohorts(folder) for folder in folders}) == 1
    assert _cohorts(tmp_path / "all" / "local-seed0") != ()
    result = json.loads((tmp_path / "all" / "comparison.json").read_text())
    assert [entry["method"] for entry in result["methods"]] == ["local", "fedavg", "fedmrl"]
    against = result["methods"][2]["difference"]
    assert against["pairs"] == 6
    assert against["low"] <= against["mean"] <= against["high"]
    assert against["tie"] == (against["low"] <= 0 <= against["high"])
    assert result["methods"][0]["difference"] is None
    assert "fedmrl" in (tmp_path / "all" / "comparison.html").read_text()


def test_a_target_and_another_reference_are_views_of_the_same_runs(file: Path, tmp_path: Path) -> None:
    made = experiments_by_method(file, ["local", "fedavg", "fedmrl"], ["evaluate.every=1"])
    plain = compare_experiments(made, [0], tmp_path / "all").comparison
    before = logs(tmp_path / "all")
    asked = compare_experiments(
        made, [0], tmp_path / "all", targets=[0.001, 1.0], against="fedavg"
    ).comparison
    assert logs(tmp_path / "all") == before
    assert asked == json.loads((tmp_path / "all" / "comparison.json").read_text())
    local, fedavg, fedmrl = asked["methods"]
    assert asked["baseline"] == "fedavg"
    assert fedavg["difference"] is None
    assert local["difference"]["mean"] == -plain["methods"][1]["difference"]["mean"]
    assert len(fedmrl["by_client"]["differences"]["0"]) == 3
    low, high = fedmrl["targets"]
    crossed = [line for line in _ledger(tmp_path / "all" / "fedmrl-seed0") if line["round"] == 1]
    for direction in ("up", "down"):
        sent = [line for line in crossed if line["direction"] == direction and line["purpose"] == "train"]
        assert low["runs"]["0"][direction]["scalars"] == sum(line["scalars"] for line in sent) > 0
        assert low["runs"]["0"][direction]["bytes"] == sum(line["bytes"] for line in sent)
    assert low["runs"]["0"]["round"] == 1
    assert high["runs"] == {"0": None}
    assert compare_experiments(made, [0], tmp_path / "all").comparison == plain


def _ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def test_views_that_cannot_be_are_refused_before_anything_trains(file: Path, tmp_path: Path) -> None:
    made = experiments_by_method(file, ["local", "fedavg"])
    with pytest.raises(ConfigError, match=r"'fedavgg'.*did you mean 'fedavg'"):
        compare_experiments(made, [0], tmp_path / "all", against="fedavgg")
    with pytest.raises(ConfigError, match="target 90 is not a score"):
        compare_experiments(made, [0], tmp_path / "all", targets=[90])
    assert not (tmp_path / "all").exists()


def _cohorts(folder: Path) -> tuple[tuple[int, str], ...]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return tuple((line["round"], line["client"]) for line in lines if line["when"] == "after_training")


def test_asking_again_trains_nothing(file: Path, tmp_path: Path) -> None:
    made = experiments_by_method(file, ["local", "fedavg"])
    first = compare_experiments(made, [0], tmp_path / "all")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "all").glob("*/metrics.jsonl")}
    skipped: list[str] = []

    def nobody(label: str) -> Observer:
        raise AssertionError(f"{label} ran again")

    again = compare_experiments(made, [0], tmp_path / "all", nobody, skipped.append)
    assert again.comparison == first.comparison
    assert [sentence.split(":")[0] for sentence in skipped] == ["local", "fedavg"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_damaged_files_of_a_run_are_written_anew_or_named(file: Path, tmp_path: Path) -> None:
    home, run = tmp_path / "all", tmp_path / "all/local-seed0"

    def again() -> None:
        potluck.compare(file, methods=["local"], overrides=["training.rounds=1"], out=home)

    again()
    (run / "summary.json").write_text("{")
    again()
    assert json.loads((run / "summary.json").read_text())["rounds"] == 1
    damages = {
        "config.yaml": ("name: small\n", "local-seed0 was run with other settings"),
        "environment.json": (
            "{",
            "put a whole copy of it back, or remove .*local-seed0, which is then run",
        ),
        "metrics.jsonl": ("{", r"metrics\.jsonl has lost lines"),
    }
    for name, (content, sentence) in damages.items():
        whole = (run / name).read_bytes()
        (run / name).write_text(content)
        with pytest.raises(RunError, match=sentence):
            again()
        (run / name).write_bytes(whole)
    missing = r"metrics\.jsonl is missing; .*; or remove .*local-seed0, and potluck compare runs it again"
    (run / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=missing):
        again()
    with pytest.raises(RunError, match=r"metrics\.jsonl is missing; copy the folder again"):
        potluck.open(run)
    compared = Comparison(home, json.loads((home / "comparison.json").read_text()))
    for gone in ("metrics.jsonl", ""):
        with pytest.raises(RunError, match=rf"{run / gone} is gone: .* run potluck compare again"):
            compared.frame()
        shutil.rmtree(run, ignore_errors=True)
    (home / "comparison.json").write_text("{")
    with pytest.raises(RunError, match=r"comparison\.json cannot be read: .*; run potluck compare again"):
        potluck.open(home)


def test_a_stopped_comparison_goes_on_to_the_same_end(file: Path, tmp_path: Path) -> None:
    made = experiments_by_method(file, ["local", "fedmrl"])
    whole = compare_experiments(made, [0], tmp_path / "whole")
    with pytest.raises(Interrupted):
        compare_experiments(
            made, [0], tmp_path / "parts", lambda label: StopAfter(1) if label == "fedmrl" else Observer()
        )
    assert not (tmp_path / "parts" / "comparison.json").exists()
    parts = compare_experiments(made, [0], tmp_path / "parts")
    assert logs(tmp_path / "parts") == logs(tmp_path / "whole")
    assert _without_time(parts.comparison) == _without_time(whole.comparison)


def _without_time(comparison: dict[str, object]) -> str:
    methods = [{**entry, "seconds_per_round": None} for entry in comparison["methods"]]  # type: ignore[attr-defined]
    return json.dumps({**comparison, "methods": methods})


def test_a_run_that_never_began_is_begun(file: Path, tmp_path: Path) -> None:
    made = experiments_by_method(file, ["local"], ["training.rounds=1"])
    left = tmp_path / "all" / "local-seed0"
    left.mkdir(parents=True)
    for name in ("experiment.yaml", ".lock"):
        (tmp_path / "all" / name).write_text("")
    (left / "contract.json").write_text("pinned by somebody")
    with pytest.raises(RunError, match="local-seed0 is not a run folder; move it out of the way"):
        compare_experiments(made, [0], tmp_path / "all")
    for name in (".lock", "split.json", ".environment.json.ab12cd34"):  # of a process that was killed
        (left / name).write_text("{")
    compare_experiments(made, [0], tmp_path / "all")
    assert (left / "summary.json").exists()


def test_runs_of_other_settings_are_not_mixed_in(file: Path, tmp_path: Path) -> None:
    compare_experiments(experiments_by_method(file, ["local"]), [0], tmp_path / "all")
    said = (tmp_path / "all/experiment.yaml").read_bytes()
    before = logs(tmp_path / "all")
    for change, told in {
        "training.batch_size=32": r"local-seed0 .*training\.batch_size: 64 there, 32 here",
        "training.rounds=1": r"training\.rounds: 2 there, 1 here\); compare with training\.rounds=2, .*--rounds 1",
    }.items():
        with pytest.raises(RunError, match=told):
            compare_experiments(experiments_by_method(file, ["local"], [change]), [0], tmp_path / "all")
    with (
        RunFolder(tmp_path / "all").locked(),
        pytest.raises(RunError, match="another process is at work"),
    ):
        compare_experiments(experiments_by_method(file, ["fedavg"], [change]), [0], tmp_path / "all")
    assert logs(tmp_path / "all") == before
    assert (tmp_path / "all/experiment.yaml").read_bytes() == said


def test_a_comparison_of_more_rounds_plays_its_runs_on(file: Path, tmp_path: Path) -> None:
    def compared(rounds: int, folder: str, *changes: str) -> Comparison:
        made = experiments_by_method(file, ["local", "fedmrl"], [f"training.rounds={rounds}", *changes])
        return compare_experiments(made, [0], tmp_path / folder)

    compared(2, "parts", "evaluate.every=2")
    short = logs(tmp_path / "parts")
    with pytest.raises(RunError, match=r"fedmrl-seed0 .*method\.d1: 16 there, 8 here"):
        compared(3, "parts", "evaluate.every=2", "method.d1=8")
    assert logs(tmp_path / "parts") == short  # not even Local has got its third round
    longer, whole = compared(3, "parts", "evaluate.every=2"), compared(3, "whole", "evaluate.every=2")
    assert logs(tmp_path / "parts") == logs(tmp_path / "whole") != short
    assert _without_time(longer.comparison) == _without_time(whole.comparison)
    with pytest.raises(RunError, match="is a comparison, and resume takes a run"):
        potluck.resume(tmp_path / "parts", rounds=4)


@pytest.mark.parametrize("name", ["thesis.tex", "experiment.yaml"])
def test_a_folder_of_somebody_else_is_left_alone(file: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("# by hand")
    with pytest.raises(RunError, match="has something other"):
        compare_experiments(experiments_by_method(file, ["local"]), [0], tmp_path / "mine")
    assert {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()} == {name: "# by hand"}


def test_a_comparison_that_was_killed_at_its_first_files_begins_again(file: Path, tmp_path: Path) -> None:
    made = experiments_by_method(file, ["local"], ["training.rounds=1"])
    at = 0
    while not (tmp_path / "all/local-seed0").exists():
        at += 1
        with Kill(at):  # each begins where the one before was killed
            compare_experiments(made, [0], tmp_path / "all")
    assert at > 5
    assert {path.name for path in (tmp_path / "all").iterdir()} == {
        ".lock",
        "experiment.yaml",
        "local-seed0",
    }


def test_a_method_that_cannot_work_is_refused_before_another_trains(file: Path, tmp_path: Path) -> None:
    made = experiments_by_method(file, ["local", "fedmrl"], ["fedmrl.d1=1000"])
    with pytest.raises(ConfigError, match="d1 is 1000"):
        compare_experiments(made, [0], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_comparison_says_what_it_compares(file: Path, tmp_path: Path) -> None:
    compare_experiments(experiments_by_method(file, ["local"], ["training.rounds=1"]), [0], tmp_path / "all")
    written = yaml.safe_load((tmp_path / "all" / "experiment.yaml").read_text())
    assert written["training"]["rounds"] == 1


MIXED = """\
name: mixed
federation:
  - {data: {name: digits, samples: 80}, partition: {kind: iid, clients: 1}, models: mlp-small}
  - {data: {name: digits-attributes, samples: 80}, partition: {kind: iid, clients: 1}, models: conv-small}
models: {rep_dim: 16}
method: local
training: {rounds: 2, batch_size: 16}
"""


def test_further_measures_are_those_of_the_last_logged_lines(tmp_path: Path) -> None:
    (tmp_path / "mixed.yaml").write_text(MIXED)
    made = experiments_by_method(tmp_path / "mixed.yaml", ["local"])
    (entry,) = compare_experiments(made, [0], tmp_path / "all").comparison["methods"]
    run = tmp_path / "all" / "local-seed0"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["round"], last["client"], last["when"]) == (2, "1", "after_aggregation")
    assert entry["further"] == {"f1": {"mean": last["test"]["f1"], "std_over_seeds": None}}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy"]["further"] == {"f1": {"mean": last["test"]["f1"], "clients": 1}}
    assert "Further measures" in (run / "report.html").read_text()
    assert "Further measures" in (tmp_path / "all" / "comparison.html").read_text()


def test_two_data_sets_measured_alike_are_shown_client_by_client(tmp_path: Path) -> None:
    (tmp_path / "alike.yaml").write_text(MIXED.replace("digits-attributes", "digits"))
    made = experiments_by_method(tmp_path / "alike.yaml", ["local"], ["training.rounds=1"])
    comparison = compare_experiments(made, [0], tmp_path / "all").comparison
    assert comparison["metrics"] == {"0": "accuracy", "1": "accuracy"}
    assert comparison["methods"][0]["gain"] == 0
    assert "Client by client" in (tmp_path / "all" / "comparison.html").read_text()
