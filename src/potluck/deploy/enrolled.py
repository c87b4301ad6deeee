"""The server's view of its clients in a real federation: their cards."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from potluck.core.card import ClientId
from potluck.core.dataset import Dataset
from potluck.core.method import Method, check_tasks
from potluck.core.own_metrics import own_metrics
from potluck.core.population import ClientFacts
from potluck.core.public import check_same_samples
from potluck.core.task import Task
from potluck.data import DataConfig, Split
from potluck.data.prepare import AugmentConfig, Preparation
from potluck.deploy.wire import Enrolment
from potluck.errors import ConfigError, Misfits
from potluck.experiment.blocks import Sites
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation, PublicSamples, assemble, public_views
from potluck.federation.groups import GroupData
from potluck.federation.private_models import PrivateModels
from potluck.methods.registry import find_method

MOST_NUMBERS = 1 << 22  # in a sample of a client
LEAST_PUBLIC = 1 << 28  # bytes of public samples that any server may hold
TEXTS = ("text-classification", "retrieval")
VECTOR = Task("classification", 2, (1,))  # nothing of images or texts can be read as this


def enrolled_federation(experiment: Experiment, enrolments: Mapping[ClientId, Enrolment]) -> Federation:
    """The server's federation of the clients that have enrolled: facts come from their cards.

    Where a card is silent they come from the models that the experiment names.
    """
    sites = sites_of(experiment)
    enrolled = {client: enrolments[client] for client in sites.sites if client in enrolments}
    pool, seeds = experiment.pool(), experiment.all_seeds()
    pool.cover(sites.sites)
    method = find_method(experiment.method.name)(experiment.method, pool)
    any_task = takes_any_task(type(method))
    if not any_task:
        _check_common_task(enrolled, sites.classes)
    check_tasks(method, {client: enrolment.card.task for client, enrolment in enrolled.items()})
    public = experiment.public_samples(method)
    _check_sizes(enrolled, 0 if public is None else len(public[1]))
    groups = [GroupData(_no_samples(one.card.task), 1) for one in enrolled.values()]
    groups = groups if any_task else [replace(groups[0], clients=len(enrolled))]
    models = PrivateModels(pool, sites.sites, seeds, experiment.models.init == "per_client")
    _check_widths(enrolled, models, method)
    federation = assemble(
        method,
        tuple(enrolled),
        _facts(enrolled, models, any_task),
        models,
        groups,
        Split.of_sizes({client: one.samples for client, one in enrolled.items()}),
        seeds=seeds,
        training=experiment.training.for_clients(),
        overrides=experiment.training.per_client,
        participation=experiment.training.participation,
        publics=public_views(public, _viewed(groups, public, _augmentation(experiment)), seeds),
        device=experiment.engine.torch_device(),
        precision=experiment.engine.precision,
        metrics=own_metrics(
            experiment.metrics,
            {client: one.card.task for client, one in enrolled.items()},
            experiment.folder,
        ),
        others_unknown=True,
    )
    seen = federation.population.public()
    if seen is not None:
        check_same_samples(seen, federation.population.cards)
    return federation.prepared()


def _facts(
    enrolled: Mapping[ClientId, Enrolment], models: PrivateModels, any_task: bool
) -> Callable[[ClientId], ClientFacts]:
    """A client's card is what is known of it. No card tells whether a body trains; the site looks itself."""
    places = {client: place if any_task else 0 for place, client in enumerate(enrolled)}

    def facts(client: ClientId) -> ClientFacts:
        card, samples = enrolled[client].card, enrolled[client].samples
        everything = range(card.task.classes)
        return ClientFacts(
            task=card.task,
            class_names=_numbered(card.task.classes),
            samples=samples,
            architecture=models.architecture(client),
            label=lambda: "its own model",
            build_model=lambda: models.build(client, card.task),
            head=lambda: models.head(client, card.task),
            group=places[client],
            known=({"trains_body": True, "classes_held": everything} | dict(card.extra)).get,
        )

    return facts


def _readable(group: GroupData) -> GroupData:
    """The server does not have the sites' vocabularies, so of public texts it knows only the ids."""
    return GroupData(_no_samples(VECTOR), 1) if group.data.task.kind in TEXTS else group


def _augmentation(experiment: Experiment) -> AugmentConfig:
    return experiment.data.augment if isinstance(experiment.data, DataConfig) else AugmentConfig()


def _viewed(
    groups: Sequence[GroupData], public: PublicSamples | None, augment: AugmentConfig
) -> list[GroupData]:
    """The groups as the server sees public samples for them.

    It holds the samples as the first one reads them. Of the others it needs to know only which samples they have,
    and no card makes it hold more than that.
    """
    first, *others = map(_readable, groups)
    first = first if public is None else _normalised(first, public[0], augment)
    return [first, *(_smallest(group, public) for group in others)]


def _normalised(group: GroupData, public: Dataset, augment: AugmentConfig) -> GroupData:
    """A group whose samples are prepared like the public ones: cards do not tell how a site normalises its own."""
    shape = group.data.task.image or group.data.task.input
    mean, std = (_for_channels(values, shape[0]) for values in (public.mean, public.std))
    return replace(
        group,
        data=replace(group.data, mean=mean, std=std),
        prepare=Preparation(mean, std, augment).prepare,
    )


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Numbers per channel; where samples have other channels than these are for, their mean for all of them."""
    return values if len(values) in (0, channels) else (sum(values) / len(values),)


def _smallest(group: GroupData, public: PublicSamples | None) -> GroupData:
    """A group with samples as small as can be that has the same public samples as this one."""
    shape = group.data.task.input
    if public is None or (len(shape) != 3 and public[0].x.shape[1:] == shape):
        return group
    return GroupData(_no_samples(Task("classification", 2, (1, 1, 1)) if len(shape) == 3 else VECTOR), 1)


def _check_sizes(enrolled: Mapping[ClientId, Enrolment], public: int) -> None:
    """Refuse cards by which the server would need much memory: for a sample, or for all the public ones."""
    for place, (client, one) in enumerate(enrolled.items()):
        task = one.card.task
        size, shape = math.prod(task.input), "×".join(map(str, task.input))
        if size > MOST_NUMBERS:
            raise ConfigError(
                f"client {client} has samples of {size:,} numbers ({shape}), and a server takes at most "
                f"{MOST_NUMBERS:,}; give it smaller samples"
            )
        if place == 0 and task.kind not in TEXTS and 4 * size * public > most_public():
            raise ConfigError(
                f"client {client} would have the server hold {public:,} public samples of {size:,} numbers "
                f"({shape}), which is more than {most_public():,} bytes; lower public.samples"
            )


def most_public() -> int:
    """The most bytes of public samples that a server holds: a quarter of its machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(LEAST_PUBLIC, memory // 4)


def sites_of(experiment: Experiment) -> Sites:
    """The clients that an experiment names."""
    if not isinstance(experiment.partition, Sites):
        raise ConfigError(
            "a federation needs to know its clients: write partition: {sites: [north, south], classes: 10}"
        )
    return experiment.partition


def takes_any_task(method: type[Method]) -> bool:
    """Whether each site may have a task of its own. Not where classes are matched by name: cards lack names."""
    return method.tasks == "any" and "classes_held" not in method.card_fields


def _no_samples(task: Task) -> Dataset:
    kind = torch.long if task.kind == "text-classification" else torch.float32
    nothing = torch.zeros(0, *task.input, dtype=kind), torch.zeros(0, dtype=torch.long)
    return Dataset("data of the sites", task, *nothing, 0, _numbered(task.classes))


@lru_cache(maxsize=8)
def _numbered(classes: int) -> tuple[str, ...]:
    """Classes without names, as cards tell none."""
    return tuple(map(str, range(classes)))


def _check_common_task(enrolled: Mapping[ClientId, Enrolment], classes: int | None) -> None:
    """Refuse clients with another task than most have; nothing is built for a card before that."""
    tasks = {client: enrolment.card.task for client, enrolment in enrolled.items()}
    first, task = next(iter(tasks.items()))
    wanted = classes or task.classes
    fitting = Counter(one for one in tasks.values() if one.classes == wanted).most_common(2)
    decided = len(fitting) == 1 or (len(fitting) == 2 and fitting[0][1] > fitting[1][1])
    if decided:
        task = fitting[0][0]
        first = next(client for client, other in tasks.items() if other == task)
    wrong = {
        client: f"client {client} has another task than client {first} and the experiment's {wanted} classes: "
        f"{other.to_json()}, {task.to_json()}"
        for client, other in tasks.items()
        if other != task or other.classes != wanted
    }
    if wrong and decided:
        raise Misfits(wrong)
    if wrong:
        raise ConfigError(next(iter(wrong.values())))


def _check_widths(enrolled: Mapping[ClientId, Enrolment], models: PrivateModels, method: Method) -> None:
    """Refuse cards with another width than the experiment gives their models."""
    wrong: dict[ClientId, str] = {}
    for client, one in enrolled.items():
        told, named = one.card.extra.get("width"), _named_width(models, client, one.card.task, method)
        if told is not None and named not in (None, told):
            wrong[client] = (
                f"{method.name}: client {client} has a representation of width {told:,}, and the experiment's "
                f"models give it {named:,}; build it with that width, or set models.rep_dim to one that all have"
            )
    if wrong:
        raise Misfits(wrong)


def _named_width(models: PrivateModels, client: ClientId, task: Task, method: Method) -> int | None:
    """The width of the server's own model where it has one; else the one that sites build their models with."""
    pool, key = models.pool, models.architecture(client)
    if method.server_needs == "head":
        return pool.width(key, task)
    return None if pool.sets_width(key) else pool.rep_dim
