"""What a target costs, and who gains: against logs written by hand."""

import json
import math
from pathlib import Path

import pytest
import yaml

from potluck.core.rng import Rng
from potluck.errors import ConfigError, RunError
from potluck.report import comparison_page, sheets, targets
from potluck.report.comparison import compare_runs


def write_log(path: Path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(folder: Path, method: str, seed: int, scores, *, when="after_aggregation", scalars=10) -> Path:
    """A run that evaluates every second round: `scores` are rows of client values, the first of round 2."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"method": {"name": method}, "seed": seed}))
    (folder / "split.json").write_text(json.dumps({"hash": str(seed)}))
    measured = [
        {"round": 2 * row, "client": str(client), "when": when, "test": {"accuracy": value, "samples": 1}}
        for row, values in enumerate(scores, 1)
        for client, value in enumerate(values)
    ]
    write_log(folder / "metrics.jsonl", measured)
    crossed = [
        {"round": number, "client": client, "step": "train", "direction": direction, "purpose": purpose,
         "scalars": amount * scalars, "bytes": 4 * amount * scalars}
        for number in range(1, 2 * len(scores) + 1)
        for client in "01"
        for direction, purpose, amount in (
            ("up", "train", 1), ("down", "train", 2), ("down", "evaluate", 100), ("up", "setup", 1000),
        )
    ]  # fmt: skip
    write_log(folder / "ledger.jsonl", crossed if scalars else [])
    return folder


RISING = ((0.2, 0.4), (0.5, 0.7), (0.9, 0.9))  # means 0.3, 0.6 and 0.9 in the rounds 2, 4 and 6


def test_a_target_costs_what_crossed_for_training_until_its_round(tmp_path):
    run = make_run(tmp_path / "run", "a", 0, RISING)
    low, exact, never = targets.run_costs(run, [0.31, 0.9, 0.91])
    assert low == {
        "round": 4,
        "up": {"scalars": 80, "bytes": 320},  # 4 rounds of 2 clients with 10 scalars
        "down": {"scalars": 160, "bytes": 640},
    }
    assert exact is not None
    assert exact["round"] == 6
    assert never is None


def test_a_mean_counts_as_it_is_shown_and_the_first_round_counts(tmp_path):
    thirds = make_run(tmp_path / "thirds", "a", 0, [(0.7, 0.7, 0.7), (0.1, 0.1, 0.1), (0.8, 0.8, 0.8)])
    assert math.fsum([0.7] * 3) / 3 < 0.7  # the mean is short of the target by rounding alone
    assert [cost and cost["round"] for cost in targets.run_costs(thirds, [0.7, 0.75])] == [2, 6]


def test_before_a_round_its_messages_have_not_crossed(tmp_path):
    run = make_run(tmp_path / "run", "a", 0, RISING, when="before")
    (cost,) = targets.run_costs(run, [0.6])
    assert cost == {
        "round": 4,
        "up": {"scalars": 60, "bytes": 240},
        "down": {"scalars": 120, "bytes": 480},
    }


def test_the_headline_is_what_is_judged_and_held_out_clients_are_not(tmp_path):
    run = make_run(tmp_path / "run", "a", 0, RISING)
    other = {"round": 2, "client": "0", "when": "after_training", "test": {"accuracy": 1.0, "samples": 1}}
    new = {**other, "client": "new", "when": "after_aggregation", "held_out": True}
    with (run / "metrics.jsonl").open("a") as log:
        log.write(f"{json.dumps(other)}\n{json.dumps(new)}\n")
    (cost,) = targets.run_costs(run, [0.9])
    assert cost is not None
    assert cost["round"] == 6


def test_a_run_without_scores_reaches_nothing(tmp_path):
    assert targets.run_costs(make_run(tmp_path / "run", "a", 0, ()), [0.1]) == [None]


def test_a_broken_ledger_is_named(tmp_path):
    run = make_run(tmp_path / "run", "a", 0, RISING)
    write_log(run / "ledger.jsonl", [{"round": 1, "purpose": "train"}])
    with pytest.raises(RunError, match="line 1 is not an entry of the ledger"):
        targets.run_costs(run, [0.1])


@pytest.mark.parametrize("target", [0.0, -0.5, 1.01, 90.0, math.nan, math.inf])
def test_what_is_no_score_is_refused(tmp_path, target):
    with pytest.raises(ConfigError, match=r"the target .* is not a score"):
        targets.check_targets([0.5, target])
    targets.check_targets([1.0, 1e-9])


# --- over seeds, in tables and on the page --------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    """Local sends nothing; a reaches 0.6 in the rounds 4 and 2, and 0.9 with one seed alone."""
    slow, flat = ((0.6, 0.6), (0.6, 0.6)), ((0.5, 0.7), (0.5, 0.7))
    return {
        "local": [make_run(tmp_path / f"l{seed}", "local", seed, flat, scalars=0) for seed in (0, 1)],
        "a": [make_run(tmp_path / "a0", "a", 0, RISING), make_run(tmp_path / "a1", "a", 1, slow)],
    }


@pytest.fixture
def comparison(runs):
    compared = compare_runs(runs, Rng(0), baseline="a", draws=20)
    return targets.with_targets(compared, runs, [0.6, 0.9, 0.95])


def test_costs_are_means_over_the_seeds_that_reached_the_target(comparison):
    local, a = comparison["methods"]
    assert comparison["targets"] == [0.6, 0.9, 0.95]
    first, second, third = a["targets"]
    assert first["reached"] == 2
    assert first["round"] == {"mean": 3, "std_over_seeds": pytest.approx(2**0.5, abs=1e-6)}
    assert first["up"]["scalars"] == {"mean": 60, "std_over_seeds": pytest.approx(800**0.5, abs=1e-6)}
    assert [first["runs"][seed]["round"] for seed in "01"] == [4, 2]
    assert second["reached"] == 1
    assert second["round"] == {"mean": 6, "std_over_seeds": None}
    assert second["runs"]["1"] is None
    assert third["reached"] == 0
    assert third["round"]["mean"] is None
    assert local["targets"][0]["up"]["scalars"] == {"mean": 0, "std_over_seeds": 0.0}
    json.dumps(comparison, allow_nan=False)


def test_the_table_of_targets_says_what_was_not_reached(comparison):
    sheet = sheets.targets_sheet(comparison)
    assert sheet is not None
    rows = {(row[0], row[1]): row[3:] for row in sheet.rows}
    assert {row[2] for row in sheet.rows} == {"after aggregation, by default"}
    assert rows["60", "a"] == ("3 ± 1.4", "60 ± 28.3", "120 ± 56.6", "240 B ± 113 B", "480 B ± 226 B")
    assert rows["90", "a"] == ("6 (1 of 2 seeds)", "120", "240", "480 B", "960 B")
    assert rows["90", "Local"] == ("not reached", *4 * ["–"])
    assert rows["60", "Local"][0] == "2 ± 0"
    assert len(sheet.rows) == 6
    first = sheet.entries[0]
    keys = {column.name: column.sort_key(first) for column in sheet.columns}
    assert keys == {
        "measured": "after aggregation, by default",
        "target %": 0.6, "method": "a", "round": 3, "scalars up": 60, "scalars down": 120,
        "bytes up": 240, "bytes down": 480,
    }  # fmt: skip
    assert sheets.targets_sheet({**comparison, "targets": []}) is None


def test_clients_are_set_against_the_reference(comparison):
    local, a = comparison["methods"]
    assert "by_client" not in a
    gains = local["by_client"]
    assert gains["differences"] == {"0": {"0": -0.4, "1": -0.2}, "1": {"0": -0.1, "1": 0.1}}
    assert (gains["better"], gains["equal"], gains["worse"]) == (1, 0, 3)
    assert local["difference"]["mean"] == pytest.approx(-0.15)
    assert a["difference"] is None
    sheet = sheets.gains_sheet(comparison)
    assert sheet is not None
    assert sheet.title == "Clients against a (default)"
    expected = (
        "Local",
        "after aggregation, by default",
        "4",
        "1 (25 %)",
        "0 (0 %)",
        "3 (75 %)",
        "−40.00",
        "−15.00",
        "+10.00",
    )
    assert sheet.rows == [expected]
    listed = sheets.differences_sheet(comparison)
    assert listed is not None
    assert listed.rows[1] == ("0", "1", "−20.00")


def test_who_asks_for_nothing_gets_what_was_always_there(runs):
    plain = compare_runs(runs, Rng(0), draws=20)
    assert plain["baseline"] == "local"
    assert not any({"targets", "rounds"} & entry.keys() for entry in plain["methods"])
    assert sheets.targets_sheet(plain) is None


def test_the_page_shows_both(comparison, runs, tmp_path):
    shown = comparison_page.write_comparison(tmp_path / "with.html", comparison).read_text(encoding="utf-8")
    for part in ("What a target costs", "not reached", "6 (1 of 2 seeds)", "Clients against a", "−40.00"):
        assert part in shown, part
    plain = compare_runs(runs, Rng(0), draws=20)
    without = comparison_page.write_comparison(tmp_path / "without.html", plain).read_text(encoding="utf-8")
    assert "What a target costs" not in without
    assert "Clients against Local" in without


def test_a_label_is_text_on_the_page(runs, tmp_path):
    evil = "<script>alert(1)</script>"
    compared = compare_runs({evil: runs["a"], "b": runs["local"]}, Rng(0), evil, draws=9)
    shown = comparison_page.write_comparison(tmp_path / "evil.html", compared).read_text(encoding="utf-8")
    assert evil not in shown
    assert "Clients against &lt;script&gt;" in shown
