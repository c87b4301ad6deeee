"""Numbers and names as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

NOTHING = "–"
UNFIT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # in XML or HTML
# the spaces in `91.80 %`, `51.6 kB`, `4.9 CPU s`, `17.9 ± 1.2`, `6.5 / 6.6` and `M = 3`, or the ends of lines there
UNIT = re.compile(
    r"(?<=\d)[ \n](?=(?:%|±|[kMG]i?B|B|[mµ]?s|min|h|CPU s)(?![\w/]))|(?<=±) (?=\d)|(?<=CPU) (?=s\b)"
    r"|(?<=\d) (?=/ \d)|(?<=\d /) (?=\d)|(?<=\b\w) (?== \d)|(?<=\b\w\d) (?== \d)|(?<= =) (?=\d)"
    r"|(?<=\N{NO-BREAK SPACE}=) (?=\d)"
)
METHOD_NAMES = {"local": "Local"}
MOMENT_NAMES = {
    "after_aggregation": "after aggregation",
    "after_training": "after training",
    "before": "before training",
}
VIEW_NAMES = {
    "last": "last round",
    "best_by_validation": "best round by validation",
    "best_by_test": "best round by test",
}
METRIC_NAMES = {
    "mean_ap": "mean AP",
    "f1": "F1",
    "mean_iou": "mean IoU",
    "pixel_accuracy": "pixel accuracy",
    **{f"{way}_f1": f"{way} F1" for way in ("macro", "micro", "weighted")},
    **{f"top{k}_accuracy": f"top-{k} accuracy" for k in (2, 3, 5, 10)},
    "auroc": "AUROC",
    "average_precision": "average precision",
    "balanced_accuracy": "balanced accuracy",
    "expected_calibration_error": "calibration error",
    "log_loss": "log loss",
    "explained_variance": "explained variance",
    "median_absolute_error": "median absolute error",
    "cohen_kappa": "Cohen's kappa",
    "matthews_corrcoef": "Matthews correlation",
    "rmse": "RMSE",
    "mse": "MSE",
    "mae": "MAE",
    "r2": "R²",
    "mean_recall": "mean recall",
    **{f"i2t_r{k}": f"R@{k} image to text" for k in (1, 5, 10)},
    **{f"t2i_r{k}": f"R@{k} text to image" for k in (1, 5, 10)},
}

# --- numbers for people ---------------------------------------------------------------------------------


def with_units(text: str) -> str:
    """A text in which no line ends between a number and its unit."""
    return UNIT.sub("\N{NO-BREAK SPACE}", text)


def fit_to_write(text: str) -> str:
    """The same text for a page or an SVG file, without the letters of names that neither may hold."""
    return UNFIT.sub("?", text)


def text(value: Any) -> str:
    """Any value as text, a dash for None."""
    return NOTHING if value is None else str(value)


def count(value: float | None) -> str:
    """A number of things with thousands separators: 465,658."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:,.1f}"


def counted(value: float | None, noun: str) -> str:
    """A number of things with their name.

    >>> [counted(value, "round") for value in (1, 2, 1000)]
    ['1 round', '2 rounds', '1,000 rounds']
    """
    return f"{count(value)} {noun}{'s' * (value != 1)}"


def size(value: float | None) -> str:
    """Bytes in decimal units: 1.8 MB is 1,800,000 bytes."""
    if value is None:
        return NOTHING
    if value < 999.5:
        return f"{value:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:,.1f} PB"


def percent(value: float | None) -> str:
    """A fraction in percent with two digits: 91.23 %."""
    return NOTHING if value is None else f"{hundredths(value)} %"


def hundredths(value: float | None) -> str:
    """A fraction in percent without its sign, for a column that has the sign in its head: 91.23."""
    return NOTHING if value is None else f"{100 * value:.2f}"


def points(value: float | None) -> str:
    """A signed difference of two fractions, in percentage points, with a real minus sign."""
    if value is None:
        return NOTHING
    shown = f"{100 * value:+.2f}"
    return "0.00" if float(shown) == 0 else shown.replace("-", "−")


def number(value: float | None, places: int | None = None) -> str:
    """A plain number with so many decimals, by default with four digits, and a real minus sign."""
    if value is None:
        return NOTHING
    shown = f"{value:.4g}" if places is None else f"{value:.{places}f}"
    return shown.removeprefix("-") if float(shown) == 0 else shown.replace("-", "−")


def signed(value: float | None, places: int | None = None) -> str:
    """A plain difference with its sign."""
    shown = number(value, places)
    return shown if value is None or shown.startswith("−") or float(shown) == 0 else f"+{shown}"


def with_spread(value: Mapping[str, Any], show: Callable[[float | None], str]) -> str:
    """A mean over seeds with its deviation, where there is one: 91.23 ± 0.40."""
    spread = value.get("std_over_seeds")
    return show(value["mean"]) if spread is None else f"{show(value['mean'])} ± {show(spread)}"


def with_interval(difference: Mapping[str, Any], show: Callable[[float | None], str] = points) -> str:
    """A difference and its interval, by default in percentage points: +0.24 [−0.31, +0.85] tie."""
    if difference.get("low") is None:
        return show(difference.get("mean"))
    interval = f"[{show(difference['low'])}, {show(difference['high'])}]"
    return f"{show(difference['mean'])} {interval}{' tie' if difference['tie'] else ''}"


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 8 ms, 0.42 s, 2 min 05 s, 3 h 07 min."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


# --- names for people -----------------------------------------------------------------------------------


def measured(metrics: Mapping[str, str] | None) -> str:
    """What a mean over clients is a mean of: accuracy, another metric, or "score" where clients have several."""
    names = {*(metrics or {}).values()} or {"accuracy"}
    return metric_name(names.pop()) if len(names) == 1 else "score"


def method_label(name: str) -> str:
    """A method as tables show it: `Local` for `local`, `Local, lr=0.1` for `local,lr=0.1`."""
    first, comma, rest = name.partition(",")
    shown = METHOD_NAMES.get(first)
    return name if shown is None else f"{shown}, {rest}" if comma else shown


def metric_name(name: str) -> str:
    """A metric in words."""
    return METRIC_NAMES.get(name, name)


def moment(when: str | None) -> str:
    """A moment of evaluation in words."""
    return NOTHING if when is None else MOMENT_NAMES.get(when, when)


def shortened(text: str, most: int) -> str:
    """Text on one line, cut with an ellipsis if too long."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def capital(word: str) -> str:
    """Capitalise the first letter only."""
    return word[0].upper() + word[1:]


def full_sentence(text: str) -> str:
    """A note as a sentence of its own: with a capital, unless it begins with a setting, and a full stop.

    >>> full_sentence("there is one client alone"), full_sentence("engine.workers does nothing here.")
    ('There is one client alone.', 'engine.workers does nothing here.')
    """
    first = text.split(" ", 1)[0]
    return f"{capital(text) if first.isalpha() else text}{'' if text.endswith('.') else '.'}"


# --- numbers for JSON -----------------------------------------------------------------------------------


def rounded(value: float | None) -> float | None:
    """Six digits; None for NaN and infinity, which JSON does not have."""
    return round(float(value), 6) if value is not None and math.isfinite(value) else None


def whole(value: float) -> float | int:
    """A mean of counts: an integer where it is one, else six digits."""
    return int(value) if value == int(value) else round(value, 6)
