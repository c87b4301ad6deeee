"""`report.html`: a run as one self-contained page.

The page loads nothing (its own policy forbids it), follows the reader's light or dark theme, and escapes
every name it shows. It holds no date: the same run gives the same page. This module gathers what a page shows;
the HTML is in `templates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from potluck.errors import RunError
from potluck.files import write_anew
from potluck.report.again import again, comparison_of
from potluck.report.charts import ClientCurves, client_bars, client_curves, over_rounds
from potluck.report.format import (
    capital,
    count,
    counted,
    duration,
    full_sentence,
    moment,
    percent,
    size,
)
from potluck.report.html import in_words, render
from potluck.report.log import (
    TIMING,
    Curve,
    Key,
    Metrics,
    kept_round,
    method_name,
    read_config,
    read_contract,
    read_mapping,
    read_metrics,
    read_table,
)
from potluck.report.measures import Measure
from potluck.report.predictions_part import predictions_part
from potluck.report.reading import reading
from potluck.report.render import Column, Sheet, words
from potluck.report.scores import messages_block, seconds_per_round, summarise
from potluck.report.sheets import (
    about_kept,
    client_rows,
    data_name,
    how,
    measure_in,
    not_measured,
    number_of_rows,
    run_further_sheet,
    run_sheet,
    some_rows,
)
from potluck.report.split_chart import split_chart
from potluck.report.split_file import by_group, read_split, total_of

MOST_ROWS = 1000  # clients in the table of a page
_ELSEWHERE = ("models", "settings", "contract")  # what other parts of the page show of environment.json
_Part = dict[str, Any] | None  # what the template of a section needs; None leaves the section out

# --- a run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """The files of a run; absent ones are empty mappings."""

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    split: Mapping[str, Any]
    contract: Mapping[str, Any]
    summary: Mapping[str, Any]
    tuning: Mapping[str, Any]
    metrics: Metrics
    key: Key | None

    @property
    def measure(self) -> Measure:
        """What the clients are measured by."""
        stored = self.environment.get("metrics")
        return measure_in((self.summary.get("accuracy") or {}) | {"metric_facts": stored})

    @property
    def title(self) -> str:
        name = data_name(self.config)
        method = self.contract.get("method") or method_name(self.config)
        return f"{method} on {name}" if name else str(method)


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run, finished or not, and give its path.

    Only `config.yaml` has to be there; a section whose files are absent is left out.
    """
    run = _load(Path(folder))
    with reading(run.folder):
        page = render("run.html.j2", _context(run))
    path = run.folder / "report.html"
    write_anew(path, page)
    return path


def _context(run: _Run) -> dict[str, Any]:
    return {
        "title": run.title,
        "subtitle": _subtitle(run),
        "measure": capital(run.measure.name),
        "cards": _cards(run),
        "stopped": run.summary.get("stopped"),
        "comparison": _comparison(run),
        "advice": [*_state(run), *map(full_sentence, run.summary.get("advice") or []), *_remarks(run)],
        "failures": _failures(run),
        "curves": _curves(run),
        "protocols": _protocols(run),
        "tuning": _tuning(run.tuning),
        "clients": _clients(run),
        "predictions": predictions_part(run.folder, run.key, run.split) if run.key else None,
        "further": run_further_sheet(run.summary),
        "split": split_part(run.split),
        "contract": _contract(run.contract),
        "again": again(run.folder, run.config, run.environment),
        "settings": yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True),
        "environment": _environment(run.environment),
    }


def _environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What the run started with, without what is empty or stands elsewhere on the page."""
    shown = {name: value for name, value in environment.items() if name not in _ELSEWHERE}
    return {name: value for name, value in shown.items() if value not in (None, "", [], {})}


def _load(folder: Path) -> _Run:
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}: give the folder of a run")
    config = read_config(folder)
    metrics = read_metrics(folder)
    stored = read_mapping(folder / "summary.json") or {}
    chosen = stored.get("accuracy") or {}
    logged = summarise(metrics, chosen.get("when"), chosen.get("mode")) if metrics.series else chosen
    environment = read_mapping(folder / "environment.json") or {}
    return _Run(
        folder=folder,
        config=config,
        environment=environment,
        split=read_split(folder / "split.json", logged.get("per_client") or ()),
        contract=read_contract(folder, environment) or {},
        summary=(stored or _unfinished(folder, config)) | {"accuracy": logged},
        tuning=read_mapping(folder / "tuning.json") or {},
        metrics=metrics,
        key=metrics.headline(chosen.get("when"), chosen.get("mode")),
    )


def _unfinished(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run that has not written one yet, as far as its logs go."""
    ledger, training = folder / "ledger.jsonl", config.get("training")
    return {
        "method": method_name(config),
        "rounds": training.get("rounds") if isinstance(training, Mapping) else None,
        "seed": config.get("seed"),
        "messages": messages_block(ledger) if ledger.exists() else None,
        "seconds_per_round": seconds_per_round(folder / "timing.jsonl"),
    }


def _subtitle(run: _Run) -> str:
    partition = run.config.get("partition")
    kind = partition.get("kind") if isinstance(partition, Mapping) else partition
    clients = run.summary.get("clients") or total_of(run.split)
    seed = run.summary.get("seed")
    facts = [
        counted(clients, "client") if isinstance(clients, int) and clients else "",
        f"{kind} split" if kind else "",
        counted(run.summary["rounds"], "round") if run.summary.get("rounds") else "",
        f"seed {seed}" if isinstance(seed, int) else "",
    ]
    parts = [
        str(run.config.get("name") or run.folder.name),
        *(fact.replace(" ", "\N{NO-BREAK SPACE}") for fact in facts),
        str(run.contract.get("citation") or ""),
    ]
    return "\N{NO-BREAK SPACE}· ".join(part for part in parts if part)


def _cards(run: _Run) -> list[tuple[str, str, str]]:
    """The large numbers on top, each with a label and a detail."""
    accuracy, messages = run.summary.get("accuracy") or {}, run.summary.get("messages") or {}
    cards = []
    if accuracy.get("last") is not None:
        name, show = run.measure.name, run.measure.full
        label = f"{name if name.startswith('mean') else f'mean {name}'}, {how(accuracy)}"
        spread, tenth = show(accuracy.get("std_over_clients")), show(accuracy.get("worst_tenth"))
        over = (
            f"± {spread} over clients; worst tenth {tenth}"
            if run.summary.get("clients") != 1
            else "one client"
        )
        cards.append((label, show(accuracy["last"]), over))
    if held_out := accuracy.get("held_out"):
        never = f"{count(held_out['clients'])} that never trained"
        cards.append(("held-out clients", run.measure.full(held_out["last"]), never))
    for direction, way in (("up", "leaves a client"), ("down", "comes to a client")):
        if part := messages.get(direction):
            cards.append((f"{way}, per round", size(part["bytes"]), f"{count(part['scalars'])} scalars"))
    if (seconds := run.summary.get("seconds_per_round")) is not None:
        device = run.environment.get("device")
        cards.append(("a round takes", duration(seconds), f"median, on {device}" if device else "median"))
    return cards


def _failures(run: _Run) -> list[str]:
    """The clients that failed, as client → number of times, or whatever else the summary says of failures."""
    failures = run.summary.get("failures") or []
    if not isinstance(failures, Mapping):
        return [in_words(line) for line in (failures if isinstance(failures, list) else [failures])]
    reasons = run.summary.get("failure_reasons") or {}
    return [
        f"client {client}: {_times(value)}{_last_reason(client, reasons.get(client))}"
        for client, value in failures.items()
    ]


def _times(value: Any) -> str:
    return "once" if value == 1 else f"{in_words(value)} times"


def _last_reason(client: str, reason: Any) -> str:
    """Why a client failed the last time; it need not be named once more."""
    return f", the last time: {in_words(reason).removeprefix(f'client {client}: ')}" if reason else ""


def _remarks(run: _Run) -> list[str]:
    """What happened to a federation that its numbers must be read with."""
    told = not_measured(run.summary.get("accuracy") or {})
    excluded = ", ".join(run.summary.get("excluded") or ())
    went_back = [
        f"round {one['round']} was taken back and repeated without client {one['without']}, "
        f"{_why_without(one.get('times'))}, as no client could go on after it"
        for one in run.summary.get("went_back") or ()
    ]
    bad_starts = [
        f"round {one['round']} was repeated without client {one['without']}, with whose first weights no "
        "client could train"
        for one in run.summary.get("bad_starts") or ()
    ]
    homes = _homes(run.summary.get("homes") or ())
    found = [told, f"excluded from the run: {excluded}" if excluded else "", *went_back, *bad_starts, *homes]
    return [f"{capital(sentence)}." for sentence in found if sentence]


def _why_without(times: float | None) -> str:
    if times is None:
        return "which was left out since"
    return f"whose message was {times:.3g} times as large as the median of the others'"


def _homes(homes: Sequence[Mapping[str, Any]]) -> list[str]:
    """How busy the homes of a cluster were, machine by machine, and how many were lost."""
    nodes = {home["node"]: [one for one in homes if one["node"] == home["node"]] for home in homes}
    shares = [
        f"{node} with {counted(len(own), 'home')}, at work {', '.join(format(one['busy'], '.0%') for one in own)}"
        for node, own in nodes.items()
    ]
    lost = sum(bool(home["lost"]) for home in homes)
    told = f"; {counted(lost, 'home')} lost on the way, which changed no number" if lost else ""
    return [f"run on a Ray cluster: {'; '.join(shares)}{told}"] if homes else []


def _comparison(run: _Run) -> str:
    """The name of the comparison that a run belongs to; its page is in the folder above."""
    above = comparison_of(run.folder)
    return above.resolve().name if above else ""


def _state(run: _Run) -> list[str]:
    """What a reader has to know of a run that has not ended, or has no scores."""
    found = []
    if not (run.folder / "summary.json").exists():
        played = max(
            read_table(run.folder / "timing.jsonl", TIMING)["round"].drop_null().to_pylist(), default=0
        )
        wanted = run.summary.get("rounds")
        of = f" of {wanted:,}" if isinstance(wanted, int) else ""
        shows = f"this page shows the first {played:,}{of} rounds"
        if played == wanted:
            shows = f"all {played:,} rounds are done, but the summary is missing; resume the run to write it"
        found.append(f"The run is not finished: {shows}.")
    accuracy = run.summary.get("accuracy") or {}
    if accuracy.get("last") is None and not accuracy.get("held_out"):
        found.append("There are no scores: no client has been measured.")
    return found


def _curves(run: _Run) -> _Part:
    """Accuracy over rounds, with a band around the series that the run is judged by."""
    if run.key is None or run.key not in run.metrics.series:
        return None
    keys = [run.key, *(key for key in run.metrics.series if key != run.key)]
    curves = [run.metrics.series[key].curve(_name(key), band=key == run.key) for key in keys]
    if held_out := run.metrics.held_out.get(run.key):
        curves.append(held_out.curve("held-out clients"))
    evaluate = run.config.get("evaluate")
    common = isinstance(evaluate, Mapping) and evaluate.get("on") == "global"
    data = "the common test data" if common else "each client's own test data"
    band = f", {_name(run.key)}" if len(keys) > 1 else ""
    mean = f"Mean over clients of the {run.measure.name} on {data}."
    has_band = curves[0].rounds.size > 1 and len(run.metrics.series[run.key].names) > 1
    lead = f"{mean} The band is one standard deviation over clients{band}." if has_band else mean
    chart = over_rounds(curves, run.measure, f"{capital(run.measure.name)} over rounds")
    return {"chart": chart, "lead": lead} if chart else None


def _name(key: Key) -> str:
    """A moment and a mode in words: `after training, by model`."""
    return how({"when": key[0], "mode": key[1]})


def _protocols(run: _Run) -> _Part:
    """The log under every protocol: papers differ in the column they quote."""
    if run.key is None or run.key not in run.metrics.series:
        return None

    def score(name: str, field: str) -> Column:
        return Column(name, lambda block: block[field], run.measure.full)

    blocks = [summarise(run.metrics, *key) for key in run.metrics.series]
    uneven = len({block["coverage"] for block in blocks}) > 1
    columns = (
        words("evaluated", lambda block: block["when"], moment),
        words("mode", lambda block: block["mode"]),
        *([Column("clients", lambda block: block["coverage"], count)] if uneven else []),
        score("last", "last"),
        score("best by validation", "best_by_validation"),
        score("best by test", "best_by_test"),
        score("last, by samples", "weighted_last"),
        score("spread", "std_over_clients"),
        score("worst tenth", "worst_tenth"),
    )
    headline = list(run.metrics.series).index(run.key)
    return {"sheet": Sheet("", columns, blocks), "headline": headline}


def _tuning(tuning: Mapping[str, Any]) -> _Part:
    """How an option that was left open got its value: what each candidate reached, and what it cost."""
    if not tuning:
        return None
    from potluck.report.pictures.cost import accuracy_against_bytes

    option, chosen, curve = tuning["option"], tuning["chosen"], tuning["curve"]
    columns = (
        Column(option, lambda point: point["value"]),
        Column("validation accuracy", lambda point: point["validation"], percent),
        Column("per client and round", lambda point: point["bytes"], size),
        Column("scalars", lambda point: point["scalars"], count),
    )
    return {
        "option": option,
        "chosen": chosen,
        "rounds": tuning["rounds"],
        "tolerance": f"{100 * tuning['tolerance']:g}",
        "picture": accuracy_against_bytes(curve, option, chosen),
        "sheet": Sheet("", columns, curve),
        "marked": [point["value"] for point in curve].index(chosen),
    }


def _clients(run: _Run) -> _Part:
    accuracy = run.summary.get("accuracy") or {}
    every = client_rows(run.split, accuracy, _models(run), _further(run))
    if not every:
        return None
    values, total = accuracy.get("per_client") or {}, number_of_rows(run.split, every)
    rows = some_rows(every, MOST_ROWS)
    some = f": {len(values):,} of {total:,} clients." if len(values) < total else "."
    return {
        "lead": f"In the last evaluated round, {how(accuracy)}{some}" if values else "",
        "kept": about_kept(accuracy, kept_round(run.folder)),
        "title": f"All {len(rows)} clients" if len(rows) == total else f"{len(rows):,} of {total:,} clients",
        "left_out": _left_out(len(rows), total),
        "chart": client_bars(values, run.measure, f"{capital(run.measure.name)} per client"),
        "curves": _client_curves(run),
        "sheet": run_sheet(run.summary, rows),
        "bars": run.measure.name if values and run.measure.is_share else "",
    }


def _left_out(shown: int, total: int) -> str:
    """That the table has not everyone, where it has not."""
    if shown == total:
        return ""
    return (
        f"The table has {shown:,} of {total:,} clients: those that were measured, then the first of the others; "
        "all are in split.json."
    )


def _client_curves(run: _Run) -> ClientCurves | None:
    """The scores of every client over rounds, at the moment and in the mode that the run is judged by."""
    series = run.metrics.series.get(run.key) if run.key else None
    if series is None:
        return None
    rounds = np.repeat(series.rounds, np.diff(series.starts))
    known = np.flatnonzero(np.isfinite(series.accuracy))
    order = known[np.argsort(series.client[known], kind="stable")]
    ends = np.searchsorted(series.client[order], range(len(series.names) + 1))
    parts = [order[start:end] for start, end in pairwise(ends.tolist())]
    named = zip(series.names, parts, strict=True)
    curves = [Curve(name, rounds[part], series.accuracy[part]) for name, part in named]
    return client_curves(curves, series.curve("mean"), run.measure)


def _further(run: _Run) -> dict[str, dict[str, float]]:
    """The further measures of every client in the last evaluated round, by name."""
    series = run.metrics.series.get(run.key) if run.key else None
    row = series.row("last") if series else None
    if series is None or row is None:
        return {}
    places = range(int(series.starts[row]), int(series.starts[row + 1]))
    return {
        series.names[series.client[place]]: {
            name: float(values[place])
            for name, values in series.further.items()
            if np.isfinite(values[place])
        }
        for place in places
    }


def _models(run: _Run) -> dict[str, str]:
    """The name of each client's model, where the run's files say it client by client."""
    settings = run.config.get("models")
    pool = settings.get("pool") if isinstance(settings, Mapping) else None
    models = run.environment.get("models") or run.summary.get("models") or pool
    named = models.items() if isinstance(models, Mapping) else ()
    return {str(client): str(m.get("name") if isinstance(m, Mapping) else m) for client, m in named}


def split_part(split: Mapping[str, Any]) -> _Part:
    """A picture of who has which class, one per data set where groups have their own."""
    if not any(part.get("counts") for part in split.get("clients") or ()):
        return None
    charts = []
    for group, everyone, total in by_group(split):
        own = [part for part in everyone if part.get("counts")]
        chart = split_chart(
            [part["counts"] for part in own],
            [str(part["id"]) for part in own],
            [str(name) for name in group.get("class_names") or ()] or None,
            total if "total" in split else None,
        )
        charts.append((group["data"] if "groups" in split else None, chart))
    return {"hash": split.get("hash"), "charts": charts}


# --- the wire -------------------------------------------------------------------------------------------


def _contract(contract: Mapping[str, Any]) -> _Part:
    """What leaves a client, what comes to it, and what stays."""
    if not contract:
        return None
    client = contract.get("client")
    sizes = ""
    if isinstance(client, Mapping) and client.get("id") is not None:
        model = f" ({client['model']})" if client.get("model") else ""
        sizes = f" Sizes are those of client {client['id']}{model}."
    lists = {name: _as_list(contract.get(name)) for name in ("report", "card", "stays")}
    return {"sizes": sizes, "up": _crossing(contract, "up"), "down": _crossing(contract, "down"), **lists}


def _as_list(values: Any) -> Sequence[Any]:
    return values if isinstance(values, (list, tuple)) else [values] if values else []


def _crossing(contract: Mapping[str, Any], direction: str) -> dict[str, Any]:
    """The tensors of all steps in one direction, and their total where there are several."""
    steps, total = contract.get("steps") or (), contract.get(f"{direction}_scalars")
    tensors = [
        {
            "name": str(tensor.get("name")),
            "shape": in_words(tensor.get("shape")),
            "detail": _tensor_detail(tensor, step if len(steps) > 1 else {}, direction),
        }
        for step in steps
        for tensor in step.get(direction) or ()
    ]
    several = len(tensors) > 1 and isinstance(total, (int, float))
    return {"tensors": tensors, "total": count(total) if several else ""}


def _tensor_detail(tensor: Mapping[str, Any], step: Mapping[str, Any], direction: str) -> str:
    scalars, times = tensor.get("scalars"), step.get("times")
    parts = [
        in_words(tensor.get("meaning")),
        f"{count(scalars)} scalars" if isinstance(scalars, (int, float)) else in_words(scalars),
        "optional" if tensor.get("optional") else "",
        f"step {step['name']}" if step.get("name") else "",
        f"{count(times[direction])} times a round" if times else "",
    ]
    return " · ".join(part for part in parts if part)
