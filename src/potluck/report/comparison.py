"""Finished runs side by side: paired differences to a baseline, with bootstrap intervals."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from potluck.core.rng import Rng
from potluck.errors import ConfigError, RunError
from potluck.report.format import rounded, whole
from potluck.report.log import (
    ACCURACY,
    LEDGER,
    NOBODY,
    VIEWS,
    Curve,
    Floats,
    Key,
    Metrics,
    Scores,
    View,
    method_name,
    natural,
    read_config,
    read_mapping,
    read_metrics,
    read_table,
)
from potluck.report.measures import ACCURACY as ACCURACY_MEASURE
from potluck.report.measures import Measure, measure_of
from potluck.report.scores import DIRECTIONS, UNITS, disagreement, messages_block, seconds_per_round
from potluck.report.split_file import by_group, read_split

BySeed = Mapping[str, Mapping[str, float]]  # seed → client → accuracy


def over_seeds(values: Sequence[float]) -> dict[str, float | None]:
    """The mean and the sample deviation of one value per seed; None where there are too few values."""
    return {
        "mean": rounded(float(np.mean(values))) if len(values) else None,
        "std_over_seeds": rounded(float(np.std(values, ddof=1))) if len(values) > 1 else None,
    }


# --- paired differences ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A paired difference in accuracy, with its bootstrap interval (None when there is only one pair)."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def tie(self) -> bool | None:
        """Whether the interval contains 0; None without an interval."""
        return None if self.low is None or self.high is None else self.low <= 0 <= self.high

    def to_json(self) -> dict[str, Any]:
        """The entry of `comparison.json`."""
        ends = {"low": rounded(self.low), "high": rounded(self.high)}
        return {"mean": rounded(self.mean), **ends, "tie": self.tie, "pairs": self.pairs}


def paired(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """`a` − `b` for every client that has both values, in client order."""
    return {client: a[client] - b[client] for client in sorted(a.keys() & b.keys(), key=natural)}


def bootstrap_interval(
    differences: Sequence[Floats], rng: np.random.Generator, draws: int = 2000, level: float = 0.95
) -> tuple[float, float]:
    """A percentile bootstrap interval for the mean of paired differences, given as one array per seed.

    With one seed, clients are resampled, and the interval says nothing about other seeds. With several, seeds are
    resampled, then clients within each drawn seed; the statistic is the mean of the seeds' means. With five seeds
    or fewer such an interval is narrower than it claims. A single value gives (NaN, NaN).
    """
    if sum(map(len, differences)) < 2:
        return math.nan, math.nan
    means = np.array([_resampled_mean(differences, rng) for _ in range(draws)])
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _resampled_mean(seeds: Sequence[Floats], rng: np.random.Generator) -> float:
    chosen = rng.integers(len(seeds), size=len(seeds)) if len(seeds) > 1 else [0]
    means = [seeds[row][rng.integers(len(seeds[row]), size=len(seeds[row]))].mean() for row in chosen]
    return float(np.mean(means))


def paired_difference(
    method: BySeed, baseline: BySeed, rng: np.random.Generator, draws: int = 2000, level: float = 0.95
) -> Difference | None:
    """How much better a method is than the baseline; None when no seed has a client in common."""
    rows = [
        np.array(list(paired(method[seed], baseline[seed]).values()))
        for seed in sorted(method.keys() & baseline.keys(), key=natural)
    ]
    rows = [row for row in rows if len(row)]
    if not rows:
        return None
    low, high = bootstrap_interval(rows, rng, draws, level)
    mean = float(np.mean([row.mean() for row in rows]))
    return Difference(mean, rounded(low), rounded(high), pairs=sum(map(len, rows)))


def client_gains(method: BySeed, baseline: BySeed, measure: Measure = ACCURACY_MEASURE) -> dict[str, Any]:
    """The difference of every client in every seed, and how many are better, equal or worse."""
    seeds = sorted(method.keys() & baseline.keys(), key=natural)
    differences = {
        seed: {client: rounded(value) for client, value in paired(method[seed], baseline[seed]).items()}
        for seed in seeds
    }
    values = [value for clients in differences.values() for value in clients.values() if value is not None]
    better = sum(map(measure.is_gain, values))
    signs = {"better": better, "worse": sum(value != 0 for value in values) - better}
    return {**signs, "equal": len(values) - sum(signs.values()), "differences": differences}


def relative_gain(method: BySeed, baseline: BySeed) -> float | None:
    """Δ %: the mean over clients, then seeds, of 100·(value − baseline)/baseline, in each client's own metric.

    INFERRED from the Δ of FedMuscle's tables, whose definition was not at hand. Clients whose baseline is 0 are
    left out.
    """
    means = []
    for seed in sorted(method.keys() & baseline.keys()):
        both = method[seed].keys() & {client for client, value in baseline[seed].items() if value > 0}
        gains = [100 * (method[seed][one] / baseline[seed][one] - 1) for one in sorted(both, key=natural)]
        means += [math.fsum(gains) / len(gains)] if gains else []
    return math.fsum(means) / len(means) if means else None


# --- comparisons ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """What a comparison needs of one run."""

    folder: Path
    method: str  # its label
    name: str
    seed: str
    split: str | None
    key: Key | None
    scores: dict[Key, Scores]  # of every moment and mode, in the round of the view
    chosen: dict[Key, Scores]  # the same in the round that is best by validation
    curves: dict[Key, Curve]
    sent: dict[int, float]  # evaluated round → bytes of training by then, all clients together
    messages: dict[str, Any]
    seconds: float | None
    about: dict[str, Any]
    rounds: int | None
    names: dict[str, str]  # client → what it is measured by, where tasks or data sets differ
    data_sets: dict[str, str]
    further: dict[str, dict[str, Any]]
    environment: dict[str, Any]

    @property
    def headline(self) -> Scores:
        """The scores that the run is judged by."""
        return self.scores.get(self.key, NOBODY) if self.key else NOBODY


Groups = Mapping[str, Mapping[str, _Result]]  # label → seed → run


def check_view(view: str) -> None:
    """Refuse a view that there is not."""
    if view not in VIEWS:
        raise ConfigError(f"there is no view {view!r}; the views are {', '.join(VIEWS)}")


def compare_runs(
    runs: Sequence[Path] | Mapping[str, Sequence[Path]],
    rng: Rng,
    baseline: str = "local",
    view: View = "last",
    when: str | None = None,
    draws: int = 2000,
    level: float = 0.95,
    references: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Compare finished runs; each method is paired with `baseline` by seed and client.

    `runs` are folders, or folders by label where one method appears under several settings; `references` names
    for each label another one to pair it with than `baseline`. Runs of one seed must share their split. A
    method's interval does not depend on which others are compared. The result is plain data, the content of
    `comparison.json`.
    """
    check_view(view)
    labelled = runs.items() if isinstance(runs, Mapping) else [(None, runs)]
    results = [_read_result(folder, label, view, when) for label, folders in labelled for folder in folders]
    if not results:
        raise RunError("there is nothing to compare: give the folders of at least two runs")
    groups, measures = _group(results), _measures(results)
    seeds = sorted({run.seed for run in results}, key=natural)
    settings = {"view": view, "level": level, "draws": draws, "baseline": baseline, "seeds": seeds}
    pairing = _Pairing(groups, rng, draws, level, measure_of(measures.get("metrics"), _facts(results)))
    methods = []
    for method, group in groups.items():
        against = (references or {}).get(method, baseline if references is None else None)
        against = against if against in groups and against != method else None
        entry = _method_entry(method, list(group.values())) | pairing.entries(method, against)
        if measures:
            entry |= {"gain": pairing.relative(method, against), "per_client": _per_client(_values(group))}
        methods.append(entry)
    return results[0].about | settings | measures | {"methods": methods}


def disagreement_with(comparison: Mapping[str, Any], runs: Mapping[str, Sequence[Path]]) -> str | None:
    """Where a comparison says something else than the logs of its runs, by label; None if it does not.

    Intervals are not drawn again, so nothing is said of them.
    """
    found = compare_runs(
        runs,
        Rng(0),
        comparison["baseline"],
        comparison["view"],
        draws=1,
        level=comparison["level"],
        references={entry["method"]: entry["against"] for entry in comparison["methods"]},
    )
    entries = zip(comparison["methods"], found["methods"], strict=True)
    said = {"methods": [_shared(entry, other) for entry, other in entries]}
    return disagreement(_shared(comparison, found) | said, found)


def _shared(said: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of the things that were found, without the numbers of draws."""
    return {key: _undrawn(said[key]) for key in found if key in said and key != "draws"}


def _undrawn(value: Any) -> Any:
    """A value without the ends of intervals."""
    if isinstance(value, list):
        return [_undrawn(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    drawn = ("low", "high", "tie") if "pairs" in value else ()
    return {key: _undrawn(inner) for key, inner in value.items() if key not in drawn}


@dataclass(frozen=True)
class _Pairing:
    """Sets runs against those of their reference."""

    groups: Groups
    rng: Rng
    draws: int
    level: float
    measure: Measure

    def entries(self, method: str, against: str | None) -> dict[str, Any]:
        """The difference to the reference, client by client too, and every moment and mode that was measured."""
        own, key = self.groups[method], _key(self.groups[method])
        keys = dict.fromkeys(key for run in own.values() for key in run.scores)
        ordered = sorted(keys, key=lambda one: (one != key, key is not None and one[0] != key[0]))
        other = self.groups[against] if against is not None else {}
        found: dict[str, Any] = {"against": against, "difference": self._difference(method, key, other)}
        if other:
            found["by_client"] = client_gains(_values(own), _values(other), self.measure)
        measured = [
            _spread_of(own, one) | {"difference": self._difference(method, one, other)} for one in ordered
        ]
        return found | {"measured": measured}

    def _difference(
        self, method: str, key: Key | None, other: Mapping[str, _Result]
    ) -> dict[str, Any] | None:
        own = self.groups[method]
        if key is None or not other:
            return None
        at_headline = key == _key(own)
        # The same draws for every method, moment and mode, so that equal scores have equal intervals.
        stream = self.rng.child("bootstrap").numpy()
        reference = _values(other) if at_headline else _values(other, _same_moment(other, key))
        found = paired_difference(_values(own, key), reference, stream, self.draws, self.level)
        return found.to_json() if found else None

    def relative(self, method: str, against: str | None) -> float | None:
        """Δ % to the reference; of the reference itself it is 0."""
        if not self.measure.is_share or not self.measure.higher_is_better:
            return None
        own = _values(self.groups[method])
        return rounded(relative_gain(own, _values(self.groups[against]) if against is not None else own))


def _key(group: Mapping[str, _Result]) -> Key | None:
    return next(iter(group.values())).key


def _same_moment(group: Mapping[str, _Result], key: Key) -> Key | None:
    """The series of a reference at the same moment, in its reported mode; its headline where it has none."""
    headline = _key(group)
    known = {found for run in group.values() for found in run.scores}
    wanted = (key[0], headline[1]) if headline else None
    return wanted if wanted in known else headline


def _values(group: Mapping[str, _Result], key: Key | None = None) -> BySeed:
    """The scores of every client by seed, at the headline or at another moment and mode."""
    return {
        seed: (run.headline if key is None else run.scores.get(key, NOBODY)).per_client()
        for seed, run in group.items()
    }


def _spread_of(group: Mapping[str, _Result], key: Key) -> dict[str, Any]:
    """One moment and mode of a method: mean, spread over clients and worst tenth, over the seeds.

    Another mode at the moment of the headline has a curve, too.
    """
    runs, headline = list(group.values()), _key(group)
    scores = [run.scores[key] for run in runs if key in run.scores]
    drawn = headline is not None and key != headline and key[0] == headline[0]
    curve = {"curve": _curve_over_seeds(runs, key)} if drawn else {}
    clients = max((len(one.clients) for one in scores), default=0)
    chosen = [run.chosen[key].mean() for run in runs if key in run.chosen]
    return {
        "when": key[0],
        "mode": key[1],
        "clients": clients,
        **_over_clients(scores),
        "best_by_validation": over_seeds([one for one in chosen if one is not None]),
        **curve,
    }


def _over_clients(scores: Sequence[Scores]) -> dict[str, Any]:
    known = [one for one in scores if len(one.clients)]
    return {
        "accuracy": over_seeds([one.mean() or 0.0 for one in known]),
        "std_over_clients": over_seeds([one.spread() or 0.0 for one in known]),
        "worst_tenth": over_seeds([one.worst_tenth() or 0.0 for one in known]),
    }


def _facts(results: Sequence[_Result]) -> dict[str, Any]:
    """The facts of further metrics that the runs have noted, by metric."""
    noted = [run.environment.get("metrics") for run in results]
    return {name: facts for one in noted if isinstance(one, Mapping) for name, facts in one.items()}


def _measures(results: Sequence[_Result]) -> dict[str, Any]:
    """What each client is measured by and on which data; empty where all have one data set and its accuracy."""
    names = {client: name for run in results for client, name in run.names.items()}
    facts = _facts(results)
    stored = {"metric_facts": facts} if facts else {}
    if not names:
        return stored
    metrics = {client: names[client] for client in sorted(names, key=natural)}
    known = results[0].data_sets
    data_sets = {client: known[client] for client in metrics if client in known}
    return stored | {"metrics": metrics, **({"data_sets": data_sets} if data_sets else {})}


def _per_client(values: BySeed) -> dict[str, float | None]:
    """The mean over seeds of every client."""
    clients = sorted({client for seed in values.values() for client in seed}, key=natural)
    rows = {client: [seed[client] for seed in values.values() if client in seed] for client in clients}
    return {client: rounded(math.fsum(row) / len(row)) for client, row in rows.items()}


def _read_result(folder: Path, label: str | None, view: View, when: str | None) -> _Result:
    config = read_config(folder)
    metrics = read_metrics(folder)
    try:
        key = metrics.headline(when)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    series = metrics.series.get(key) if key else None
    measured = {client for one in metrics.series.values() for client in one.names}
    split = read_split(folder / "split.json", measured)
    method = method_name(config)
    curves = {found: one.curve(label or method) for found, one in metrics.series.items()}
    return _Result(
        folder=folder,
        method=label or method,
        name=method,
        seed=json.dumps(config.get("seed"), sort_keys=True),
        split=split.get("hash"),
        key=key,
        scores={found: one.scores(view) for found, one in metrics.series.items()},
        chosen={found: one.scores("best_by_validation") for found, one in metrics.series.items()},
        curves=curves,
        sent=_sent(folder / "ledger.jsonl", sorted({n for c in curves.values() for n in c.rounds.tolist()})),
        messages=messages_block(folder / "ledger.jsonl"),
        seconds=seconds_per_round(folder / "timing.jsonl"),
        about=_about(config),
        rounds=(config.get("training") or {}).get("rounds"),
        names=_names(config, metrics, series.evaluated(view) if series else ()),
        data_sets=_data_sets(split),
        further=series.further_means(view) if series else {},
        environment=read_mapping(folder / "environment.json") or {},
    )


def _sent(path: Path, rounds: Sequence[int]) -> dict[int, float]:
    """The bytes that all clients sent and received for training up to each of the rounds."""
    ledger = read_table(path, LEDGER)
    train = ledger.filter(pc.field("purpose") == "train")
    number, size = train["round"].to_numpy(), train["bytes"].to_numpy()
    order = np.argsort(number, kind="stable")
    total = np.append(0, np.cumsum(size[order]))[np.searchsorted(number[order], rounds, side="right")]
    return dict(zip(rounds, total.tolist(), strict=True))


def _names(config: Mapping[str, Any], metrics: Metrics, clients: Sequence[str]) -> dict[str, str]:
    """What each client is measured by; empty where one data set and its accuracy are all there is."""
    groups = config.get("federation") or ()
    if not metrics.names and len(groups) < 2:
        return {}
    return {client: metrics.names.get(client, ACCURACY) for client in clients}


def _data_sets(split: Mapping[str, Any]) -> dict[str, str]:
    """The data set of each client, where groups have their own: `split.json` lists clients group by group."""
    if not split.get("groups"):
        return {}
    return {str(part["id"]): str(group["data"]) for group, own, _ in by_group(split) for part in own}


def _about(config: Mapping[str, Any]) -> dict[str, Any]:
    """What all runs of a comparison share, for its titles and captions."""
    name = {"name": config["name"]} if config.get("name") else {}
    return name | {key: config.get(key) for key in ("data", "partition")} | _federation(config)


def _federation(config: Mapping[str, Any]) -> dict[str, Any]:
    groups = config.get("federation")
    return {"federation": [{"data": group.get("data")} for group in groups]} if groups else {}


def _group(results: Sequence[_Result]) -> dict[str, dict[str, _Result]]:
    """Method → seed → run; refuses a second run of one seed, and runs of one seed on different splits."""
    groups: dict[str, dict[str, _Result]] = defaultdict(dict)
    splits: dict[str, _Result] = {}
    for run in results:
        other = groups[run.method].setdefault(run.seed, run)
        if other is not run:
            raise RunError(
                f"{other.folder} and {run.folder} are both {run.method} with seed {run.seed}: "
                "remove one, or give them labels"
            )
        first = splits.setdefault(run.seed, run)
        if first.split != run.split:
            raise RunError(
                f"{first.folder} and {run.folder} have seed {run.seed} but different splits: "
                "only runs on the same split can be compared"
            )
    return dict(groups)


def _method_entry(method: str, runs: Sequence[_Result]) -> dict[str, Any]:
    """What `comparison.json` says of one method, before it is set against its reference."""
    seconds = [run.seconds for run in runs if run.seconds is not None]
    key, further = runs[0].key, _further_over_seeds(runs)
    return {
        "method": method,
        "method_name": runs[0].name,
        "rounds_trained": runs[0].rounds,
        "when": key[0] if key else None,
        "mode": key[1] if key else None,
        "seeds": len(runs),
        "clients": max(len(run.headline.clients) for run in runs),
        **_over_clients([run.headline for run in runs]),
        "messages": _mean_messages(runs),
        "seconds_per_round": rounded(float(np.mean(seconds))) if seconds else None,
        "curve": _curve_over_seeds(runs, key),
        "runs": {run.seed: run.folder.name for run in runs},
        "not_measured": _other_modes(runs[0]),
        **({"further": further} if further else {}),
    }


def _other_modes(run: _Result) -> list[str]:
    """The ways to predict that the method has and the run did not measure."""
    measured = {mode for _, mode in run.scores}
    return [mode for mode in run.environment.get("modes") or () if mode not in measured]


def _further_over_seeds(runs: Sequence[_Result]) -> dict[str, dict[str, float | None]]:
    """The mean and the sample deviation over seeds of every further measure."""
    names = dict.fromkeys(name for run in runs for name in run.further)
    rows = {name: [run.further[name]["mean"] for run in runs if name in run.further] for name in names}
    return {name: over_seeds(row) for name, row in rows.items()}


def _mean_messages(runs: Sequence[_Result]) -> dict[str, Any]:
    return {
        direction: {
            unit: whole(float(np.mean([run.messages[direction][unit] for run in runs]))) for unit in UNITS
        }
        for direction in DIRECTIONS
    }


def _curve_over_seeds(runs: Sequence[_Result], key: Key | None) -> dict[str, list[Any]] | None:
    """The mean over seeds in every round that all seeds evaluated, with the lowest and the highest seed."""
    found = [(run, run.curves[key]) for run in runs if key is not None and key in run.curves]
    curves = [dict(zip(c.rounds.tolist(), c.mean.tolist(), strict=True)) for _, c in found]
    if not curves:
        return None
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[number] for curve in curves] for number in rounds]
    mean = [rounded(float(np.mean(row))) for row in values]
    sent = [whole(float(np.mean([run.sent[number] for run, _ in found]))) for number in rounds]
    ends = {"low": [rounded(min(row)) for row in values], "high": [rounded(max(row)) for row in values]}
    return {"rounds": rounds, "mean": mean, "bytes": sent} | ends
