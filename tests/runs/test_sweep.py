"""Several experiments in one file: variants, sweeps, and what they may not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import potluck
from potluck.cli.app import app
from potluck.errors import ConfigError, RunError
from potluck.experiment.schema import Experiment
from potluck.runs.comparisons.plan import check_sweep, read_block, read_sweep
from potluck.runs.folder import RunFolder

BASE = """\
name: several
data: digits
partition: {kind: dirichlet, alpha: 1.0, clients: 3, min_size: 20}
models: {pool: [mlp-small, conv-small]}
method: {name: fedmrl, d1: 16}
training: {rounds: 1, batch_size: 64}
"""
MANY = {f"training.k{number}": [*range(20)] for number in range(9)}  # a product of 20 to the ninth
BLOCKS = """\
variants:
  fedproto: {method: fedproto}
  method.d1: [8, 16]
  wide: {method.d1: 32, training.optimizer.lr: 0.5}
sweep:
  partition.alpha: [0.5, 1.0]
  more: {partition.clients: 4}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "several.yaml"
    path.write_text(BASE + BLOCKS)
    return path


def write(path: Path, blocks: str) -> Path:
    path.write_text(BASE + blocks)
    return path


def options(experiment: Experiment) -> Any:
    return experiment.method


def test_variants_and_settings_are_spelled_out(file: Path) -> None:
    made = read_sweep(file).experiments
    assert list(made) == ["alpha=0.5", "alpha=1.0", "more"]
    labels = ["local,lr=0.5", "local", "fedproto", "d1=8", "d1=16", "wide"]
    assert all(list(each) == labels for each in made.values())
    half, more = made["alpha=0.5"], made["more"]
    assert {one.partition.alpha for one in half.values()} == {0.5}  # type: ignore[union-attr]
    assert {one.partition.clients for one in more.values()} == {4}  # type: ignore[union-attr]
    names = [one.method.name for one in half.values()]
    assert names == ["local", "local", "fedproto", "fedmrl", "fedmrl", "fedmrl"]
    assert [options(half[label]).d1 for label in ("d1=8", "d1=16", "wide")] == [8, 16, 32]
    assert half["wide"].training.optimizer.lr == 0.5
    assert half["d1=8"].training.optimizer.lr == more["d1=8"].training.optimizer.lr != 0.5
    assert half["wide"].training.batch_size == 64


def test_run_plays_the_file_without_them(file: Path) -> None:
    alone = Experiment.load(file)
    assert (options(alone).d1, alone.partition.alpha) == (16, 1.0)  # type: ignore[union-attr]


def test_overrides_come_first_and_those_of_a_method_reach_its_variants(file: Path) -> None:
    overrides = ["training.rounds=7", "fedproto.weight=3", "partition.alpha=9"]
    made = read_sweep(file, overrides=overrides).experiments
    assert {one.training.rounds for each in made.values() for one in each.values()} == {7}
    assert made["alpha=0.5"]["fedproto"].partition.alpha == 0.5  # type: ignore[union-attr]
    assert made["more"]["fedproto"].partition.alpha == 9  # type: ignore[union-attr]
    assert options(made["more"]["fedproto"]).weight == 3
    with pytest.raises(ConfigError, match=r"fedavg\.share=layers.*not one of the methods"):
        read_sweep(file, overrides=["fedavg.share=layers"])


def test_methods_take_the_place_of_variants(file: Path) -> None:
    made = read_sweep(file, ["local", "fedmrl"]).experiments
    assert list(made) == ["alpha=0.5", "alpha=1.0", "more"]
    assert options(made["more"]["fedmrl"]).d1 == 16
    assert list(made["more"]) == ["local", "fedmrl"]


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ("variants: {a: {partition.alpha: 0.1}}", r"variants\.a changes partition\.alpha.*under sweep"),
        ("variants: {a: {seed: 3}}", r"variants\.a changes seed.*use --seeds"),
        ("variants: {a/b: {method.d1: 3}}", "'a/b' cannot name a folder"),
        ("variants: {method.d1: [[1, 2]]}", r"'d1=\[1, 2\]' cannot name a folder"),
        ("variants: {method.d1: [8, 8]}", "two entries 'd1=8'"),
        ("variants: {d1=8: {method.d1: 4}, method.d1: [8]}", "two entries 'd1=8'"),
        ("variants: [fedproto]", "variants: must be a block"),
        ("variants: {fedproto: fedproto}", r"variants\.fedproto: give a label with a block"),
        ("sweep: {a: {partition.alfa: 1}}", r"unknown key 'partition\.alfa'.*'alpha'"),
        ("variants: {a: {method.d2: 1}}", r"unknown key 'method\.d2'"),
        ("variants: {grid: {method.d1: 8}}", r"variants\.grid\.method\.d1: give a list of values"),
        ("variants: {grid: {method.d1: []}}", r"variants\.grid\.method\.d1: give a list of values"),
        ("sweep: {grid: [1, 2]}", r"sweep\.grid: must be a block of keys with lists"),
        ("variants: {grid: {method.d1: [8, 8]}}", "two entries 'd1=8'"),
        ("variants: {grid: {partition.alpha: [1, 2]}}", r"changes partition\.alpha"),
        ("variants: {grid: {models: [a/b]}}", "'models=a/b' cannot name a folder"),
        ("grid: {method.d1: [8]}", "unknown key 'grid'"),
        (f"sweep: {{grid: {MANY}}}", r"sweep\.grid: these are 512,000,000,000 entries"),
        (f"variants: {{method.d1: {[*range(10_001)]}}}", r"variants\.method\.d1: these are 10,001 entries"),
        ("variants: {method.d1: []}", r"variants\.method\.d1: the list is empty"),
        (
            "variants: {a: {method: fedavg}}\nsweep: {seed: [1, 2]}",
            r"sweep\.seed=1 changes seed.*use --seeds",
        ),
        (
            "variants: {a: {method.d1: 8, method: fedavg}}",
            r"variants\.a: method\.d1 has no meaning for fedavg",
        ),
        ("sweep: {a: {method.d1: 8, method: fedavg}}", r"sweep\.a: method\.d1 has no meaning for fedavg"),
        (
            "variants: {a: {method: fedavg}}\nsweep: {method.d1: [1, 2]}",
            r"sweep\.d1=1: method\.d1 changes nothing.*no meaning for a",
        ),
        ("variants: {method.d1: [8, 4]}\nsweep: {method.d1: [1, 2]}", r"method\.d1 changes nothing"),
        ("sweep: {method: [fedavg, fedproto]}", "method changes nothing.*under methods"),
        ("sweep: {method.name: [fedavg]}", r"method\.name changes nothing.*under methods"),
        (
            "variants: {a: {method: local}}\nsweep: {x: {method.name: fedavg}}",
            r"sweep\.x: method\.name changes nothing",
        ),
        ("variants: {local: {method: fedavg}}", r"variants\.local runs fedavg.*another label"),
        ("variants: {'local,x': {method: fedavg}}", r"variants\.local,x runs fedavg"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, blocks: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_sweep(write(tmp_path / "wrong.yaml", blocks))


def test_a_sweep_over_an_option_reaches_the_methods_that_have_it(tmp_path: Path) -> None:
    blocks = "variants: {a: {method: fedmrl}, b: {method: fedavg}}\nsweep: {method.d1: [4, 8]}"
    path = tmp_path / "option.yaml"
    for name in ("fedmrl", "fedavg"):
        path.write_text(BASE.replace("{name: fedmrl, d1: 16}", name) + blocks)
        made = read_sweep(path).experiments
        assert [options(each["a"]).d1 for each in made.values()] == [4, 8]
        assert {each["b"].method.name for each in made.values()} == {"fedavg"}


def test_a_sweep_over_methods_leaves_local_alone(tmp_path: Path) -> None:
    blocks = "variants: {training.epochs: [1]}\nsweep: {method.name: [fedavg, fedproto]}"
    path = tmp_path / "names.yaml"
    path.write_text(BASE.replace("{name: fedmrl, d1: 16}", "local") + blocks)
    for setting, made in read_sweep(path).experiments.items():
        names = {label: one.method.name for label, one in made.items()}
        assert names == {"local,epochs=1": "local", "epochs=1": setting.partition("=")[2]}


def test_a_variant_that_cannot_work_is_found_in_the_last_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "late.yaml", "sweep: {first: {seeds.split: 1}, last: {models.rep_dim: 8}}")
    with pytest.raises(ConfigError, match="d1 is 16, but client 0"):
        check_sweep(read_sweep(path).experiments)


def test_a_grid_is_a_product_beside_other_variants(tmp_path: Path) -> None:
    blocks = "variants: {fedproto: {method: fedproto}, grid: {method.d1: [8, 16], training.epochs: [1, 2]}}"
    made = read_sweep(write(tmp_path / "grid.yaml", blocks))
    labels = ["d1=8,epochs=1", "d1=8,epochs=2", "d1=16,epochs=1", "d1=16,epochs=2"]
    assert list(made.variants) == ["fedproto", *labels]
    assert list(made.experiments[""]) == ["local,epochs=2", "local", "fedproto", *labels]
    assert made.variants["d1=16,epochs=2"] == {"method.d1": 16, "training.epochs": 2}
    last = made.experiments[""]["d1=16,epochs=2"]
    assert (options(last).d1, last.training.epochs) == (16, 2)


def test_keys_of_a_grid_with_one_last_word_have_longer_names() -> None:
    block = {"grid": {"method.tune.rounds": [1], "training.rounds": [2]}}
    assert list(read_block(block, "variants")) == ["tune.rounds=1,training.rounds=2"]


def test_a_sweep_is_a_comparison_per_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "few.yaml", "variants: {method.d1: [8]}\nsweep: {partition.alpha: [0.5, 2.0]}\n")
    result = CliRunner().invoke(app, ["compare", str(path), "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert list(shown) == ["alpha=0.5", "alpha=2.0"]
    for setting, comparison in shown.items():
        assert [entry["method"] for entry in comparison["methods"]] == ["local", "d1=8"]
        assert comparison["partition"]["alpha"] == float(setting.partition("=")[2])
        folder = tmp_path / "runs" / "several-compare" / setting
        assert {part.name for part in folder.glob("*-seed0")} == {"local-seed0", "d1=8-seed0"}
        assert "d1=8" in (folder / "comparison.html").read_text()


OURS = json.dumps({"format": 2, "name": "several", "settings": {"alpha=9": {"partition.alpha": 9}}})


@pytest.mark.parametrize(
    ("files", "ours"),
    [
        ({"sweep.json": '{"method": "grid", "parameters": {}}'}, False),
        ({"sweep.json": "by hand", "alpha=9/experiment.yaml": ""}, False),
        ({"sweep.html": "by hand", ".lock": ""}, False),
        ({"config.yaml": "", ".lock": "", "alpha=0.5/experiment.yaml": ""}, False),  # a run
        ({"experiment.yaml": "", ".lock": ""}, False),  # a comparison
        ({"comparison.json": "{}"}, False),
        ({".lock": "", "alpha=0.5/.lock": ""}, True),  # stopped at once
        ({"alpha=0.5/experiment.yaml": "", "notes.txt": ""}, True),  # stopped, of an older version
        ({"sweep.json": "damaged", "sweep.html": "", "alpha=0.5/experiment.yaml": ""}, True),
        ({"sweep.json": OURS, "sweep.html": "", "notes.txt": ""}, True),
        ({"sweep.json": OURS, "experiment.yaml": ""}, True),  # of an older version, into a comparison
    ],
)
def test_a_sweep_writes_into_no_folder_but_its_own(
    tmp_path: Path, files: dict[str, str], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "all"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    begun = []
    monkeypatch.setattr("potluck.runs.comparisons.api.compare_experiments", lambda *_, **__: begun.append(1))
    monkeypatch.setattr("potluck.runs.comparisons.api.Sweep.write", lambda self: begun.append(0))
    asked = {"sweep": {"partition.alpha": [0.5]}, "out": folder}
    if ours:
        potluck.compare(write(tmp_path / "few.yaml", ""), **asked)
        assert begun == [1, 0]
        return
    with pytest.raises(RunError, match="has something other than a sweep; choose another folder"):
        potluck.compare(write(tmp_path / "few.yaml", ""), **asked)
    assert not begun
    assert {name: (folder / name).read_text() for name in files} == files


def test_a_sweep_locks_its_folder_and_follows_no_link(tmp_path: Path) -> None:
    folder, path = tmp_path / "all", write(tmp_path / "few.yaml", "")
    (tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    (folder / "alpha=0.5").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"alpha=0\.5 is a link to another place"):
        potluck.compare(path, sweep={"partition.alpha": [0.5]}, out=folder)
    (folder / "alpha=0.5").unlink()
    with (
        RunFolder(folder).locked(),
        pytest.raises(RunError, match=f"another process is at work in {folder};"),
    ):
        potluck.compare(path, sweep={"partition.alpha": [0.5]}, out=folder)
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("values", [[2, 2.0], [True, 1]])
def test_one_setting_under_two_names_is_refused(values: list[Any]) -> None:
    for block in ({"partition.clients": values}, {"grid": {"partition.clients": values, "seed": [0]}}):
        with pytest.raises(ConfigError, match="are the same setting; leave one of them out"):
            read_block(block, "sweep")
