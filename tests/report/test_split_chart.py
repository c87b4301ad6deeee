"""The split as a page draws it."""

import pytest

from potluck.report.split_chart import split_chart


def test_bubbles_have_the_areas_of_their_samples():
    chart = split_chart([[16, 0], [4, 1]], ["a", "b"], ["cat", "dog"], None)
    assert chart.marks == [(0.25, "M750 375h0"), (0.5, "M750 125h0"), (1.0, "M250 125h0")]
    assert (chart.columns, chart.most, chart.filled) == (2, "16", False)
    assert chart.clients == [(25.0, "a"), (75.0, "b")]
    assert chart.classes == [(25.0, "cat"), (75.0, "dog")]
    assert chart.bars.count("M") == 2
    assert [value for _, value in chart.key] == ["10", "5", "1"]


def test_cells_of_many_clients_are_filled_and_what_is_left_out_is_said():
    chart = split_chart([[1]] * 150, [*map(str, range(150))], None, 2000)
    assert chart.filled
    assert chart.columns == 100
    assert chart.marks[0][1].startswith("M0 0H10V500H0Z")
    assert chart.left_out == "Shown: the first 100 of 2,000 clients."
    assert [name for _, name in chart.clients] == ["0", "20", "40", "60", "80"]


@pytest.mark.parametrize("counts", [[], [[]], [[0, 0]]])
def test_nothing_to_show_is_an_empty_chart(counts):
    chart = split_chart(counts, [*map(str, range(len(counts)))], None, None)
    assert (list(chart.marks), list(chart.key)) == ([], [])


def test_many_classes_have_narrow_rows_and_some_names():
    chart = split_chart([[1] * 80], ["a"], [f"class number {place}" for place in range(80)], None)
    assert chart.tall == 480
    assert len(chart.classes) == 27
    assert all(len(name) <= 15 for _, name in chart.classes)


def test_negative_numbers_in_names_have_the_sign_of_minus():
    chart = split_chart([[1, 1, 1]], ["0"], ["below -2.5", "from -.5", "grade-3"], None)
    assert [name for _, name in chart.classes] == ["below −2.5", "from −.5", "grade-3"]
