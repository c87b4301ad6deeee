"""What clients predicted, sample by sample, where the settings keep it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from potluck.core.card import ClientId
from potluck.core.task import Task
from potluck.engine.evaluation.settings import SPLITS
from potluck.engine.protocol import Answer
from potluck.federation.federation import Federation


@dataclass(frozen=True)
class Predictions:
    """What a client predicted in one mode, sample by sample of a split; `rows` number those of its data set."""

    client: ClientId
    mode: str
    split: str
    task: Task
    rows: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    own_rows: np.ndarray | None = None  # their numbers in the client's own file, where these differ


def read_predictions(
    answers: Sequence[Answer], modes: Sequence[str], on: str, federation: Federation
) -> Iterator[Predictions]:
    """What clients predicted, as far as it was asked for; the reported mode first."""
    for answer, mode, split in product(answers, modes, SPLITS):
        names = [f"{mode}/{split}/{what}" for what in ("labels", "scores")]
        if names[0] in answer.up:
            labels, scores = (answer.up[name].cpu().numpy() for name in names)
            task = federation.population.task_of(answer.client)
            rows = _row_numbers(federation, answer.client, split, on)
            own = _own_rows(federation, answer.client, rows)
            yield Predictions(answer.client, mode, split, task, rows, labels, scores, own)


def _row_numbers(federation: Federation, client: ClientId, split: str, on: str) -> np.ndarray:
    if split == "test" and on == "global":
        return federation.clients.shared_test(client)
    rows: np.ndarray = getattr(federation.split[client], split)
    return rows


def _own_rows(federation: Federation, client: ClientId, rows: np.ndarray) -> np.ndarray | None:
    own = federation.clients.groups[federation.population[client].group].data.own_rows
    return None if own is None else own.numpy()[rows]
