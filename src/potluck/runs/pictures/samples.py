"""Which clients and samples a picture of models is of. Data are loaded again, and must be those of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from potluck.core.card import ClientId
from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.data import Split
from potluck.data.client_splits import ClientSplits
from potluck.errors import ConfigError, DataError, RunError, nearest
from potluck.federation.groups import shared_test
from potluck.report.reading import reading
from potluck.runs.folder import RunFolder
from potluck.runs.pictures.asked import Asked, RunFiles
from potluck.runs.results.run_result import RunResult
from potluck.runs.resuming import Past

MOST = 2000  # samples: kernels have a number for every two


@dataclass(frozen=True)
class Samples:
    """Rows of the data set that some clients work on, as it holds them."""

    data: Dataset
    split: Split
    rows: npt.NDArray[np.int64]

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The class of every row."""
        return self.data.y[self.rows].numpy().astype(np.int64)


def data_of(run: RunFiles, group: int, given: Dataset | None) -> Dataset:
    """The data set of a group of clients: `given`, or loaded as the run did; other content is refused."""
    known = run.environment.get("data") or []
    data = given if given is not None else _loaded(run, group)
    if group < len(known) and data.fingerprint != known[group]:
        raise DataError(
            f"the data {data.name!r} are not those {run.folder} was trained on: samples or labels differ; give the "
            "same data"
        )
    return data


def _loaded(run: RunFiles, group: int) -> Dataset:
    past = Past.read(RunFolder(run.folder))
    if not past.about["portable"]:
        raise RunError(
            f"{run.folder} was run from Python with models or data of its own, so a picture of its features needs "
            "the data: potluck.plot(…, data=dataset)"
        )
    data = past.experiment(remedy="give the data yourself: potluck.plot(…, data=dataset)").load_data()
    return data if isinstance(data, Dataset) else data[group]


def common_samples(
    run: RunFiles, result: RunResult, clients: Sequence[ClientId], asked: Asked, most: int
) -> Samples:
    """Samples that all clients are shown: some of the test part, or of the clients' own test rows."""
    group = _group(result, clients)
    data, split = data_of(run, group, asked.options.data), split_of(run)
    own = ClientSplits.of(split[client] for client in clients)
    with reading(run.folder / "split.json"):
        rows = shared_test(data, own)
    if asked.options.classes is not None:
        rows = rows[np.isin(data.y[rows].numpy(), _numbers(asked.options.classes, data.class_names))]
    if len(rows) < 2:
        raise RunError(
            f"the clients of {run.folder} have too few such test samples for a comparison; run it with more "
            "(partition.test)"
        )
    wanted = asked.options.samples or most
    if wanted > MOST:
        raise ConfigError(f"samples: give at most {MOST:,}, not {wanted:,}")
    chosen = Rng(0).child("picture", "samples").numpy().permutation(len(rows))[:wanted]
    return Samples(data, split, np.sort(rows[chosen]))


def _numbers(classes: Sequence[str], names: Sequence[str]) -> list[int]:
    """The numbers of classes, which may be given by name."""
    known = {name: place for place, name in enumerate(names)} | {
        str(place): place for place in range(len(names))
    }
    unknown = [word for word in classes if word not in known]
    if unknown:
        raise ConfigError(f"classes: there is no class {unknown[0]!r}; {nearest(unknown[0], names)}")
    return [known[word] for word in classes]


def split_of(run: RunFiles) -> Split:
    """Who has which rows."""
    path = run.folder / "split.json"
    try:
        return Split.load(path)
    except DataError as error:
        raise RunError(f"{path} is damaged; {RunFolder(run.folder).remedy}") from error


def _group(result: RunResult, clients: Sequence[ClientId]) -> int:
    """The group of all these clients; groups have their own data, and models are compared on the same."""
    population = result.clients.models.federation.population
    groups = {population[client].group for client in clients}
    if len(groups) > 1:
        raise ConfigError(
            f"clients {', '.join(clients)} work on different data sets, and models are compared on the same "
            "samples; name clients of one group"
        )
    return groups.pop()


def chosen_clients(result: RunResult, asked: Asked, most: int, least: int = 1) -> list[ClientId]:
    """The clients of a picture: those named, or of the first group one of every architecture, then others."""
    found, models = result.clients, result.clients.models
    if models.kept_round is None:
        raise RunError(
            f"{result.folder} has no trained models: {models.why_none}; run it again with keep: last for "
            f"{asked.kind}"
        )
    kept = [client for client in found if client in models.about["files"]]
    if asked.options.clients is not None:
        names = [found[client].id for client in asked.options.clients]
        absent = [name for name in names if name not in kept]
        if absent:
            raise RunError(
                f"no model of client {absent[0]} is kept in {result.folder}; {nearest(absent[0], kept)}"
            )
    else:
        names = _of_first_group(result, kept)[:most]
    if len(names) < least:
        raise ConfigError(
            f"{asked.kind} sets clients side by side, and {result.folder} has {len(names)}; give a run with at "
            f"least {least} clients of one data set"
        )
    return names


def _of_first_group(result: RunResult, kept: Sequence[ClientId]) -> list[ClientId]:
    """Clients of the first group: one of every architecture first, in client order otherwise."""
    population = result.clients.models.federation.population
    own = [client for client in kept if population[client].group == population[kept[0]].group]
    first = {population[client].architecture: client for client in reversed(own)}
    return sorted(own, key=lambda client: first[population[client].architecture] != client)


def client_names(result: RunResult, clients: Sequence[ClientId]) -> list[str]:
    """Clients with their models: `0 mlp-small`."""
    population = result.clients.models.federation.population
    return [f"{client} {population.label(client)}" for client in clients]
