"""A long federation takes no more memory, files or threads than a short one; only its logs grow."""

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import sites
import torch
from links import FEDMRL, Link, serve

from potluck.deploy.engine import FlowerEngine
from potluck.engine.settings import EngineSettings
from potluck.live.status_file import FILES
from potluck.runs.folder import LOGS
from potluck.runs.observers import Observer

WARM = 8  # rounds until everything is there that is kept: three checkpoints, three rounds at a site
PER_ROUND = 16_000  # bytes of resident memory that a round may leave behind: less than half of one model


def few_samples(client):
    """So few that rounds cost what the federation costs, not the training."""
    whole = sites.part(client)
    few = {name: tuple(values[:4] for values in whole[name]) for name in ("train", "validation", "test")}
    return few | {name: whole[name] for name in ("mean", "std")}


class Few(Link):
    """Sites with few samples; no order is remembered, and one of them comes back as a new node now and then."""

    def __init__(self, home):
        super().__init__(home, model="mlp-small")
        self.exchanges = 0
        for site in self.sites.values():
            few = few_samples(site.client)
            site.load = lambda few=few: few

    def exchange(self, letters, timeout, most):
        self.exchanges += 1
        answers = [self.sites[node].answer(data) for node, data in letters]
        if self.exchanges % 20 == 0:
            self.sites[1000 + self.exchanges] = self.sites.pop(max(self.sites))
        return answers


@dataclass(frozen=True)
class Sample:
    """What a process and its folders hold at one moment."""

    memory: int  # resident, in bytes
    tensors: int
    files: int
    threads: int
    run: int  # bytes in the run's folder, without logs and the status, which has the last notices
    home: int  # bytes in a site's home folder
    names: int  # files in both


def size(folder, but=()):
    found = [path for path in folder.rglob("*") if path.is_file() and path.name not in but]
    return sum(path.stat().st_size for path in found), len(found)


def sampled(run, home):
    gc.collect()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    (in_run, files), (in_home, further) = size(run, (*LOGS, FILES["server"])), size(home)
    handles = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return Sample(
        pages * os.sysconf("SC_PAGE_SIZE"),
        tensors,
        handles,
        threading.active_count(),
        in_run,
        in_home,
        files + further,
    )


class Sampling(Observer):
    """Takes a sample after every so many rounds."""

    def __init__(self, run, home, every):
        self.run, self.home, self.every, self.samples = run, home, every, {}

    def round(self, end):
        if end.round >= WARM and end.round % self.every == 0:
            self.samples[end.round] = sampled(self.run, self.home)


def long_run(tmp_path, rounds, every):
    """Play rounds; the samples, and the bytes of the logs."""
    watcher = Sampling(tmp_path / "run", tmp_path / "0", every)
    training = {"rounds": rounds, "batch_size": 4, "optimizer": {"lr": 0.01}}
    serve(Few(tmp_path), tmp_path / "run", sites.federated(FEDMRL, training=training), watcher)
    logs = {
        name: (tmp_path / "run" / name).stat().st_size for name in LOGS if (tmp_path / "run" / name).exists()
    }
    return list(watcher.samples.values()), logs


def check_flat(samples):
    first, last = samples[0], samples[-1]
    assert last.tensors <= first.tensors
    assert last.files <= first.files
    assert last.threads <= first.threads
    assert last.names <= first.names
    for name in ("run", "home"):
        sizes = [getattr(one, name) for one in samples]
        assert max(sizes) - sizes[0] < 1000, f"{name}: {sizes}"  # numbers become longer


@pytest.mark.faults  # some ten seconds, a minute on a busy machine
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks at /proc")
def test_a_federation_holds_as_much_after_many_rounds_as_after_few(tmp_path):
    samples, logs = long_run(tmp_path, rounds=40, every=8)
    check_flat(samples)
    assert logs.keys() == {"metrics.jsonl", "ledger.jsonl", "timing.jsonl"}


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks at /proc")
def test_memory_and_disk_are_flat_over_five_hundred_rounds(tmp_path):
    rounds, every = 500, 20
    samples, logs = long_run(tmp_path, rounds, every)
    check_flat(samples)
    memory = [one.memory for one in samples]
    settled, later = (
        min(memory[4:8]),
        min(memory[-4:]),
    )  # of several, as free memory is not given back at once
    assert later - settled < PER_ROUND * rounds, [f"{one:,}" for one in memory]
    grown = {name: round(length / rounds) for name, length in logs.items()}
    print(f"resident memory {settled:,} → {later:,} bytes; {samples[-1]}; log bytes per round: {grown}")


class Passing:
    """Nodes that come, say nothing, and are gone at the next look."""

    def __init__(self):
        self.looks = 0

    def nodes(self):
        self.looks += 1
        return [self.looks]

    def keys(self):
        return {}

    def took(self):
        return []

    def exchange(self, letters, timeout, most):
        return ["no answer came"] * len(letters)


def test_a_server_forgets_nodes_that_are_gone():
    engine = FlowerEngine(Passing(), sites.IDS, EngineSettings(device="cpu"), (), {})
    for _ in range(300):
        engine.look()
    assert len(engine._tries) + len(engine._met) <= 2
    assert len(engine._refusals) <= 100
