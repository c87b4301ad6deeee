"""Scores at chosen rounds."""

from __future__ import annotations

import json

import pytest
import yaml

from potluck.core.rng import Rng
from potluck.report import chosen_rounds as rounds
from potluck.report import comparison_page, sheets
from potluck.report.comparison import compare_runs


def make_run(folder, method, seed, scores):
    """A run whose `scores` are (round, moment, mode, values of the clients)."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"method": {"name": method}, "seed": seed}))
    (folder / "split.json").write_text(json.dumps({"hash": str(seed)}))
    lines = [
        {
            "round": number,
            "client": str(client),
            "when": when,
            "mode": mode,
            "test": {"accuracy": value, "samples": 1},
        }
        for number, when, mode, values in scores
        for client, value in enumerate(values)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


AFTER, TRAINED = "after_aggregation", "after_training"


@pytest.fixture
def runs(tmp_path):
    """One method with two modes, one of them measured at another moment; the second seed was stopped early."""
    whole = [
        (2, AFTER, "large", (0.2, 0.4)),
        (4, AFTER, "large", (0.5, 0.7)),
        (4, TRAINED, "small", (0.9, 0.9)),
    ]
    return {
        "local": [
            make_run(tmp_path / f"l{seed}", "local", seed, [(4, AFTER, "model", (0.5,))]) for seed in (0, 1)
        ],
        "a": [
            make_run(tmp_path / "a0", "a", 0, whole),
            make_run(tmp_path / "a1", "a", 1, [(2, AFTER, "large", (0.5, 0.5))]),
        ],
    }


def test_means_over_clients_and_their_spread_over_seeds(runs):
    large, small = rounds.scores_at(runs["a"], [2, 4])
    assert (large["when"], large["mode"]) == (AFTER, "large")
    assert large["scores"][0] == {
        "mean": 0.4,
        "std_over_seeds": pytest.approx(0.02**0.5, abs=1e-6),
        "runs": [0.3, 0.5],
    }
    assert large["scores"][1] == {"mean": 0.6, "std_over_seeds": None, "runs": [0.6, None]}
    assert (small["when"], small["mode"]) == (TRAINED, "small")
    assert small["scores"][0]["mean"] is None
    assert small["scores"][1]["runs"] == [0.9, None]


@pytest.fixture
def comparison(runs):
    return rounds.with_rounds(compare_runs(runs, Rng(0), draws=20), runs, [2, 4])


def test_the_table_has_a_row_per_method_moment_and_mode(comparison):
    sheet = sheets.rounds_sheet(comparison)
    assert [column.name for column in sheet.columns][3:] == ["round 2", "round 4"]
    rows = {row[:3]: row[3:] for row in sheet.rows}
    assert rows == {
        ("Local", "after aggregation", "model"): ("–", "50.00 ± 0.00"),
        ("a", "after aggregation", "large"): ("40.00 ± 14.14", "60.00 (1 of 2 seeds)"),
        ("a", "after training", "small"): ("–", "90.00 (1 of 2 seeds)"),
    }
    *_, local = sheet.entries
    assert [column.sort_key(local) for column in sheet.columns][1:] == [AFTER, "model", None, 0.5]
    json.dumps(comparison, allow_nan=False)


def test_without_rounds_there_is_no_table(runs):
    assert sheets.rounds_sheet(compare_runs(runs, Rng(0), draws=20)) is None


def test_the_page_shows_it(comparison, tmp_path):
    text = comparison_page.write_comparison(tmp_path / "comparison.html", comparison).read_text(
        encoding="utf-8"
    )
    assert "Round by round" in text
    assert "40.00\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}14.14" in text
