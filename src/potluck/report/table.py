"""Tables: one description of what to show, rendered for the terminal, for plain text and for Markdown.

>>> count(465658), size(1_800_000), percent(0.9123), duration(0.42)
('465,658', '1.8 MB', '91.23 %', '0.42 s')
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

NOTHING = "–"
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
METHOD_NAMES = {"local": "Local"}
METRIC_NAMES = {
    "mean_ap": "mean AP",
    "f1": "F1",
    "mean_iou": "mean IoU",
    "pixel_accuracy": "pixel accuracy",
    "mean_recall": "mean recall",
    **{f"i2t_r{k}": f"R@{k} image to text" for k in (1, 5, 10)},
    **{f"t2i_r{k}": f"R@{k} text to image" for k in (1, 5, 10)},
}

# --- numbers for people ---------------------------------------------------------------------------------


def count(value: float | None) -> str:
    """A number of things with thousands separators: 465,658."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:,.1f}"


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
    """A fraction in percent with two digits."""
    return NOTHING if value is None else f"{100 * value:.2f} %"


def points(value: float | None) -> str:
    """A signed difference of two fractions, in percentage points, with a real minus sign."""
    if value is None:
        return NOTHING
    text = f"{100 * value:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 8 ms, 0.42 s, 2 min 05 s, 3 h 07 min."""
    if seconds is None:
        return NOTHING
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def measured(metrics: Mapping[str, str] | None) -> str:
    """What a mean over clients is a mean of: accuracy, another measure, or a score where clients have several."""
    names = {*(metrics or {}).values()} or {"accuracy"}
    return metric_name(names.pop()) if len(names) == 1 else "score"


def metric_name(name: str) -> str:
    """A measure in words."""
    return METRIC_NAMES.get(name, name)


def moment(when: str | None) -> str:
    """A moment of evaluation in words."""
    return NOTHING if when is None else MOMENT_NAMES.get(when, when)


# --- sheets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """The head of a column; numbers go right."""

    name: str
    align: Literal["left", "right"] = "right"


SortKey = str | float | None


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn: text in cells, notes below it, and keys to sort by where it can be."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    keys: tuple[tuple[SortKey, ...], ...] = ()

    def first(self, rows: int, where: str) -> Sheet:
        """The same sheet with so many rows at most, and a note that says where they all are."""
        if len(self.rows) <= rows:
            return self
        note = f"The first {rows} of {len(self.rows)} rows; {where} has them all."
        return replace(self, rows=self.rows[:rows], keys=self.keys[:rows], notes=(note, *self.notes))

    def without_empty_columns(self) -> Sheet:
        """The same sheet without the columns that have no value at all; without rows nothing is left out."""
        kept = [i for i in range(len(self.columns)) if any(row[i] != NOTHING for row in self.rows)]
        if not self.rows:
            return self
        return Sheet(
            self.title,
            tuple(self.columns[i] for i in kept),
            tuple(tuple(row[i] for i in kept) for row in self.rows),
            self.notes,
            tuple(tuple(row[i] for i in kept) for row in self.keys),
        )


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


def capital(word: str) -> str:
    """With a capital letter in front; the others stay as they are."""
    return word[0].upper() + word[1:]


# --- renderings -----------------------------------------------------------------------------------------


def rich_table(sheet: Sheet) -> Table:
    """A sheet for the terminal. Cells are text, never markup: a client may be called `[red]`."""
    table = Table(
        title=Text(sheet.title, "bold"),
        title_justify="left",
        caption=Text("\n".join(sheet.notes)) if sheet.notes else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in sheet.columns:
        table.add_column(Text(column.name), justify=column.align, overflow="fold")
    for row in sheet.rows:
        table.add_row(*map(Text, row))
    return table


def plain(sheet: Sheet) -> str:
    """A sheet as aligned text, for logs and files."""
    lines = [tuple(column.name for column in sheet.columns), *sheet.rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    drawn = [
        "  ".join(
            cell.rjust(width) if column.align == "right" else cell.ljust(width)
            for cell, width, column in zip(line, widths, sheet.columns, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([sheet.title, "", *drawn, *([""] if sheet.notes else []), *sheet.notes]) + "\n"


def markdown(sheet: Sheet) -> str:
    """A sheet as a Markdown table with its notes below."""
    rule = ["---:" if column.align == "right" else ":---" for column in sheet.columns]
    lines = [
        [_cell(column.name) for column in sheet.columns],
        rule,
        *([_cell(c) for c in row] for row in sheet.rows),
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return table + "\n" + "".join(f"\n{_cell(note)}\n" for note in sheet.notes)


def _cell(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    for special in ("\\", "|", "`", "*", "_", "<", ">", "]("):
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split())


def as_json(value: Mapping[str, Any]) -> str:
    """Plain data for machines."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)


def run_table(summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> Table:
    """`run_sheet` for the terminal."""
    return rich_table(run_sheet(summary, clients))


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """`comparison_sheet` for the terminal."""
    return rich_table(comparison_sheet(comparison))


def comparison_markdown(comparison: Mapping[str, Any]) -> str:
    """`comparison_sheet` for a README or a page of documentation."""
    return markdown(comparison_sheet(comparison))
