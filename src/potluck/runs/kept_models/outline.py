"""The outline of a federation: all that is needed to make its clients again without their data, as plain values.

Models, functions and methods of the user are named in it, never stored: who opens a run brings them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.dataset import Dataset
from potluck.core.method import Method
from potluck.core.population import ClientFacts, Population
from potluck.core.public import Public
from potluck.core.rng import Rng, Seeds
from potluck.core.settings import ClientTraining
from potluck.core.streams import Source
from potluck.core.task import Task
from potluck.data import ClientSplit, Split
from potluck.data.own.encoding import Encoding
from potluck.data.prepare import Preparation
from potluck.data.split import view_of
from potluck.experiment.plain import plain
from potluck.federation.federation import Federation, assemble
from potluck.federation.groups import GroupData
from potluck.federation.private_models import PrivateModels
from potluck.models import Entry, ModelPool
from potluck.models.build import source_name, unpack

Outline = Mapping[str, Any]

# --- writing --------------------------------------------------------------------------------------------


def outline_of(federation: Federation) -> dict[str, Any]:
    """The outline of a federation whose clients are all here."""
    population, models = federation.population, federation.clients.models
    seeds = federation.seeds
    return {
        "method": federation.method.config.model_dump(mode="json", fallback=plain),
        "precision": federation.precision,
        "seeds": {name: getattr(seeds, name) for name in ("split", "init", "cohort", "training")},
        "independent_init": models.independent_init,
        "pool": {
            "rep_dim": models.pool.rep_dim,
            "adapter": models.pool.adapter,
            "architectures": {key: _named(entry) for key, entry in models.pool.entries.items()},
        },
        "groups": [_group(group) for group in federation.clients.groups],
        "public": _public(population),
        "held_out": sorted(population.held_out),
        "clients": {client: _client(federation, client) for client in population.ids},
    }


def _named(entry: Entry) -> dict[str, Any]:
    """A model's entry: its name in the registry, or in angle brackets that of a class, function or module."""
    source, options = unpack(entry)
    name = source if isinstance(source, str) else f"<{source_name(source)}>"
    return {"source": name, "options": plain(options)}


def _group(group: GroupData) -> dict[str, Any]:
    data = group.data
    return {
        "name": data.name,
        "clients": group.clients,
        "task": data.task.to_json(),
        "class_names": list(data.class_names),
        "stored": {"type": str(data.x.dtype).removeprefix("torch."), "shape": list(data.x.shape[1:])},
        "mean": list(data.mean),
        "std": list(data.std),
    } | ({"encoding": data.encoding.to_json()} if data.encoding is not None else {})


def _public(population: Population) -> dict[str, Any] | None:
    """How many public samples there are, and which rows each group lacks in its modality."""
    view = population.public()
    if view is None:
        return None
    views = [population.public(client) for client in population.first_clients]
    lacking = [[] if one is None else (~one.mask).nonzero().flatten().tolist() for one in views]
    return {"name": view.name, "samples": len(view), "lacking": lacking}


def _client(federation: Federation, client: ClientId) -> dict[str, Any]:
    population = federation.population
    facts = population[client]
    return {
        "architecture": facts.architecture,
        "model": facts.label(),
        "group": facts.group,
        "samples": dict(facts.samples),
        "classes_held": list(population.classes_held(client)),
        "view": federation.split[client].view,
    }


# --- reading --------------------------------------------------------------------------------------------


def without_data(outline: Outline, method: Method, pool: ModelPool) -> Federation:
    """The federation of an outline: its clients can be built and can predict, but have no samples."""
    seeds, clients = Seeds(**outline["seeds"]), outline["clients"]
    groups = [_no_samples(group) for group in outline["groups"]]
    models = PrivateModels(pool, list(clients), seeds, outline["independent_init"])
    federation = assemble(
        method,
        list(clients),
        _facts(outline, groups, models),
        models,
        groups,
        Split.of([_no_rows(client, facts["view"]) for client, facts in clients.items()], outline["held_out"]),
        seeds=seeds,
        training=ClientTraining(),
        publics=_publics(outline, groups),
        precision=outline["precision"],
    )
    with seeds.tree("init").child("check").as_default():
        method.setup(federation.population)
    return federation


def _no_rows(client: ClientId, view: Mapping[str, Any]) -> ClientSplit:
    """A client without rows that still sees samples in its own way: standardised, or with a feature shift."""
    nothing = np.empty(0, dtype=np.int64)
    return ClientSplit(client, nothing, nothing, nothing, **view_of(view))


def _no_samples(group: Mapping[str, Any]) -> GroupData:
    """The data set of a group with its task and preparation, but no rows."""
    stored = group["stored"]
    x = torch.empty(0, *stored["shape"], dtype=getattr(torch, stored["type"]))
    mean, std = tuple(group["mean"]), tuple(group["std"])
    task, names = Task.from_json(group["task"]), tuple(group["class_names"])
    table = Encoding.from_json(group["encoding"]) if "encoding" in group else None
    data = Dataset(
        group["name"], task, x, torch.empty(0, dtype=torch.long), 0, names, mean, std, encoding=table
    )
    return GroupData(data, group["clients"], Preparation(mean, std).prepare, augmented=False)


def _facts(
    outline: Outline, groups: Sequence[GroupData], models: PrivateModels
) -> Callable[[ClientId], ClientFacts]:
    def facts(client: ClientId) -> ClientFacts:
        own = outline["clients"][client]
        data = groups[own["group"]].data
        return ClientFacts(
            task=data.task,
            class_names=data.class_names,
            samples=own["samples"],
            architecture=own["architecture"],
            label=lambda: str(own["model"]),
            build_model=lambda: models.build(client, data.task),
            head=lambda: models.head(client, data.task),
            group=own["group"],
            known={"classes_held": tuple(own["classes_held"])}.get,
        )

    return facts


def _publics(outline: Outline, groups: Sequence[GroupData]) -> Callable[[torch.device], list[Public]]:
    """Public data of the right size and gaps; the samples themselves are not needed to predict."""
    about = outline["public"]
    each = [] if about is None else zip(groups, about["lacking"], strict=True)
    views = [_public_view(about, *one) for one in each]
    return lambda device: views


def _public_view(about: Mapping[str, Any], group: GroupData, lacking: Sequence[int]) -> Public:
    mask = torch.ones(about["samples"], dtype=torch.bool)
    mask[list(lacking)] = False
    empty: Tensor = torch.empty(0, dtype=torch.long)
    data = Dataset(about["name"], group.data.task, empty, empty, 0, ())
    return Public(data, np.arange(about["samples"]), Source(empty, empty), mask, Rng(0))
