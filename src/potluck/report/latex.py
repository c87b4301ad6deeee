"""Comparisons and sweeps as LaTeX tables (package booktabs)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from potluck.report.format import VIEW_NAMES, capital, count, counted, method_label, moment, with_interval
from potluck.report.measures import Measure
from potluck.report.sheets import (
    data_name,
    has_modes,
    in_given_order,
    measure_in,
    reference_label,
    references_of,
    rows_of,
)

Comparison = Mapping[str, Any]


class Tex(str):
    """Text that is LaTeX already; every other text is escaped before it gets into a table."""

    __slots__ = ()


STAR = Tex("$^*$")
SPECIAL = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "²": "$^2$",
    "–": "--",
    "−": "$-$",
    "↓": r"$\downarrow$",
}


def comparison_table(comparison: Comparison, name: str = "") -> str:
    """The methods, best first: mode, score with its deviation, difference with its interval; the best is bold.

    `name` is that of its folder, which the label is made of.
    """
    measure, rows = measure_in(comparison), rows_of(comparison)
    best = _best([row["accuracy"]["mean"] for row in rows], measure)
    several = len(references_of(rows)) > 1
    head = ["method", "mode", measure.head, *(["against"] if several else []), f"difference{_unit(measure)}"]
    body = [
        [
            method_label(row["method"]),
            _mode(row, comparison),
            _score(row["accuracy"], measure, best),
            *([method_label(row["against"] or "–")] if several else []),
            _difference(row.get("difference"), measure),
        ]
        for row in rows
    ]
    align = "ll" + "r" + ("l" if several else "") + "l"
    caption = _caption([comparison], measure, rows)
    return _table(align, head, body, caption, _label(name, comparison))


def sweep_table(comparisons: Mapping[str, Comparison], name: str = "") -> str:
    """A row per method and mode, in the order given, a column per setting; the best of every setting is bold."""
    first = next(iter(comparisons.values()))
    measure = measure_in(first)
    scores = {
        setting: {(row["method"], row.get("mode")): row["accuracy"] for row in in_given_order(comparison)}
        for setting, comparison in comparisons.items()
    }
    best = {
        setting: _best([one["mean"] for one in each.values()], measure) for setting, each in scores.items()
    }
    names = list(dict.fromkeys(name for each in scores.values() for name in each))
    body = [
        [
            method_label(method),
            _mode({"method": method, "mode": mode}, first),
            *(
                _score(each.get((method, mode), {"mean": None}), measure, best[setting])
                for setting, each in scores.items()
            ),
        ]
        for method, mode in names
    ]
    head = ["method", "mode", *scores]
    caption = _caption(list(comparisons.values()), measure, in_given_order(first), differences=False)
    return _table("ll" + "r" * len(scores), head, body, caption, _label(name, first))


def tex(*parts: str) -> Tex:
    """Parts together as LaTeX, each escaped unless it is LaTeX already."""
    return Tex("".join(part if isinstance(part, Tex) else _escaped(part) for part in parts))


def _escaped(text: str) -> str:
    """Text without signs that LaTeX would read as commands."""
    return "".join(SPECIAL.get(sign, sign) for sign in text)


def _mode(row: Mapping[str, Any], comparison: Comparison) -> str:
    """The mode of a row; a star marks the reported one of a method that was measured in several."""
    entry: Mapping[str, Any] = next(
        (one for one in comparison["methods"] if one["method"] == row["method"]), {}
    )
    star = STAR if has_modes(entry) and row.get("mode") == entry.get("mode") else ""
    return tex(str(row.get("mode") or "–"), star)


def _label(name: str, comparison: Comparison) -> str:
    """What a paper refers to the table by: `tab:digits` of the folder `digits-compare`.

    Two comparisons may be of one experiment, and a name may have no letter that LaTeX takes in a label.
    """
    names = (name.removesuffix("-compare"), comparison.get("name"), data_name(comparison), "comparison")
    found = (re.findall(r"[A-Za-z0-9]+", str(one or "")) for one in names)
    return f"tab:{'-'.join(next(filter(None, found)))}"


def _unit(measure: Measure) -> str:
    return " (points)" if measure.is_share else ""


def _best(values: Sequence[float | None], measure: Measure) -> str:
    """The best value as it is shown, so that equal numbers in print are bold together."""
    known = sorted((value for value in values if value is not None), key=measure.rank)
    return measure.value(known[0]) if known else ""


def _score(score: Mapping[str, Any], measure: Measure, best: str) -> str:
    shown = measure.value(score["mean"])
    spread = score.get("std_over_seeds")
    text = tex(shown) if spread is None else tex(shown, Tex(r" $\pm$ "), measure.value(spread))
    return Tex(rf"\textbf{{{text}}}") if shown == best else text


def _difference(difference: Mapping[str, Any] | None, measure: Measure) -> str:
    return with_interval(difference, measure.difference) if difference else "–"


def _setup(comparison: Comparison) -> list[str]:
    """How the clients came to be and how long they trained: `dirichlet split`, `8 clients`, `10 rounds`."""
    partition, methods = comparison.get("partition"), comparison["methods"]
    kind = partition.get("kind") if isinstance(partition, Mapping) else partition
    alpha = partition.get("alpha") if isinstance(partition, Mapping) else None
    clients = max((entry.get("clients") or 0 for entry in methods), default=0)
    rounds = sorted({entry["rounds_trained"] for entry in methods if entry.get("rounds_trained")})
    return [
        f"{kind} split" if kind else "",
        Tex(rf"$\alpha = {alpha:g}$") if isinstance(alpha, int | float) else "",
        counted(clients, "client") if clients else "",
        f"{f'{count(rounds[0])} to ' * (len(rounds) > 1)}{counted(rounds[-1], 'round')}" if rounds else "",
    ]


def _caption(
    comparisons: Sequence[Comparison],
    measure: Measure,
    rows: Sequence[Mapping[str, Any]],
    differences: bool = True,
) -> str:
    """What the numbers are: data, split, clients, rounds, view, moment, seeds, and how the interval was made.

    Of several comparisons it says what they have in common.
    """
    comparison = comparisons[0]
    shared = [part for part in _setup(comparison) if part and all(part in _setup(one) for one in comparisons)]
    listed = [sign for part in shared for sign in (", ", part)][1:]
    setup = tex(" (", *listed, ")") if shared else ""
    seeds, view = comparison.get("seeds") or [], comparison.get("view", "last")
    moments = ", ".join(dict.fromkeys(moment(row.get("when")) for row in rows))
    several = any(map(has_modes, comparison["methods"]))
    star = tex(" ", STAR, ": the reported mode of the method.") if several else ""
    references = references_of(rows)
    level = Tex(rf"{100 * comparison.get('level', 0.95):g}\,\%")
    to = "Local under the same settings"
    if len(references) == 1:
        to = reference_label(references[0], comparison)
    over = ", one seed"
    if len(seeds) > 1:
        over = Tex(rf", mean $\pm$ sample standard deviation over {len(seeds)} seeds")
    name = (
        measure.name if differences else measure.with_unit
    )  # with differences the head of a column has the unit
    on = f" on {data_name(comparison)}" if data_name(comparison) else ""
    best = "best in bold" if measure.higher_is_better else "lower is better, best in bold"
    what = tex(
        f"{capital(name)}{on}", setup, f", {VIEW_NAMES.get(view, view)}, {moments}", over, f"; {best}.", star
    )
    pairs = tex(f" Differences: paired with {to}, with ", level, " bootstrap intervals.")
    return tex(what, pairs) if differences else what


def _table(align: str, head: Sequence[str], body: Sequence[Sequence[str]], caption: str, label: str) -> str:
    lines = [
        "% \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{tex(caption)}}}",
        rf"\label{{{tex(label)}}}",
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        " & ".join(map(tex, head)) + r" \\",
        r"\midrule",
        *(" & ".join(map(tex, row)) + r" \\" for row in body),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"
