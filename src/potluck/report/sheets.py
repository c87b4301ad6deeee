"""The tables of runs and comparisons.

Those of a comparison take the content of `comparison.json`, as `compare_runs` gives it; they are None where the
comparison has nothing of what they show.
"""

from __future__ import annotations

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
    duration,
    hundredths,
    measured,
    method_label,
    metric_name,
    moment,
    percent,
    points,
    size,
    with_interval,
    with_spread,
)
from potluck.report.log import natural
from potluck.report.render import Column, Sheet, itself, words

Comparison = Mapping[str, Any]
_ABSENT: Mapping[str, float | None] = {"mean": None, "std_over_seeds": None}

# --- a run ----------------------------------------------------------------------------------------------


def run_sheet(summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> Sheet:
    """One run, client by client: `clients` have an id and, where known, model, train, test, accuracy."""
    metrics = (summary.get("accuracy") or {}).get("metrics") or {}
    by_metric = words("measured by", lambda client: metric_name(metrics.get(client["id"], NOTHING)))
    columns = (
        words("client", itemgetter("id")),
        words("model", lambda client: client.get("model") or None),
        Column("train samples", lambda client: client.get("train"), count),
        Column("test samples", lambda client: client.get("test"), count),
        *([by_metric] if len({*metrics.values()}) > 1 else []),
        Column(measured(metrics), lambda client: client.get("accuracy"), percent),
    )
    title = f"{summary.get('method', 'run')}, {count(summary.get('rounds'))} rounds"
    return Sheet(title, columns, clients, headline(summary)).without_empty_columns()


def headline(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The few lines that say how a run went."""
    accuracy, messages = summary.get("accuracy") or {}, summary.get("messages") or {}
    up, down = messages.get("up") or {}, messages.get("down") or {}
    coverage = accuracy.get("coverage") or len(accuracy.get("per_client") or {})
    lines = [
        f"{measured(accuracy.get('metrics'))} {percent(accuracy.get('last'))} ± "
        f"{percent(accuracy.get('std_over_clients'))} over {count(coverage)} clients in the last round "
        f"({moment(accuracy.get('when'))}), worst tenth {percent(accuracy.get('worst_tenth'))}"
    ]
    if held_out := accuracy.get("held_out"):
        lines.append(f"held-out clients: {percent(held_out['last'])} over {count(held_out['clients'])}")
    if further := accuracy.get("further"):
        told = (f"{metric_name(name)} {percent(value['mean'])}" for name, value in further.items())
        lines.append(f"further measures: {', '.join(told)}")
    lines.append(
        f"per client and round: {count(up.get('scalars'))} scalars up ({size(up.get('bytes'))}), "
        f"{count(down.get('scalars'))} down ({size(down.get('bytes'))})"
    )
    if published := messages.get("as_published"):
        sent = f"{count(published.get('up'))} scalars up, {count(published.get('down'))} down"
        lines.append(f"as the paper counts: {sent}")
    lines.append(f"time per round: {duration(summary.get('seconds_per_round'))}")
    return tuple(lines)


def run_further_sheet(summary: Mapping[str, Any]) -> Sheet | None:
    """The further measures of one run, a row each; None where no task has any."""
    further = (summary.get("accuracy") or {}).get("further")
    if not further:
        return None
    columns = (
        words("measure", itemgetter(0), metric_name),
        Column("clients", lambda entry: entry[1]["clients"], count),
        Column("mean", lambda entry: entry[1]["mean"], percent),
    )
    return Sheet("Further measures", columns, list(further.items()), sortable=False)


def client_rows(
    split: Mapping[str, Any], accuracy: Mapping[str, Any], models: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The clients of `run_sheet`, from `split.json`, a summary's accuracy, and the clients' models."""
    parts = {str(part["id"]): part for part in split.get("clients") or ()}
    values = accuracy.get("per_client") or {}
    held_out = {str(client) for client in split.get("held_out") or ()}
    return [
        {
            "id": client,
            "model": models.get(client),
            "train": len(parts[client]["train"]) if "train" in parts.get(client, {}) else None,
            "test": len(parts[client]["test"]) if "test" in parts.get(client, {}) else None,
            "accuracy": values.get(client),
        }
        for client in sorted((parts.keys() | values.keys()) - held_out, key=natural)
    ]


# --- methods side by side -------------------------------------------------------------------------------


def comparison_sheet(comparison: Comparison) -> Sheet:
    """The methods, best first, each against the baseline."""
    baseline = _baseline(comparison)

    def gain(entry: Mapping[str, Any]) -> str:
        return (
            NOTHING if entry["method"] == baseline or entry["gain"] is None else points(entry["gain"] / 100)
        )

    columns = (
        words("method", itemgetter("method"), method_label),
        _over_seeds(f"{measured(comparison.get('metrics'))} %", itemgetter("accuracy"), hundredths),
        Column(
            f"against {method_label(baseline)}",
            lambda entry: entry.get("difference") or {},
            with_interval,
            key=lambda difference: difference.get("mean"),
            align="left",
        ),
        *([Column("Δ %", itself, gain, key=itemgetter("gain"))] if comparison.get("metrics") else []),
        Column("up", lambda entry: entry["messages"]["up"]["scalars"], count),
        Column("down", lambda entry: entry["messages"]["down"]["scalars"], count),
        Column("time", lambda entry: entry.get("seconds_per_round"), duration),
    )
    return Sheet(_title(comparison), columns, ranked(comparison["methods"]), _notes(comparison))


def ranked(methods: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Methods by accuracy, best first, those without a value last."""

    def rank(entry: Mapping[str, Any]) -> float:
        mean = entry["accuracy"]["mean"]
        return 1.0 if mean is None else -mean

    return sorted(methods, key=rank)


def data_name(config: Mapping[str, Any]) -> str | None:
    """What an experiment runs on: its data set, or those of its federation, each once."""
    groups = config.get("federation") or [config]
    found = [group.get("data") for group in groups]
    names = [data.get("name") if isinstance(data, Mapping) else data for data in found]
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
        f"{methods} method{'s' * (methods != 1)}",
        f"on {name}" if name else "",
        f"({kind})" if kind else "",
    ]
    return " ".join(part for part in parts if part)


def _notes(comparison: Comparison) -> tuple[str, ...]:
    """How to read the comparison: what each column is, and what must not be read into it."""
    seeds, view, metrics = (
        comparison.get("seeds") or [],
        comparison.get("view", "last"),
        comparison.get("metrics"),
    )
    reference, several = method_label(_baseline(comparison)), _several_seeds(comparison)
    over = f"± the sample standard deviation over {len(seeds)} seeds" if several else "one seed"
    resampled = "seeds, then clients within a seed" if several else "clients of the one seed"
    level, draws = f"{100 * comparison.get('level', 0.95):g} %", count(comparison.get("draws"))
    notes = [
        f"{capital(measured(metrics))}: mean over clients, {VIEW_NAMES.get(view, view)}, {over}.",
        f"Against {reference}: paired difference in points with its {level} bootstrap interval, resampling "
        f"{resampled} ({draws} draws); a tie is an interval that holds 0.",
    ]
    if metrics:
        notes.append(
            f"Δ %: the mean over clients of 100·(value − {reference}'s)/{reference}'s, each by its own measure; "
            f"clients for which {reference}'s is 0 are left out; "
            "this definition is inferred, not published."
        )
    notes.append("Up and down: scalars per client and round, for training. Time: mean per round.")
    if len({entry.get("when") for entry in comparison["methods"]} - {None}) > 1:
        each = ", ".join(f"{entry['method']} {moment(entry.get('when'))}" for entry in comparison["methods"])
        notes.append(f"The methods were not evaluated at the same moment: {each}.")
    return tuple(notes)


# --- what else a comparison shows -----------------------------------------------------------------------


def clients_sheet(comparison: Comparison) -> Sheet | None:
    """A row per client, with what it is measured by, and a column per method; None where all have one task."""
    metrics, data = comparison.get("metrics"), comparison.get("data_sets")
    if not metrics:
        return None

    def of_method(entry: Mapping[str, Any]) -> Column:
        return Column(method_label(entry["method"]), entry["per_client"].get, hundredths)

    methods = ranked(comparison["methods"])
    columns = (
        words("client", itself),
        words("measured by", lambda client: metric_name(metrics[client])),
        *([words("data", lambda client: data.get(client, NOTHING))] if data else []),
        *map(of_method, methods),
    )
    absent = any(entry["per_client"].get(client) is None for client in metrics for entry in methods)
    note = "–: undefined for this client, or not evaluated; left out of the means and of Δ %."
    return Sheet("Client by client, in percent", columns, list(metrics), (note,) if absent else ())


def further_sheet(comparison: Comparison) -> Sheet | None:
    """A row per further measure and a column per method; None where no task has any."""
    methods = ranked(comparison["methods"])
    names = list(dict.fromkeys(name for entry in methods for name in entry.get("further") or ()))
    if not names:
        return None

    def of_method(entry: Mapping[str, Any]) -> Column:
        further = entry.get("further") or {}
        return _over_seeds(
            method_label(entry["method"]), lambda name: further.get(name) or _ABSENT, hundredths
        )

    view = comparison.get("view", "last")
    spread = ", ± the sample standard deviation over seeds" if _several_seeds(comparison) else ""
    note = f"Mean over the clients that have the measure, {VIEW_NAMES.get(view, view)}{spread}."
    columns = (words("measure", metric_name), *map(of_method, methods))
    return Sheet("Further measures, in percent", columns, names, (note,))


def targets_sheet(comparison: Comparison) -> Sheet | None:
    """A row per target and method, with the round that reached it and the cost; None without targets."""
    wanted = comparison.get("targets")
    if not wanted:
        return None

    def sent(unit: str, direction: str, show: Callable[[float | None], str]) -> Column:
        return _over_seeds(f"{unit} {direction}", lambda entry: entry[1][direction][unit], show)

    columns = (
        Column("target %", lambda entry: entry[1]["target"], lambda target: f"{100 * target:g}"),
        words("method", itemgetter(0), method_label),
        Column("round", itemgetter(1), _reached, key=lambda cost: cost["round"]["mean"]),
        *(sent("scalars", direction, count) for direction in ("up", "down")),
        *(sent("bytes", direction, size) for direction in ("up", "down")),
    )
    methods = ranked(comparison["methods"])
    entries = [
        (entry["method"], entry["targets"][place]) for place in range(len(wanted)) for entry in methods
    ]
    notes = (
        f"Round: the first evaluated one whose mean {measured(comparison.get('metrics'))} reached the target. "
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

    def at_round(place: int, number: int) -> Column:
        return Column(
            f"round {number}", lambda entry: entry[1]["scores"][place], _score, key=itemgetter("mean")
        )

    columns = (
        words("method", itemgetter(0), method_label),
        words("measured", lambda entry: entry[1]["when"], moment),
        words("mode", lambda entry: entry[1]["mode"]),
        *(at_round(place, number) for place, number in enumerate(wanted)),
    )
    entries = [(entry["method"], row) for entry in ranked(comparison["methods"]) for row in entry["rounds"]]
    notes = (
        f"Mean {measured(comparison.get('metrics'))} of the clients measured, in percent.",
        *(["± the sample standard deviation over seeds."] if _several_seeds(comparison) else []),
    )
    return Sheet("Round by round", columns, entries, notes)


def _score(score: Mapping[str, Any]) -> str:
    """A mean at a chosen round, and how many seeds have it if not all."""
    known = sum(value is not None for value in score["runs"])
    return with_spread(score, hundredths) + _some(known, len(score["runs"]))


def gains_sheet(comparison: Comparison) -> Sheet | None:
    """How many clients gain and lose against the baseline; None where clients were not compared."""
    entries = [
        (entry["method"], entry["by_client"], _differences(entry["by_client"]))
        for entry in ranked(comparison["methods"])
        if "by_client" in entry
    ]
    if not entries:
        return None
    columns = (
        words("method", itemgetter(0), method_label),
        Column("clients", lambda entry: len(entry[2]), count),
        *(_share(sign) for sign in ("better", "equal", "worse")),
        Column("lowest", lambda entry: min(entry[2], default=None), points),
        Column("median", lambda entry: median(entry[2]) if entry[2] else None, points),
        Column("highest", lambda entry: max(entry[2], default=None), points),
    )
    reference = method_label(_baseline(comparison))
    note = (
        f"Better: clients whose {measured(comparison.get('metrics'))} is higher than under {reference}, "
        f"{VIEW_NAMES[comparison.get('view', 'last')]}. Lowest to highest: differences in points."
        + (" A client counts once per seed." if _several_seeds(comparison) else "")
    )
    return Sheet(f"Clients against {reference}", columns, entries, (note,), sortable=False)


def _differences(by_client: Mapping[str, Any]) -> list[float]:
    return [value for clients in by_client["differences"].values() for value in clients.values()]


def _share(sign: str) -> Column:
    """How many clients have a difference of this sign, and their share."""

    def show(entry: tuple[str, Mapping[str, Any], Sequence[float]]) -> str:
        _, by_client, differences = entry
        return f"{by_client[sign]:,} ({100 * by_client[sign] / max(len(differences), 1):.0f} %)"

    return Column(sign, itself, show)


def differences_sheet(comparison: Comparison) -> Sheet | None:
    """A row per client and seed with its difference under every method; None where clients were not compared."""
    methods = [entry for entry in ranked(comparison["methods"]) if "by_client" in entry]
    found = [entry["by_client"]["differences"] for entry in methods]
    pairs = dict.fromkeys((seed, client) for seeds in found for seed in seeds for client in seeds[seed])
    if not pairs:
        return None

    def of_method(entry: Mapping[str, Any]) -> Column:
        seeds = entry["by_client"]["differences"]
        return Column(method_label(entry["method"]), lambda pair: seeds.get(pair[0], {}).get(pair[1]), points)

    columns = (words("seed", itemgetter(0)), words("client", itemgetter(1)), *map(of_method, methods))
    return Sheet("All clients, in points", columns, list(pairs))
