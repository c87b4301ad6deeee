"""One run of rounds over the clients of a federation, and what it notes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.modest import Modest
from potluck.core.packed import State
from potluck.core.server import Server
from potluck.core.state import Part
from potluck.deploy.engine import FlowerEngine
from potluck.deploy.register import Register
from potluck.engine.evaluation.lapses import Lapses
from potluck.engine.norms import Form, LastNorms, largest_ratio
from potluck.engine.retries import Waits
from potluck.errors import PotluckError, RunError
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Run
from potluck.runs.observers import Observer, Observers, RoundEnd


class Presence(Observer):
    """Says after every round which clients are connected and how many bytes have crossed."""

    def __init__(self, engine: FlowerEngine, tell: Callable[[str], None]) -> None:
        self.engine, self.tell = engine, tell

    def round(self, end: RoundEnd) -> None:
        """Count who is there."""
        engine = self.engine
        there = set(engine.courier.nodes())
        present = [client for client, node in engine.homes.items() if node in there]
        self.tell(
            f"round {end.round}: {len(present)} of {len(engine.ids)} clients are here ({', '.join(present)}); "
            f"so far {engine.sent:,} bytes sent, {engine.received:,} received"
        )


class Conduct(Observer):
    """Remembers before a checkpoint is written how clients behaved: norms, lapses, and who dropped out."""

    def __init__(self, engine: FlowerEngine, register: Register) -> None:
        self.engine, self.register = engine, register
        self.failures: Mapping[ClientId, str] = {}  # who dropped out of the last round
        self._norms, self._lapses = LastNorms(), Lapses()
        self._first: dict[Form, float] = {}  # as `Yardsticks` has them
        self._sizes: Callable[[], Mapping[ClientId, float]] = dict
        self._accepted: Callable[[], Mapping[ClientId, int]] = dict

    def follow(self, run: Run) -> None:
        """Tell a run what is known of its clients, and keep what it finds out."""
        self._norms, self._lapses = run.rounds.acceptance.last_norms, run.examiner.asking.lapses
        self._sizes, self._accepted = lambda: run.rounds.acceptance.sizes, lambda: run.rounds.accepted
        run.rounds.acceptance.yardsticks.first = self._first
        values = self.register.values
        self._norms.values = {client: dict(known) for client, known in values.last_norms.items()}
        self.engine.lapses.recall({client: one.model_dump() for client, one in values.late.items()})
        self._lapses.recall({client: one.model_dump() for client, one in values.doubted.items()})

    def round(self, end: RoundEnd) -> None:
        """Keep it."""
        self.failures, accepted = end.failures, self._accepted()
        sizes = {client: size for client, size in self._sizes().items() if accepted.get(client) == end.round}
        self.register.keep_round(
            end.round, sizes, self._norms.values, self._lapses.kept(), self.engine.lapses.kept()
        )


def federated_run(
    engine: FlowerEngine,
    experiment: Experiment,
    folder: RunFolder,
    federation: Federation,
    watcher: Observer,
    run: str,
    incarnation: int,
    fresh: bool,
    *observers: Observer,
    waits: Waits | None = None,
    strangers: bool = True,
) -> Run:
    """A run over the clients of a federation, ready to play from its start or from its last checkpoint.

    Without `strangers` all clients are the run's own, as in a simulation: norms are compared only if asked for.
    """
    told = Observers(watcher, Presence(engine, watcher.notice), *observers)
    going = Run(experiment, folder, federation, told, engine, waits)
    going.rounds.name, going.rounds.incarnation = run, incarnation
    engine.largest, engine.facts = going.rounds.largest_reply, going.examiner.facts
    acceptance = going.rounds.acceptance
    acceptance.largest_ratio = largest_ratio(experiment.training.max_norm, strangers)
    if strangers:
        acceptance.strangers, acceptance.fresh = True, lambda client: _new_model(federation, client)
    if not fresh:
        _check_fits(going)
        going.restore()
    return going


def _new_model(federation: Federation, client: ClientId) -> dict[str, Tensor]:
    """The tensors of a new model of the architecture that the experiment names for a client."""
    try:
        with Modest():
            model = federation.population.build_model(client)
    except PotluckError:  # the site has one of its own, which is not known here
        return {}
    return Part(model, federation.method.config.buffers).wire()


def _check_fits(going: Run) -> None:
    """Refuse to go on with clients for which the server's state would have to be another."""
    saved = going.checkpoints.files.load()
    if saved is not None and not fits(going.rounds.server, saved.server):
        clients, method = ", ".join(going.federation.population.ids), going.federation.method.name
        raise RunError(
            f"{going.folder.path}: the state of the {method} server after round {saved.round} is for other clients "
            f"than {clients}; go on with those it had, or start a new run"
        )


def fits(server: Server, state: State) -> bool:
    """Whether a state can be put into a server: all but its mappings, whose names come and go, must be the same."""
    open_parts = [name for name, part in server.parts.items() if isinstance(part.content, dict)]
    fixed = {name: value.shape for name, value in server.tensors().items() if _root(name) not in open_parts}
    given = {name: value.shape for name, value in state.items() if _root(name) not in open_parts}
    return fixed == given


def _root(name: str) -> str:
    return name.partition("/")[0]
