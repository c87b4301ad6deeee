"""Experiment files with anything in them: each is read, or refused in one sentence."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from potluck.errors import ConfigError, PotluckError
from potluck.experiment.overrides import apply_override
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


def mutated(chance: random.Random) -> bytes:
    values, place = copy.deepcopy(BASE), chance.choice(list(places(BASE)))
    block: Any = values
    for step in place[:-1]:
        block = block[step]
    key = place[-1]
    if isinstance(block, dict) and chance.random() < 0.15:
        key = chance.choice(["extra", "na me", "", "1"])
    block[key] = "__HERE__"
    text = yaml.safe_dump(values, default_flow_style=True, width=10**9)
    content = bytearray(text.replace("__HERE__", chance.choice(VALUES)).encode())
    if chance.random() < 0.1:
        content[chance.randrange(len(content))] = chance.randrange(256)
    return bytes(content)


def test_the_file_itself_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(BASE))
    assert Experiment.load(tmp_path / "a.yaml").name == "tiny"


@pytest.mark.parametrize("seed", range(3))
def test_no_file_whatever_is_an_internal_error(tmp_path: Path, seed: int) -> None:
    chance, refused = random.Random(seed), 0
    for _ in range(60):
        content = mutated(chance)
        (tmp_path / "a.yaml").write_bytes(content)
        try:
            Experiment.load(tmp_path / "a.yaml").to_yaml()
        except PotluckError as error:
            refused += 1
            assert len(str(error)) < 1500, content
        except Exception as error:
            raise AssertionError(content[:2000]) from error
    assert refused > 10


@pytest.mark.parametrize("value", VALUES)
def test_no_override_whatever_is_an_internal_error(value: str) -> None:
    try:
        apply_override(copy.deepcopy(BASE), f"training.rounds={value}")
    except ConfigError as error:
        assert "training.rounds" in str(error)
