"""The engine of a real federation: letters to nodes, and their answers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from potluck.core.card import ClientId
from potluck.core.metrics import MetricFacts
from potluck.core.plain_values import printable
from potluck.deploy.donors import Donors
from potluck.deploy.keyring import KeyRegister
from potluck.deploy.plausible import implausible
from potluck.deploy.repeats import Repeats
from potluck.deploy.wire import (
    LARGEST_INTRODUCTION,
    SAME_VERSION,
    Enrolment,
    Hello,
    most_bytes,
    pack_order,
    pack_reply,
    unpack_reply,
)
from potluck.engine.evaluation.lapses import Lapses
from potluck.engine.frames import Letter, Node
from potluck.engine.protocol import Answer, Engine, Examination, Failure, Outcome, Request, about
from potluck.engine.retries import Clock
from potluck.engine.settings import EngineSettings
from potluck.engine.work_times import WorkTimes
from potluck.errors import MessageError, RunError
from potluck.live.board import Board

TRIES = 3  # at a node that does not introduce itself; it may belong to somebody else
HELLO = 120.0  # seconds a node has to introduce itself; half as many after each time that its owner did not
HALVED = 2  # times at most: an exchange through Flower alone takes several seconds
LOOK = 3.0  # seconds between two looks at who is there
LOOKS = 4  # looks after which nodes are greeted, though others still come and go
REMEMBERED = 100  # nodes that were not taken in, whose reasons are told
UNLIKE = "its task, its model or its public samples do not fit those of the others; ask the operator"
GRACE = 30.0  # seconds that the others have, from the last arrival on, once enough clients are there


class Courier(Protocol):
    """Carries bytes to nodes and back."""

    def nodes(self) -> list[Node]:
        """Who is there now."""

    def keys(self) -> Mapping[Node, str]:
        """The key each of them has shown to Flower, as a fingerprint."""

    def exchange(self, letters: Sequence[Letter], timeout: float, most: Sequence[int]) -> list[bytes | str]:
        """The answer to every letter, in order, or a sentence where none came in time or one of more bytes than
        `most` says for it, which is not read.
        """

    def took(self) -> Sequence[float | None]:
        """The seconds until each answer of the last exchange was here; None, or nothing at all, where unknown."""


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
        clock: Clock | None = None,
    ) -> None:
        """`fields` are what every card must tell; with `keys` a client must come with its own node key."""
        self.clock = clock if clock is not None else Clock()
        self.courier, self.notice, self.keys = courier, notice, keys
        self.ids, self.settings, self.fields = tuple(ids), settings, set(fields)
        self.device = settings.torch_device()
        self.welcome = welcome
        self.hello = pack_order(Hello(welcome))
        self.largest: Callable[[ClientId, tuple[str, ...]], int | None] = lambda client, steps: None
        self.excluded: frozenset[ClientId] = frozenset()  # left out for good
        self.facts: Mapping[str, MetricFacts] = {}  # of the experiment's own metrics
        self.board = Board()
        self.times = WorkTimes()
        self.enrolled: dict[ClientId, Enrolment] = {}
        self.homes: dict[ClientId, Node] = {}
        self.sent = self.received = 0  # bytes, envelopes included
        self.turned_away: dict[
            ClientId, tuple[bytes, str]
        ] = {}  # who cannot take part with this card, and why
        self.donors, self.repeats = Donors(), Repeats()
        self.lapses = Lapses()  # of training; evaluation has its own
        self._silent: set[ClientId] = set()  # who was connected in the last exchange, and gave no answer
        self._met: set[Node] = set()
        self._tries: dict[Node, int] = {}
        self._vain: Counter[ClientId | None] = Counter()  # greetings in a row that enrolled nobody, by owner
        self._refusals: dict[Node, str] = {}
        self._open = False

    def gather(self, wanted: Sequence[ClientId] | None = None, needed: int | None = None) -> None:
        """Wait for all clients, or for those `wanted`; at most as long as patience lasts.

        Once `needed` of them are there, the others have a little time from each arrival on.
        """
        wanted = self.ids if wanted is None else wanted
        needed = len(wanted) if needed is None else needed
        arrival = start = self.clock.now()
        before: set[Node] = set()
        here = looks = 0
        while True:
            there, looks = self.courier.nodes(), looks + 1
            if len(there) >= len(wanted) or before == set(there) or looks >= LOOKS:
                looks = 0
                self._tries.clear()  # who was refused may have put it right
                self._meet(there)  # one greeting for all costs no more than one for each
            before, now = set(there), self.clock.now()
            missing = [client for client in wanted if client not in self.homes]
            if len(wanted) - len(missing) > here:
                here, arrival = len(wanted) - len(missing), now
            late = now - start > self.settings.patience
            if here >= needed and (not missing or late or now - arrival >= GRACE):
                if missing:
                    self.notice(f"going on without {', '.join(missing)}: {here} of {len(wanted)} are here")
                return
            if late:
                raise RunError(self._not_joined(missing, here, needed))
            self.board.state = "waiting"
            self.clock.sleep(LOOK)

    def _not_joined(self, missing: Sequence[ClientId], here: int, needed: int) -> str:
        names, reasons = ", ".join(missing), "".join(f"; {one}" for one in self._refusals.values())
        told = f"after {self.settings.patience:g} s these clients have not joined: {names}{reasons}"
        return told if needed == here + len(missing) else f"{told} ({here} are here, {needed} are needed)"

    def look(self) -> None:
        """Greet whoever is new."""
        self._meet(self.courier.nodes())

    def turn_away(self, client: ClientId, reason: str) -> None:
        """Let a client that has enrolled not take part; it may come back with another card."""
        self.turned_away[client] = pack_reply(self.enrolled.pop(client)), reason
        node = self.homes.pop(client)
        self._met.discard(node)
        self._refuse(node, reason)

    def exclude(self, client: ClientId) -> None:
        """Let a client of this run take part no more."""
        self.ids = tuple(one for one in self.ids if one != client)
        self.excluded |= {client}
        self.homes.pop(client, None)
        self.board.client(client).excluded = True

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Have every client do its steps, all at once."""
        return self.run_sparing(requests, 0)

    def run_sparing(self, requests: Sequence[Request], spare: int) -> list[Outcome]:
        """The same; clients that let a training wait in vain before are asked apart, with less time.

        So it is only where the quorum can be met without them, and not when a round is tried again.
        """
        self._open = True
        first = all(one.stamp.attempt == 1 for one in requests)
        for one in requests[:1]:
            self.lapses.begin(one.stamp.round)
        doubted = {one.client for one in requests if self.lapses.is_doubted(one.client)}
        if not first or len(doubted) > spare or len(doubted) == len(requests):
            doubted = set()
        found = self._timed([one for one in requests if one.client not in doubted])
        dropped = {client for client in doubted if self.lapses.is_dropped(client)}
        late = [one for one in requests if one.client in doubted - dropped]
        found |= self._timed(late, self.lapses.short_time)
        for client in dropped:
            told = f"client {client}: not asked, as it let the server wait in vain before"
            found[client] = Failure(client, told, lost=True)
        outcomes = self.repeats.check(requests, [found[one.client] for one in requests])
        self.donors.note(requests, outcomes)
        return outcomes

    def _timed(self, requests: Sequence[Request], within: float | None = None) -> dict[ClientId, Outcome]:
        """The outcomes by client; who was there and gave no answer has lapsed."""
        if not requests:
            return {}
        deadline, start = self.settings.deadline, self.clock.now()
        outcomes = self._ask(requests, deadline if within is None else min(within, deadline))
        lost = [one.client for one in outcomes if isinstance(one, Failure) and one.lost]
        waited = self.waited_for(lost)
        trusted = not any(self.lapses.is_doubted(one.client) for one in requests)
        self.lapses.note(waited, self.clock.now() - start, trusted)
        return {one.client: one for one in outcomes}

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure clients; one whose round was not accepted is measured as it was before."""
        return self.examine_within(examinations, self.settings.deadline)

    def examine_within(self, examinations: Sequence[Examination], seconds: float) -> list[Outcome]:
        """The same, with less time than the deadline."""
        settled = [
            dataclasses.replace(one, stamp=dataclasses.replace(one.stamp, settled=not self._open))
            for one in examinations
        ]
        return self._ask(settled, min(seconds, self.settings.deadline))

    def waited_for(self, lost: Collection[ClientId]) -> Collection[ClientId]:
        """Those that were connected; one that is away, or says that its disk is full, costs no time."""
        return [client for client in lost if client in self._silent]

    @property
    def work_seconds(self) -> Mapping[ClientId, float]:
        """From sending an order to its answer, with the way there and back; without those that did not answer."""
        return {client: seconds for client, seconds in self.times.seconds.items() if seconds}

    def settle(self, round_: int, cohort: Sequence[ClientId], accepted: Sequence[ClientId]) -> None:
        """Nothing to send: the stamp of a client's next order says which of its rounds was accepted."""
        self._open = False

    def _ask(self, orders: Sequence[Request] | Sequence[Examination], seconds: float) -> list[Outcome]:
        there = self.courier.nodes()
        self._meet(there)
        letters: dict[ClientId, Letter] = {}
        most: list[int] = []
        for order in orders:
            node = self.homes.get(order.client)
            if node in there:
                letters[order.client] = node, pack_order(order)
                most.append(self._most(order))
        carried = self._carry(list(letters.values()), most, seconds)
        answers = dict(zip(letters, carried, strict=True))
        took = dict(zip(letters, self.courier.took(), strict=False)) if letters else {}
        for order in orders:
            self.times.add(order, took.get(order.client) or 0.0)
        absent = "it is not connected"
        outcomes = [self._outcome(order, answers.get(order.client, absent)) for order in orders]
        self._silent = {client for client, answer in answers.items() if isinstance(answer, str)}
        for one in outcomes:
            if isinstance(one, Failure):
                self.board.refused(one.client, one.reason)
            else:
                self.board.replied(one.client)
        return outcomes

    def _most(self, order: Request | Examination) -> int:
        """The most bytes that the contract allows for the answer; an examination is answered with numbers only."""
        return most_bytes(self.largest(order.client, order.steps) if isinstance(order, Request) else 0)

    def _carry(self, letters: list[Letter], most: Sequence[int], timeout: float) -> list[bytes | str]:
        answers = self.courier.exchange(letters, timeout, most) if letters else []
        self.sent += sum(len(data) for _, data in letters)
        self.received += sum(len(answer) for answer in answers if isinstance(answer, bytes))
        self.board.sent, self.board.received = self.sent, self.received
        return answers

    def _outcome(self, order: Request | Examination, answer: bytes | str) -> Outcome:
        """What a client answered, or one sentence why it did not."""
        who = f"client {order.client}"
        if self.is_revoked(order.client):
            return Failure(order.client, f"{who}: its key was revoked; give it a new one")
        if isinstance(answer, str):
            return Failure(order.client, f"{who}: {answer}", lost=True)
        try:
            reply = unpack_reply(answer)
            if isinstance(reply, Answer) and reply.client == order.client:
                return self._sound(order, reply)
        except MessageError as error:
            return Failure(order.client, f"{who}: {error}")
        except Exception as error:  # whatever a reply does to its reader, it is about this client alone
            return Failure(
                order.client,
                f"{who}: its reply cannot be used: {type(error).__name__}: {str(error)[:200]}; {SAME_VERSION}",
            )
        if isinstance(reply, Failure):
            return Failure(order.client, about(order.client, reply.reason), reply.lost)
        return Failure(order.client, f"{who}: its reply is none to what was asked; {SAME_VERSION}")

    def _sound(self, order: Request | Examination, reply: Answer) -> Outcome:
        """Refuse an answer without all metrics that were asked for, or with a report that cannot be true."""
        reason = implausible(order, reply, self.enrolled[order.client], self.facts)
        if reason:
            return Failure(order.client, f"client {order.client}: {reason}; check what runs there")
        return dataclasses.replace(reply, up=reply.up.to(self.device))

    def _meet(self, there: Sequence[Node]) -> None:
        """Greet new nodes, so that they introduce their clients. A client that comes back has a new node."""
        self._renew_keys(there)
        self._forget(there)
        new = [node for node in there if node not in self._met and self._tries.get(node, 0) < TRIES]
        letters = [(node, self._greeting(node)) for node in new]
        most = [LARGEST_INTRODUCTION] * len(new)
        owners = {node: self._owner(node) for node in new}
        waits = [HELLO / 2 ** min(self._vain[owner], HALVED) for owner in owners.values()]
        answers = self._carry(letters, most, min(max(waits, default=HELLO), self.settings.deadline))
        for node, answer in zip(new, answers, strict=True):
            self._tries[node] = self._tries.get(node, 0) + 1
            refusal = self._enrol(node, answer)
            self._vain[owners[node]] = self._vain[owners[node]] + 1 if refusal else 0
            if refusal and self._refusals.get(node) != refusal:
                self._refuse(node, refusal)
        self.board.seen([client for client, node in self.homes.items() if node in there])

    def _greeting(self, node: Node) -> bytes:
        """The welcome; a node that was not taken in hears why, though nothing of other clients' cards."""
        reason = self._refusals.get(node, "")
        if any(reason == told for _, told in self.turned_away.values()):
            reason = UNLIKE
        return pack_order(Hello(self.welcome, printable(reason))) if reason else self.hello

    def _owner(self, node: Node) -> ClientId | None:
        """Whose key a node has shown; None for all that show no client's. A node started anew has another id."""
        return None if self.keys is None else self.keys.owner(self.courier.keys().get(node, ""))

    def _forget(self, there: Sequence[Node]) -> None:
        """Let go of nodes that are gone and no client's: whoever starts again comes as a new one."""
        known = {*there, *self.homes.values()}
        self._met &= known
        self._tries = {node: tries for node, tries in self._tries.items() if node in known}

    def _refuse(self, node: Node, reason: str) -> None:
        if len(self._refusals) >= REMEMBERED:
            self._refusals.pop(next(iter(self._refusals)))
        self._refusals[node] = reason
        self.board.stranger(f"node {node}", reason)
        self.notice(f"node {node} was not taken in: {reason}")

    def _renew_keys(self, there: Sequence[Node]) -> None:
        """Take over keys that were changed, and let go of nodes whose key is no longer that of their client."""
        if self.keys is None:
            return
        changes = self.keys.renew()
        for change in changes:
            self.notice(change)
        if changes:
            self._tries.clear()  # who was refused may have the right key now
            self._refusals.clear()
        for client, node in [*self.homes.items()]:
            shown = self.courier.keys().get(node, "")
            reason = self.keys.wrong(client, shown) if node in there else ""
            if reason:
                del self.homes[client]
                self._met.discard(node)
                self._tries[node] = TRIES  # it would only be refused, or not answer any more
                self._refuse(node, reason)

    def is_revoked(self, client: ClientId) -> bool:
        """Whether the key of a client was taken away from it."""
        return self.keys is not None and self.keys.is_revoked(client)

    def _enrol(self, node: Node, answer: bytes | str) -> str:
        """Enrol a client, or say in one sentence why not."""
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
        if client in self.excluded:
            return f"client {client} is excluded from this run; --include {client} takes it back"
        if client not in self.ids:
            return f"{client!r} is none of the experiment's clients"
        if set(reply.card.extra) != self.fields:
            return f"client {client}: its card tells {sorted(reply.card.extra)}, asked were {sorted(self.fields)}"
        refusal = self.keys.refuse(client, self.courier.keys().get(node, "")) if self.keys else ""
        if refusal:
            return refusal
        card, reason = self.turned_away.get(client, (b"", ""))
        if card == pack_reply(reply):
            return reason
        before = self.enrolled.setdefault(client, reply)
        if pack_reply(before) != pack_reply(reply):
            return f"client {client}: it came back with another card: its data or its model have changed"
        self.notice(f"client {client} {'is back' if client in self.homes else 'is here'}")
        self.homes[client] = node
        self.turned_away.pop(client, None)
        self._met.add(node)
        self._refusals.pop(node, None)
        self.board.strangers.pop(f"node {node}", None)
        return ""
