"""Comparisons and sweeps as LaTeX tables (package booktabs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from potluck.report.format import VIEW_NAMES, capital, method_label, moment, with_interval
from potluck.report.measures import Measure
from potluck.report.sheets import data_name, measure_in, references_of, rows_of

Comparison = Mapping[str, Any]
SPECIAL = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "²": "$^2$",
    "–": "--",
}


def comparison_table(comparison: Comparison) -> str:
    """The methods, best first: mode, score with its deviation, difference with its interval; the best is bold."""
    measure, rows = measure_in(comparison), rows_of(comparison)
    best = _best([row["accuracy"]["mean"] for row in rows], measure)
    several = len(references_of(rows)) > 1
    head = ["method", "mode", measure.head, *(["against"] if several else []), f"difference{_unit(measure)}"]
    body = [
        [
            escaped(method_label(row["method"])),
            escaped(str(row.get("mode") or "–")),
            _score(row["accuracy"], measure, best),
            *([escaped(method_label(row["against"] or "–"))] if several else []),
            _difference(row.get("difference"), measure),
        ]
        for row in rows
    ]
    align = "ll" + "r" + ("l" if several else "") + "l"
    return _table(align, [escaped(name) for name in head], body, _caption(comparison, measure, rows))


def sweep_table(comparisons: Mapping[str, Comparison]) -> str:
    """A row per method and mode and a column per setting; the best of every setting is bold."""
    first = next(iter(comparisons.values()))
    measure = measure_in(first)
    scores = {
        setting: {(row["method"], row.get("mode")): row["accuracy"] for row in rows_of(comparison)}
        for setting, comparison in comparisons.items()
    }
    best = {
        setting: _best([one["mean"] for one in each.values()], measure) for setting, each in scores.items()
    }
    names = list(dict.fromkeys(name for each in scores.values() for name in each))
    body = [
        [
            escaped(method_label(method)),
            escaped(str(mode or "–")),
            *(
                _score(each.get((method, mode), {"mean": None}), measure, best[setting])
                for setting, each in scores.items()
            ),
        ]
        for method, mode in names
    ]
    head = ["method", "mode", *map(escaped, scores)]
    return _table("ll" + "r" * len(scores), head, body, _caption(first, measure, rows_of(first), False))


def escaped(text: str) -> str:
    """Text without signs that LaTeX would read as commands."""
    return "".join(SPECIAL.get(sign, sign) for sign in text)


def _unit(measure: Measure) -> str:
    return " (points)" if measure.is_share else ""


def _best(values: Sequence[float | None], measure: Measure) -> str:
    """The best value as it is shown, so that equal numbers in print are bold together."""
    known = sorted((value for value in values if value is not None), key=measure.rank)
    return measure.value(known[0]) if known else ""


def _score(score: Mapping[str, Any], measure: Measure, best: str) -> str:
    shown = measure.value(score["mean"])
    spread = score.get("std_over_seeds")
    text = _signs(shown) if spread is None else rf"{_signs(shown)} $\pm$ {_signs(measure.value(spread))}"
    return rf"\textbf{{{text}}}" if shown == best else text


def _difference(difference: Mapping[str, Any] | None, measure: Measure) -> str:
    if not difference:
        return "--"
    return _signs(with_interval(difference, measure.difference))


def _signs(number: str) -> str:
    """A real minus sign."""
    return number.replace("−", "$-$").replace("–", "--")


def _caption(
    comparison: Comparison, measure: Measure, rows: Sequence[Mapping[str, Any]], differences: bool = True
) -> str:
    """What the numbers are: data, view, moment, modes, seeds, and how the interval was made."""
    seeds, view = comparison.get("seeds") or [], comparison.get("view", "last")
    moments = ", ".join(dict.fromkeys(moment(row.get("when")) for row in rows))
    modes = ", ".join(dict.fromkeys(f"{method_label(row['method'])} by {row.get('mode')}" for row in rows))
    references = references_of(rows)
    level = f"{100 * comparison.get('level', 0.95):g}\\,\\%"
    to = method_label(references[0]) if len(references) == 1 else "Local under the same settings"
    over = f", mean $\\pm$ standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else ", one seed"
    on = f" on {data_name(comparison)}" if data_name(comparison) else ""
    best = "best in bold" if measure.higher_is_better else "lower is better, best in bold"
    return (
        f"{escaped(f'{capital(measure.name)}{on}')}, {VIEW_NAMES.get(view, view)}, "
        f"{moments}{over}; {best}. Predictions: {escaped(modes)}."
        + (
            f" Differences: paired with {escaped(to)}, with {level} bootstrap intervals."
            if differences
            else ""
        )
    )


def _table(align: str, head: Sequence[str], body: Sequence[Sequence[str]], caption: str) -> str:
    lines = [
        "% \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in body),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"
