"""Options one can read: the table of `potluck explain METHOD --options`, and the same in errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import Field
from typer.testing import CliRunner

from potluck import Experiment, MethodConfig
from potluck.cli.app import app
from potluck.core.options import options_of
from potluck.errors import ConfigError
from potluck.methods.registry import find_method, method_names


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, ["explain", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("method", method_names())
def test_every_option_has_a_meaning_and_a_source(method: str) -> None:
    options = options_of(find_method(method).Config)
    assert [one.name for one in options if not (one.meaning and one.source)] == []


def test_an_option_that_says_no_source_is_found() -> None:
    class Config(MethodConfig):
        rate: float = Field(default=0.1, description="a rate")

    assert [one.name for one in options_of(Config) if not one.source] == ["rate"]


def test_the_table_has_name_type_default_range_meaning_and_source() -> None:
    (row,) = (line for line in shown("fedmrl", "--options").splitlines() if line.startswith("tune.rounds"))
    assert "whole number" in row
    assert ">= 1" in row
    assert "rounds of each pilot run" in row
    assert row.rstrip().endswith("ours")


def test_programs_get_the_same() -> None:
    entry = json.loads(shown("fedin", "--options", "--json"))
    options = {one["name"]: one for one in entry["options"]}
    assert entry["method"] == "fedin"
    assert options["noise"]["default"] == 0.0
    assert options["alleviate"]["allowed"] == "simplified, exact, none"
    assert options["strength"]["source"] == "paper, Eq. 13"


@pytest.mark.parametrize("method", method_names())
def test_every_default_is_plain(method: str) -> None:
    found = json.loads(shown(method, "--options", "--json"))["options"]
    assert found
    assert [
        one["name"] for one in found if re.search(r"<.*>| object at |=", json.dumps(one["default"]))
    ] == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"strenght": 2},
            "unknown key 'method.strenght'; did you mean 'strength'? strength: λ of Eq. 13; 1 in the paper "
            "(allowed: >= 0; default: 1)",
        ),
        (
            {"batch": 1},
            "method.batch: must be greater than or equal to 2 (given: 1); batch: samples in a batch of "
            "features; the paper's batch size (allowed: >= 2; default: 16)",
        ),
        ({"project_in": [64, 8, 0]}, "project_in: channels, height and width of s_in in the shared space"),
        ({"pool": "none"}, "(allowed: round, all; default: round)"),
    ],
)
def test_an_error_about_an_option_says_what_it_means(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        Experiment.make(
            partition={"kind": "iid", "clients": 2}, models="mlp-small", method={"name": "fedin", **options}
        )
    assert sentence in str(error.value)
