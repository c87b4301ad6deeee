"""Keeping trained models: every client's state as it was measured, in the run folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.message import Message
from potluck.core.state import Moments
from potluck.engine.evaluation.examined import Examined
from potluck.engine.evaluation.settings import EvaluateSettings
from potluck.engine.multi_gpu import MultiGpuStore
from potluck.engine.rounds import Rounds
from potluck.engine.seats import KindSeats
from potluck.engine.store.client_store import ClientStore
from potluck.engine.store.transfers import size as state_size
from potluck.errors import ConfigError
from potluck.experiment.blocks import KeepSettings
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.report.format import size
from potluck.report.log import MOMENTS
from potluck.runs.folder import FORMAT, RunFolder
from potluck.runs.kept_models.files import (
    States,
    kept_rounds,
    remove_models,
    remove_unfinished,
    round_folder,
    stored_tensors,
    write_models,
)
from potluck.runs.kept_models.outline import lists_some, outline_of
from potluck.runs.observers.base import Observer, RoundEnd
from potluck.signals import held_back

FOLDER = "models"
Store = ClientStore | MultiGpuStore


class KeptModels(Observer):
    """Keeps the models of a run: those after its last round, or after the best one by validation.

    The models of a round are a folder that appears whole. Until a checkpoint includes a better round, the folder
    before it stays too: a run that is killed then goes on with the right one.
    """

    def __init__(
        self,
        folder: RunFolder,
        settings: KeepSettings,
        states: MeasuredStates,
        tell: Callable[[str], None],
        saved_round: Callable[[], int],
    ) -> None:
        """`tell` hears that nothing is kept; `saved_round` gives the round of the newest checkpoint."""
        self.home, self.settings, self.states = folder / FOLDER, settings, states
        self.tell, self.saved_round = tell, saved_round
        self._scores: dict[int, float] = {}  # of every round that was validated
        self._fits: bool | None = None  # None: not known yet
        self._counted = False  # whether that was found from the tensors to be written

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Remove the models of rounds that will be played again."""
        remove_unfinished(self.home)
        self._drop(round_ for round_ in kept_rounds(self.home) if round_ > done)
        self._scores = {}

    def recall(self, found: Examined) -> None:
        """Learn the score of a round from before; of its moments the last one in the log counts."""
        self._scores.pop(found.round, None)
        self._learn(found.round, [found])

    def catch_up(self, done: int) -> None:
        """All rounds before are recalled: keep the best of them and no other.

        A run can be stopped after its best round was logged and before its models were written. They are those of
        the checkpoint then.
        """
        best = self._best_round()
        if self.settings.models != "best" or best is None:
            return
        if best not in kept_rounds(self.home):
            if best == done:
                self._keep(done)
            elif self._has_room(done):
                self.tell(
                    f"the models of round {best}, the best so far, were not kept; a later round is if it is better"
                )
        self._drop(round_ for round_ in kept_rounds(self.home) if round_ not in self._wanted())

    def round(self, end: RoundEnd) -> None:
        """Say early that the models will take too much room; keep those of the best round so far."""
        if self.settings.models != "none" and self._fits is None:
            self._fits = self._within_limit(self.states.at_least())
        self.measured(end.round, end.examined)

    def measured(self, round_: int, examined: Sequence[Examined]) -> None:
        """Keep the models of the newest round if it is the best so far."""
        self._learn(round_, examined)
        if self.settings.models == "best" and self._fits and round_ == self._best_round():
            self._keep(round_)

    def finish(self, round_: int) -> None:
        """The run is over: keep the models of its last round, if those are wanted, and no others.

        The last round is evaluated even if it is not due. If that makes it the best, the best one that was due
        stays beside it: a run that is extended takes the surplus evaluation back.
        """
        missing = round_ > 0 and round_ not in kept_rounds(self.home)
        if self.settings.models == "last" and missing and self._fits is not False:
            self._keep(round_)
        kept = kept_rounds(self.home)
        wanted = self._wanted() if self.settings.models == "best" else set(kept[-1:])
        self._drop(old for old in kept if old not in wanted)

    def _learn(self, round_: int, examined: Sequence[Examined]) -> None:
        score = validation_score(examined, self.states.federation.population.held_out)
        if score is not None:
            self._scores[round_] = score

    def _best_round(self, due: bool = False) -> int | None:
        """The first of the best rounds so far, of all or of those that are evaluated however long the run is."""
        every = self.states.evaluate.every if due else 1
        return max(
            (one for one in self._scores if one % every == 0), key=self._scores.__getitem__, default=None
        )

    def _wanted(self) -> set[int | None]:
        return {self._best_round(), self._best_round(due=True)}

    def _keep(self, round_: int) -> None:
        """Write the models of the newest round; Ctrl-C waits until that is done."""
        if self._has_room(round_):
            with held_back():
                self._write(round_)

    def _has_room(self, round_: int) -> bool:
        """Whether the models are within the limit, counted once from the tensors to be written."""
        if not self._counted:
            needed = self.states.nbytes(round_, self.states.clients())
            self._fits, self._counted = self._within_limit(needed), True
        return bool(self._fits)

    def _write(self, round_: int) -> None:
        clients, before = self.states.clients(), kept_rounds(self.home)
        names = {client: f"client-{number}.safetensors" for number, client in enumerate(clients)}
        score = self._scores.get(round_) if self.settings.models == "best" else None
        about: dict[str, Any] = {"format": FORMAT, "round": round_, "score": score}
        about |= {"moments": self.states.moments, "files": names}
        written = ((names[client], found) for client, found in self.states.of(round_, clients))
        some = lists_some(self.states.federation)
        outline = json.dumps(outline_of(self.states.federation, clients)) if some else self._outline
        write_models(round_folder(self.home, round_), written, about, outline)
        saved = self.saved_round()
        needed = max((old for old in before if old <= saved), default=None)
        self._drop(old for old in before if old not in {needed, round_, *self._wanted()})

    @cached_property
    def _outline(self) -> str:
        """The outline that lists everyone."""
        return json.dumps(outline_of(self.states.federation))

    def _drop(self, rounds: Iterable[int]) -> None:
        for old in list(rounds):
            remove_models(round_folder(self.home, old))

    def _within_limit(self, needed: int) -> bool:
        fits = needed <= self.settings.limit
        if not fits:
            self.tell(
                f"the trained models are not kept: they would take {size(needed)} or more, the limit is "
                f"{size(int(self.settings.limit))}; raise keep.limit, or say keep: none"
            )
        return fits


class MeasuredStates:
    """The states of clients as they were measured after a round.

    The store has what training left. What `after_aggregation` measured is that state with the newest downlink
    received; here it is received once more, in the host's memory. The state of an optimiser is left out.
    """

    def __init__(self, rounds: Rounds, store: Store, evaluate: EvaluateSettings) -> None:
        self.rounds, self.store, self.evaluate = rounds, store, evaluate
        self.federation: Federation = rounds.federation

    @property
    def moments(self) -> list[str]:
        """The moments whose states are kept: the last one, and after training where that is measured."""
        also = ["after_training"] if "after_training" in self.evaluate.when else []
        return ["after_aggregation", *also]

    def clients(self) -> list[ClientId]:
        """Whose models are kept: everyone's, or where only cohorts are measured, of those who ever trained."""
        if self.evaluate.who == "all":
            return list(self.federation.population.ids)
        return sorted(self.store.held(), key=self.federation.split.clients.places.__getitem__)

    def of(self, round_: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, States]]:
        """The states of clients after this round, which must be the newest; clients of one kind in a row."""
        for client in sorted(clients, key=self._seats.clients.kind):
            live = self._seats.sit(client, self.store.fetch(client))
            self._seats.clients.enter(live, round_, {})
            yield client, self._measured(live)

    @cached_property
    def _seats(self) -> KindSeats:
        """Live clients in the host's memory, wherever those of the engine are."""
        builder = self.federation.clients
        return KindSeats(builder if builder.device.type == "cpu" else builder.on(torch.device("cpu")))

    def _measured(self, live: Client) -> States:
        method, trained = self.federation.method, _copied(live)
        down = Message(method.downlink(self.rounds.server, live.id)).to(live.device)
        with live.rng.child("examine").as_default():
            method.receive(live, down)
        states = {"after_aggregation": _copied(live), "after_training": trained}
        return {moment: states[moment] for moment in self.moments}

    def nbytes(self, round_: int, clients: Sequence[ClientId]) -> int:
        """How much room the states of clients take in files, from one client of each kind."""
        kind = self.federation.clients.kind
        counts, first = Counter(map(kind, clients)), {kind(client): client for client in reversed(clients)}
        return sum(
            counts[kind(client)] * sum(tensor.nbytes for tensor in stored_tensors(found).values())
            for client, found in self.of(round_, list(first.values()))
        )

    def at_least(self) -> int:
        """A lower bound of `nbytes` that takes no work: from stored states, for the kinds that have any."""
        kind, clients = self.federation.clients.kind, self.clients()
        counts, sizes = Counter(map(kind, clients)), dict[str, int]()
        for client in clients:
            new = kind(client) not in sizes and self.store.holds(client)
            if new and (state := self.store.fetch(client)) is not None:
                sizes[kind(client)] = state_size(state)
        return sum(counts[one] * each for one, each in sizes.items())


def _copied(live: Client) -> dict[str, Tensor]:
    """A copy of a client's state without optimisers."""
    kept = {name: part for name, part in live.parts.items() if not isinstance(part.content, Moments)}
    return {
        f"{name}/{key}" if key else name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, part in kept.items()
        for key, value in part.tensors().items()
    }


def validation_score(examined: Sequence[Examined], held_out: Collection[ClientId]) -> float | None:
    """The mean validation score of a round at its headline moment, as a number that is higher when better."""
    found = min(examined, key=lambda one: MOMENTS.index(one.when), default=None)
    scores = {} if found is None else found.scores("validation")
    values = [score for client, score in scores.items() if client not in held_out]
    if found is None or not values:
        return None
    return (1 if found.facts().higher_is_better else -1) * sum(values) / len(values)


def check_keep(experiment: Experiment, federation: Federation) -> None:
    """Refuse to keep the best models of a run in which nothing is validated."""
    population = federation.population
    if experiment.keep.models == "best" and not any(
        population.samples(client)["validation"] for client in population.trainers
    ):
        raise ConfigError(
            "keep: best goes by validation samples, and no client has any; set partition.validation, or say "
            "keep: last"
        )
