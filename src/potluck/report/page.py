"""`report.html`: a run, or several methods side by side, as one page that needs nothing else.

The page loads nothing (its own policy forbids it), follows the reader's light or dark theme, and escapes
every name it shows. It holds no date: the same run gives the same page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from potluck.errors import RunError
from potluck.files import write_whole
from potluck.report import plots
from potluck.report.format import capital, count, duration, measured, moment, percent, size
from potluck.report.log import (
    Curve,
    Key,
    Metrics,
    method_name,
    natural,
    read_config,
    read_mapping,
    read_metrics,
)
from potluck.report.markup import figure, page, section, table
from potluck.report.render import Column, Sheet
from potluck.report.scores import messages_block, seconds_per_round, summarise
from potluck.report.sheets import (
    VIEW_NAMES,
    clients_sheet,
    comparison_sheet,
    data_name,
    differences_sheet,
    further_sheet,
    gains_sheet,
    rounds_sheet,
    run_further_sheet,
    run_sheet,
    targets_sheet,
)

MOST_FAILURES = 20

# --- a run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """What the page of one run is made of; absent files are empty mappings."""

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
    def word(self) -> str:
        """What the clients are measured by."""
        return measured((self.summary.get("accuracy") or {}).get("metrics"))

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
    sections = (
        _headline(run),
        _failures(run),
        _rounds(run),
        _protocols(run),
        _tuning(run.tuning),
        _clients(run),
        _further(run),
        _split(run),
        _contract(run.contract),
        _settings(run),
    )
    path = run.folder / "report.html"
    write_whole(path, page(run.title, _subtitle(run), sections).encode())
    return path


def _load(folder: Path) -> _Run:
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}: give the folder of a run")
    config = read_config(folder)
    metrics = read_metrics(folder)
    stored = read_mapping(folder / "summary.json") or {}
    chosen = stored.get("accuracy") or {}
    logged = summarise(metrics, chosen.get("when"), chosen.get("mode")) if metrics.series else chosen
    return _Run(
        folder=folder,
        config=config,
        environment=read_mapping(folder / "environment.json") or {},
        split=read_mapping(folder / "split.json") or {},
        contract=read_mapping(folder / "contract.json") or {},
        summary=(stored or _unfinished(folder, config)) | {"accuracy": logged},
        tuning=read_mapping(folder / "tuning.json") or {},
        metrics=metrics,
        key=metrics.headline(chosen.get("when"), chosen.get("mode")),
    )


def _unfinished(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What can be said of a run that has not written its summary yet."""
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
    clients = run.summary.get("clients") or len(run.split.get("clients") or ())
    seed = run.summary.get("seed")
    parts = [
        str(run.config.get("name") or run.folder.name),
        f"{count(clients)} clients" if isinstance(clients, int) and clients else "",
        f"{kind} split" if kind else "",
        f"{count(run.summary['rounds'])} rounds" if run.summary.get("rounds") else "",
        f"seed {seed}" if isinstance(seed, int) else "",
        str(run.contract.get("citation") or ""),
    ]
    return " · ".join(part for part in parts if part)


def _headline(run: _Run) -> str:
    accuracy, messages = run.summary.get("accuracy") or {}, run.summary.get("messages") or {}
    cards = []
    if accuracy.get("last") is not None:
        spread, tenth = percent(accuracy.get("std_over_clients")), percent(accuracy.get("worst_tenth"))
        cards.append(
            (_mean_of(accuracy), percent(accuracy["last"]), f"± {spread} over clients; worst tenth {tenth}")
        )
    held_out = accuracy.get("held_out")
    if held_out:
        cards.append(
            (
                "held-out clients",
                percent(held_out["last"]),
                f"{count(held_out['clients'])} that never trained",
            )
        )
    for direction, words in (("up", "leaves a client"), ("down", "comes to a client")):
        part = messages.get(direction)
        if part:
            cards.append((f"{words}, per round", size(part["bytes"]), f"{count(part['scalars'])} scalars"))
    if run.summary.get("seconds_per_round") is not None:
        device = run.environment.get("device")
        cards.append(
            ("a round takes", duration(run.summary["seconds_per_round"]), f"on {device}" if device else "")
        )
    return f'<section class="headline">{_cards(cards)}</section>' if cards else ""


def _mean_of(accuracy: Mapping[str, Any]) -> str:
    word = measured(accuracy.get("metrics"))
    return word if word.startswith("mean") else f"mean {word}"


def _cards(cards: Iterable[tuple[str, str, str]]) -> str:
    return "".join(
        f'<div class="card"><span class="label">{escape(label)}</span>'
        f'<span class="value">{escape(value)}</span><span class="detail">{escape(detail)}</span></div>'
        for label, value, detail in cards
    )


def _failures(run: _Run) -> str:
    """The clients that failed, as client → number of times, or whatever else the summary says of failures."""
    failures = run.summary.get("failures")
    if not failures:
        return ""
    if isinstance(failures, Mapping):
        failures = [f"client {client}: {_words(value)} times" for client, value in failures.items()]
    lines = failures if isinstance(failures, list) else [failures]
    shown = "".join(f"<li>{escape(_words(line))}</li>" for line in lines[:MOST_FAILURES])
    more = f"<p>… and {len(lines) - MOST_FAILURES} more.</p>" if len(lines) > MOST_FAILURES else ""
    return section("What failed", f"<ul>{shown}</ul>{more}", "The rounds went on without these clients.")


def _rounds(run: _Run) -> str:
    if run.key is None or run.key not in run.metrics.series:
        return ""
    keys = [run.key, *(key for key in run.metrics.series if key != run.key)]
    curves = [
        run.metrics.series[key].curve(_name(key, keys), "spread" if key == run.key else None) for key in keys
    ]
    held_out = run.metrics.held_out.get(run.key)
    if held_out is not None:
        curves.append(held_out.curve("held-out clients"))
    title = f"{capital(run.word)} over rounds"
    picture = figure(plots.accuracy_over_rounds(curves), title)
    return section(title, picture, _rounds_text(run, run.key, several=len(keys) > 1))


def _rounds_text(run: _Run, key: Key, several: bool) -> str:
    evaluate = run.config.get("evaluate")
    common = isinstance(evaluate, Mapping) and evaluate.get("on") == "global"
    data = "the common test data" if common else "each client's own test data"
    band = f", {_name(key, list(run.metrics.series))}" if several else ""
    return f"Mean over clients of the {run.word} on {data}. The band is one standard deviation over clients{band}."


def _name(key: Key, keys: Sequence[Key]) -> str:
    """A moment and a mode in words; what all series share is left unsaid."""
    when, mode = moment(key[0]), key[1]
    if len({other for _, other in keys}) == 1:
        return when
    return mode if len({other for other, _ in keys}) == 1 else f"{mode}, {when}"


def _protocols(run: _Run) -> str:
    """The same log under every protocol; papers differ in nothing but the column they quote."""
    if run.key is None or run.key not in run.metrics.series:
        return ""
    names = (
        "evaluated",
        "mode",
        "last",
        "best by validation",
        "best by test",
        "last, by samples",
        "spread",
        "worst tenth",
    )
    columns = tuple(Column(name, "left" if place < 2 else "right") for place, name in enumerate(names))
    rows = tuple(_protocol_row(key, summarise(run.metrics, *key)) for key in run.metrics.series)
    chosen = list(run.metrics.series).index(run.key)
    text = (
        "One log, scored the ways papers score. Best by test looks at the answers: an upper bound, "
        "not a result. The bold row is the headline."
    )
    return section("The same run under other protocols", table(Sheet("", columns, rows), marked=chosen), text)


def _protocol_row(key: Key, block: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("last", "best_by_validation", "best_by_test", "weighted_last", "std_over_clients", "worst_tenth")
    return (moment(key[0]), key[1], *(percent(block[name]) for name in names))


def _tuning(tuning: Mapping[str, Any]) -> str:
    """How an option that was left open got its value: what each candidate reached, and what it cost."""
    if not tuning:
        return ""
    name, chosen, curve = tuning["option"], tuning["chosen"], tuning["curve"]
    columns = tuple(
        Column(title) for title in (name, "validation accuracy", "per client and round", "scalars")
    )
    rows = tuple(
        (str(point["value"]), percent(point["validation"]), size(point["bytes"]), count(point["scalars"]))
        for point in curve
    )
    marked = [point["value"] for point in curve].index(chosen)
    picture = figure(
        plots.accuracy_against_bytes(curve, name, chosen), f"Validation accuracy against bytes, by {name}"
    )
    text = (
        f"Pilot runs of {tuning['rounds']} rounds each. {chosen} is the smallest value within "
        f"{100 * tuning['tolerance']:g} points of the best validation accuracy. Test rows played no part, and what "
        "the pilot runs sent is not in the ledger of this run."
    )
    return section(f"How {name} was chosen", picture + table(Sheet("", columns, rows), marked=marked), text)


def client_rows(
    split: Mapping[str, Any], accuracy: Mapping[str, Any], models: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows of `table.run_sheet`, from `split.json`, a summary's accuracy, and the clients' models."""
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


def _clients(run: _Run) -> str:
    accuracy = run.summary.get("accuracy") or {}
    rows = client_rows(run.split, accuracy, _models(run))
    if not rows:
        return ""
    values = accuracy.get("per_client") or {}
    picture = figure(plots.client_bars(values), f"{capital(run.word)} per client") if values else ""
    sheet = run_sheet(run.summary, rows)
    listing = table(sheet, bars=bool(values))
    if len(rows) > 12:
        listing = f"<details><summary>All {len(rows)} clients</summary>{listing}</details>"
    return section("Clients", picture + listing, _evaluated(len(values), len(rows)))


def _further(run: _Run) -> str:
    """What the clients' tasks measure besides what they are judged by."""
    sheet = run_further_sheet(run.summary)
    text = "In the last evaluated round, each the mean over the clients that have the measure."
    return section(sheet.title, table(sheet), text) if sheet else ""


def _models(run: _Run) -> dict[str, str]:
    """The name of each client's model, where the run's files say it client by client."""
    settings = run.config.get("models")
    pool = settings.get("pool") if isinstance(settings, Mapping) else None
    models = run.environment.get("models") or run.summary.get("models") or pool
    named = models.items() if isinstance(models, Mapping) else ()
    return {str(client): str(m.get("name") if isinstance(m, Mapping) else m) for client, m in named}


def _evaluated(some: int, all_of: int) -> str:
    if not some:
        return ""
    return "In the last evaluated round" + (f": {some:,} of {all_of:,} clients." if some < all_of else ".")


def _split(run: _Run) -> str:
    clients = [part for part in run.split.get("clients") or () if part.get("counts")]
    if not clients:
        return ""
    pictures = ""
    for group in run.split.get("groups") or [dict(run.split) | {"clients": len(clients)}]:
        own, clients = clients[: group["clients"]], clients[group["clients"] :]
        picture = plots.split_picture(
            [part["counts"] for part in own],
            [str(part["id"]) for part in own],
            [str(name) for name in group.get("class_names") or ()] or None,
        )
        title = f"<h3>{escape(str(group['data']))}</h3>" if "groups" in run.split else ""
        pictures += title + figure(picture, "Training samples of each client by class")
    text = f"Training samples per class. Split {run.split['hash']}." if run.split.get("hash") else ""
    return section("Who has which class", pictures, text)


# --- the wire -------------------------------------------------------------------------------------------


def _contract(contract: Mapping[str, Any]) -> str:
    if not contract:
        return ""
    steps = contract.get("steps") or ()
    leaves = _tensors(steps, "up", contract.get("up_scalars")) + _listed(
        "With each reply", contract.get("report")
    )
    leaves += _listed("Once, at enrolment", contract.get("card"))
    comes = _tensors(steps, "down", contract.get("down_scalars"))
    stays = _listed("", contract.get("stays"))
    boxes = (("What leaves a client", leaves), ("What comes to a client", comes), ("What stays", stays))
    body = "".join(f'<div class="box"><h3>{title}</h3>{content}</div>' for title, content in boxes)
    text = "Declared by the method and enforced on both sides: nothing else crosses."
    client = contract.get("client")
    if isinstance(client, Mapping) and client.get("id") is not None:
        model = f" ({client['model']})" if client.get("model") else ""
        text += f" Sizes are those of client {client['id']}{model}."
    return section("The wire", f'<div class="boxes">{body}</div>', text)


def _tensors(steps: Sequence[Mapping[str, Any]], direction: str, total: Any) -> str:
    entries = [(step, tensor) for step in steps for tensor in step.get(direction) or ()]
    if not entries:
        return "<p>Nothing.</p>"
    several = len(steps) > 1
    items = "".join(
        f"<li><code>{escape(str(tensor.get('name')))}</code> {escape(_words(tensor.get('shape')))}"
        f"<span class='detail'>{escape(_tensor_detail(tensor, step if several else {}, direction))}</span></li>"
        for step, tensor in entries
    )
    if len(entries) < 2 or not isinstance(total, (int, float)):
        return f"<ul>{items}</ul>"
    return f"<ul>{items}</ul><p class='detail'>{count(total)} scalars per round of training</p>"


def _tensor_detail(tensor: Mapping[str, Any], step: Mapping[str, Any], direction: str) -> str:
    scalars, times = tensor.get("scalars"), step.get("times")
    parts = [
        _words(tensor.get("meaning")),
        f"{count(scalars)} scalars" if isinstance(scalars, (int, float)) else _words(scalars),
        "optional" if tensor.get("optional") else "",
        f"step {step['name']}" if step.get("name") else "",
        f"{count(times[direction])} times a round" if times else "",
    ]
    return " · ".join(part for part in parts if part)


def _listed(title: str, values: Any) -> str:
    if not values:
        return ""
    entries = values if isinstance(values, (list, tuple)) else [values]
    items = "".join(f"<li>{_named(value)}</li>" for value in entries)
    return (f"<h4>{escape(title)}</h4>" if title else "") + f"<ul>{items}</ul>"


def _named(value: Any) -> str:
    """A name with its meaning, or just words."""
    if not isinstance(value, Mapping) or "name" not in value:
        return escape(_words(value))
    name, meaning = _words(value["name"]), _words(value.get("meaning"))
    return f'<code>{escape(name)}</code><span class="detail">{escape(meaning)}</span>'


def _words(value: Any) -> str:
    """Any value of a JSON file as one line of text."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_words(entry)}" for name, entry in value.items())
    return " × ".join(map(_words, value)) if isinstance(value, (list, tuple)) else str(value)


def _settings(run: _Run) -> str:
    text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
    where = f"{run.folder.resolve().parent.name}/{run.folder.name}"
    commands = (
        f"potluck run {where}/config.yaml      # the same experiment again, from the same seed\n"
        f"potluck resume {where}               # go on after an interruption, same numbers\n"
        f"potluck explain {where}/config.yaml  # what crosses the wire, before anything runs\n"
    )
    settings = f"<details><summary>Settings</summary><pre>{escape(text)}</pre></details>"
    note = "On the same CPU, torch and number of threads the numbers are equal to the last digit."
    return section("Again", f"<pre>{escape(commands)}</pre>{settings}{_environment(run.environment)}", note)


def _environment(environment: Mapping[str, Any]) -> str:
    entries = {
        name: value for name, value in environment.items() if name != "models"
    }  # they are in the table
    if not entries:
        return ""
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(_words(v))}</td></tr>" for k, v in entries.items())
    return f"<details><summary>Environment</summary><table class='plain'>{rows}</table></details>"


# --- several methods ------------------------------------------------------------------------------------


def write_comparison(path: Path, comparison: Mapping[str, Any]) -> Path:
    """Write the page that shows several methods side by side: takes what `views.compare_runs` gives."""
    path = Path(path)
    sheet = comparison_sheet(comparison)
    baseline = str(comparison.get("baseline", "local"))
    sections = [section("Methods", _noted(sheet))]
    for make in (clients_sheet, further_sheet, rounds_sheet, targets_sheet):
        extra = make(comparison)
        if extra is not None:
            sections.append(section(extra.title, _noted(extra)))
    sections.append(_gains(comparison))
    if any(entry.get("difference") for entry in comparison["methods"]):
        picture = figure(plots.interval_picture(comparison), "Differences with their intervals")
        sections.append(
            section("What each gains", picture, "Filled: the interval does not hold 0. Hollow: a tie.")
        )
    curves = [_curve(entry) for entry in comparison["methods"] if entry.get("curve")]
    if curves:
        title = f"{capital(measured(comparison.get('metrics')))} over rounds"
        picture = figure(plots.accuracy_over_rounds(curves, reference=baseline), title)
        several = len(comparison.get("seeds") or ()) > 1
        text = "Mean over clients" + (
            " and seeds; the band is from the lowest seed to the highest." if several else "."
        )
        sections.append(section(title, picture, text))
    seeds = f"seeds {', '.join(map(str, comparison.get('seeds') or ()))}"
    view = VIEW_NAMES.get(comparison.get("view", "last"), "")
    write_whole(path, page(sheet.title, f"{seeds} · {view}", sections).encode())
    return path


def _noted(sheet: Sheet) -> str:
    return table(sheet) + "".join(f"<p class='note'>{escape(note)}</p>" for note in sheet.notes)


def _gains(comparison: Mapping[str, Any]) -> str:
    gains, clients = gains_sheet(comparison), differences_sheet(comparison)
    if gains is None:
        return ""
    listing = f"<details><summary>{clients.title}</summary>{table(clients)}</details>" if clients else ""
    return section(gains.title, _noted(gains) + listing)


def _curve(entry: Mapping[str, Any]) -> Curve:
    curve = entry["curve"]
    low, high = (np.array(curve[end], float) if curve.get(end) else None for end in ("low", "high"))
    return Curve(
        entry["method"], np.array(curve["rounds"], np.int64), np.array(curve["mean"], float), low, high
    )
