"""Metrics that are no share, and those of which less is better, in tables, LaTeX and pictures."""

import json

import pytest
import yaml

from potluck.core.rng import Rng
from potluck.report import comparison_page, latex, sheets
from potluck.report.comparison import compare_runs
from potluck.report.measures import measure_named, measure_of
from potluck.report.pictures.curves import curves_picture
from potluck.report.pictures.files import to_svg

NOTHING_SENT = {way: {"scalars": 0, "bytes": 0} for way in ("up", "down")}


def run(folder, method, metric, values, facts=None):
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"method": {"name": method}, "seed": 0}))
    (folder / "split.json").write_text(json.dumps({"hash": "s"}))
    (folder / "environment.json").write_text(json.dumps({"metrics": facts} if facts else {}))
    lines = [
        {"round": 1, "client": str(client), "when": "before", "mode": "model",
         "test": {"score": value, "metric": metric, metric: value, "samples": 3}}
        for client, value in enumerate(values)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def compared(tmp_path, metric, facts=None):
    local = run(tmp_path / "local", "local", metric, [12.0, 10.0], facts)
    other = run(tmp_path / "other", "fedavg", metric, [11.0, 11.0], facts)
    best = run(tmp_path / "best", "fedprox", metric, [9.0, 10.0], facts)
    return compare_runs([local, other, best], Rng(0), draws=20)


@pytest.mark.parametrize("metric", ["mse", "mine"])
def test_less_is_better_where_the_metric_says_so(tmp_path, metric):
    facts = {"mine": {"higher_is_better": False, "low": 0.0, "high": None}} if metric == "mine" else None
    comparison = compared(tmp_path, metric, facts)
    sheet = sheets.comparison_sheet(comparison)
    assert sheet.rows[0][0] == "fedprox"
    name = measure_named(metric).name
    assert f"{name} ↓" in [column.name for column in sheet.columns]
    assert sheet.rows[0][2] == "9.5"
    assert "Lower is better." in " ".join(sheet.notes)
    gains = {entry["method"]: entry["by_client"] for entry in comparison["methods"] if "by_client" in entry}
    assert (gains["fedavg"]["better"], gains["fedavg"]["worse"]) == (1, 1)
    assert (gains["fedprox"]["better"], gains["fedprox"]["equal"]) == (1, 1)
    table = latex.comparison_table(comparison)
    assert r"\textbf{9.5}" in table
    assert table.count(r"\textbf") == 1
    assert "%" not in " ".join(part for row in sheet.rows for part in row)


def test_pages_and_pictures_show_plain_numbers(tmp_path):
    comparison = compared(tmp_path, "mse")
    page = comparison_page.write_comparison(tmp_path / "comparison.html", comparison).read_text()
    assert "MSE over rounds" in page
    svg = to_svg(curves_picture(comparison))
    assert "9.5" in svg
    assert "950" not in svg
    assert " %" not in svg


def test_plain_numbers_of_a_comparison_have_one_number_of_decimals():
    def row(name, mean, spread, difference):
        low, high = difference - 0.0917, difference + 0.0917
        gain = {"mean": difference, "low": low, "high": high, "tie": low <= 0}
        return {
            "method": name, "mode": "model", "against": "local", "difference": gain, "messages": NOTHING_SENT,
            "accuracy": {"mean": mean, "std_over_seeds": spread}, "runs": {}, "seeds": 2,
        }  # fmt: skip

    methods = [row("a", 0.4912, 0.14, 0.08961), row("b", 1.4, 0.08652, -0.0004)]
    comparison = {"metrics": {"0": "r2"}, "seeds": ["0", "1"], "methods": methods}
    shown = sheets.comparison_sheet(comparison).rows
    assert [row[2] for row in shown] == ["1.400 ± 0.087", "0.491 ± 0.140"]
    assert [row[3] for row in shown] == ["0.000 [−0.092, +0.091] tie", "+0.090 [−0.002, +0.181] tie"]
    assert r"1.400 $\pm$ 0.087" in latex.comparison_table(comparison)


def test_an_r2_may_be_negative_and_a_share_is_in_percent():
    r2, accuracy = measure_named("r2"), measure_named("accuracy")
    assert (r2.full(-0.25), r2.difference(0.125), r2.head) == ("−0.25", "+0.125", "R²")
    assert (accuracy.full(0.25), accuracy.difference(0.125), accuracy.head) == (
        "25.00 %",
        "+12.50",
        "accuracy %",
    )
    assert measure_of({"0": "accuracy", "1": "mse"}).is_share is False
    assert measure_of(None).name == "accuracy"
