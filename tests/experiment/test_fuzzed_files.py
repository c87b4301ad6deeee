"""Experiment files with anything in them: each is read, or refused in one sentence."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from potluck.core.rng import Rng
from potluck.errors import ConfigError, PotluckError
from potluck.experiment.overrides import apply_override, read_yaml
from potluck.experiment.schema import Experiment

BASE: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "data": {"name": "digits", "samples": 60},
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 2, "validation": 0.1},
    "models": ["mlp-small"],
    "method": {"name": "fedavg"},
    "training": {"rounds": 1, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.1}, "lr_decay": 1.0},
    "evaluate": {"every": 1, "when": ["after_aggregation"], "predictions": "none"},
    "engine": {"name": "local", "device": "cpu", "workers": 1, "memory": "auto"},
    "checkpoint": {"every": 0},
    "keep": {"models": "last", "limit": "1GB"},
    "track": [],
    "plugins": [],
}
VALUES = [
    "null", "true", "[]", "{}", "''", "0", "-1", "1.5", ".nan", ".inf", "1e400", "9" * 400, "0x" + "f" * 300,
    "1:30:00", "2001-01-01", "2001-99-99", "!!binary 'aGVsbG8='", "!!binary '!!'", "!!set {a, b}", "!!omap [a: 1]",
    "!!python/name:os.system ''", "!!int 'x'", "!!float 'x'", "!!timestamp 'x'", "!!bool maybe", "!!map []",
    "!!seq {}", "!foo bar", "&a [*a]", "&a {x: *a}", "*nowhere", "[[[[[[1]]]]]]", "{? [1,2] : 3}", "{null: 1}",
    "{1: 2}", "{.nan: 1}", "{<<: 5}", "{<<: {a: 1}}", '"\\u0000"', '"\\ud800"', "'../../x'", "'/'", "[null]",
    "[1, x, {}]", "[{}]", "{name: null}", "{name: []}", "{kind: []}", "'" + "x" * 5000 + "'",
    "[" * 3000 + "]" * 3000, "{a: " * 900 + "1" + "}" * 900, "'os:system'", "1000000000000", "9" * 5000,
]  # fmt: skip


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*above, key)
        yield from places(inner, (*above, key))


def mutated(chance: np.random.Generator) -> bytes:
    values, all_places = copy.deepcopy(BASE), list(places(BASE))
    place = all_places[chance.integers(len(all_places))]
    block: Any = values
    for step in place[:-1]:
        block = block[step]
    key = place[-1]
    if isinstance(block, dict) and chance.random() < 0.15:
        key = ("extra", "na me", "", "1")[chance.integers(4)]
    block[key] = "__HERE__"
    text = yaml.safe_dump(values, default_flow_style=True, width=10**9)
    content = bytearray(text.replace("__HERE__", VALUES[chance.integers(len(VALUES))]).encode())
    if chance.random() < 0.1:
        content[chance.integers(len(content))] = int(chance.integers(256))
    return bytes(content)


def test_the_file_itself_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(BASE))
    assert Experiment.load(tmp_path / "a.yaml").name == "tiny"


@pytest.mark.parametrize("seed", range(3))
def test_no_file_whatever_is_an_internal_error(tmp_path: Path, seed: int) -> None:
    chance, refused = Rng(seed).numpy(), []
    for _ in range(60):
        content = mutated(chance)
        (tmp_path / "a.yaml").write_bytes(content)
        try:
            Experiment.load(tmp_path / "a.yaml").to_yaml()
        except PotluckError as error:
            refused.append(str(error))
        except Exception as error:
            raise AssertionError(content[:2000]) from error
    assert len(refused) > 10
    assert max(map(len, refused)) < 1500


@pytest.mark.parametrize("value", VALUES)
def test_no_override_whatever_is_an_internal_error(value: str) -> None:
    with contextlib.suppress(ConfigError):
        apply_override(copy.deepcopy(BASE), f"training.rounds={value}")


def test_a_file_that_anchors_make_endless_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="too large for an experiment"):
        Experiment.load(tmp_path / "a.yaml")


def test_what_is_merged_without_end_is_refused_while_it_is_read(tmp_path: Path) -> None:
    lines = ["z0: &a0 {k0: 1}"]
    lines += [f"z{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], k{n}: 1}}" for n in range(1, 7)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"a\.yaml, line 6.*: too much is merged by <<"):
        read_yaml(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("z: &z {a: 1, b: 2}\ny: {<<: *z, b: 3}\nx: &x {<<: *x, c: 4}")
    assert read_yaml(tmp_path / "a.yaml")["y"] == {"a": 1, "b": 3}


def test_a_number_of_many_letters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1" + ":59" * 20_000)
    with pytest.raises(ConfigError, match="line 1, column 7: a number of more than 1000 letters"):
        read_yaml(tmp_path / "a.yaml")
