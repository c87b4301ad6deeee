"""The outline of a federation: all that is needed to make its clients again without their data, as plain values.

Models, functions and methods of the user are named in it, never stored: who opens a run brings them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from potluck.data import Split
from potluck.data.client_splits import PARTS, ClientSplits
from potluck.data.own.encoding import Encoding
from potluck.data.prepare import Preparation
from potluck.data.split import view_of
from potluck.errors import RunError
from potluck.experiment.plain import plain
from potluck.federation.federation import Federation, assemble
from potluck.federation.groups import GroupData
from potluck.federation.private_models import PrivateModels
from potluck.models import Entry, ModelPool
from potluck.models.build import source_name, unpack

Outline = Mapping[str, Any]
LISTED = 10_000  # clients that an outline has in full
UNLISTED = "\0"  # begins the ids of stand-ins, which no client's id does

# --- writing --------------------------------------------------------------------------------------------


def lists_some(federation: Federation) -> bool:
    """Whether an outline lists only some of the clients."""
    return len(federation.population) > LISTED


def outline_of(federation: Federation, kept: Iterable[ClientId] = ()) -> dict[str, Any]:
    """The outline of a federation whose clients are all here.

    Of more than `LISTED` clients it has those whose models are kept, and one of each kind. `places` says then where
    they stand among all, `total` how many there are: some methods deal out options in client order.
    """
    population, models = federation.population, federation.clients.models
    seeds, places = federation.seeds, federation.split.clients.places
    few = not lists_some(federation)
    listed = population.ids if few else sorted({*kept, *population.representatives}, key=places.__getitem__)
    held_out = population.held_out if few else population.held_out.intersection(listed)
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
        "held_out": sorted(held_out),
        "clients": {client: _client(federation, client) for client in listed},
        **({} if few else {"places": [places[client] for client in listed], "total": len(population)}),
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
    seeds, clients, ids = Seeds(**outline["seeds"]), outline["clients"], _everyone(outline)
    groups = [_no_samples(group) for group in outline["groups"]]
    models = PrivateModels(pool, ids, seeds, outline["independent_init"])
    federation = assemble(
        method,
        ids,
        _facts(outline, groups, models),
        models,
        groups,
        Split.of(_no_rows(ids, clients), outline["held_out"]),
        seeds=seeds,
        representatives=list(clients),
        training=ClientTraining(),
        publics=_publics(outline, groups),
        precision=outline["precision"],
    )
    with seeds.tree("init").child("check").as_default():
        method.setup(federation.population)
    return federation


def _everyone(outline: Outline) -> list[ClientId]:
    """The ids of all clients in order; those that the outline does not list have a stand-in for theirs."""
    if "places" not in outline:
        return list(outline["clients"])
    listed = dict(zip(outline["places"], outline["clients"], strict=True))
    return [listed.get(place, f"{UNLISTED}{place}") for place in range(outline["total"])]


def _like(outline: Outline, client: ClientId) -> Mapping[str, Any]:
    """What is known of a client; of a stand-in, what is known of the first client of its group."""
    listed = outline["clients"]
    if client in listed:
        found: Mapping[str, Any] = listed[client]
        return found
    if not client.startswith(UNLISTED):
        raise RunError(
            f"client {client} was never measured, so nothing is kept of it (evaluate.who: sampled); "
            "measure all clients with evaluate.who=all"
        )
    ends = itertools.accumulate(group["clients"] for group in outline["groups"])
    group = next(number for number, end in enumerate(ends) if int(client.removeprefix(UNLISTED)) < end)
    return next(one for one in listed.values() if one["group"] == group)


def _no_rows(ids: Sequence[ClientId], listed: Mapping[ClientId, Any]) -> ClientSplits:
    """Clients without rows that still see samples in their own way: standardised, or with a feature shift."""
    views = {place: view_of(listed[client]["view"]) for place, client in enumerate(ids) if client in listed}
    changes = {place: view for place, view in views.items() if view}
    nothing = np.zeros((len(ids), len(PARTS)), dtype=np.int64)
    return ClientSplits(tuple(ids), np.empty(0, dtype=np.int64), nothing, changes)


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
        own = _like(outline, client)
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
