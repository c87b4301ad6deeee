"""The tables of runs and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from potluck.report.format import (
    MOMENT_NAMES,
    NOTHING,
    capital,
    count,
    duration,
    measured,
    metric_name,
    moment,
    percent,
    points,
    size,
)
from potluck.report.render import Column, Sheet, SortKey, markdown, rich_table

VIEW_NAMES = {
    "last": "last round",
    "best_by_validation": "best round by validation",
    "best_by_test": "best round by test",
}
METHOD_NAMES = {"local": "Local"}


def run_sheet(summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> Sheet:
    """One run, client by client: `clients` have an id and, where known, model, train, test, accuracy."""
    metrics = (summary.get("accuracy") or {}).get("metrics") or {}
    several = len({*metrics.values()}) > 1
    columns = (
        Column("client", "left"),
        Column("model", "left"),
        Column("train samples"),
        Column("test samples"),
        *([Column("measured by", "left")] if several else []),
        Column(measured(metrics)),
    )
    names = ("id", "model", "train", "test", "accuracy")
    rows, keys = [], []
    for client in clients:
        id, model, train, test, accuracy = (client.get(name) for name in names)
        by = [metric_name(metrics.get(id, NOTHING))] if several else []
        keys.append((id, model, train, test, *by, accuracy))
        rows.append((str(id), str(model or NOTHING), count(train), count(test), *by, percent(accuracy)))
    title = f"{summary.get('method', 'run')}, {count(summary.get('rounds'))} rounds"
    return Sheet(title, columns, tuple(rows), headline(summary), tuple(keys)).without_empty_columns()


def headline(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The few lines that say how a run went."""
    accuracy, messages = summary.get("accuracy") or {}, summary.get("messages") or {}
    up, down = messages.get("up") or {}, messages.get("down") or {}
    coverage = accuracy.get("coverage") or len(accuracy.get("per_client") or {})
    lines = [
        f"{measured(accuracy.get('metrics'))} {percent(accuracy.get('last'))} ± "
        f"{percent(accuracy.get('std_over_clients'))} over {count(coverage)} clients in the last round "
        f"({moment(accuracy.get('when'))}), worst tenth {percent(accuracy.get('worst_tenth'))}",
        f"per client and round: {count(up.get('scalars'))} scalars up ({size(up.get('bytes'))}), "
        f"{count(down.get('scalars'))} down ({size(down.get('bytes'))})",
        f"time per round: {duration(summary.get('seconds_per_round'))}",
    ]
    published = messages.get("as_published")
    if published:
        lines.insert(
            2,
            f"as the paper counts: {count(published.get('up'))} scalars up, {count(published.get('down'))} down",
        )
    further = accuracy.get("further")
    if further:
        told = (f"{metric_name(name)} {percent(value['mean'])}" for name, value in further.items())
        lines.insert(1, f"further measures: {', '.join(told)}")
    held_out = accuracy.get("held_out")
    if held_out:
        lines.insert(1, f"held-out clients: {percent(held_out['last'])} over {count(held_out['clients'])}")
    return tuple(lines)


def comparison_sheet(comparison: Mapping[str, Any]) -> Sheet:
    """Several methods, best first, each against the baseline: takes what `views.compare_runs` gives."""
    baseline = str(comparison.get("baseline", "local"))
    reference = METHOD_NAMES.get(baseline, baseline)
    columns = (
        Column("method", "left"),
        Column(f"{measured(comparison.get('metrics'))} %"),
        Column(f"against {reference}", "left"),
        *([Column("Δ %")] if comparison.get("metrics") else []),
        Column("up"),
        Column("down"),
        Column("time"),
    )
    entries = ranked(comparison["methods"])
    return Sheet(
        _comparison_title(comparison),
        columns,
        tuple(_comparison_row(entry, baseline) for entry in entries),
        _comparison_notes(comparison, reference),
        tuple(_comparison_keys(entry) for entry in entries),
    )


def _comparison_keys(entry: Mapping[str, Any]) -> tuple[SortKey, ...]:
    messages, against = entry["messages"], entry.get("difference") or {}
    up, down = messages["up"]["scalars"], messages["down"]["scalars"]
    return (
        entry["method"],
        entry["accuracy"]["mean"],
        against.get("mean"),
        *([entry["gain"]] if "gain" in entry else []),
        up,
        down,
        entry.get("seconds_per_round"),
    )


def ranked(methods: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Methods by accuracy, best first, those without a value last."""
    return sorted(methods, key=lambda entry: -_or(entry["accuracy"]["mean"], -1.0))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _comparison_row(entry: Mapping[str, Any], baseline: str) -> tuple[str, ...]:
    accuracy, messages, against = entry["accuracy"], entry["messages"], entry.get("difference") or {}
    mean, spread = accuracy["mean"], accuracy.get("std_over_seeds")
    shown = NOTHING if mean is None else f"{100 * mean:.2f}"
    return (
        METHOD_NAMES.get(entry["method"], entry["method"]),
        shown if spread is None else f"{shown} ± {100 * spread:.2f}",
        NOTHING if entry["method"] == baseline else difference(against),
        *([_gain(entry, baseline)] if "gain" in entry else []),
        count(messages["up"]["scalars"]),
        count(messages["down"]["scalars"]),
        duration(entry.get("seconds_per_round")),
    )


def _gain(entry: Mapping[str, Any], baseline: str) -> str:
    gain = entry["gain"]
    return NOTHING if gain is None or entry["method"] == baseline else points(gain / 100)


def clients_sheet(comparison: Mapping[str, Any]) -> Sheet | None:
    """A row per client, with what it is measured by, and a column per method; None where all have one task."""
    metrics = comparison.get("metrics")
    if not metrics:
        return None
    entries = ranked(comparison["methods"])
    heads = [Column(METHOD_NAMES.get(entry["method"], entry["method"])) for entry in entries]
    values = [[entry["per_client"].get(client) for entry in entries] for client in metrics]
    data = comparison.get("data_sets")
    names = [
        (client, metric_name(metric), *([data.get(client, NOTHING)] if data else []))
        for client, metric in metrics.items()
    ]
    absent = "–: undefined for this client, or not evaluated; left out of the means and of Δ %."
    return Sheet(
        "Client by client, in percent",
        (
            Column("client", "left"),
            Column("measured by", "left"),
            *([Column("data", "left")] if data else []),
            *heads,
        ),
        tuple((*name, *map(_hundredths, row)) for name, row in zip(names, values, strict=True)),
        (absent,) if any(None in row for row in values) else (),
        tuple((*name, *row) for name, row in zip(names, values, strict=True)),
    )


def further_sheet(comparison: Mapping[str, Any]) -> Sheet | None:
    """A row per further measure and a column per method; None where no task has any."""
    entries = ranked(comparison["methods"])
    found = [entry.get("further") or {} for entry in entries]
    names = list(dict.fromkeys(name for own in found for name in own))
    if not names:
        return None
    heads = [Column(METHOD_NAMES.get(entry["method"], entry["method"])) for entry in entries]
    values = [[own.get(name) or _ABSENT for own in found] for name in names]
    view = comparison.get("view", "last")
    spread = ", ± the sample standard deviation over seeds" if len(comparison.get("seeds") or ()) > 1 else ""
    return Sheet(
        "Further measures, in percent",
        (Column("measure", "left"), *heads),
        tuple(
            (metric_name(name), *(_with_spread(value, _hundredths) for value in row))
            for name, row in zip(names, values, strict=True)
        ),
        (f"Mean over the clients that have the measure, {VIEW_NAMES.get(view, view)}{spread}.",),
        tuple(
            (metric_name(name), *(value["mean"] for value in row))
            for name, row in zip(names, values, strict=True)
        ),
    )


_ABSENT: Mapping[str, float | None] = {"mean": None, "std_over_seeds": None}


def run_further_sheet(summary: Mapping[str, Any]) -> Sheet | None:
    """The further measures of one run, a row each; None where no task has any."""
    further = (summary.get("accuracy") or {}).get("further")
    if not further:
        return None
    return Sheet(
        "Further measures",
        (Column("measure", "left"), Column("clients"), Column("mean")),
        tuple(
            (metric_name(name), count(value["clients"]), percent(value["mean"]))
            for name, value in further.items()
        ),
    )


def targets_sheet(comparison: Mapping[str, Any]) -> Sheet | None:
    """A row per target and method, with the round that reached it and the cost; None without targets."""
    wanted = comparison.get("targets")
    if not wanted:
        return None
    names = ("round", "scalars up", "scalars down", "bytes up", "bytes down")
    entries = [
        (entry["method"], entry["targets"][place])
        for place in range(len(wanted))
        for entry in ranked(comparison["methods"])
    ]
    several = len(comparison.get("seeds") or ()) > 1
    notes = (
        f"Round: the first evaluated one whose mean {measured(comparison.get('metrics'))} reached the target. "
        "Scalars and bytes: sent for training until then, all clients and rounds together.",
        *(["± the sample standard deviation over the seeds that reached it."] if several else []),
    )
    return Sheet(
        "What a target costs",
        (Column("target %"), Column("method", "left"), *map(Column, names)),
        tuple(_target_row(method, cost) for method, cost in entries),
        notes,
        tuple(
            (cost["target"], method, *(value["mean"] for value in _spreads(cost))) for method, cost in entries
        ),
    )


def _target_row(method: str, cost: Mapping[str, Any]) -> tuple[str, ...]:
    round_, *amounts = _spreads(cost)
    reached, seeds = cost["reached"], len(cost["runs"])
    some = f" ({reached} of {seeds} seeds)" if 0 < reached < seeds else ""
    return (
        f"{100 * cost['target']:g}",
        METHOD_NAMES.get(method, method),
        f"{_with_spread(round_, count)}{some}" if reached else "not reached",
        *(_with_spread(value, count) for value in amounts[:2]),
        *(_with_spread(value, size) for value in amounts[2:]),
    )


def _spreads(cost: Mapping[str, Any]) -> list[Mapping[str, float | None]]:
    units, directions = ("scalars", "bytes"), ("up", "down")
    return [cost["round"], *(cost[direction][unit] for unit in units for direction in directions)]


def _with_spread(value: Mapping[str, float | None], show: Callable[[float | None], str]) -> str:
    spread = value["std_over_seeds"]
    return show(value["mean"]) if spread is None else f"{show(value['mean'])} ± {show(spread)}"


def rounds_sheet(comparison: Mapping[str, Any]) -> Sheet | None:
    """A row per method, moment and mode, a column per round that was asked for; None where none was."""
    wanted = comparison.get("rounds")
    if not wanted:
        return None
    entries = [(entry["method"], row) for entry in ranked(comparison["methods"]) for row in entry["rounds"]]
    several = len(comparison.get("seeds") or ()) > 1
    notes = (
        f"Mean {measured(comparison.get('metrics'))} of the clients measured, in percent.",
        *(["± the sample standard deviation over seeds."] if several else []),
    )
    names = (f"round {number}" for number in wanted)
    return Sheet(
        "Round by round",
        (Column("method", "left"), Column("measured", "left"), Column("mode", "left"), *map(Column, names)),
        tuple(
            (
                METHOD_NAMES.get(method, method),
                MOMENT_NAMES.get(row["when"], row["when"]),
                row["mode"],
                *map(_score_cell, row["scores"]),
            )
            for method, row in entries
        ),
        notes,
        tuple(
            (method, row["when"], row["mode"], *(score["mean"] for score in row["scores"]))
            for method, row in entries
        ),
    )


def _score_cell(score: Mapping[str, Any]) -> str:
    known, seeds = sum(value is not None for value in score["runs"]), len(score["runs"])
    some = f" ({known} of {seeds} seeds)" if 0 < known < seeds else ""
    return _with_spread(score, _hundredths) + some


def gains_sheet(comparison: Mapping[str, Any]) -> Sheet | None:
    """How many clients gain and lose against the reference; None where clients were not asked for."""
    entries = [entry for entry in ranked(comparison["methods"]) if "by_client" in entry]
    if not entries:
        return None
    baseline = str(comparison["baseline"])
    reference = METHOD_NAMES.get(baseline, baseline)
    several = len(comparison.get("seeds") or ()) > 1
    names = ("clients", "better", "equal", "worse", "lowest", "median", "highest")
    return Sheet(
        f"Clients against {reference}",
        (Column("method", "left"), *map(Column, names)),
        tuple(_gains_row(entry["method"], entry["by_client"]) for entry in entries),
        (
            f"Better: clients whose {measured(comparison.get('metrics'))} is higher than under {reference}, "
            f"{VIEW_NAMES[comparison.get('view', 'last')]}. Lowest to highest: differences in points."
            + (" A client counts once per seed." if several else ""),
        ),
    )


def _gains_row(method: str, gains: Mapping[str, Any]) -> tuple[str, ...]:
    values = sorted(value for clients in gains["differences"].values() for value in clients.values())
    counts = [gains[name] for name in ("better", "equal", "worse")]
    ends = (values[0], median(values), values[-1]) if values else (None, None, None)
    shares = (f"{number:,} ({100 * number / max(len(values), 1):.0f} %)" for number in counts)
    return (METHOD_NAMES.get(method, method), count(len(values)), *shares, *map(points, ends))


def differences_sheet(comparison: Mapping[str, Any]) -> Sheet | None:
    """A row per client and seed with its difference under every method; None where clients were not asked for."""
    entries = [entry for entry in ranked(comparison["methods"]) if "by_client" in entry]
    found = [entry["by_client"]["differences"] for entry in entries]
    pairs = dict.fromkeys((seed, client) for seeds in found for seed in seeds for client in seeds[seed])
    if not pairs:
        return None
    values = [[seeds.get(seed, {}).get(client) for seeds in found] for seed, client in pairs]
    heads = [Column(METHOD_NAMES.get(entry["method"], entry["method"])) for entry in entries]
    return Sheet(
        "All clients, in points",
        (Column("seed", "left"), Column("client", "left"), *heads),
        tuple((*pair, *map(points, row)) for pair, row in zip(pairs, values, strict=True)),
        keys=tuple((*pair, *row) for pair, row in zip(pairs, values, strict=True)),
    )


def _hundredths(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.2f}"


def difference(against: Mapping[str, Any]) -> str:
    """A difference and its interval in percentage points: +0.24 [−0.31, +0.85] tie."""
    if against.get("low") is None:
        return points(against.get("mean"))
    interval = f"[{points(against['low'])}, {points(against['high'])}]"
    return f"{points(against['mean'])} {interval}{' tie' if against['tie'] else ''}"


def data_name(config: Mapping[str, Any]) -> str | None:
    """What an experiment runs on: its data set, or those of its federation, each once."""
    groups = config.get("federation") or [config]
    found = [group.get("data") for group in groups]
    names = [data.get("name") if isinstance(data, Mapping) else data for data in found]
    return ", ".join(dict.fromkeys(str(name) for name in names if name)) or None


def _comparison_title(comparison: Mapping[str, Any]) -> str:
    name, partition = data_name(comparison), comparison.get("partition")
    kind = partition.get("kind") if isinstance(partition, Mapping) else partition
    count_of = len(comparison["methods"])
    words = [
        f"{count_of} method{'s' * (count_of != 1)}",
        f"on {name}" if name else "",
        f"({kind})" if kind else "",
    ]
    return " ".join(word for word in words if word)


def _comparison_notes(comparison: Mapping[str, Any], reference: str) -> tuple[str, ...]:
    seeds, view = comparison.get("seeds") or [], comparison.get("view", "last")
    several, metrics = len(seeds) > 1, comparison.get("metrics")
    over = f"± the sample standard deviation over {len(seeds)} seeds" if several else "one seed"
    resampled = "seeds, then clients within a seed" if several else "clients of the one seed"
    level, draws = f"{100 * comparison.get('level', 0.95):g} %", count(comparison.get("draws"))
    notes = [
        f"{capital(measured(metrics))}: mean over clients, {VIEW_NAMES.get(view, view)}, {over}.",
        f"Against {reference}: paired difference in points with its {level} bootstrap interval, resampling "
        f"{resampled} ({draws} draws); a tie is an interval that holds 0.",
        "Up and down: scalars per client and round, for training. Time: mean per round.",
    ]
    if metrics:
        notes.insert(
            2,
            f"Δ %: the mean over clients of 100·(value − {reference}'s)/{reference}'s, each by its own measure; "
            f"clients for which {reference}'s is 0 are left out; "
            "this definition is inferred, not published.",
        )
    moments = {entry.get("when") for entry in comparison["methods"]} - {None}
    if len(moments) > 1:
        each = ", ".join(f"{entry['method']} {moment(entry.get('when'))}" for entry in comparison["methods"])
        notes.append(f"The methods were not evaluated at the same moment: {each}.")
    return tuple(notes)


def run_table(summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> Table:
    """`run_sheet` for the terminal."""
    return rich_table(run_sheet(summary, clients))


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """`comparison_sheet` for the terminal."""
    return rich_table(comparison_sheet(comparison))


def comparison_markdown(comparison: Mapping[str, Any]) -> str:
    """`comparison_sheet` for a README or a page of documentation."""
    return markdown(comparison_sheet(comparison))
