"""The server of a federation: the same rounds and the same run folder, over clients that are somewhere else.

Nothing in here knows Flower: a `Courier` carries bytes to nodes and back.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch

from potluck.client import Card, ClientId
from potluck.data import Dataset, Split
from potluck.data.federation import PARTS, ClientSplit
from potluck.engine.base import Answer, Engine, Examination, Failure, Outcome, Request
from potluck.engine.flower.frames import Letter, Node
from potluck.engine.flower.site import welcome
from potluck.engine.flower.wire import (
    LARGEST_INTRODUCTION,
    Enrolment,
    Hello,
    most_bytes,
    pack_order,
    pack_reply,
    unpack_reply,
)
from potluck.errors import ConfigError, MessageError, RunError
from potluck.experiment import EngineSettings, Experiment, Sites
from potluck.message import Shapes
from potluck.method import Method, find_method
from potluck.public import Public, check_same_samples
from potluck.record import RunFolder, read_json, write_json
from potluck.runs import Run, RunResult, Watcher, check_version, chosen_modes, write_start
from potluck.task import Task
from potluck.world import Ground, World

FILE = "federation.json"
TRIES = 3  # at a node that does not introduce itself; it may belong to somebody else
HELLO = 120.0  # seconds a node has to introduce itself
LOOK = 3.0  # seconds between two looks at who is there
VECTOR = Task("classification", 2, (1,))  # nothing of images or texts can be read as this


class Courier(Protocol):
    """Carries bytes to nodes and back."""

    def nodes(self) -> list[Node]:
        """Who is there now."""

    def keys(self) -> Mapping[Node, str]:
        """The key each of them has shown to Flower, as a fingerprint."""

    def exchange(self, letters: Sequence[Letter], timeout: float, most: Sequence[int]) -> list[bytes | str]:
        """The answer to every letter, in order; a sentence where none came in time, or one of more bytes than
        `most` says for it, which is not read.
        """


class KeyRegister:
    """Which key a client id belongs to: the one it is known by, or the one that came with it first.

    `keep` writes a new entry down, before the client is taken in.
    """

    def __init__(
        self,
        known: Mapping[ClientId, str],
        keep: Callable[[Mapping[ClientId, str]], None] = lambda keys: None,
    ) -> None:
        self.known, self._keep = dict(known), keep

    def refuse(self, client: ClientId, key: str) -> str:
        """One sentence if a client may not come with a key; else it belongs to that from now on."""
        if not key:
            return f"client {client}: its node has shown no key"
        owner = next((other for other, own in self.known.items() if own == key), client)
        if owner != client:
            return f"client {client}: the key of its node, {key}, is that of client {owner}"
        if client not in self.known:
            self.known[client] = key
            self._keep(self.known)
        own = self.known[client]
        return "" if own == key else f"client {client}: the key of its node, {key}, is not its own, {own}"


class EnrolledWorld(World):
    """The server's world: the clients' cards, and for what they do not tell, the models its experiment names."""

    def __init__(self, experiment: Experiment, enrolled: Mapping[ClientId, Enrolment]) -> None:
        sites = _sites(experiment)
        self.enrolled = {client: enrolled[client] for client in sites.sites}
        pool = experiment.pool()
        pool.cover(sites.sites)
        method = find_method(experiment.method.name)(experiment.method, pool)
        if not takes_any_task(type(method)):
            _check_common_task(self.enrolled, sites.classes)
        grounds = [Ground(_no_samples(one.card.task), 1) for one in self.enrolled.values()]
        super().__init__(
            method=method,
            data=grounds[0].data,
            grounds=grounds if takes_any_task(type(method)) else (),
            public=experiment.public_samples(method),
            split=_placeholders(self.enrolled),
            pool=pool,
            seeds=experiment.all_seeds(),
            training=experiment.training.for_clients(),
            overrides=experiment.training.per_client,
            participation=experiment.training.participation,
            independent_init=experiment.models.init == "per_client",
            device=experiment.engine.torch_device(),
            precision=experiment.engine.precision,
        )
        public = self.public()
        if public is not None:
            check_same_samples(public, self.cards)
        with self.seeds.tree("init").child("check").as_default():
            self.method.check(self)

    def _public_for(self, ground: Ground) -> Public:
        """The server has no words of the sites: of texts it knows the ids alone."""
        if ground.data.task.kind not in ("text-classification", "retrieval"):
            return super()._public_for(ground)
        return super()._public_for(Ground(_no_samples(VECTOR), 1))

    def global_test(self, client: ClientId) -> np.ndarray:
        """The server has no data."""
        return np.zeros(0, dtype=np.int64)

    def save_split(self, path: Path) -> None:
        """Write down how many rows every client has; which classes they are of is not known."""
        self.split.save(path)

    def card(self, client: ClientId) -> Card:
        """As the client wrote it."""
        return self.enrolled[client].card

    def samples(self, client: ClientId) -> dict[str, int]:
        """As the client counted them."""
        return dict(self.enrolled[client].samples)

    def label(self, client: ClientId) -> str:
        """The server does not know the clients' models."""
        return "its own model"

    def classes_held(self, client: ClientId) -> tuple[int, ...]:
        """As the card says; all where it does not."""
        told: tuple[int, ...] = self._told(client, "classes_held", tuple(range(self.task.classes)))
        return told

    def width(self, client: ClientId) -> int:
        """As the card says, else that of the experiment's model."""
        told: int = self._told(client, "width", None) or super().width(client)
        return told

    def stem(self, client: ClientId) -> tuple[int, ...]:
        """As the card says, else that of the experiment's model."""
        told: tuple[int, ...] | None = self._told(client, "stem", None)
        return told if told is not None else super().stem(client)

    def trains_body(self, client: ClientId) -> bool:
        """No card tells; the site looks before it joins."""
        return True

    def names(self, client: ClientId) -> Shapes:
        """As the card says, else those of the experiment's model."""
        told: Shapes = self._told(client, "names", None) or super().names(client)
        return told

    def _told(self, client: ClientId, field: str, default: Any) -> Any:
        return self.enrolled[client].card.extra.get(field, default)


def _placeholders(enrolled: Mapping[ClientId, Enrolment]) -> Split:
    """Rows in the numbers the clients told, one client's after the other's: there is nothing behind them."""
    clients, start = [], 0
    for client, enrolment in enrolled.items():
        ends = np.cumsum([start, *(enrolment.samples[part] for part in PARTS)])
        rows = {part: np.arange(ends[number], ends[number + 1]) for number, part in enumerate(PARTS)}
        clients.append(ClientSplit(client, **rows))
        start = int(ends[-1])
    return Split.of(clients)


def _sites(experiment: Experiment) -> Sites:
    if not isinstance(experiment.partition, Sites):
        raise ConfigError(
            "a federation needs to know its clients: write partition: {sites: [north, south], classes: 10}"
        )
    return experiment.partition


def takes_any_task(method: type[Method]) -> bool:
    """Whether sites may bring tasks of their own. What goes by the names of classes may not: cards have none."""
    return method.tasks == "any" and "classes_held" not in method.card_fields


def _no_samples(task: Task) -> Dataset:
    kind = torch.long if task.kind == "text-classification" else torch.float32
    nothing = torch.zeros(0, *task.input, dtype=kind), torch.zeros(0, dtype=torch.long)
    return Dataset("data of the sites", task, *nothing, 0, tuple(map(str, range(task.classes))))


def _check_common_task(enrolled: Mapping[ClientId, Enrolment], classes: int | None) -> None:
    tasks = {client: enrolment.card.task for client, enrolment in enrolled.items()}
    first, task = next(iter(tasks.items()))
    for client, other in tasks.items():
        if other != task or other.classes != (classes or task.classes):
            raise ConfigError(
                f"client {client} has another task than client {first} and the experiment's "
                f"{classes or task.classes} classes: {other.to_json()}, {task.to_json()}"
            )


class FlowerEngine(Engine):
    """Sends orders to the nodes of the clients. A client is known by its own id, whatever node it comes from."""

    def __init__(
        self,
        courier: Courier,
        ids: Sequence[ClientId],
        settings: EngineSettings,
        fields: Iterable[str],
        welcome: Mapping[str, Any],
        notice: Callable[[str], None] = lambda sentence: None,
        keys: KeyRegister | None = None,
    ) -> None:
        """`fields` are those of every client's card; with `keys` a client comes with its own node key alone."""
        self.courier, self.notice, self.keys = courier, notice, keys
        self.ids, self.settings, self.fields = tuple(ids), settings, set(fields)
        self.device = settings.torch_device()
        self.hello = pack_order(Hello(welcome))
        self.largest: Callable[[ClientId, tuple[str, ...]], int | None] = lambda client, steps: None
        self.enrolled: dict[ClientId, Enrolment] = {}
        self.homes: dict[ClientId, Node] = {}
        self.sent = self.received = 0  # bytes, envelopes included
        self._met: set[Node] = set()
        self._tries: dict[Node, int] = {}
        self._refusals: dict[Node, str] = {}
        self._open = False

    def gather(self) -> dict[ClientId, Enrolment]:
        """Wait for all clients of the experiment."""
        end = time.monotonic() + self.settings.patience
        before: set[Node] = set()
        while True:
            there = self.courier.nodes()
            if len(there) >= len(self.ids) or before == set(there):
                self._tries.clear()  # who was refused may have put it right
                self._meet(there)  # one greeting for all costs no more than one for each
            before = set(there)
            missing = [client for client in self.ids if client not in self.homes]
            if not missing:
                return dict(self.enrolled)
            if time.monotonic() > end:
                names, reasons = ", ".join(missing), "".join(f"; {one}" for one in self._refusals.values())
                raise RunError(
                    f"after {self.settings.patience:g} s these clients have not joined: {names}{reasons}"
                )
            time.sleep(LOOK)

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Have every client do its steps, all at once."""
        self._open = True
        return self._ask(requests)

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure clients; one whose round was not accepted is measured as it was before."""
        settled = [
            dataclasses.replace(one, stamp=dataclasses.replace(one.stamp, settled=not self._open))
            for one in examinations
        ]
        return self._ask(settled)

    def settle(self, round_: int, cohort: Sequence[ClientId], accepted: Sequence[ClientId]) -> None:
        """Nothing to send: every later stamp tells a client which round was accepted from it."""
        self._open = False

    def _ask(self, orders: Sequence[Request] | Sequence[Examination]) -> list[Outcome]:
        there = self.courier.nodes()
        self._meet(there)
        letters: dict[ClientId, Letter] = {}
        most: list[int] = []
        for order in orders:
            node = self.homes.get(order.client)
            if node in there:
                letters[order.client] = node, pack_order(order)
                most.append(self._most(order))
        carried = self._carry(list(letters.values()), most, self.settings.deadline)
        answers = dict(zip(letters, carried, strict=True))
        absent = "it is not connected"
        return [self._outcome(order, answers.get(order.client, absent)) for order in orders]

    def _most(self, order: Request | Examination) -> int:
        """The most bytes the answer to an order can rightly have; examinations are answered with numbers alone."""
        return most_bytes(self.largest(order.client, order.steps) if isinstance(order, Request) else 0)

    def _carry(self, letters: list[Letter], most: Sequence[int], timeout: float) -> list[bytes | str]:
        answers = self.courier.exchange(letters, timeout, most) if letters else []
        self.sent += sum(len(data) for _, data in letters)
        self.received += sum(len(answer) for answer in answers if isinstance(answer, bytes))
        return answers

    def _outcome(self, order: Request | Examination, answer: bytes | str) -> Outcome:
        """What a client answered, or one sentence why it did not."""
        who = f"client {order.client}"
        if isinstance(answer, str):
            return Failure(order.client, f"{who}: {answer}")
        try:
            reply = unpack_reply(answer)
        except MessageError as error:
            return Failure(order.client, f"{who}: {error}")
        if isinstance(reply, Answer) and reply.client == order.client:
            return self._sound(order, reply)
        if isinstance(reply, Failure):
            named = reply.reason.startswith(who)
            return Failure(order.client, reply.reason if named else f"{who}: {reply.reason}")
        return Failure(order.client, f"{who}: its reply is none to what was asked")

    def _sound(self, order: Request | Examination, reply: Answer) -> Outcome:
        """Metrics are sums over known numbers of samples: an answer that lacks one would end the run."""
        if isinstance(order, Examination):
            counts, task = self.enrolled[order.client].samples, self.enrolled[order.client].card.task
            splits = [split for split in ("validation", "test") if counts[split]]
            names = [f"{mode}/{split}" for mode in order.modes for split in splits]
            wanted = {f"{name}/{what}" for name in names for what in task.rules.told}
            if set(reply.report.metrics) != wanted or reply.up:
                return Failure(
                    order.client, f"client {order.client}: it did not answer with the metrics asked for"
                )
        return dataclasses.replace(reply, up=reply.up.to(self.device))

    def _meet(self, there: Sequence[Node]) -> None:
        """Have nodes that are new introduce their clients; one that came back has a new node."""
        new = [node for node in there if node not in self._met and self._tries.get(node, 0) < TRIES]
        letters = [(node, self.hello) for node in new]
        most = [LARGEST_INTRODUCTION] * len(new)
        answers = self._carry(letters, most, min(HELLO, self.settings.deadline))
        for node, answer in zip(new, answers, strict=True):
            self._tries[node] = self._tries.get(node, 0) + 1
            refusal = self._enrol(node, answer)
            if refusal and self._refusals.get(node) != refusal:
                self.notice(f"node {node} was not taken in: {refusal}")
                self._refusals[node] = refusal

    def _enrol(self, node: Node, answer: bytes | str) -> str:
        """Take a client in; one sentence if that cannot be."""
        if isinstance(answer, str):
            return answer
        try:
            reply = unpack_reply(answer)
        except MessageError as error:
            return str(error)
        if isinstance(reply, Failure):
            return reply.reason
        if not isinstance(reply, Enrolment):
            return "it did not introduce itself"
        client = reply.card.client
        if client not in self.ids:
            return f"{client!r} is none of the experiment's clients"
        if set(reply.card.extra) != self.fields:
            return f"client {client}: its card tells {sorted(reply.card.extra)}, asked were {sorted(self.fields)}"
        refusal = self.keys.refuse(client, self.courier.keys().get(node, "")) if self.keys else ""
        if refusal:
            return refusal
        before = self.enrolled.setdefault(client, reply)
        if pack_reply(before) != pack_reply(reply):
            return f"client {client}: it came back with another card: its data or its model have changed"
        self.notice(f"client {client} {'is back' if client in self.homes else 'is here'}")
        self.homes[client] = node
        self._met.add(node)
        return ""


class FederatedRun(Run):
    """A run whose clients outlive it: no client hears of a round's end before the checkpoint of it is on disk."""

    @classmethod
    def over(
        cls,
        engine: FlowerEngine,
        experiment: Experiment,
        folder: RunFolder,
        world: World,
        watcher: Watcher,
        run: str,
        incarnation: int,
        fresh: bool,
    ) -> Self:
        """A run that is ready to play: from its start, or from its last checkpoint."""
        going = cls(experiment, folder, world, watcher, engine)
        going.rounds.name, going.rounds.incarnation = run, incarnation
        engine.largest = going.rounds.largest_reply
        if not fresh:
            going.restore(going.checkpoints.load())
        return going

    def _advise(self) -> None:
        """The server knows too little of the sites' models and samples."""

    def _checkpoint(self) -> None:
        super()._checkpoint()
        self.checkpoints.wait()

    def _tell(self, round_: int, lines: Sequence[Mapping[str, Any]], seconds: float) -> None:
        super()._tell(round_, lines, seconds)
        engine = self.engine
        assert isinstance(engine, FlowerEngine)
        there = set(engine.courier.nodes())
        present = [client for client, node in engine.homes.items() if node in there]
        self.watcher.notice(
            f"round {round_}: {len(present)} of {len(engine.ids)} clients are here ({', '.join(present)}); so far "
            f"{engine.sent:,} bytes sent, {engine.received:,} received"
        )


def play(
    experiment: Experiment,
    courier: Courier,
    folder: RunFolder,
    watcher: Watcher | None = None,
    keys: Mapping[ClientId, str] | None = None,
) -> RunResult:
    """Run a federation in a folder: from the start, or on from where an earlier server ended.

    With `keys` every client id belongs to one node key: the one named there, else the first it comes with.
    """
    watcher = watcher or Watcher()
    experiment = prepared(experiment)
    with folder.locked():
        fresh = not (folder / "config.yaml").exists()
        if not fresh:
            _check_same(folder, experiment)
        if (folder / "summary.json").exists():
            raise RunError(f"the run in {folder.path} is finished; choose another --out")
        run, incarnation = begin(folder)
        register = None if keys is None else key_register(folder, keys)
        fields = find_method(experiment.method.name).told()
        told = welcome(experiment, run)
        engine = FlowerEngine(
            courier, _sites(experiment).sites, experiment.engine, fields, told, watcher.notice, register
        )
        world = EnrolledWorld(experiment, engine.gather())
        chosen_modes(experiment, world.method.modes)
        if world.method.open_option(world) is not None:
            raise ConfigError(
                "an option left open (auto) is chosen by trial runs; choose it before a federation"
            )
        if fresh:
            write_start(folder, experiment, world)
        return FederatedRun.over(engine, experiment, folder, world, watcher, run, incarnation, fresh).play()


def prepared(experiment: Experiment) -> Experiment:
    """The experiment as a federation runs it: a checkpoint after every round, own test data only."""
    _sites(experiment)
    if experiment.evaluate.on == "global":
        raise ConfigError(
            "evaluate.on: the clients of a federation have only test data of their own; use own"
        )
    return experiment.variant(checkpoint={"every": 0})


def open_folder(path: Path) -> RunFolder:
    """The run folder, made if it is not there."""
    return RunFolder(path) if path.is_dir() else RunFolder.create(path, exact=True)


def _check_same(folder: RunFolder, experiment: Experiment) -> None:
    check_version(folder.path, read_json(folder / "environment.json"))
    if (folder / "config.yaml").read_text() != experiment.to_yaml():
        raise RunError(
            f"{folder.path} was begun with other settings; go on with those, or choose another --out"
        )
    if not (folder / FILE).exists():
        raise RunError(f"{folder.path} is no run of a federation; choose another --out")


def begin(folder: RunFolder) -> tuple[str, int]:
    """The name of the run among all others, and how often it was started, this time included."""
    about: dict[str, Any] = {"run": secrets.token_hex(8), "starts": 0}
    if (folder / FILE).exists():
        about = read_json(folder / FILE)
    about["starts"] += 1
    write_json(folder / FILE, about)
    return str(about["run"]), int(about["starts"])


def key_register(folder: RunFolder, given: Mapping[ClientId, str]) -> KeyRegister:
    """The register of a run's keys, kept beside its name; a key that is given by hand counts before a kept one."""

    def keep(keys: Mapping[ClientId, str]) -> None:
        write_json(folder / FILE, read_json(folder / FILE) | {"keys": dict(keys)})

    return KeyRegister({**read_json(folder / FILE).get("keys", {}), **given}, keep)
