"""Tables: numbers as people read them, and one sheet in three renderings."""

import io
import json

import pytest
from rich.console import Console

from potluck.report import table


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (table.count(465658), "465,658"),
        (table.count(0), "0"),
        (table.count(6.5), "6.5"),
        (table.count(None), "–"),
        (table.size(0), "0 B"),
        (table.size(999), "999 B"),
        (table.size(999.9), "1.0 kB"),
        (table.size(1_800_000), "1.8 MB"),
        (table.size(999_990), "1.0 MB"),
        (table.size(2.5e12), "2.5 TB"),
        (table.size(None), "–"),
        (table.percent(0.9123), "91.23 %"),
        (table.percent(None), "–"),
        (table.points(0.0124), "+1.24"),
        (table.points(-0.0124), "−1.24"),
        (table.points(-1e-9), "0.00"),
        (table.points(None), "–"),
        (table.duration(0.0081), "8.1 ms"),
        (table.duration(0.42), "0.42 s"),
        (table.duration(12.34), "12.3 s"),
        (table.duration(59.96), "1 min 00 s"),
        (table.duration(125), "2 min 05 s"),
        (table.duration(11_220), "3 h 07 min"),
        (table.duration(None), "–"),
        (table.moment("after_training"), "after training"),
    ],
)
def test_numbers_for_people(shown, expected):
    assert shown == expected


SUMMARY = {
    "method": "fedmrl",
    "rounds": 5,
    "accuracy": {
        "last": 0.9,
        "std_over_clients": 0.05,
        "worst_tenth": 0.7,
        "when": "after_aggregation",
        "coverage": 2,
    },
    "messages": {"up": {"scalars": 465658, "bytes": 1862632}, "down": {"scalars": 1, "bytes": 4}},
    "seconds_per_round": 0.42,
}


def draw(renderable, width=200):
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None).print(renderable)
    return buffer.getvalue()


def test_the_table_of_a_run_shows_headline_and_clients():
    rows = [{"id": "7", "model": "cnn", "train": 1200, "test": 45, "accuracy": 0.91}, {"id": "[red]"}]
    text = draw(table.run_table(SUMMARY, rows))
    for part in ("90.00 %", "465,658", "1.9 MB", "0.42 s", "1,200", "91.00 %", "[red]", "after aggregation"):
        assert part in text


def test_columns_without_any_value_are_left_out():
    sheet = table.run_sheet(SUMMARY, [{"id": "1", "accuracy": 0.5}, {"id": "2"}])
    assert [column.name for column in sheet.columns] == ["client", "accuracy"]
    assert sheet.keys == (("1", 0.5), ("2", None))
    assert len(table.run_sheet({}, []).columns) == 5


def method(name, mean, difference=None, spread=0.01, when="after_aggregation"):
    nothing = {"scalars": 0, "bytes": 0}
    return {
        "method": name,
        "when": when,
        "accuracy": {"mean": mean, "std_over_seeds": spread},
        "difference": difference,
        "messages": {"up": nothing, "down": {"scalars": 1_200_000, "bytes": 4_800_000}},
        "seconds_per_round": 0.5,
    }


COMPARISON = {
    "data": {"name": "digits"},
    "partition": {"kind": "dirichlet"},
    "baseline": "local",
    "seeds": ["0", "1"],
    "view": "last",
    "level": 0.95,
    "draws": 2000,
    "methods": [
        method("local", 0.8),
        method("fedavg", None, spread=None),
        method("a|b", 0.81, {"mean": 0.01, "low": -0.01, "high": 0.03, "tie": True, "pairs": 4}),
        method("fedmrl", 0.9, {"mean": 0.1, "low": 0.05, "high": 0.15, "tie": False, "pairs": 4}),
    ],
}


def test_methods_are_ranked_and_those_without_a_value_are_last():
    names = [row[0] for row in table.comparison_sheet(COMPARISON).rows]
    assert names == ["fedmrl", "a|b", "Local", "fedavg"]


def test_a_comparison_shows_intervals_and_ties():
    sheet = table.comparison_sheet(COMPARISON)
    assert sheet.rows[0][1:3] == ("90.00 ± 1.00", "+10.00 [+5.00, +15.00]")
    assert sheet.rows[1][2] == "+1.00 [−1.00, +3.00] tie"
    assert sheet.rows[2][2] == "–"
    assert "seeds, then clients" in " ".join(sheet.notes)


def test_a_comparison_fits_a_terminal_of_80_columns():
    lines = draw(table.comparison_table(COMPARISON), width=80).splitlines()
    assert any("fedmrl" in line and "1,200,000" in line and "0.50 s" in line for line in lines)


def test_one_seed_and_mixed_moments_are_said():
    methods = [method("local", 0.8, when="after_training"), method("fedavg", 0.7)]
    notes = " ".join(table.comparison_sheet({**COMPARISON, "seeds": ["0"], "methods": methods}).notes)
    assert "one seed" in notes
    assert "clients of the one seed" in notes
    assert "not evaluated at the same moment" in notes


def test_markdown_has_equal_columns_and_escapes_its_signs():
    lines = [line for line in table.comparison_markdown(COMPARISON).splitlines() if line.startswith("|")]
    assert len(lines) == 6
    assert {line.replace("\\|", "").count("|") for line in lines} == {7}
    assert "a\\|b" in lines[3]
    assert table.markdown(table.Sheet("", (table.Column("x"),), (("[a](b)",),))).count("\\](") == 1


def test_plain_text_is_aligned():
    sheet = table.Sheet(
        "title", (table.Column("name", "left"), table.Column("n")), (("a", "1"), ("long", "1,000")), ("note",)
    )
    assert table.plain(sheet) == "title\n\nname      n\na         1\nlong  1,000\n\nnote\n"


def test_json_refuses_what_json_cannot_say():
    assert json.loads(table.as_json(COMPARISON))["baseline"] == "local"
    with pytest.raises(ValueError):
        table.as_json({"x": float("nan")})
