"""Pictures: what is drawn, that it is the same each time, and that no name breaks it."""

import itertools
import re
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from potluck.cli.method_examples import explained_in_demo
from potluck.report.log import Curve
from potluck.report.measures import Measure
from potluck.report.pictures.clients import client_bars
from potluck.report.pictures.confusion import confusion_picture
from potluck.report.pictures.curves import accuracy_over_rounds
from potluck.report.pictures.differences import interval_picture
from potluck.report.pictures.files import to_bytes, to_png, to_svg
from potluck.report.pictures.split import split_picture
from potluck.report.pictures.style import spread_apart
from potluck.report.pictures.wire import wire_picture


def curve(label="fedmrl", last=0.9, rounds=20, band=True):
    mean = np.linspace(0.3, last, rounds)
    ends = (mean - 0.05, mean + 0.05) if band else (None, None)
    return Curve(label, np.arange(1, rounds + 1), mean, *ends)


def texts(figure):
    root = ET.fromstring(to_svg(figure))
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def split(clients, classes):
    counts = np.random.default_rng(0).integers(0, 40, (clients, classes))
    return counts.tolist(), [str(client) for client in range(clients)]


def test_a_picture_is_the_same_each_time():
    assert to_svg(accuracy_over_rounds([curve()])) == to_svg(accuracy_over_rounds([curve()]))
    png = [to_png(split_picture(*split(5, 10)), dpi=50) for _ in range(2)]
    assert png[0] == png[1]
    assert png[0].startswith(b"\x89PNG")


def test_settings_of_the_user_neither_matter_nor_change():
    before = to_svg(accuracy_over_rounds([curve()]))
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.fonttype": "path"}):
        assert to_svg(accuracy_over_rounds([curve()])) == before
        assert matplotlib.rcParams["font.size"] == 30


def test_an_svg_refers_to_nothing_outside():
    svg = to_svg(accuracy_over_rounds([curve()]))
    assert svg.startswith("<svg")
    assert "matplotlib.org" not in svg
    assert "<metadata" not in svg
    assert svg.count("http://") == svg.count("http://www.w3.org/")


def test_lines_are_labelled_at_their_ends():
    shown = texts(accuracy_over_rounds([curve("fedmrl", 0.912), curve("local", 0.8)], reference="local"))
    assert "91.2  fedmrl" in shown
    assert "80.0  local" in shown
    assert {"round", "accuracy"} < {*shown}


@pytest.mark.parametrize("level", [1.093, 123.4567])
def test_a_level_loss_has_a_name_and_different_values_on_its_axis(level):
    flat = Curve("fedmrl", np.arange(1, 4), np.full(3, level))
    figure = accuracy_over_rounds([flat], measure=Measure("loss", is_share=False))
    shown = texts(figure)
    assert "loss" in shown
    assert len({*shown}) == len(shown) > 6


def test_of_many_lines_the_best_and_the_reference_are_named():
    curves = [curve(f"m{place}", 0.5 + place / 100) for place in range(32)] + [curve("local", 0.4)]
    shown = " ".join(filter(None, texts(accuracy_over_rounds(curves, reference="local"))))
    assert "m31" in shown
    assert "m14" in shown
    assert "local" in shown
    assert "m0" not in shown.split()
    assert f"Grey: {', '.join(f'm{place}' for place in range(14))}." in shown


def test_equal_lines_share_one_label():
    shown = texts(accuracy_over_rounds([curve("a", 0.9), curve("b", 0.9), curve("c", 0.8)]))
    assert "90.0  a = b" in shown
    assert "80.0  c" in shown


@pytest.mark.parametrize("curves", [[], [curve(rounds=1)], [Curve("x", np.empty(0, np.int64), np.empty(0))]])
def test_little_or_nothing_can_be_drawn(curves):
    ET.fromstring(to_svg(accuracy_over_rounds(curves)))


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (5, 10), (100, 10), (20, 100), (150, 120)])
def test_splits_of_every_size_can_be_drawn(clients, classes):
    figure = split_picture(*split(clients, classes))
    width, height = figure.get_size_inches()
    assert width < 10
    assert height < 12
    svg = to_svg(figure)
    assert len(svg) < 2_500_000
    assert ("the first 100 of 150 clients and the first 100 of 120 classes" in svg) == (clients == 150)


def test_a_client_without_samples_can_be_drawn():
    ET.fromstring(to_svg(split_picture([[0, 0], [0, 0]], ["a", "b"], ["x", "y"])))


def test_bars_leave_out_clients_without_a_value():
    shown = texts(client_bars({"a": 0.5, "b": None, "c": 0.7}))
    assert "mean 60.0" in shown
    assert "b" not in shown
    ET.fromstring(to_svg(client_bars({})))
    ET.fromstring(to_svg(client_bars({str(client): client / 300 for client in range(300)})))


def test_intervals_show_ties():
    def entry(name, low, high):
        mean = (low + high) / 2
        tie = low <= 0 <= high
        return {
            "method": name,
            "accuracy": {"mean": mean},
            "difference": {"mean": mean, "low": low, "high": high, "tie": tie},
        }

    methods = [
        entry("a", 0.01, 0.03),
        entry("b", -0.01, 0.02),
        {"method": "local", "accuracy": {"mean": 0.0}},
    ]
    shown = texts(interval_picture({"baseline": "local", "methods": methods}))
    assert {"+2.00", "+0.50  tie", "points against Local"} <= set(shown)


def test_no_name_is_read_as_a_formula_or_as_markup():
    name = "$\\frac$ <b>&"
    shown = texts(split_picture([[1], [2]], [name, "b"], [name]))
    assert name in shown or name[:11] + "…" in shown


@pytest.mark.parametrize("form", ["svg", "png", "pdf"])
def test_a_picture_may_show_letters_that_no_file_may_hold(form):
    content = to_bytes(split_picture([[1], [2]], ["a\x00b", "\x1b[2J"], ["\x9f\uffff"]), form)
    if form == "svg":
        assert {"a?b", "?[2J", "??"} <= {one.text for one in ET.fromstring(content).iter()}


def test_characters_our_font_lacks_give_no_warning(recwarn):
    to_svg(split_picture([[1]], ["病院"], ["猫"]))
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


@given(st.lists(st.floats(0, 100), max_size=9).map(sorted), st.floats(0.1, 10))
@settings(deadline=None)
def test_labels_keep_their_distance_and_order(values, gap):
    placed = spread_apart(values, gap, 0, 100)
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(placed))
    assert not placed or (placed[0] >= -1e-9 and placed[-1] <= 100 + 1e-9)


def test_long_names_of_clients_are_all_written():
    names = ["alpine hospital", "bay", "city clinic", "delta", "elm"]
    for figure in (client_bars(dict.fromkeys(names, 0.5)), split_picture([[3, 1]] * 5, names)):
        shown = "\n".join(texts(figure))
        assert all(name.split()[0] in shown for name in names)


def test_equal_lines_say_once_what_they_share():
    names = ("after training, by single-large", "after aggregation, by single-large")
    shown = texts(accuracy_over_rounds([curve(name) for name in names]))
    assert "90.0  after training = after aggregation, by single-large" in shown


@pytest.mark.parametrize("method", ["fedin", "heterofl", "creamfl"])
def test_a_narrow_wire_says_what_a_wide_one_says_and_fits_a_phone(method: str) -> None:
    contract = explained_in_demo(method) or {}
    wide, narrow = (wire_picture(contract, {}, 8, narrow=one) for one in (False, True))
    words = [{*re.findall(r"\w+", " ".join(texts(figure)))} for figure in (wide, narrow)]
    assert words[0] <= words[1]
    assert narrow.get_figwidth() < 4
    renderer = FigureCanvasAgg(narrow).get_renderer()
    ends = [one.get_window_extent(renderer).x1 / narrow.dpi for one in narrow.axes[0].texts]
    assert max(ends) <= narrow.get_figwidth()


@pytest.mark.parametrize("name", ["\ufeffnorth", "\u202enorth", "nor\u200bth"])
def test_letters_that_nobody_sees_spoil_no_picture(name):
    tables = {"0": np.eye(2, dtype=np.int64)}
    for form in ("pdf", "svg", "png"):
        assert to_bytes(confusion_picture(tables, [name, "south"]), form)
    assert "north" in to_svg(confusion_picture(tables, ["north", "south"]))
    assert name not in to_svg(confusion_picture(tables, [name, "south"]))
