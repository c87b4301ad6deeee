"""Pictures of a finished run's models: CKA by stage, maps of features, confusion matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

from potluck.core.card import ClientId
from potluck.core.rng import Rng
from potluck.errors import ConfigError, RunError
from potluck.report.format import count, counted, moment
from potluck.report.log import read_mapping
from potluck.report.pictures.confusion import confusion_picture
from potluck.report.pictures.representations import FeatureMap, cka_picture, map_picture
from potluck.report.predictions import FOLDER
from potluck.runs.pictures.asked import Asked, RunFiles
from potluck.runs.pictures.samples import (
    Samples,
    chosen_clients,
    client_names,
    common_samples,
    data_of,
    split_of,
)
from potluck.runs.pictures.stages import features_of, stage_similarity
from potluck.runs.predictions import confusion as kept_confusion
from potluck.runs.results.run_result import RunResult

MOST_CLIENTS = {"cka": 10, "tsne": 4, "pca": 4, "confusion": 12}  # unless clients are named
MOST_SAMPLES = {"cka": 500, "tsne": 200, "pca": 200}  # unless samples are asked for
MOST_POINTS = 5000  # of a map; t-SNE of more takes minutes
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
IntoPlane = Callable[[Floats], Floats]


def cka(asked: Asked) -> Figure:
    """How alike clients represent the same samples, stage by stage."""
    run = asked.only
    result = run.result(asked.kind)
    clients = chosen_clients(result, asked, MOST_CLIENTS["cka"], least=2)
    samples = common_samples(run, result, clients, asked, MOST_SAMPLES["cka"])
    stages = stage_similarity(result, clients, samples, asked)
    if not stages:
        raise ConfigError("these models have no stage in common; name some that all have: --stages features")
    note = (
        f"Linear CKA on {_on(samples)}, {_when(result, asked)}. The mean is over pairs of different clients."
    )
    return cka_picture(stages, client_names(result, clients), f"{note}{_left_out(result, clients, asked)}")


def tsne(asked: Asked) -> Figure:
    """Features in the plane by t-SNE."""
    return _map(asked, "t-SNE", _by_tsne)


def pca(asked: Asked) -> Figure:
    """Features in the plane of their two largest principal components."""
    return _map(asked, "PCA", _by_pca)


def _map(asked: Asked, how: str, into_plane: IntoPlane) -> Figure:
    run = asked.only
    result = run.result(asked.kind)
    clients = chosen_clients(result, asked, MOST_CLIENTS[asked.kind])
    task = result.clients[clients[0]].task
    if not task.single_label:
        raise RunError(
            f"{asked.kind} colours samples by their class, and a sample of {run.folder} has none ({task.kind}); "
            "draw cka"
        )
    samples = common_samples(run, result, clients, asked, MOST_SAMPLES[asked.kind])
    _refuse_many(len(clients) * len(samples.rows))
    features = features_of(result, clients, samples, asked)
    _refuse_unmeasured(run, dict(zip(clients, features, strict=True)))
    maps = _maps(features, samples.labels, into_plane)
    names = result.clients[clients[0]].class_names
    names = names if len(names) == task.classes else tuple(map(str, range(task.classes)))
    apart = " Widths differ, so every client has a map of its own." if len(maps) > 1 else ""
    note = (
        f"{_what(asked)} of {_on(samples)}, {_when(result, asked)}.{apart}{_left_out(result, clients, asked)}"
    )
    return map_picture(maps, client_names(result, clients), names, how, note)


def _what(asked: Asked) -> str:
    return "Features" if not asked.options.stages else f"Stage {asked.options.stages[0]}"


def _refuse_many(points: int) -> None:
    if points > MOST_POINTS:
        raise ConfigError(
            f"a map may have {MOST_POINTS:,} points, and these are {points:,}; ask for fewer samples or clients"
        )


def _refuse_unmeasured(run: RunFiles, features: Mapping[ClientId, Floats]) -> None:
    """Refuse features that are no numbers: they have no place in a plane."""
    unfit = [client for client, own in features.items() if not np.isfinite(own).all()]
    if unfit:
        raise RunError(
            f"{run.folder}: the features of client {unfit[0]} are not all finite numbers, as after training that "
            "diverged; name clients whose training did not (--clients)"
        )


def _maps(features: Sequence[Floats], labels: Integers, into_plane: IntoPlane) -> list[FeatureMap]:
    """One map of all clients where their features have one width, else one for each."""
    places = [np.full(len(labels), place) for place in range(len(features))]
    if len({one.shape[1] for one in features}) == 1:
        points = into_plane(np.concatenate(features))
        every = np.tile(labels, len(features))
        return [FeatureMap(points[:, 0], points[:, 1], np.concatenate(places), every)]
    planes = [into_plane(one) for one in features]
    return [
        FeatureMap(points[:, 0], points[:, 1], place, labels)
        for points, place in zip(planes, places, strict=True)
    ]


def _by_tsne(features: Floats) -> Floats:
    seed = Rng(0).child("picture", "tsne").integer % 2**32
    near = min(30.0, max(1.0, (len(features) - 1) / 3))
    rank = min(50, *features.shape)
    if features.shape[1] > rank:
        features = PCA(rank, random_state=seed).fit_transform(features)
    init = "pca" if min(features.shape) >= 2 else "random"
    found: Floats = TSNE(2, perplexity=near, init=init, random_state=seed).fit_transform(features)
    return found


def _by_pca(features: Floats) -> Floats:
    known = min(2, *features.shape)
    found: Floats = PCA(known, random_state=0).fit_transform(features)
    return found if known == 2 else np.column_stack([found, np.zeros(len(found))])


# --- confusion ------------------------------------------------------------------------------------------


def confusion(asked: Asked) -> Figure:
    """Confusion matrices from kept predictions, or else from kept models and the clients' test samples."""
    run = asked.only
    options = asked.options
    if (run.folder / FOLDER).is_dir():
        found = kept_confusion(run.folder, moment=options.moment, mode=options.mode)
        tables = {client: table.to_numpy(np.int64) for client, table in found.items()}
        names = _class_names(run, len(next(iter(tables.values()))))
        source = "kept predictions"
        chosen = _named(tables, options.clients)
    else:
        chosen, names = _from_models(run, asked)
        tables, source = chosen, "kept models"
    shown = dict(list(chosen.items())[: MOST_CLIENTS["confusion"]])
    more = (
        ""
        if len(shown) == len(tables)
        else f" Shown: {len(shown)} of {len(tables)} clients; together are those shown."
    )
    note = f"Test samples, from {source}. Colour: share of the true class.{more}"
    return confusion_picture(shown, names, note)


def _named(tables: Mapping[str, Integers], clients: Sequence[str] | None) -> dict[str, Integers]:
    if clients is None:
        return dict(tables)
    absent = [client for client in clients if client not in tables]
    if absent:
        raise ConfigError(
            f"there are no predictions of client {absent[0]}; known: {', '.join(list(tables)[:20])}"
        )
    return {client: tables[client] for client in clients}


def _class_names(run: RunFiles, classes: int) -> list[str]:
    split = read_mapping(run.folder / "split.json") or {}
    names = [str(name) for name in split.get("class_names") or ()]
    return names if len(names) == classes else [str(place) for place in range(classes)]


def _from_models(run: RunFiles, asked: Asked) -> tuple[dict[str, Integers], list[str]]:
    result = run.result(asked.kind)
    if result.clients.models.kept_round is None:
        raise RunError(
            f"{run.folder} has kept neither predictions nor models; run it with evaluate: {{predictions: true}} or "
            "without keep: none"
        )
    clients = chosen_clients(result, asked, MOST_CLIENTS["confusion"])
    population = result.clients.models.federation.population
    task = result.clients[clients[0]].task
    if not task.single_label:
        raise RunError(
            f"only a task with one class per sample has a confusion matrix, not {task.kind}; draw clients"
        )
    data, split = data_of(run, population[clients[0]].group, asked.options.data), split_of(run)
    tables = {
        client: _matrix(result, client, Samples(data, split, split[client].test), asked) for client in clients
    }
    return tables, list(result.clients[clients[0]].class_names)


def _matrix(result: RunResult, client: ClientId, own: Samples, asked: Asked) -> Integers:
    classes = result.clients[client].task.classes
    table = np.zeros((classes, classes), np.int64)
    if len(own.rows):
        scores = result.clients[client].predict(
            own.data.x[own.rows], moment=asked.options.moment, mode=asked.options.mode
        )
        np.add.at(table, (own.labels, scores.argmax(1).numpy()), 1)
    return table


# --- words ----------------------------------------------------------------------------------------------


def _on(samples: Samples) -> str:
    return f"{counted(len(samples.rows), 'common test sample')} of {samples.data.name}"


def _when(result: RunResult, asked: Asked) -> str:
    when = asked.options.moment or result.clients[next(iter(result.clients))].moment
    return f"models of round {result.clients.models.round}, {moment(when)}"


def _left_out(result: RunResult, clients: Sequence[ClientId], asked: Asked) -> str:
    if asked.options.clients is not None or len(clients) == len(result.clients):
        return ""
    return f" Shown: {len(clients)} of {count(len(result.clients))} clients."
