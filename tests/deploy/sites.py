"""Three sites of a federation, and the simulation they must equal: the same samples, models and seeds."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import cache, partial
from pathlib import Path

from potluck.engine.protocol import Failure
from potluck.engine.serial import SerialEngine
from potluck.experiment.schema import Experiment
from potluck.models import build
from potluck.runs.api import write_start
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Run

MODELS = ("conv-small", "conv-large", "mlp-small")
IDS = ("0", "1", "2")


def settings(method, rounds=2, ids=IDS, **others):
    """An experiment on three clients, or on the first of them, with few digits, every client's weights its own."""
    return {
        "name": "three",
        "models": {"pool": dict(zip(ids, MODELS, strict=False)),
                   "rep_dim": 16, "init": "per_client"},
        "method": method,
        "training": {"rounds": rounds, "batch_size": 16, "optimizer": {"lr": 0.05}},
        "engine": {"device": "cpu", "workers": 1, "deadline": 60, "patience": 5},
        "evaluate": {"when": ["after_aggregation"]},
        "public": {"data": "digits", "samples": 60},
    } | others  # fmt: skip


def simulated(method, rounds=2, ids=IDS, **others):
    """The experiment with its data and split: what `potluck run` takes."""
    cut = {"kind": "dirichlet", "clients": len(ids), "alpha": 1.0, "validation": 0.1, "test": 0.75}
    return Experiment.make(data="digits", partition=cut, **settings(method, rounds, ids, **others))


def federated(method, rounds=2, ids=IDS, **others):
    """The same for `potluck serve`."""
    return Experiment.make(partition={"sites": ids, "classes": 10}, **settings(method, rounds, ids, **others))


@cache
def dealt(ids=IDS):
    """The samples of all sites, and who has which."""
    experiment = simulated("local", ids=ids)
    data = experiment.load_data()
    return data, experiment.make_split(data)


def part(client, ids=IDS):
    """What a site's `load` gives: the rows the simulation's split deals to this client."""
    data, split = dealt(ids)
    rows = split[client]
    parts = {name: (data.x[getattr(rows, name)], data.y[getattr(rows, name)])
             for name in ("train", "validation", "test")}  # fmt: skip
    return parts | {"mean": data.mean, "std": data.std, "public": data}


def model(client, task, rep_dim):
    """What a site's `build` gives."""
    return build(MODELS[IDS.index(client)], task, rep_dim)


def loader(client):
    return partial(part, client)


def builder(client):
    return partial(model, client)


def spring(folder, module, inputs):
    """Let a training step of this process die, or wait, while a test has put a file there; evaluations wait too."""
    if module.training and (folder / "die").exists():
        (folder / "die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    trap = folder / ("hold" if module.training else "hold-evaluation")
    while trap.exists():
        (folder / "held").touch()
        time.sleep(0.05)


def trapped(client, task, rep_dim, folder):
    """The site's model with a trap in it; the numbers are the same."""
    found = model(client, task, rep_dim)
    found.fc.register_forward_pre_hook(partial(spring, Path(folder)))
    return found


def write_site(folder, client, tampered=""):
    """The site's own file, in a folder of its own that also holds its traps."""
    folder.mkdir(parents=True, exist_ok=True)
    home = str(Path(__file__).parent)
    text = (f"import sys\nsys.path.insert(0, {home!r})\nimport sites\n"
            f"def build(task, rep_dim):\n    return sites.trapped({client!r}, task, rep_dim, {str(folder)!r})\n"
            f"def load():\n    return sites.part({client!r})\n")  # fmt: skip
    path = folder / "site.py"
    path.write_text(text + tampered)
    return path


def write_experiment(path, experiment):
    path.write_text(experiment.to_yaml())
    return path


def log(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


class Absent(SerialEngine):
    """The serial engine, with clients that are away in some rounds."""

    away: frozenset = frozenset()

    def run(self, requests):
        there = iter(super().run([one for one in requests if (one.client, one.stamp.round) not in self.away]))
        return [
            Failure(one.client, "away") if (one.client, one.stamp.round) in self.away else next(there)
            for one in requests
        ]


def serial(method, folder, away=(), **others):
    """The metrics of a simulation."""
    experiment = simulated(method, **others)
    federation, home = experiment.build(), RunFolder.create(folder, exact=True)
    engine = Absent(federation.clients)
    engine.away = frozenset(away)
    write_start(home, experiment, federation)
    Run(experiment, home, federation, engine=engine).play()
    return log(folder)
