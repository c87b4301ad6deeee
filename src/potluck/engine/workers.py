"""Clients on several CPU cores: worker processes do the steps, this process keeps every state.

A worker is forked from this process, so it has the data, the models and any user-defined method without a copy
and without a pickle. Forking a process that has threads is safe here for two reasons: a worker touches nothing
that another thread of its parent may have locked, and it works in a thread of its own, because OpenMP would
wait for ever for the thread team of the thread that was forked. The main thread of a worker only watches for
the end of its parent.

States and messages go to the worker and back over a socket as raw memory, about 15 ms for a model of 2.6 million
parameters. Records, transactions and checkpoints are those of the serial engine, and so are the bits.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import NoReturn

import torch

from potluck.core.card import ClientId
from potluck.engine.protocol import Answer, Examination, Outcome, Request
from potluck.engine.runner import StoringEngine, TransactionRunner, guarded
from potluck.engine.seats import KindSeats
from potluck.engine.store.client_store import ClientStore
from potluck.engine.transactions import Errand, opened, stored
from potluck.engine.wire import TensorFrame, done_frame, errand_frame, read_done, read_errand
from potluck.engine.work_times import WorkTimes
from potluck.errors import ConfigError, PotluckError, RunError, StepFailed
from potluck.federation.builder import ClientBuilder
from potluck.front_door import OwnExit, own_place
from potluck.signals import SIGNALS, held_back

# Parameters × samples of a client's round; below it a round takes a fraction of a second. Small convolutions have
# much work for few parameters, so the bound is low: at worst workers cost a small run a few tenths of a second.
SMALL = 20_000_000
FEW = 5  # clients whose models are built to estimate the size of the work


class WorkerFault(RuntimeError):
    """A bug in a worker, not a failure of its client; the traceback is in the notes."""


def worker_count(clients: ClientBuilder, cohort: int, threads: int) -> int:
    """`engine.workers: auto`: one per core and client of a cohort, but 1 where processes do not pay off.

    Also 1 on a machine with a GPU: there PyTorch refuses gradients in a fork of a process that computed some.
    """
    if sys.platform != "linux" or torch.cuda.device_count():
        return 1
    if _round_size(clients) < SMALL:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)) // threads, cohort))


def _round_size(clients: ClientBuilder) -> float:
    """Parameters of the largest model × samples a client trains on in a round, on average."""
    trainers = clients.population.trainers
    kinds = {clients.kind(client): client for client in reversed(trainers[:FEW])}
    largest = max(sum(p.numel() for p in clients.build_model(one).parameters()) for one in kinds.values())
    samples: int = sum(
        rows * clients.client_training(client).epochs
        for client, rows in zip(clients.split.ids, clients.split.clients.sizes[:, 0].tolist(), strict=True)
        if client not in clients.population.held_out
    )
    return largest * samples / len(trainers)


class WorkersEngine(StoringEngine):
    """Clients on the CPU cores of this machine, each at work in one of a few worker processes."""

    def __init__(
        self, clients: ClientBuilder, store: ClientStore | None = None, workers: int = 2, threads: int = 1
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError("engine.workers: worker processes need Linux; set it to auto or 1")
        self.clients = clients
        self.store = store if store is not None else ClientStore()
        self.count, self.threads = workers, threads
        self.workers: list[Worker] = []
        self.times = WorkTimes()

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Have the workers serve every request."""
        return self._spread(requests)

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Have the workers measure every client."""
        return self._spread(examinations)

    @property
    def work_seconds(self) -> Mapping[ClientId, float]:
        """From handing an errand out to its answer."""
        return self.times.seconds

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        with held_back():
            while self.workers:
                self.workers.pop().end()

    def _spread(self, requests: Sequence[Request] | Sequence[Examination]) -> list[Outcome]:
        """Give the next request to whoever is free until everyone has answered."""
        outcomes: dict[ClientId, Outcome] = {}
        try:
            for request in requests:
                while not self._free_worker():
                    outcomes |= self._collect()
                early = self._begin(request)
                if early is not None:
                    outcomes[request.client] = early
            while any(worker.errand for worker in self.workers):
                outcomes |= self._collect()
        except BaseException:
            self.close()  # or what is still under way would be taken for the answer to a later request
            raise
        return [outcomes[request.client] for request in requests]

    def _begin(self, request: Request | Examination) -> Outcome | None:
        """Open the record and hand the work out; an outcome if no worker is needed or none can be had."""

        def begin() -> Answer | None:
            errand = opened(self.store, request)
            if isinstance(errand, Answer):
                return errand
            self._hand_out(errand)
            return None

        return guarded(self.clients, request.client, begin)

    def _hand_out(self, errand: Errand) -> None:
        """Send an errand to a free worker; one that died while it was idle is replaced."""
        for _ in range(1 + self.count):
            worker = self._free_worker() or self._hire()
            if worker.begin(errand):
                return
            self._dismiss(worker)
        raise StepFailed("its worker processes end as soon as they begin; set engine.workers to 1")

    def _free_worker(self) -> Worker | None:
        """An idle worker, a new one if there may be more, None if all are busy."""
        idle = next((worker for worker in self.workers if worker.errand is None), None)
        return self._hire() if idle is None and len(self.workers) < self.count else idle

    def _hire(self) -> Worker:
        with held_back():  # an interrupt in between would leave a worker that nobody ends
            worker = Worker(self.clients, self.threads, [other.channel for other in self.workers])
            self.workers.append(worker)
        return worker

    def _dismiss(self, worker: Worker) -> str:
        with held_back():
            self.workers.remove(worker)
            return worker.end()

    def _collect(self) -> dict[ClientId, Outcome]:
        """Wait until some worker has answered (or died), and take the answers."""
        busy = {worker.channel: worker for worker in self.workers if worker.errand is not None}
        outcomes: dict[ClientId, Outcome] = {}
        for channel in wait(list(busy)):
            worker = busy[channel]  # type: ignore[index]
            assert worker.errand is not None
            request = worker.errand.request
            self.times.add(request, time.perf_counter() - worker.began)
            outcomes[request.client] = self._taken(worker, request)
        return outcomes

    def _taken(self, worker: Worker, request: Request | Examination) -> Outcome:
        return guarded(self.clients, request.client, lambda: self._take(worker, request))

    def _take(self, worker: Worker, request: Request | Examination) -> Outcome:
        """Store what a worker has done, or raise why it has not."""
        try:
            frame = worker.answer()
        except (EOFError, OSError):
            raise StepFailed(
                f"its worker process {self._dismiss(worker)}; if memory ran out, lower engine.workers"
            ) from None
        raise_trouble(frame)
        return stored(self.store, request, read_done(frame)).answer


class Worker:
    """One worker process, as its parent sees it."""

    def __init__(self, clients: ClientBuilder, threads: int, others: Sequence[socket.socket]) -> None:
        self.channel, theirs = socket.socketpair()
        self.errand: Errand | None = None
        self.began = 0.0  # with the errand
        with theirs:
            try:
                self.process = _fork(lambda: _serve(clients, threads, theirs, [*others, self.channel]))
            except OSError as error:
                raise RunError(f"no worker process can be started ({error}); lower engine.workers") from error

    def begin(self, errand: Errand) -> bool:
        """Send an errand; False if the process is gone."""
        frame = errand_frame(errand)
        self.errand, self.began = errand, time.perf_counter()
        try:
            frame.send(self.channel)
        except OSError:
            return False
        return True

    def answer(self) -> TensorFrame:
        """Receive what the process sends back."""
        frame = TensorFrame.receive(self.channel)
        self.errand = None
        return frame

    def end(self) -> str:
        """Kill the process, and say how it ended."""
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        except ChildProcessError:  # another part of this program has already waited for it
            return "ended"
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _fork(work: Callable[[], NoReturn]) -> int:
    _flush()  # or both processes would write what is in the buffers
    with warnings.catch_warnings():
        # Python warns of threads; see the module docstring.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        work()
    return process


def _serve(
    clients: ClientBuilder, threads: int, channel: socket.socket, foreign: Sequence[socket.socket]
) -> NoReturn:
    """The life of a worker: it works until its parent ends or closes the connection."""
    try:
        for number in SIGNALS:  # Ctrl-C reaches all processes: the parent decides
            signal.signal(number, signal.SIG_IGN)
        for other in foreign:  # the parent's ends; while one is open nobody can see that the parent is gone
            other.close()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(_work, clients, threads, channel), daemon=True).start()
        watch = select.poll()
        watch.register(channel, 0)  # wakes up only when the connection ends
        watch.poll()
    finally:
        os._exit(0)


def _work(clients: ClientBuilder, threads: int, channel: socket.socket) -> None:
    try:
        torch.set_num_threads(threads)
        side = WorkerSide(clients)
        while True:
            side.do(TensorFrame.receive(channel)).send(channel)
    except (EOFError, OSError):  # the parent is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class WorkerSide:
    """The live clients of a worker process; the records stay with its parent."""

    def __init__(self, clients: ClientBuilder) -> None:
        self.runner, self.seats = TransactionRunner(clients), KindSeats(clients)

    def do(self, frame: TensorFrame) -> TensorFrame:
        """Do an errand; there is always something to send back, also after an error."""
        try:
            return done_frame(self.runner.work(read_errand(frame), self.seats))
        except BaseException as error:
            return trouble_frame(error)
        finally:
            _flush()


def trouble_frame(error: BaseException) -> TensorFrame:
    """An error on its way to the parent process: a failure of the client, or a fault with its traceback."""
    if isinstance(error, PotluckError):
        return TensorFrame({"failure": str(error)})
    place = own_place(error.__traceback__) if isinstance(error, SystemExit) else None
    if place is not None:
        return TensorFrame({"exit": place})
    text = "".join(traceback.format_exception(error))
    return TensorFrame({"fault": f"{type(error).__name__}: {error}", "traceback": text})


def raise_trouble(frame: TensorFrame) -> None:
    """Raise what a frame says went wrong; nothing if it has an answer."""
    note = frame.note
    if "exit" in note:
        raise OwnExit(note["exit"])
    if "fault" in note:
        fault = WorkerFault(note["fault"])
        fault.add_note(note["traceback"])
        raise fault
    if "failure" in note:
        raise StepFailed(note["failure"])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be none, or a closed one
            stream.flush()
