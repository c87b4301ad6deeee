"""What FedRE's server learns of a client's class means from the mixtures it is sent.

    python benchmarks/entanglement.py                                      two minutes of one CPU core
    python benchmarks/entanglement.py --seeds 0,1 --markdown table.md      the table of docs/methods/fedre.md

Real runs on digits: five clients with 2, 4 or all 10 classes each, whose extractors train throughout. The server
keeps every r̃ and ỹ of a client and solves R = W·P for the class means P. The error is ‖P̂ − P‖ / ‖P‖ against the
means of the last round, over the classes the client holds. Errors are medians over clients and seeds, because two
mixtures may by chance be almost the same; accuracies are means.

- `one mixture`: the newest r̃ is taken for every class mean.
- `least squares`: over the last 2, 8, 20 rounds, for 2, 4, 10 classes.
- `best attack`: the smallest error over windows of rounds and ridge regressions towards zero or the mean mixture.
  Window and strength are chosen with the truth in hand. No server can do that: it bounds attacks of this kind.
- `common head`, `own head`: test accuracy over clients after the last round, with the newest head and with the one
  the client has just trained.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.engine.numerics import threads
from potluck.engine.protocol import Answer, Examination, Outcome, Request
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.kit.class_means import ClassStats
from potluck.kit.shared_head import representations
from potluck.testing.faulty_engines import Wrapped

CLIENTS, ROUNDS = 5, 60
WINDOWS = {2: 2, 4: 8, 10: 20}  # rounds the least squares look back, by classes held
STRENGTHS = (0.0, 1e-3, 1e-2, 1e-1, 1.0)  # of the ridge
METHODS: dict[str, dict[str, Any]] = {
    "as published (RAP)": {},
    "the same, after 30 rounds": {"rounds": 30},
    "the same, after 120 rounds": {"rounds": 120},
    "fixed weights": {"fixed": True},
    "noise 0.1": {"noise": 0.1},
    "noise 0.5": {"noise": 0.5},
    "noise 1": {"noise": 1.0},
    "label in 4 levels": {"levels": 4},
    "label in 2 levels": {"levels": 2},
    "label in 1 level": {"levels": 1},
    "equal weights (VAP)": {"mechanism": "VAP"},
    "one class mean (RSP)": {"mechanism": "RSP"},
    "nothing (Local)": {"name": "local"},
}


@dataclass
class Heard:
    """What the server has of one client, and the truth beside it."""

    representations: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    truth: Tensor = field(default_factory=lambda: torch.empty(0))  # the class means of the last round


class Listening(Wrapped):
    """Keeps every upload, as the server may."""

    def __init__(self, inner: SerialEngine, federation: Federation) -> None:
        super().__init__(inner)
        self.heard = {client: Heard() for client in federation.population.ids}

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = self.inner.run(requests)
        for outcome in outcomes:
            assert isinstance(outcome, Answer), outcome
            if outcome.up:
                self.heard[outcome.client].representations.append(outcome.up["representation"])
                self.heard[outcome.client].labels.append(outcome.up["label"])
        return outcomes


def class_means(federation: Federation, local: SerialEngine, client: ClientId) -> Tensor:
    """The truth, from the client's own state."""
    record = local.store.peek(client)
    assert record is not None
    assert record.base is not None
    live = federation.clients.build_client(client)
    live.restore(record.base)
    z, y = representations(live)
    stats = ClassStats(live.task.classes, z.shape[1])
    stats.add(z, y)
    return stats.means(live.classes_held)


def experiment(classes: int, seed: int, rounds: int = ROUNDS, **options: Any) -> Experiment:
    split = {"kind": "pathological", "classes_per_client": classes} if classes < 10 else {"kind": "iid"}
    return Experiment.make(
        data="digits",
        partition={**split, "clients": CLIENTS, "test": 0.25},
        models="mlp-small",
        method={"name": "fedre"} | options,
        training={"rounds": rounds, "epochs": 1, "batch_size": 64, "optimizer": {"lr": 0.1}},
        seed=seed,
    )


def play(federation: Federation, total: int) -> tuple[dict[ClientId, Heard], dict[str, float]]:
    """All rounds: what was heard, and the accuracy after the last."""
    local = SerialEngine(federation.clients)
    engine = Listening(local, federation)
    rounds = Rounds(federation, engine)
    with threads(1):
        for number in range(1, total + 1):
            rounds.play(number, federation.population.ids)
        found = {
            "common head": _accuracy(rounds, federation, total, received=True),
            "own head": _accuracy(rounds, federation, total, received=False),
        }
        for client, heard in engine.heard.items():
            heard.truth = class_means(federation, local, client)
    return engine.heard, found


def _accuracy(rounds: Rounds, federation: Federation, total: int, received: bool) -> float:
    shares = []
    for client in federation.population.ids:
        down = Message(federation.method.downlink(rounds.server, client)) if received else None
        stamp = rounds.stamp(client, total, 1)
        [answer] = rounds.engine.examine([Examination(client, down, stamp, ("model",))])
        assert isinstance(answer, Answer), answer
        shares.append(
            float(answer.report.metrics["model/test/correct"]) / federation.population.samples(client)["test"]
        )
    return sum(shares) / len(shares)


def errors(heard: Heard, held: Sequence[int], window: int) -> dict[str, float]:
    """The relative error of each guess at one client's class means."""
    r, w = torch.stack(heard.representations).double(), torch.stack(heard.labels).double()[:, list(held)]
    truth = heard.truth.double()

    def error(guess: Tensor) -> float:
        return float((guess - truth).norm() / truth.norm())

    windows = {min(length, len(r)) for length in (window, 2 * window, 4 * window, len(r))}
    return {
        "one mixture": error(r[-1].expand_as(truth)),
        "least squares": error(solve(r[-window:], w[-window:], 0.0)),
        "best attack": min(
            error(solve(r[-length:], w[-length:], strength, towards_mean=towards))
            for length in windows
            for strength in STRENGTHS
            for towards in (False, True)
        ),
    }


def solve(r: Tensor, w: Tensor, strength: float, towards_mean: bool = False) -> Tensor:
    """P that minimises ‖R − W·P‖² + strength·‖P − P₀‖², P₀ the mean mixture or zero; of many the nearest to P₀."""
    start = r.mean(0).expand(w.shape[1], -1) if towards_mean else r.new_zeros(w.shape[1], r.shape[1])
    pull = strength**0.5 * torch.eye(w.shape[1], dtype=w.dtype)
    left = torch.cat([w, pull])
    right = torch.cat([r - w @ start, torch.zeros_like(start)])
    solved: Tensor = start + torch.linalg.pinv(left, rtol=1e-6) @ right
    return solved


def measure(classes: int, seeds: Sequence[int], options: Mapping[str, Any]) -> dict[str, float]:
    rows: list[dict[str, float]] = []
    accuracies: list[dict[str, float]] = []
    for seed in seeds:
        settings = experiment(classes, seed, **options)
        federation = settings.build()
        everything, found = play(federation, settings.training.rounds)
        accuracies.append(found)
        for client, heard in everything.items():
            if heard.labels:
                rows.append(errors(heard, federation.population.classes_held(client), WINDOWS[classes]))
    wrong = {name: median(row[name] for row in rows) for name in rows[0]} if rows else {}
    return wrong | {name: mean(row[name] for row in accuracies) for name in accuracies[0]}


COLUMNS = ("one mixture", "least squares", "best attack", "common head", "own head")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--classes", default="2,4,10")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    lines = ["| classes | sent | " + " | ".join(COLUMNS) + " |", "|---:|---|" + "---:|" * len(COLUMNS)]
    started = time.perf_counter()
    for classes in map(int, options.classes.split(",")):
        for name, changes in METHODS.items():
            if options.only in name:
                found = measure(classes, seeds, changes)
                cells = [f"{found[column]:.3f}" if column in found else "–" for column in COLUMNS[:3]]
                cells += [f"{found[column]:.1%}" for column in COLUMNS[3:]]
                lines.append(f"| {classes} | {name} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    print(f"{time.perf_counter() - started:.0f} s")
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
