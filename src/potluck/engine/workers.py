"""Clients on several CPU cores: worker processes do the steps, this process keeps every state.

A worker is forked from this process, so it has the world (data, models, methods of one's own) without a copy and
without a pickle. Forking with threads around is safe here for two reasons: a worker touches nothing that another
thread of its parent may have held, and it works in a thread of its own, because OpenMP waits for ever for the
team of the thread that was forked. The main thread of a worker only watches for the end of its parent.

State and message go to the worker and back over a socket as plain bytes, about 15 ms for a model of 2.6 million
parameters. Records, transactions and checkpoints are those of the local engine, and so are the bits.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.core.packed import Packed, State
from potluck.core.state import Report
from potluck.engine.protocol import Answer, Examination, Failure, Outcome, Request, Stamp
from potluck.engine.serial import LocalEngine
from potluck.engine.store.client_store import ClientStore
from potluck.engine.transactions import Work
from potluck.errors import ConfigError, PotluckError, RunError, StepFailed
from potluck.federation.builder import ClientBuilder
from potluck.signals import SIGNALS, held_back

R = TypeVar("R", Request, Examination)
LENGTH = 8  # bytes that say how long the head of a frame is
FLAT = ""  # the name under which the one piece of a packed state travels; no tensor is called so
SMALL = 20_000_000  # parameters × samples of a client's round; below it a round takes a fraction of a second
FEW = 5  # clients whose models are looked at to guess the size of the work


class WorkerFault(RuntimeError):
    """An error in a worker that is no sentence about its client; the traceback is in its notes."""


@dataclass(frozen=True)
class Frame:
    """What crosses between the processes: a small note, and tensors in groups, in the order they have."""

    note: Mapping[str, Any]
    groups: Mapping[str, State] = field(default_factory=dict)

    def pack(self) -> list[memoryview]:
        """The pieces to send: length, head, then the bytes of every tensor."""
        groups = {name: _tensors(group) for name, group in self.groups.items()}
        layouts = {name: group.layout for name, group in self.groups.items() if isinstance(group, Packed)}
        kinds = {
            name: [[key, str(value.dtype).removeprefix("torch."), value.shape] for key, value in group]
            for name, group in groups.items()
        }
        head = json.dumps({"note": self.note, "groups": kinds, "layouts": layouts}).encode()
        start = [memoryview(len(head).to_bytes(LENGTH, "little")), memoryview(head)]
        return start + [_memory(value) for group in groups.values() for _, value in group]

    @classmethod
    def receive(cls, channel: socket.socket) -> Frame:
        """The next frame; `EOFError` when the other side is gone."""
        length = int.from_bytes(_fill(channel, memoryview(bytearray(LENGTH))), "little")
        head = json.loads(bytes(_fill(channel, memoryview(bytearray(length)))))
        groups: dict[str, State] = {}
        for name, kinds in head["groups"].items():
            group = {key: torch.empty(shape, dtype=getattr(torch, kind)) for key, kind, shape in kinds}
            for value in group.values():
                _fill(channel, _memory(value))
            layout = head["layouts"].get(name)
            groups[name] = group if layout is None else Packed(group.pop(FLAT), _as_tuple(layout), group)
        return cls(head["note"], groups)


def _tensors(group: State) -> list[tuple[str, Tensor]]:
    named = {FLAT: group.flat, **group.loose} if isinstance(group, Packed) else group
    return [(name, value.detach().contiguous()) for name, value in named.items()]


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, where they are."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _as_tuple(value: Any) -> Any:
    """What was a tuple before it went through JSON."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _fill(channel: socket.socket, place: memoryview) -> memoryview:
    """Read exactly as many bytes as there is place for."""
    rest = place
    while len(rest):
        count = channel.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return place


@dataclass(frozen=True)
class Errand:
    """A request with all a worker needs to do it: the state to start from (None: the initial one)."""

    request: Request | Examination
    state: State | None
    counters: Mapping[str, int] = field(default_factory=dict)
    first: bool = True

    def frame(self) -> Frame:
        """To the worker."""
        request = self.request
        about = {"client": request.client, "stamp": asdict(request.stamp)}
        if isinstance(request, Request):
            about |= {"steps": request.steps, "purpose": request.purpose}
        else:
            about |= {"modes": request.modes, "on": request.on}
        groups = {"state": self.state, "down": request.down}
        present = {name: group for name, group in groups.items() if group is not None}
        return Frame({"request": about, "counters": self.counters, "first": self.first}, present)

    @classmethod
    def read(cls, frame: Frame) -> Errand:
        """At the worker."""
        about = frame.note["request"]
        client, stamp = about["client"], Stamp(**about["stamp"])
        down = Message(frame.groups["down"]) if "down" in frame.groups else None
        request: Request | Examination
        if "steps" in about:
            request = Request(client, tuple(about["steps"]), down or Message(), stamp, about["purpose"])
        else:
            request = Examination(client, down, stamp, tuple(about["modes"]), about["on"])
        return cls(request, frame.groups.get("state"), frame.note["counters"], frame.note["first"])


def worker_count(clients: ClientBuilder, cohort: int, threads: int) -> int:
    """`engine.workers: auto`: as many as there are cores and clients for, 1 where processes do not pay.

    1 also on a machine with a GPU: there PyTorch refuses gradients in a fork of a process that computed some.
    """
    if sys.platform != "linux" or torch.cuda.device_count():
        return 1
    first = {
        clients.population.architecture(client): client
        for client in reversed(clients.population.trainers[:FEW])
    }
    largest = max(
        sum(p.numel() for p in clients.population.build_model(one).parameters()) for one in first.values()
    )
    samples = sum(
        clients.population.samples(client)["train"] for client in clients.population.trainers
    ) / len(clients.population.trainers)
    if largest * samples * clients.training.epochs < SMALL:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)) // threads, cohort))


class WorkersEngine(LocalEngine):
    """Clients of this machine's CPU cores, each at work in one of a few worker processes."""

    def __init__(
        self, clients: ClientBuilder, store: ClientStore | None = None, workers: int = 2, threads: int = 1
    ) -> None:
        super().__init__(clients, store)
        if sys.platform != "linux":
            raise ConfigError("engine.workers: worker processes need Linux; set it to auto or 1")
        self.count, self.threads = workers, threads
        self.workers: list[Worker] = []

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Have the workers serve every request."""
        return self._spread(self._begin, requests)

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Have the workers measure every client."""
        return self._spread(self._begin_examination, examinations)

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        with held_back():
            while self.workers:
                self.workers.pop().end()

    def _spread(self, begin: Callable[[R], Outcome], requests: Sequence[R]) -> list[Outcome]:
        """Give the next request to whoever is free until everyone has answered."""
        outcomes: dict[ClientId, Outcome] = {}
        try:
            for request in requests:
                while not self._free_worker():
                    outcomes |= self._collect()
                outcomes[request.client] = self._guarded(begin, request)
            while any(worker.errand for worker in self.workers):
                outcomes |= self._collect()
        except BaseException:
            self.close()  # what is still under way must not be taken for an answer to a later request
            raise
        return [outcomes[request.client] for request in requests]

    def _begin(self, request: Request) -> Outcome:
        record = self.store.record(request.client)
        repeated = record.open(request.stamp)
        if repeated is not None:
            return repeated
        state, counters = record.start()
        return self._hand_out(Errand(request, state, counters, first=record.work is None))

    def _begin_examination(self, examination: Examination) -> Outcome:
        record = self.store.peek(examination.client)
        state = record.current(examination.stamp) if record else None
        return self._hand_out(Errand(examination, state))

    def _hand_out(self, errand: Errand) -> Outcome:
        """Send an errand to a free worker; one that died while it had nothing to do is replaced."""
        for _ in range(1 + self.count):
            worker = self._free_worker() or self._hire()
            if worker.begin(errand):
                return Failure(errand.request.client, "no answer yet")
            self._dismiss(worker)
        raise StepFailed("its worker processes end as soon as they begin; set engine.workers to 1")

    def _free_worker(self) -> Worker | None:
        """A worker with nothing to do, a new one if there may be more, None if all are busy."""
        idle = next((worker for worker in self.workers if worker.errand is None), None)
        return self._hire() if idle is None and len(self.workers) < self.count else idle

    def _hire(self) -> Worker:
        with held_back():  # a worker that nobody knows of would never be ended
            worker = Worker(self.clients, self.threads, [other.channel for other in self.workers])
            self.workers.append(worker)
        return worker

    def _dismiss(self, worker: Worker) -> str:
        with held_back():
            self.workers.remove(worker)
            return worker.end()

    def _collect(self) -> dict[ClientId, Outcome]:
        """Wait until somebody has answered (or died) and take the answers."""
        busy = {worker.channel: worker for worker in self.workers if worker.errand is not None}
        outcomes: dict[ClientId, Outcome] = {}
        for channel in wait(list(busy)):
            worker = busy[channel]  # type: ignore[index]
            assert worker.errand is not None
            request = worker.errand.request
            take = functools.partial(self._take, worker)
            outcomes[request.client] = self._guarded(take, request)  # type: ignore[type-var]
        return outcomes

    def _take(self, worker: Worker, request: Request | Examination) -> Outcome:
        try:
            frame = worker.answer()
        except (EOFError, OSError):
            raise StepFailed(
                f"its worker process {self._dismiss(worker)}; if memory ran out, lower engine.workers"
            ) from None
        note = frame.note
        if "fault" in note:
            fault = WorkerFault(note["fault"])
            fault.add_note(note["traceback"])
            raise fault
        if "failure" in note:
            raise StepFailed(note["failure"])
        report = Report(note["steps"], dict(frame.groups["losses"]), dict(frame.groups["metrics"]))
        answer = Answer(request.client, Message(frame.groups["up"]), report)
        if isinstance(request, Request):
            at = request.stamp
            self.store.record(request.client).work = Work(
                at.round, at.attempt, at.exchange, frame.groups["state"], answer, dict(note["counters"])
            )
        return answer


class Worker:
    """One worker process, as its parent sees it."""

    def __init__(self, clients: ClientBuilder, threads: int, others: Sequence[socket.socket]) -> None:
        self.channel, theirs = socket.socketpair()
        self.errand: Errand | None = None
        with theirs:
            try:
                self.process = _fork(lambda: _serve(clients, threads, theirs, [*others, self.channel]))
            except OSError as error:
                raise RunError(f"no worker process can be started ({error}); lower engine.workers") from error

    def begin(self, errand: Errand) -> bool:
        """Send an errand; False if the process is gone."""
        pieces = errand.frame().pack()
        self.errand = errand
        try:
            for piece in pieces:
                self.channel.sendall(piece)
        except OSError:
            return False
        return True

    def answer(self) -> Frame:
        """What the process sends back."""
        frame = Frame.receive(self.channel)
        self.errand = None
        return frame

    def end(self) -> str:
        """Kill the process, and say how it ended."""
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        except ChildProcessError:  # somebody else in this program has asked for its end already
            return "ended"
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _fork(work: Callable[[], NoReturn]) -> int:
    _flush()  # what stands in the buffers would be written twice
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of threads; see the module's head
        process = os.fork()
    if not process:
        work()
    return process


def _serve(
    clients: ClientBuilder, threads: int, channel: socket.socket, foreign: Sequence[socket.socket]
) -> NoReturn:
    """The life of a worker: it works until its parent has gone or lets go of it."""
    try:
        for number in SIGNALS:  # Ctrl-C reaches all processes: the parent decides
            signal.signal(number, signal.SIG_IGN)
        for other in foreign:  # the parent's ends; while one is open nobody can see that the parent is gone
            other.close()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(_work, clients, threads, channel), daemon=True).start()
        watch = select.poll()
        watch.register(channel, 0)  # wakes up for the end of the connection only
        watch.poll()
    finally:
        os._exit(0)


def _work(clients: ClientBuilder, threads: int, channel: socket.socket) -> None:
    try:
        torch.set_num_threads(threads)
        side = WorkerSide(clients)
        while True:
            for piece in side.do(Frame.receive(channel)):
                channel.sendall(piece)
    except (EOFError, OSError):  # the parent is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class WorkerSide(LocalEngine):
    """The live clients of a worker process; the records stay with its parent."""

    def do(self, frame: Frame) -> list[memoryview]:
        """Do an errand; whatever happens there is something to send back."""
        try:
            return self._do(Errand.read(frame)).pack()
        except PotluckError as error:
            return Frame({"failure": str(error)}).pack()
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            return Frame({"fault": f"{type(error).__name__}: {error}", "traceback": text}).pack()
        finally:
            _flush()

    def _do(self, errand: Errand) -> Frame:
        request = errand.request
        client = self._live(request.client, errand.state)
        self.clients.enter(client, request.stamp.round, dict(errand.counters))
        if isinstance(request, Examination):
            answer = self.performer.examine(client, request)
            state: State = {}
        else:
            answer = self.performer.perform(client, request, first=errand.first)
            state = client.snapshot()
        report = answer.report
        groups = {"up": answer.up, "losses": report.losses, "metrics": report.metrics, "state": state}
        return Frame({"steps": report.steps, "counters": client.counters}, groups)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be none, or a closed one
            stream.flush()
