"""Tables: numbers as people read them, and one sheet in three renderings."""

import io
import itertools

import pytest
from rich.console import Console

from potluck.core.task_kinds import TASK_KINDS
from potluck.report import format, latex, render, sheets
from potluck.report.charts import GREY
from potluck.report.comparison_charts import bytes_chart, looks_of
from potluck.report.pictures.style import row_styles


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format.count(465658), "465,658"),
        (format.count(0), "0"),
        (format.count(6.5), "6.5"),
        (format.count(None), "–"),
        (format.size(0), "0 B"),
        (format.size(999), "999 B"),
        (format.size(999.9), "1.0 kB"),
        (format.size(1_800_000), "1.8 MB"),
        (format.size(999_990), "1.0 MB"),
        (format.size(2.5e12), "2.5 TB"),
        (format.size(None), "–"),
        (format.percent(0.9123), "91.23 %"),
        (format.percent(None), "–"),
        (format.points(0.0124), "+1.24"),
        (format.points(-0.0124), "−1.24"),
        (format.points(-1e-9), "0.00"),
        (format.points(None), "–"),
        (format.duration(0.0081), "8.1 ms"),
        (format.duration(0.42), "0.42 s"),
        (format.duration(float("nan")), format.NOTHING),
        (format.duration(12.34), "12.3 s"),
        (format.duration(59.96), "1 min 00 s"),
        (format.duration(125), "2 min 05 s"),
        (format.duration(11_220), "3 h 07 min"),
        (format.duration(None), "–"),
        (format.moment("after_training"), "after training"),
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
    text = draw(render.rich_table(sheets.run_sheet(SUMMARY, rows)))
    for part in ("90.00 %", "465,658", "1.9 MB", "0.42 s", "1,200", "91.00 %", "[red]", "after aggregation"):
        assert part in text


def test_columns_without_any_value_are_left_out():
    sheet = sheets.run_sheet(SUMMARY, [{"id": "1", "accuracy": 0.5}, {"id": "2"}])
    assert [column.name for column in sheet.columns] == ["client", "accuracy"]
    assert [[column.sort_key(entry) for column in sheet.columns] for entry in sheet.entries] == [
        ["1", 0.5],
        ["2", None],
    ]
    assert len(sheets.run_sheet({}, []).columns) == 5


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


def test_a_sweep_lists_its_methods_in_one_order_whatever_their_scores():
    names = ("local", "fedproto", "fedmrl")
    scores = {"alpha=0.1": (0.8, 0.7, 0.9), "alpha=1": (0.7, 0.9, 0.8)}
    comparisons = {
        setting: COMPARISON
        | {"methods": [method(name, mean) for name, mean in zip(names, means, strict=True)]}
        for setting, means in scores.items()
    }
    sheet = sheets.sweep_sheet({setting: {"alpha": setting} for setting in scores}, comparisons)
    assert [(row["setting"], row["method"]) for row in sheet.entries] == [
        (setting, name) for setting in scores for name in names
    ]
    rows = [line.split(" & ")[0] for line in latex.sweep_table(comparisons).splitlines() if " & " in line]
    assert rows == ["method", "Local", "fedproto", "fedmrl"]
    for looks in (looks_of, row_styles):
        first, second = map(looks, comparisons.values())
        assert first == second


def test_of_more_rows_than_looks_the_best_have_one():
    many = COMPARISON | {"methods": [method("local", 0.5), *(method(f"m{n:02}", n / 100) for n in range(60))]}
    looks = looks_of(many)
    assert looks["m59"] != GREY
    assert looks["m00"] == GREY


def test_methods_are_ranked_and_those_without_a_value_are_last():
    names = [row[0] for row in sheets.comparison_sheet(COMPARISON).rows]
    assert names == ["fedmrl", "a|b", "Local", "fedavg"]


def test_a_comparison_shows_intervals_and_ties():
    sheet = sheets.comparison_sheet(COMPARISON)
    assert sheet.rows[0][1:3] == ("90.00 ± 1.00", "+10.00 [+5.00, +15.00]")
    assert sheet.rows[1][2] == "+1.00 [−1.00, +3.00] tie"
    assert sheet.rows[2][2] == "–"
    assert "seeds, then clients" in " ".join(sheet.notes)
    assert "so few pairs (4) says little" in " ".join(sheet.notes)


def test_a_comparison_fits_a_terminal_of_80_columns():
    lines = draw(render.rich_table(sheets.comparison_sheet(COMPARISON)), width=80).splitlines()
    assert any("fedmrl" in line and "1,200,000" in line and "0.50 s" in line for line in lines)


def test_one_seed_and_mixed_moments_are_said():
    methods = [method("local", 0.8, when="after_training"), method("fedavg", 0.7)]
    notes = " ".join(sheets.comparison_sheet({**COMPARISON, "seeds": ["0"], "methods": methods}).notes)
    assert "one seed" in notes
    assert "clients of the one seed" in notes
    assert "not evaluated at the same moment" in notes


def test_markdown_has_equal_columns_and_escapes_its_signs():
    lines = [
        line
        for line in render.markdown(sheets.comparison_sheet(COMPARISON)).splitlines()
        if line.startswith("|")
    ]
    assert len(lines) == 6
    assert {line.replace("\\|", "").count("|") for line in lines} == {7}
    assert "a\\|b" in lines[3]
    assert render.markdown(render.Sheet("", (render.Column("x", str),), ["[a](b)"])).count("\\](") == 1


def test_plain_text_is_aligned():
    columns = (
        render.words("name", lambda entry: entry[0]),
        render.Column("n", lambda entry: entry[1], format.count),
    )
    sheet = render.Sheet("title", columns, [("a", 1), ("long", 1000)], ("note",))
    assert render.plain(sheet) == "title\n\nname      n\na         1\nlong  1,000\n\nnote\n"


def test_a_column_sorts_by_numbers_and_shows_text():
    sheet = sheets.comparison_sheet(COMPARISON)
    keys = {column.name: [column.sort_key(entry) for entry in sheet.entries] for column in sheet.columns}
    assert keys["method"] == ["fedmrl", "a|b", "local", "fedavg"]
    assert keys["accuracy %"] == [0.9, 0.81, 0.8, None]
    assert keys["against Local"] == [0.1, 0.01, None, None]
    assert keys["down"] == [1_200_000] * 4
    assert keys["time"] == [0.5] * 4


def test_client_rows_leave_out_held_out_clients_and_keep_those_without_a_test_part():
    split = {
        "clients": [{"id": "10", "train": [1]}, {"id": "9", "train": [1, 2], "test": []}, {"id": "x"}],
        "held_out": ["x"],
    }
    rows = sheets.client_rows(split, {"per_client": {"9": 0.5}}, {"9": "cnn"})
    assert rows == [
        {"id": "9", "model": "cnn", "train": 2, "test": 0, "accuracy": 0.5},
        {"id": "10", "model": None, "train": 1, "test": None, "accuracy": None},
    ]


def of_groups(name, mean, values, further=None):
    entry = method(name, mean) | {"gain": 0.0 if name == "local" else 12.5, "per_client": values}
    return entry if further is None else entry | {"further": further}


GROUPS = {
    **COMPARISON,
    "metrics": {"0": "accuracy", "1": "accuracy"},
    "data_sets": {"0": "digits", "1": "sst2"},
    "methods": [of_groups("local", 0.8, {"0": 0.9, "1": 0.7}), of_groups("muscle", 0.9, {"0": 0.95})],
}


def test_groups_measured_by_accuracy_have_a_relative_gain():
    sheet = sheets.comparison_sheet(GROUPS)
    assert [column.name for column in sheet.columns][1:4] == ["accuracy %", "against Local", "Δ %"]
    assert [row[3] for row in sheet.rows] == ["+12.50", "–"]
    (note,) = [note for note in sheet.notes if note.startswith("Δ %")]
    assert "clients for which Local's is 0 are left out" in note


def test_the_client_table_names_data_and_shows_a_dash_where_there_is_no_value():
    sheet = sheets.clients_sheet(GROUPS)
    assert [column.name for column in sheet.columns] == ["client", "measured by", "data", "muscle", "Local"]
    assert sheet.rows == [
        ("0", "accuracy", "digits", "95.00", "90.00"),
        ("1", "accuracy", "sst2", "–", "70.00"),
    ]
    assert any("undefined" in note for note in sheet.notes)
    whole = of_groups("muscle", 0.9, {"0": 0.95, "1": 0.85})
    assert sheets.clients_sheet({**GROUPS, "methods": [whole]}).notes == ()


def test_further_measures_have_a_row_each_and_a_column_per_method():
    recall = {"mean": 0.25, "std_over_seeds": 0.01}
    local = of_groups("local", 0.8, {}, {"f1": {"mean": 0.5, "std_over_seeds": None}, "i2t_r5": recall})
    other = of_groups("muscle", 0.9, {}, {"f1": {"mean": 0.75, "std_over_seeds": None}})
    sheet = sheets.further_sheet({**GROUPS, "methods": [local, other]})
    assert [column.name for column in sheet.columns] == ["measure", "muscle", "Local"]
    assert sheet.rows == [("F1", "75.00", "50.00"), ("R@5 image to text", "–", "25.00 ± 1.00")]
    assert sheets.further_sheet(GROUPS) is None


def test_a_comparison_of_an_earlier_version_is_shown_as_it_was():
    old = {name: value for name, value in GROUPS.items() if name != "data_sets"}
    assert [column.name for column in sheets.clients_sheet(old).columns][:3] == [
        "client",
        "measured by",
        "muscle",
    ]
    assert sheets.clients_sheet(COMPARISON) is sheets.further_sheet(COMPARISON) is None
    assert "Δ %" not in render.plain(sheets.comparison_sheet(COMPARISON))


def test_a_run_tells_its_further_measures():
    further = {"f1": {"mean": 0.5, "clients": 2}, "pixel_accuracy": {"mean": 0.9, "clients": 1}}
    notes = sheets.headline({**SUMMARY, "accuracy": SUMMARY["accuracy"] | {"further": further}})
    assert "further measures: F1 50.00 %, pixel accuracy 90.00 % over 1 client" in notes
    assert not any("further" in note for note in sheets.headline(SUMMARY))


def test_every_measure_a_task_tells_has_a_name_in_words():
    told = {name for measure in TASK_KINDS.values() for name in measure.told} - {"correct", "loss"}
    assert {name for name in told if "_" in format.metric_name(name)} == set()


def test_a_long_sheet_is_cut_and_says_where_the_rest_is():
    sheet = sheets.clients_sheet(GROUPS)
    assert sheet.first(len(sheet.rows), "there") is sheet
    cut = sheet.first(1, "comparison.html")
    assert cut.rows == sheet.rows[:1]
    assert cut.notes[0] == f"The first 1 of {len(sheet.rows)} rows; comparison.html has them all."
    assert cut.notes[1:] == sheet.notes


def test_models_of_another_round_than_the_last_are_said():
    accuracy = {"rounds": {"last": 6, "best_by_validation": 5}, "best_by_validation": 0.3772}
    assert sheets.about_kept(accuracy, 6) == sheets.about_kept(accuracy, None) == ""
    told = sheets.about_kept(accuracy, 5)
    assert told.startswith(
        "those after round 5, the best by validation (test accuracy 37.72 % there); the scores"
    )
    summary = {**SUMMARY, "accuracy": SUMMARY["accuracy"] | accuracy}
    assert f"models: {told}" in sheets.run_sheet(summary, [], 5).notes


def test_no_text_of_a_sheet_steers_a_terminal():
    sheet = render.Sheet("a\x1b[2J", (render.words("b\x07", str),), ["c\x9b2J", "two\nlines"], ("d\x1b]0;p",))
    assert set(render.plain(sheet)) & set("\x1b\x07\x9b") == set()


def test_sizes_along_an_axis_are_apart_on_a_phone_too():
    curve = {"rounds": [1, 2], "mean": [0.5, 0.6], "bytes": [600_000, 4_100_000]}
    row = {"method": "fedavg", "when": "after_aggregation", "mode": "model", "curve": curve}
    rows = [{**row, "accuracy": {"mean": 0.6}}]
    chart = bytes_chart({"baseline": "local", "methods": rows})
    places, sizes = zip(*chart.x, strict=True)
    assert sizes[:2] == ("1.0 MB", "2.0 MB")
    assert all(right - left >= 16 for left, right in itertools.pairwise(places))
