"""Settings: what is refused, and what the sentence says to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from potluck import Experiment, from_arrays, run
from potluck.errors import ConfigError, PotluckError, nearest
from potluck.experiment.origins import registered_here
from potluck.experiment.overrides import read_override, read_yaml

BASE: dict[str, Any] = {
    "data": "digits",
    "partition": {"kind": "iid", "clients": 3},
    "models": ["mlp-small"],
    "method": "fedavg",
}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rounds": 3}, "did you mean 'training.rounds'"),
        ({"round": 3}, "did you mean 'training.rounds'"),
        ({"fedcosine": 1}, "unknown key 'fedcosine'; known: "),
        ({"participation": 0.5}, "did you mean 'training.participation'"),
        ({"partition": {"kind": "iid", "clients": 3, "classes": 2}}, "did you mean 'classes_per_client'"),
        ({"training": {"lr": 0.1}}, "did you mean 'training.optimizer.lr'.*learning rate"),
        ({"method": {"name": "fedavg", "rounds": 3}}, "did you mean 'training.rounds'"),
        ({"trainin": {}}, "did you mean 'training'"),
        ({"evaluate": {"evry": 2}}, "did you mean 'every'"),
        ({"training": {"optimizer": {"name": "adam", "momentum": 0.9}}}, "momentum has no meaning for adam"),
        (
            {"training": {"optimizer": {"name": "adamw", "nesterov": True}}},
            "nesterov has no meaning for adamw",
        ),
        ({"training": {"optimizer": {"betas": [0.5, 0.9]}}}, "betas has no meaning for sgd"),
        ({"training": {"optimizer": {"name": "adam", "betas": [1.5, 0.9]}}}, "betas"),
        ({"training": {"optimizer": {"name": "adam", "betas": [0.9, 1.0]}}}, "betas"),
        ({"partition": {"kind": "iid", "clients": 3, "held_out": [9]}}, "held_out: give a number or a share"),
        (
            {"partition": {"kind": "iid", "clients": 3, "held_out": "x"}},
            "held_out: must be a whole number or a number",
        ),
        *(
            (
                {"partition": {"kind": "iid", "clients": 3, "held_out": many}},
                "held_out .* leaves none to train",
            )
            for many in (1e308, 10**400, float("nan"))
        ),
        ({"partition": {"kind": "iid", "clients": 10**400, "held_out": 0.5}}, "partition.clients: "),
        ({"data": (np.zeros((3, 2)), np.zeros(3))}, r"data: give the name.*from_arrays\(x, y\), from_frame"),
        ({"federation": {"min_clients": 2}}, "federation is a list of groups"),
        ({"data": {"name": "digits", "dir": "/nowhere"}}, "data set 'digits' is read from no folder"),
        ({"training": 3}, "training: must be a block of keys with values, such as {epochs: …}"),
        (
            {"training": {"optimizer": "adam"}},
            "training.optimizer: must be a block of keys with values, such as {name: adam}",
        ),
        ({"name": "a b"}, "name: write letters, digits"),
        ({"checkpoint": {"every": "soon"}}, "checkpoint.every: .*60s.* never"),
    ],
)
def test_a_sentence_says_what_is_meant(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PotluckError, match=sentence):
        Experiment.make(**(BASE | values)).load_data()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("partition.file=split.json", "'partition.clients'; it does not go with .*partition={…}"),
        ("partition.kind=natural", "'partition.clients'; it does not go with .*partition={…}"),
        ("training={rounds:2}", "write a space after the colon: rounds: 2"),
        ("method={name:fedavg}", "write a space after the colon: name: fedavg"),
        ("partition=dirichlet", "write partition.kind=dirichlet"),
        ("training.rounds=true", r"training.rounds: must be a number \(given: True\)"),
        ("models.0.name=x", "unknown model 'x'"),
        ("models.pool.²=x", "'²' is not a position in a list of"),
        (f"models.pool.{'9' * 5000}=x", "is not a position in a list of"),
        ("partition={file: 3}", r"partition.file: give the path of a file \(given: 3\)"),
        (3, "3 is not an override; write key=value"),
        ("variants.a.method=local", "write variants into the file; potluck compare runs them"),
    ],
)
def test_an_override_that_cannot_be_is_answered_with_what_to_write(
    override: Any, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    with pytest.raises(PotluckError, match=sentence):
        Experiment.load(tmp_path / "base.yaml", [override]).pool()


def test_a_key_of_models_may_be_set_where_a_file_lists_them(tmp_path: Path) -> None:
    file = tmp_path / "short.yaml"
    file.write_text(yaml.safe_dump(BASE | {"models": ["mlp-small", "conv-small"]}))
    models = Experiment.load(file, ["models.rep_dim=32"]).models
    assert (models.pool, models.rep_dim) == (["mlp-small", "conv-small"], 32)
    assert Experiment.load(file, ["models.1=mlp-large"]).models.pool == ["mlp-small", "mlp-large"]


@pytest.mark.parametrize("overrides", ["training.rounds=7", {"training.rounds": 7}])
def test_one_override_may_stand_alone(overrides: Any, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    assert Experiment.load(tmp_path / "base.yaml", overrides).training.rounds == 7
    with pytest.raises(ConfigError, match="overrides: give a list"):
        Experiment.load(tmp_path / "base.yaml", None)  # type: ignore[arg-type]


def test_class_names_that_are_too_few_are_named() -> None:
    x, y = np.zeros((6, 3)), np.arange(6) % 3
    with pytest.raises(
        PotluckError, match="class_names has so many: name every class, or leave out class_names"
    ):
        from_arrays(x, y, class_names=["a", "b"])
    with pytest.raises(PotluckError, match="add 1 to all labels"):
        from_arrays(x, y - 1)


def test_an_unknown_option_of_a_metric_is_named() -> None:
    metric = {"name": "sklearn:fbeta_score", "options": {"bta": 2}}
    with pytest.raises(ConfigError, match="fbeta_score has no option 'bta'; did you mean 'beta'"):
        Experiment.make(**BASE, metrics=[metric]).build()


@pytest.mark.parametrize(
    ("out", "sentence"),
    [(3, "path of a folder, not 3"), ("", "out is empty"), (".", "has something other than a run")],
)
def test_a_place_for_a_run_that_cannot_be(out: Any, sentence: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(PotluckError, match=sentence):
        run(**BASE, out=out)


@pytest.mark.parametrize("optimizer", [{"name": "adam", "lr": 0.1}, {"momentum": 0.5, "nesterov": True}])
def test_an_optimiser_with_all_defaults_written_out_is_read(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    experiment = Experiment.make(**BASE, training={"optimizer": optimizer})
    (tmp_path / "config.yaml").write_text(experiment.to_yaml())
    assert Experiment.load(tmp_path / "config.yaml").training == experiment.training


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tab.yaml").write_text("training:\n\trounds: 3\n")
    with pytest.raises(ConfigError, match=r"tab\.yaml, line 2, column 1: a tab; use spaces"):
        read_yaml(tmp_path / "tab.yaml")
    for text, told in (
        ("models: [a, b", r"a list; close it with \]"),
        ("data: {name: a", r"a block; close it with \}"),
    ):
        (tmp_path / "open.yaml").write_text(text)
        with pytest.raises(
            ConfigError, match=rf"open\.yaml, line 1, column \d+: the file ends inside {told}$"
        ):
            read_yaml(tmp_path / "open.yaml")
    with pytest.raises(
        ConfigError, match=r"^method: the block has no name; write for example method: \{name"
    ):
        Experiment.make(**BASE | {"method": {"d1": 3}})
    with pytest.raises(ConfigError, match=r"^training\.rounds: must be a whole number \(given: 'x'\)"):
        Experiment.make(**BASE, training={"rounds": "x"})
    with pytest.raises(ConfigError, match="is a folder"):
        read_yaml(tmp_path)
    with pytest.raises(ConfigError, match=r"plugins: there is no file mine\.py"):
        Experiment.make(**BASE, plugins=["mine.py"])
    assert nearest("x", ()) == "there is none"


@pytest.mark.parametrize("data", ["digits", "cifar10", "fashion_mnist"])
def test_what_comes_with_the_library_is_not_registered_here(data: str) -> None:
    """Another process knows it: it neither travels to other machines nor stands in the record of a run."""
    group = Experiment.make(
        data=data, partition={"kind": "iid", "clients": 2}, models=["conv-small"], method="local"
    ).groups
    assert registered_here("local", group, ()) == []


@pytest.mark.parametrize(
    ("written", "read"), [("010", "8"), ("-017", "-15"), ("1:30", "90"), ("1:30.5", "90.5"), ("00", "0")]
)
def test_a_number_that_yaml_reads_otherwise_is_refused(written: str, read: str, tmp_path: Path) -> None:
    sentence = f"{written} is {read} in YAML; write that, or put quotes around a text"
    with pytest.raises(ConfigError, match=f"'seed={written}': {sentence}"):
        read_override(f"seed={written}")
    (tmp_path / "e.yaml").write_text(f"seed: {written}\n")
    with pytest.raises(ConfigError, match=f"e.yaml, line 1, column 7: {sentence}"):
        read_yaml(tmp_path / "e.yaml")
    assert read_override(f"name='{written}'") == ("name", written)
    assert read_override("seed=1_000") == ("seed", 1000)


@pytest.mark.parametrize(
    "block",
    [
        {"partition": {"kind": "iid", "clients": True}},
        {"partition": {"kind": "iid", "clients": 4, "held_out": True}},
        {"partition": {"kind": "natural", "min_size": True}},
        {"partition": {"kind": "feature_shift", "shift": "blur", "clients": True}},
        {"data": {"name": "digits", "samples": True}},
    ],
)
def test_a_truth_value_is_no_number(block: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be a number \(given: True\)"):
        Experiment.make(**{"models": ["mlp-small"], "method": "local", **block})
