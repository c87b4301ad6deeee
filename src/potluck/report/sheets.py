"""The tables of runs and comparisons.

Those of a comparison take the content of `comparison.json`, as `compare_runs` gives it; they are None where the
comparison has nothing of what they show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

from potluck.report.format import (
    NOTHING,
    VIEW_NAMES,
    capital,
    count,
    counted,
    duration,
    method_label,
    metric_name,
    moment,
    points,
    size,
    with_interval,
    with_spread,
)
from potluck.report.log import natural
from potluck.report.measures import ACCURACY, Measure, measure_named, measure_of
from potluck.report.render import Column, Sheet, itself, words
from potluck.report.split_file import total_of

Comparison = Mapping[str, Any]
REPORTED = " *"  # beside the mode that a method is judged by, where it was measured in several
BY_VALIDATION = (
    "Best by validation: the same in the round with the best mean validation score of each run; "
    "--view best_by_validation (in Python view=…) gives all tables for it."
)
UNEVEN = (
    "Clients: how many were measured. Only those that took part in the last round are measured after training, so "
    "means over different numbers of clients are not to be compared."
)
FEW_PAIRS = 5  # an interval from fewer paired values is no more than a hint
_ABSENT: Mapping[str, float | None] = {"mean": None, "std_over_seeds": None}

# --- a run ----------------------------------------------------------------------------------------------


def run_sheet(
    summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]], kept: int | None = None
) -> Sheet:
    """One run, client by client: `clients` have an id and, where known, model, train, test, accuracy.

    `kept` is the round whose models are kept.
    """
    metrics = (summary.get("accuracy") or {}).get("metrics") or {}
    measure = measure_in(summary.get("accuracy") or {})
    measure = measure.fitted([client.get("accuracy") for client in clients], ())
    further = dict.fromkeys(name for client in clients for name in client.get("further") or ())
    by_metric = words("measured by", lambda client: metric_name(metrics.get(client["id"], NOTHING)))
    columns = (
        words("client", itemgetter("id")),
        words("model", lambda client: client.get("model") or None),
        Column("train samples", lambda client: client.get("train"), count),
        Column("test samples", lambda client: client.get("test"), count),
        *([by_metric] if len({*metrics.values()}) > 1 else []),
        Column(measure.name, lambda client: client.get("accuracy"), measure.full),
        *(_further_column(name, clients, summary.get("accuracy") or {}) for name in further),
    )
    rounds = summary.get("rounds")
    title = f"{summary.get('method', 'run')}, {counted(rounds, 'round')}"
    told = about_kept(summary.get("accuracy") or {}, kept)
    notes = (*headline(summary), *([f"models: {told}"] if told else []))
    return Sheet(title, columns, clients, notes).without_empty_columns()


def about_kept(accuracy: Mapping[str, Any], kept: int | None) -> str:
    """Which models are kept, if they are not those of the last round, which the scores are of; else nothing."""
    rounds = accuracy.get("rounds") or {}
    if kept is None or rounds.get("last") in (None, kept):
        return ""
    measure, by_validation = measure_in(accuracy), accuracy.get("best_by_validation")
    there = ""
    if rounds.get("best_by_validation") == kept and by_validation is not None:
        there = f", the best by validation (test {measure.name} {measure.full(by_validation)} there)"
    return f"those after round {kept}{there}; the scores here are of round {rounds['last']}"


def _further_column(name: str, clients: Sequence[Mapping[str, Any]], accuracy: Mapping[str, Any]) -> Column:
    """A further measure of every client, where it has it."""

    def value(client: Mapping[str, Any]) -> float | None:
        found: float | None = (client.get("further") or {}).get(name)
        return found

    measure = measure_named(name, accuracy.get("metric_facts")).fitted(map(value, clients), ())
    return Column(measure.head, value, measure.value)


def headline(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The few lines that say how a run went."""
    accuracy, messages = summary.get("accuracy") or {}, summary.get("messages") or {}
    up, down = messages.get("up") or {}, messages.get("down") or {}
    measure = measure_in(accuracy)
    coverage = accuracy.get("coverage") or len(accuracy.get("per_client") or {})
    lines = [
        f"{measure.name} {_spread(accuracy, measure)} over {counted(coverage, 'client')} in the last round "
        f"({how(accuracy)}), worst tenth {measure.full(accuracy.get('worst_tenth'))}"
    ]
    if absent := not_measured(accuracy):
        lines.append(absent)
    for other in other_views(accuracy):
        tenth = f"worst tenth {measure.full(other['worst_tenth'])}"
        lines.append(f"{how(other)}: {_spread(other, measure)}{_of_some(other, coverage)}, {tenth}")
    if held_out := accuracy.get("held_out"):
        lines.append(f"held-out clients: {measure.full(held_out['last'])} over {count(held_out['clients'])}")
    if further := accuracy.get("further"):
        told = (
            f"{metric_name(name)} {_further(name, accuracy)(value['mean'])}{_of_some(value, coverage)}"
            for name, value in further.items()
        )
        lines.append(f"further measures: {', '.join(told)}")
    lines.append(
        f"per client and round: {count(up.get('scalars'))} scalars up ({size(up.get('bytes'))}), "
        f"{count(down.get('scalars'))} down ({size(down.get('bytes'))})"
    )
    if published := messages.get("as_published"):
        sent = f"{count(published.get('up'))} scalars up, {count(published.get('down'))} down"
        lines.append(f"as the paper counts: {sent}")
    lines.append(f"time per round: {duration(summary.get('seconds_per_round'))} (median)")
    return tuple(lines)


def not_measured(accuracy: Mapping[str, Any]) -> str:
    """One sentence on clients that were missing when they were to be measured; empty if nobody was."""
    missing = accuracy.get("missing") or {}
    last, rounds = missing.get("last") or (), missing.get("rounds") or {}
    if last:
        told = f"{', '.join(last)} {'was' if len(last) == 1 else 'were'} not measured in the last round"
        return f"{told}: means and curves are over the other clients, in rounds in which none of them was missing"
    if rounds:
        told = ", ".join(f"{', '.join(clients)} in round {round_}" for round_, clients in rounds.items())
        return f"not measured: {told}; curves and best rounds leave these rounds out"
    return ""


def _of_some(value: Mapping[str, Any], coverage: int) -> str:
    """How many clients have a further measure, where not all do that were measured."""
    clients = value.get("clients", coverage)
    return "" if clients == coverage else f" over {counted(clients, 'client')}"


def how(block: Mapping[str, Any]) -> str:
    """The moment and the mode of a score: `after aggregation, by prototype`."""
    mode = block.get("mode")
    return moment(block.get("when")) + (f", by {mode}" if mode else "")


def other_views(accuracy: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a run measured besides its headline: other moments, other modes."""
    headline = accuracy.get("when"), accuracy.get("mode")
    return [one for one in accuracy.get("measured") or () if (one["when"], one["mode"]) != headline]


def _spread(block: Mapping[str, Any], measure: Measure) -> str:
    return f"{measure.full(block.get('last'))} ± {measure.full(block.get('std_over_clients'))}"


def measure_in(block: Mapping[str, Any]) -> Measure:
    """What the scores of a summary or a comparison are."""
    measure = measure_of(block.get("metrics"), block.get("metric_facts"))
    rows = [row for entry in block.get("methods") or () for row in (entry, *(entry.get("measured") or ()))]
    scores = [row["accuracy"] for row in rows]
    differences = [row["difference"] for row in rows if (row.get("difference") or {}).get("low") is not None]
    return measure.fitted(
        [one["mean"] for one in scores],
        [one.get("std_over_seeds") for one in scores],
        [one["high"] - one["low"] for one in differences],
    )


def _further(name: str, block: Mapping[str, Any]) -> Callable[[float | None], str]:
    """How a further measure is shown, with its unit."""
    return measure_named(name, block.get("metric_facts")).full


def run_further_sheet(summary: Mapping[str, Any]) -> Sheet | None:
    """The further measures of one run, a row each; None where no task has any."""
    accuracy = summary.get("accuracy") or {}
    further = accuracy.get("further")
    if not further:
        return None
    columns = (
        words("measure", itemgetter(0), metric_name),
        Column("clients", lambda entry: entry[1]["clients"], count),
        Column("mean", itself, lambda entry: _further(entry[0], accuracy)(entry[1]["mean"])),
    )
    return Sheet("Further measures", columns, list(further.items()), sortable=False)


def client_rows(
    split: Mapping[str, Any],
    accuracy: Mapping[str, Any],
    models: Mapping[str, Any],
    further: Mapping[str, Mapping[str, float]] | None = None,
) -> list[dict[str, Any]]:
    """The clients of `run_sheet`, from `split.json`, a summary's accuracy, and the clients' models.

    `further` has the further measures of each client, by name.
    """
    parts = {str(part["id"]): part for part in split.get("clients") or ()}
    values = accuracy.get("per_client") or {}
    held_out = {str(client) for client in split.get("held_out") or ()}
    return [
        {
            "id": client,
            "model": models.get(client),
            "train": _size(parts.get(client, {}).get("train")),
            "test": _size(parts.get(client, {}).get("test")),
            "accuracy": values.get(client),
            **({"further": further.get(client)} if further else {}),
        }
        for client in sorted((parts.keys() | values.keys()) - held_out, key=natural)
    ]


def number_of_rows(split: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> int:
    """How many rows all clients would have; `client_rows` has those that were read."""
    return len(rows) + total_of(split) - len(split.get("clients") or ()) - _held_out_unread(split)


def _held_out_unread(split: Mapping[str, Any]) -> int:
    read = {str(part["id"]) for part in split.get("clients") or ()}
    return sum(str(client) not in read for client in split.get("held_out") or ())


def some_rows(rows: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """At most so many rows, in order: first those of clients that were measured, then the first of the others."""
    if len(rows) <= most:
        return rows
    measured = (place for place, row in enumerate(rows) if row.get("accuracy") is not None)
    chosen = dict.fromkeys([*measured, *range(len(rows))])
    return [rows[place] for place in sorted(itertools.islice(chosen, most))]


def _size(rows: list[int] | int | None) -> int | None:
    """How many rows there are: those of a federation's clients are only counted."""
    return rows if rows is None or isinstance(rows, int) else len(rows)


# --- methods side by side -------------------------------------------------------------------------------


def comparison_sheet(comparison: Comparison) -> Sheet:
    """The methods, best first, in every mode that was measured, each against its reference."""
    measure = measure_in(comparison)

    def gain(entry: Mapping[str, Any]) -> str:
        return NOTHING if _is_reference(entry, comparison) else points((entry.get("gain") or 0.0) / 100)

    shows_gain = any(entry.get("gain") is not None for entry in comparison["methods"])
    rows = rows_of(comparison)
    columns = (
        words("method", itemgetter("method"), method_label),
        *([words("measured", lambda entry: entry.get("when"), moment)] if _several_moments(rows) else []),
        *([_mode([comparison])] if all(row.get("mode") for row in rows) else []),
        _over_seeds(measure.head, itemgetter("accuracy"), measure.value),
        *_against(comparison, rows),
        *([Column("Δ %", itself, gain, key=itemgetter("gain"))] if shows_gain else []),
        Column("up", lambda entry: entry["messages"]["up"]["scalars"], count),
        Column("down", lambda entry: entry["messages"]["down"]["scalars"], count),
        Column("time", lambda entry: entry.get("seconds_per_round"), duration),
    )
    return Sheet(_title(comparison), columns, rows, _notes(comparison))


def measured_sheet(comparison: Comparison) -> Sheet | None:
    """A row per method, moment and mode, with the spread over clients and the worst tenth."""
    measure = measure_in(comparison)
    rows = [
        {"method": entry["method"], "against": entry.get("against"), **one}
        for entry in ranked(comparison["methods"], measure)
        for one in entry.get("measured") or ()
    ]
    if not rows:
        return None
    uneven = len({row.get("clients") for row in rows}) > 1

    def by_validation(row: Mapping[str, Any]) -> Mapping[str, float | None]:
        return row.get("best_by_validation") or _ABSENT

    view = comparison.get("view", "last")
    chosen = view == "last" and any(by_validation(row)["mean"] is not None for row in rows)
    columns = (
        words("method", itemgetter("method"), method_label),
        words("measured", itemgetter("when"), moment),
        _mode([comparison]),
        *([Column("clients", lambda row: row.get("clients"), count)] if uneven else []),
        _over_seeds(measure.head, itemgetter("accuracy"), measure.value),
        *_against(comparison, rows),
        *([_over_seeds("best by validation", by_validation, measure.value)] if chosen else []),
        _over_seeds("spread", itemgetter("std_over_clients"), measure.value),
        _over_seeds("worst tenth", itemgetter("worst_tenth"), measure.value),
    )
    notes = (
        f"Spread: the population standard deviation over clients{_mean_of_seeds(comparison)}. Worst tenth: the "
        "mean of the worst tenth of the clients. A reference is taken at the same moment.",
        *([BY_VALIDATION] if chosen else []),
        *([about_modes(comparison)] if about_modes(comparison) else []),
        *([UNEVEN] if uneven else []),
    )
    return Sheet("Every moment and mode", columns, rows, notes)


def _mean_of_seeds(comparison: Comparison) -> str:
    return ", its mean ± the sample standard deviation over seeds" if _several_seeds(comparison) else ""


def rows_of(comparison: Comparison) -> list[Mapping[str, Any]]:
    """The rows of the main table: the methods, best first, in every mode measured at the reported moment."""
    methods = ranked(comparison["methods"], measure_in(comparison))
    return [row for entry in methods for row in _in_all_modes(entry)]


def in_given_order(comparison: Comparison) -> list[Mapping[str, Any]]:
    """The same rows, with the methods in the order they were given."""
    return [row for entry in comparison["methods"] for row in _in_all_modes(entry)]


def in_order_of_looks(comparison: Comparison, looks: int) -> list[Mapping[str, Any]]:
    """The same rows in the order in which they get their looks.

    It is the given order, so that a method looks alike in all settings of a sweep. If there are more rows than
    looks, the best come first.
    """
    given = in_given_order(comparison)
    return given if len(given) <= looks else rows_of(comparison)


def row_label(row: Mapping[str, Any]) -> str:
    """A method with the mode of its row, unless the plain model is its only one: `fedproto (prototype)`."""
    name, mode = method_label(row["method"]), row.get("mode")
    plain = mode is None or (mode == "model" and not has_modes(row))
    return name if plain else f"{name} ({mode})"


def has_modes(entry: Mapping[str, Any]) -> bool:
    """Whether a method was measured in more than one way to predict."""
    return len({one["mode"] for one in entry.get("measured") or ()}) > 1


def reference_label(name: str, comparison: Comparison) -> str:
    """What differences are taken to, with the mode it is judged by: `fedproto (prototype)`."""
    entry = next((one for one in comparison["methods"] if one["method"] == name), {"method": name})
    return row_label(entry)


def moments_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """When the scores of some rows were measured: `after aggregation`."""
    return ", ".join(dict.fromkeys(moment(row["when"]) for row in rows if row.get("when")))


def _mode(comparisons: Sequence[Comparison]) -> Column:
    """The mode of a row; a star marks the reported one of each method that was measured in several."""
    entries = [entry for one in comparisons for entry in one["methods"]]
    starred = {(entry["method"], entry.get("mode")) for entry in entries if has_modes(entry)}

    def shown(row: Mapping[str, Any]) -> str | None:
        star = REPORTED if (row["method"], row.get("mode")) in starred else ""
        return f"{row['mode']}{star}" if row.get("mode") else None

    return words("mode", shown)


def about_modes(comparison: Comparison) -> str:
    """What a mode is, and what the star beside some of them means; empty where no method has several."""
    if not any(map(has_modes, comparison["methods"])):
        return ""
    return "*: the reported mode of its method. Methods are ranked, and compared client by client, by it."


def _in_all_modes(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The row of a method, and one for each further mode that was measured at the same moment."""
    others = [
        one
        for one in entry.get("measured") or ()
        if one["when"] == entry.get("when") and one["mode"] != entry.get("mode")
    ]
    return [entry, *({**entry, "gain": None, **one} for one in others)]


def _several_moments(rows: Sequence[Mapping[str, Any]]) -> bool:
    return len({row.get("when") for row in rows} - {None}) > 1


def references_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the differences in some rows are taken to, each once."""
    return list(dict.fromkeys(str(row["against"]) for row in rows if row.get("against") is not None))


def _against(comparison: Comparison, rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The difference to the reference, and where there are several references, which one it is."""
    names = references_of(rows) or [_baseline(comparison)]
    difference = Column(
        "difference" if len(names) > 1 else f"against {reference_label(names[0], comparison)}",
        lambda entry: entry.get("difference") or {},
        partial(with_interval, show=measure_in(comparison).difference),
        key=lambda difference: difference.get("mean"),
        align="left",
    )
    which = words("against", lambda entry: entry.get("against"), lambda name: method_label(name or NOTHING))
    return [which, difference] if len(names) > 1 else [difference]


def _is_reference(entry: Mapping[str, Any], comparison: Comparison) -> bool:
    """Whether a row has nothing to be compared with, or no gain was computed."""
    alone = entry["method"] == _baseline(comparison) or ("against" in entry and entry["against"] is None)
    return alone or entry.get("gain") is None


def ranked(methods: Sequence[Mapping[str, Any]], measure: Measure = ACCURACY) -> list[Mapping[str, Any]]:
    """Methods by their score, best first, those without a value last."""
    return sorted(methods, key=lambda entry: measure.rank(entry["accuracy"]["mean"]))


def data_name(config: Mapping[str, Any]) -> str | None:
    """What an experiment runs on: its data set, or those of its federation, each once.

    Files have no name, so the experiment's own stands for them.
    """
    groups = config.get("federation") or [config]
    found = [group.get("data") for group in groups]
    names = [data.get("name") if isinstance(data, Mapping) else data for data in found]
    names = [config.get("name") or name if name == "files" else name for name in names]
    return ", ".join(dict.fromkeys(str(name) for name in names if name)) or None


def _baseline(comparison: Comparison) -> str:
    return str(comparison.get("baseline", "local"))


def _several_seeds(comparison: Comparison) -> bool:
    return len(comparison.get("seeds") or ()) > 1


def _over_seeds(
    name: str, value: Callable[[Any], Mapping[str, Any]], show: Callable[[float | None], str]
) -> Column:
    """A column of means over seeds with their deviation; it sorts by the mean."""
    return Column(name, value, partial(with_spread, show=show), key=itemgetter("mean"))


def _title(comparison: Comparison) -> str:
    name, partition = data_name(comparison), comparison.get("partition")
    kind = partition.get("kind") if isinstance(partition, Mapping) else partition
    methods = len(comparison["methods"])
    parts = [
        counted(methods, "method"),
        f"on {name}" if name else "",
        f"({kind})" if kind else "",
    ]
    return " ".join(part for part in parts if part)


def _notes(comparison: Comparison) -> tuple[str, ...]:
    """How to read the comparison: what each column is, and what must not be read into it."""
    measure = measure_in(comparison)
    moments = {entry.get("when") for entry in comparison["methods"]} - {None}
    notes = [
        about_scores(comparison, measure),
        " ".join(
            filter(None, ["Mode: the way to predict.", about_modes(comparison), _not_measured(comparison)])
        ),
        _about_differences(comparison, measure),
    ]
    if any(entry.get("gain") is not None for entry in comparison["methods"]):
        reference = method_label(_baseline(comparison))
        notes.append(
            f"Δ %: the mean over clients of 100·(value − {reference}'s)/{reference}'s, each by its own measure; "
            f"clients for which {reference}'s is 0 are left out; "
            "this definition is inferred, not published."
        )
    notes.append("Up and down: scalars per client and round, for training. Time: median over rounds.")
    if len(moments) > 1:
        each = ", ".join(f"{entry['method']} {moment(entry.get('when'))}" for entry in comparison["methods"])
        notes.append(f"The methods were not evaluated at the same moment: {each}.")
    if others := comparison.get("not_shown"):
        notes.append(
            f"Also in this folder, from earlier calls, and not shown: {', '.join(others)}. A call that names all "
            "methods and seeds shows them together, and trains nothing again."
        )
    return tuple(notes)


def about_means(comparison: Comparison) -> str:
    """What a picture shows, in a few words: `mean over clients and 3 seeds, last round, after aggregation`."""
    seeds, view = len(comparison.get("seeds") or ()), comparison.get("view", "last")
    over = f"mean over clients and {seeds} seeds" if seeds > 1 else "mean over clients"
    at = moments_of(comparison["methods"])
    return ", ".join(part for part in (over, VIEW_NAMES.get(view, view), at) if part)


def about_scores(comparison: Comparison, measure: Measure) -> str:
    """What a score is: a mean over clients, in which round, at which moment, over how many seeds."""
    seeds, view = comparison.get("seeds") or [], comparison.get("view", "last")
    over = (
        f"± the sample standard deviation over {len(seeds)} seeds"
        if _several_seeds(comparison)
        else "one seed"
    )
    moments = {entry.get("when") for entry in comparison["methods"]} - {None}
    at = f", {moment(next(iter(moments)))}" if len(moments) == 1 else ""
    return f"{capital(measure.name)}: mean over clients, {VIEW_NAMES.get(view, view)}{at}, {over}." + (
        "" if measure.higher_is_better else " Lower is better."
    )


def _about_differences(comparison: Comparison, measure: Measure) -> str:
    """What a difference is, and what it is taken to."""
    several = _several_seeds(comparison)
    resampled = "seeds, then clients within a seed" if several else "clients of the one seed"
    level, draws = f"{100 * comparison.get('level', 0.95):g} %", count(comparison.get("draws"))
    names = references_of(comparison["methods"]) or [_baseline(comparison)]
    what = "Difference to Local with the same training settings"
    if len(names) == 1:
        what = f"Against {reference_label(names[0], comparison)}"
    return (
        f"{what}: paired difference{measure.in_points} with its {level} bootstrap interval, resampling "
        f"{resampled} ({draws} draws); a tie is an interval that contains 0."
        f"{_about_few_pairs(comparison['methods'])}"
    )


def _about_few_pairs(rows: Sequence[Mapping[str, Any]]) -> str:
    """A word of caution where an interval comes from a handful of clients; else nothing."""
    found = [row["difference"] for row in rows if (row.get("difference") or {}).get("low") is not None]
    fewest = min((one.get("pairs", FEW_PAIRS) for one in found), default=FEW_PAIRS)
    return f" An interval from so few pairs ({fewest}) says little." if fewest < FEW_PAIRS else ""


def _not_measured(comparison: Comparison) -> str:
    """The ways to predict that methods have besides those in the table."""
    left_out: dict[str, list[str]] = {}  # variants of one method lack the same ways: they are named together
    for entry in comparison["methods"]:
        if entry.get("not_measured"):
            left_out.setdefault(", ".join(entry["not_measured"]), []).append(method_label(entry["method"]))
    if not left_out:
        return ""
    each = "; ".join(f"{', '.join(methods)} by {modes}" for modes, methods in left_out.items())
    return f"Not measured: {each} (evaluate.modes=all measures them)."


# --- what else a comparison shows -----------------------------------------------------------------------


def clients_sheet(comparison: Comparison) -> Sheet | None:
    """A row per client, with what it is measured by, and a column per method; None where all have one task."""
    metrics, data = comparison.get("metrics"), comparison.get("data_sets")
    if not metrics:
        return None

    stored = comparison.get("metric_facts")
    by_name = {
        name: measure_named(name, stored).fitted(
            (
                entry["per_client"].get(client)
                for entry in comparison["methods"]
                for client in metrics
                if metrics[client] == name
            ),
            (),
        )
        for name in metrics.values()
    }
    by_client = {client: by_name[name] for client, name in metrics.items()}

    def of_method(entry: Mapping[str, Any]) -> Column:
        values = entry["per_client"]
        return Column(
            method_label(entry["method"]),
            itself,
            lambda client: by_client[client].value(values.get(client)),
            key=values.get,
        )

    methods = ranked(comparison["methods"], measure_in(comparison))
    columns = (
        words("client", itself),
        words("measured by", lambda client: metric_name(metrics[client])),
        *([words("data", lambda client: data.get(client, NOTHING))] if data else []),
        *map(of_method, methods),
    )
    absent = any(entry["per_client"].get(client) is None for client in metrics for entry in methods)
    note = "–: undefined for this client, or not evaluated; left out of the means and of Δ %."
    title = f"Client by client{measure_in(comparison).in_unit}"
    notes = (*([note] if absent else []), *([_each(methods).strip()] if _each(methods) else []))
    return Sheet(title, columns, list(metrics), notes)


def _each(methods: Sequence[Mapping[str, Any]]) -> str:
    """The moment and the mode of every column of a table that has a column per method."""
    known = [one for one in methods if one.get("mode")]
    if len(known) > 1 and len({how(one) for one in known}) == 1:
        return f" Measured {how(known[0])}."
    told = [f"{method_label(one['method'])} {how(one)}" for one in known]
    return f" Measured: {'; '.join(told)}." if told else ""


def further_sheet(comparison: Comparison) -> Sheet | None:
    """A row per further measure and a column per method; None where no task has any."""
    methods = ranked(comparison["methods"], measure_in(comparison))
    names = list(dict.fromkeys(name for entry in methods for name in entry.get("further") or ()))
    if not names:
        return None
    stored = comparison.get("metric_facts")
    found = {name: [(entry.get("further") or {}).get(name, _ABSENT) for entry in methods] for name in names}
    by_name = {
        name: measure_named(name, stored).fitted(
            [one["mean"] for one in scores], [one.get("std_over_seeds") for one in scores]
        )
        for name, scores in found.items()
    }
    shares = all(measure.is_share for measure in by_name.values())
    shown = {name: measure.value if shares else measure.full for name, measure in by_name.items()}

    def of_method(entry: Mapping[str, Any]) -> Column:
        further = entry.get("further") or {}
        return Column(
            method_label(entry["method"]),
            itself,
            lambda name: with_spread(further.get(name) or _ABSENT, shown[name]),
            key=lambda name: (further.get(name) or _ABSENT)["mean"],
        )

    view = comparison.get("view", "last")
    spread = ", ± the sample standard deviation over seeds" if _several_seeds(comparison) else ""
    note = (
        f"Mean over the clients that have the measure, {VIEW_NAMES.get(view, view)}{spread}.{_each(methods)}"
    )
    columns = (
        words(
            "measure", lambda name: f"{by_name[name].name}{'' if by_name[name].higher_is_better else ' ↓'}"
        ),
        *map(of_method, methods),
    )
    return Sheet(f"Further measures{', in percent' if shares else ''}", columns, names, (note,))


def targets_sheet(comparison: Comparison) -> Sheet | None:
    """A row per target and method, with the round that reached it and the cost; None without targets."""
    wanted = comparison.get("targets")
    if not wanted:
        return None

    def sent(unit: str, direction: str, show: Callable[[float | None], str]) -> Column:
        return _over_seeds(f"{unit} {direction}", lambda entry: entry[1][direction][unit], show)

    measure = measure_in(comparison)
    columns = (
        Column(
            "target %" if measure.is_share else "target",
            lambda entry: entry[1]["target"],
            lambda target: f"{measure.scale * target:g}",
        ),
        words("method", lambda entry: entry[0]["method"], method_label),
        words("measured", lambda entry: how(entry[0])),
        Column("round", itemgetter(1), _reached, key=lambda cost: cost["round"]["mean"]),
        *(sent("scalars", direction, count) for direction in ("up", "down")),
        *(sent("bytes", direction, size) for direction in ("up", "down")),
    )
    methods = ranked(comparison["methods"], measure)
    entries = [(entry, entry["targets"][place]) for place in range(len(wanted)) for entry in methods]
    notes = (
        f"Round: the first evaluated one whose mean {measure.name} reached the target. "
        "Scalars and bytes: sent for training until then, all clients and rounds together.",
        *(
            ["± the sample standard deviation over the seeds that reached it."]
            if _several_seeds(comparison)
            else []
        ),
    )
    return Sheet("What a target costs", columns, entries, notes)


def _reached(cost: Mapping[str, Any]) -> str:
    """The round that reached a target, and in how many seeds if not in all."""
    reached, seeds = cost["reached"], len(cost["runs"])
    return with_spread(cost["round"], count) + _some(reached, seeds) if reached else "not reached"


def _some(known: int, seeds: int) -> str:
    return f" ({known} of {seeds} seeds)" if 0 < known < seeds else ""


def rounds_sheet(comparison: Comparison) -> Sheet | None:
    """A row per method, moment and mode, and a column per chosen round; None where no round was chosen."""
    wanted = comparison.get("rounds")
    if not wanted:
        return None

    measure = measure_in(comparison)

    def at_round(place: int, number: int) -> Column:
        show = partial(_score, measure=measure)
        return Column(
            f"round {number}", lambda entry: entry[1]["scores"][place], show, key=itemgetter("mean")
        )

    columns = (
        words("method", itemgetter(0), method_label),
        words("measured", lambda entry: entry[1]["when"], moment),
        words("mode", lambda entry: entry[1]["mode"]),
        *(at_round(place, number) for place, number in enumerate(wanted)),
    )
    methods = ranked(comparison["methods"], measure)
    entries = [(entry["method"], row) for entry in methods for row in entry["rounds"]]
    notes = (
        f"Mean {measure.name} of the clients measured{measure.in_unit}.",
        *(["± the sample standard deviation over seeds."] if _several_seeds(comparison) else []),
    )
    return Sheet("Round by round", columns, entries, notes)


def _score(score: Mapping[str, Any], measure: Measure) -> str:
    """A mean at a chosen round, and how many seeds have it if not all."""
    known = sum(value is not None for value in score["runs"])
    return with_spread(score, measure.value) + _some(known, len(score["runs"]))


def gains_sheet(comparison: Comparison) -> Sheet | None:
    """How many clients gain and lose against the reference; None where clients were not compared."""
    measure = measure_in(comparison)
    entries = [
        (entry, entry["by_client"], _differences(entry["by_client"]))
        for entry in ranked(comparison["methods"], measure)
        if "by_client" in entry
    ]
    if not entries:
        return None
    names = references_of([entry for entry, _, _ in entries]) or [_baseline(comparison)]
    which = words("against", lambda entry: method_label(entry[0].get("against") or _baseline(comparison)))
    columns = (
        words("method", lambda entry: entry[0]["method"], method_label),
        words("measured", lambda entry: how(entry[0])),
        *([which] if len(names) > 1 else []),
        Column("clients", lambda entry: len(entry[2]), count),
        *(_share(sign) for sign in ("better", "equal", "worse")),
        Column("lowest", lambda entry: min(entry[2], default=None), measure.difference),
        Column("median", lambda entry: median(entry[2]) if entry[2] else None, measure.difference),
        Column("highest", lambda entry: max(entry[2], default=None), measure.difference),
    )
    one = reference_label(names[0], comparison)
    reference, theirs = (one, one) if len(names) == 1 else ("the Local of its settings", "their Local")
    higher = "higher" if measure.higher_is_better else "lower"
    note = (
        f"Better: clients whose {measure.name} is {higher} than under {reference}, "
        f"{VIEW_NAMES[comparison.get('view', 'last')]}. Lowest to highest: differences{measure.in_points}."
        + (" A client counts once per seed." if _several_seeds(comparison) else "")
    )
    return Sheet(f"Clients against {theirs}", columns, entries, (note,), sortable=False)


def _differences(by_client: Mapping[str, Any]) -> list[float]:
    return [value for clients in by_client["differences"].values() for value in clients.values()]


def _share(sign: str) -> Column:
    """How many clients have a difference of this sign, and their share."""

    def show(entry: tuple[Mapping[str, Any], Mapping[str, Any], Sequence[float]]) -> str:
        _, by_client, differences = entry
        return f"{by_client[sign]:,} ({100 * by_client[sign] / max(len(differences), 1):.0f} %)"

    return Column(sign, itself, show)


def differences_sheet(comparison: Comparison) -> Sheet | None:
    """A row per client and seed with its difference under every method; None where clients were not compared."""
    measure = measure_in(comparison)
    methods = [entry for entry in ranked(comparison["methods"], measure) if "by_client" in entry]
    found = [entry["by_client"]["differences"] for entry in methods]
    pairs = dict.fromkeys((seed, client) for seeds in found for seed in seeds for client in seeds[seed])
    if not pairs:
        return None

    def of_method(entry: Mapping[str, Any]) -> Column:
        seeds = entry["by_client"]["differences"]
        name = method_label(entry["method"])
        return Column(name, lambda pair: seeds.get(pair[0], {}).get(pair[1]), measure.difference)

    columns = (words("seed", itemgetter(0)), words("client", itemgetter(1)), *map(of_method, methods))
    title = f"All clients{', in points' if measure.is_share else ''}"
    return Sheet(title, columns, list(pairs), (_each(methods).strip(),) if _each(methods) else ())


# --- sweeps ---------------------------------------------------------------------------------------------


def sweep_sheet(settings: Mapping[str, Mapping[str, Any]], comparisons: Mapping[str, Comparison]) -> Sheet:
    """A row per setting and method, in one order: score, difference to its reference, moment and mode."""
    first = next(iter(comparisons.values()))
    measure = measure_in(first)
    rows = [
        {**row, "setting": setting}
        for setting, comparison in comparisons.items()
        for row in in_given_order(comparison)
    ]
    columns = (
        words("setting", itemgetter("setting")),
        words("method", itemgetter("method"), method_label),
        *([words("measured", itemgetter("when"), moment)] if _several_moments(rows) else []),
        _mode(list(comparisons.values())),
        _over_seeds(measure.head, itemgetter("accuracy"), measure.value),
        *_against(first, rows),
    )
    keys = ", ".join(dict.fromkeys(key for changes in settings.values() for key in changes))
    notes = (
        f"Settings of {keys}; each is a comparison of its own.",
        about_scores(first, measure),
        *([about_modes(first)] if about_modes(first) else []),
        _about_differences(first, measure),
    )
    return Sheet(counted(len(comparisons), "setting"), columns, rows, notes)
