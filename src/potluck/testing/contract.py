"""`check_method`: the contract that every method keeps, ours and yours.

>>> from potluck.testing import check_method
>>> check_method("local")
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.packed import State
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.engine.protocol import Answer, Examination
from potluck.engine.serial import SerialEngine
from potluck.errors import ModelError, RoundFailed, first_line
from potluck.front_door import front_door
from potluck.testing.bench import ALL, CLASSES, DEFAULT_MODELS, AnyMethod, Bench, Played, listening
from potluck.testing.double_precision import double_precision
from potluck.testing.faulty_engines import Losing, OtherRows, Repeating, Reversed, Spy, Taped
from potluck.testing.global_randomness import watching_generators
from potluck.testing.leaks import contains, secrets_of

Check = Callable[["Bench"], None]


def clients_of_every_kind_work(bench: Bench) -> None:
    """With one class, one sample or batch norm: no client fails, all values are finite, all can be evaluated."""
    played, _ = bench.spied
    for cohort in played.cohorts:
        _require(not cohort.failures, f"clients failed: {cohort.failures}")
    for name, state in played.states().items():
        for key, value in (state or {}).items():
            _require(bool(value.isfinite().all()), f"{key} of {name} is not finite")
    before = played.states()
    _evaluate(played)
    _same(before, played.states(), "evaluation changed a state")


def _evaluate(played: Played) -> None:
    """Measure every client in all modes of the method."""
    method, server = played.federation.method, played.rounds.server
    for client in ALL:
        down = Message(method.downlink(server, client))
        stamp = played.rounds.stamp(client, played.number, 1)
        outcome = played.local.examine([Examination(client, down, stamp, method.modes)])[0]
        _require(isinstance(outcome, Answer), f"evaluation failed: {outcome}")


def tasks_it_claims_work(bench: Bench) -> None:
    """A method that takes more than classes learns numbers, too: none of its losses needs a class."""
    if not bench.build().method.takes(Task("regression", 1, bench.data.task.input)):
        return
    try:
        clients_of_every_kind_work(_to_predict_numbers(bench))
    except Exception as error:  # whatever a loss that expects classes raises
        sentence = f"it claims to take regression and fails there ({first_line(error)})"
        raise AssertionError(f"{sentence}: use client.task.loss, or set tasks = 'classes'") from error


def _to_predict_numbers(bench: Bench) -> Bench:
    """One number, which no loss takes for classes; for modules with fixed outputs as many as there were classes."""
    try:
        bench.with_numbers(1).build()
    except ModelError:
        return bench.with_numbers(CLASSES)
    return bench.with_numbers(1)


def state_survives(bench: Bench) -> None:
    """Everything trained is declared: after sitting out, saving or a new process every bit is the same."""
    schedule: list[Sequence[ClientId]] = [("0", "1", "3"), ("1", "2"), ("0", "2", "3")]
    straight = bench.play(schedule[:1])
    resting = straight.client("0")
    broken = straight.reborn(bench.build())
    for cohort in schedule[1:]:
        straight.round(cohort)
    broken.round(schedule[1])
    _same({"0": resting}, {"0": broken.client("0")}, "a client that sat out was changed")
    broken = broken.reborn(bench.build())
    broken.round(schedule[2])
    _same(straight.states(), broken.states(), "a run that was saved and resumed went another way")


def unsampled_clients_stay(bench: Bench) -> None:
    """A client that is not asked is not touched."""
    played = bench.play([ALL])
    before = played.states()
    played.round(("1", "2"))
    for client in ("0", "3"):
        _same({client: before[client]}, {client: played.client(client)}, "an unsampled client was changed")


def check_only_refuses(bench: Bench) -> None:
    """`setup` prepares all there is to prepare: `check` sets, replaces and fills no attribute of the method."""
    federation = bench.build()
    method = type(federation.method)(federation.method.config, federation.method.pool)
    method.setup(federation.population)
    before = _attributes(method)
    method.check(federation.population)
    changed = _changed(before, method)
    _require(not changed, f"check changes {', '.join(changed)}: prepare that in setup")


def only_declared_crosses(bench: Bench) -> None:
    """Every name is declared on both sides, and no message holds a copy of what is said to stay."""
    played, spy = bench.spied
    _require(not any(cohort.failures for cohort in played.cohorts), "a message was refused")
    for answer, state in spy.seen:
        client = played.federation.clients.build_client(answer.client)
        client.restore(state)
        for private, secret in secrets_of(client, played.federation.method.stays):
            for name, value in answer.up.items():
                sentence = f"{name} in a message holds {private}, which is said to stay at home"
                _require(not contains(value, secret), sentence)
    _held_classes_stay(played.federation.method)


def _held_classes_stay(method: Method) -> None:
    """Which classes a client has is told by its labels, so a method that sends them cannot say that labels stay."""
    for step in method.steps() if "labels" in method.stays else ():
        for name, field in method.up_contract(step).items():
            told = field.at_most == "(C)-1" and field.shape.partition("<=")[0].strip() == "C_k"
            sentence = (
                f"labels are said to stay at home, but {name} of the step {step} tells which classes are held"
            )
            _require(not told, f"{sentence}: leave 'labels' out of stays")


def only_training_rows_matter(bench: Bench) -> None:
    """A step reads a client's training rows alone: other samples in all other rows change no bit."""
    straight, spy = bench.spied
    played, other = bench.spy(OtherRows)
    where = _first_difference(spy, other)
    sentence = (
        "depends on samples that are not in client.rows['train']: take client.batches() or collect(client, …)"
    )
    reason = "client.source holds the rows of all clients and splits"
    _require(not where, f"{where} {sentence}, or choose among those rows, as {reason}")
    _same(straight.states(), played.states(), f"the result {sentence}; {reason}")


def no_global_randomness(bench: Bench) -> None:
    """No generator has a fixed seed, those of NumPy and Python are not used, and their seeds do not matter."""
    with Rng(2).as_default():
        straight, spy = bench.spied
    with Rng(1).as_default():
        before = torch.get_rng_state()
        with watching_generators(bench.build().method) as found:
            played, other = bench.spy()
            _evaluate(played)
        _require(not found, f"{next(iter(found), '')}: draw from client.draw(…) or server.draw(…) instead")
        _require(torch.equal(before, torch.get_rng_state()), "torch's global generator was used")
    _same(
        straight.states(),
        played.states(),
        f"{_first_difference(spy, other) or 'round'} depends on randomness that no seed of the experiment decides, "
        "or on something remembered outside the declared state",
    )


def _first_difference(one: Spy, other: Spy) -> str:
    """Where two plays go apart: `round`, if the server sent something else, or a step of a client."""
    pairs = zip(one.seen, other.seen, strict=False)
    for asked, again, ((answer, state), (answer2, state2)) in zip(
        one.requests, other.requests, pairs, strict=False
    ):
        if not _equal(asked.down, again.down):
            return "round"
        if not (_equal(answer.up, answer2.up) and _equal(state, state2)):
            return f"the step {'+'.join(asked.steps)} of client {asked.client}"
    return ""


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(_alike(value, other[name], 0.0) for name, value in one.items())


def order_does_not_matter(bench: Bench) -> None:
    """Clients served in another order give the same bits."""
    straight, _ = bench.spied
    turned = bench.play([ALL, ALL], wrap=Reversed)
    _same(straight.states(), turned.states(), "the order of clients matters")


def comparisons_are_paired(bench: Bench) -> None:
    """Split, initial private models, cohorts and batch order are the same as for `local`."""
    federation, local = bench.build(), bench.build({"name": "local"})
    _require(federation.split.hash == local.split.hash, "the split depends on the method")
    for client in federation.population.ids:
        ours, theirs = (
            federation.population.build_model(client).state_dict(),
            local.population.build_model(client).state_dict(),
        )
        _same({client: dict(theirs)}, {client: dict(ours)}, "the initial private model depends on the method")
    for round_ in range(1, 5):
        _require(
            federation.population.cohort(round_, 2) == local.population.cohort(round_, 2),
            "the cohort depends on the method",
        )
    _, spy = bench.spied
    with listening() as heard:
        bench.play([ALL, ALL], method={"name": "local"})
    for key, order in heard.items():
        _require(spy.heard.get(key, order) == order, "the order of batches depends on the method")


def faults_leave_no_trace(bench: Bench) -> None:
    """A repeated exchange, a lost reply and a client that drops out in mid-round change nothing."""
    straight, _ = bench.spied
    repeated = bench.play([ALL, ALL], wrap=Repeating)
    _same(straight.states(), repeated.states(), "a repeated exchange left a trace")
    exchanges = straight.cohorts[1].exchange
    for lost in sorted({1, exchanges}):
        played = bench.play([ALL])
        before = played.client("1")
        played.rounds.engine = Losing(played.local, "1", lost)
        played.round(ALL)
        _same({"1": before}, {"1": played.client("1")}, "a lost reply left a trace on the client")
        _require(played.rounds.accepted["1"] == 1, "a lost reply was accepted")
        if exchanges == 1:
            absent = bench.play([ALL, ("0", "2", "3")])
            _same(absent.states(), played.states(), "a lost reply differs from an absent client")
        played.rounds.engine = played.local
        _require(not played.round(ALL).failures, "a client that was lost cannot come back")


def a_captured_step_is_right(bench: Bench) -> None:
    """A step recorded once and replayed later gives what Python gives: no number is frozen in."""
    schedule = [ALL, ALL, ("0", "1")]
    with double_precision():
        eager = bench.play(schedule)
        try:
            taped = bench.play(schedule, wrap=Taped)
        except RoundFailed as error:
            sentence = f"it works step by step, but not when fit and collect are captured: {error}"
            raise AssertionError(f"{sentence}; {_CAPTURED}") from error
        require_same_from_tape(eager, taped)


_CAPTURED = (
    "pass what changes through fit(scalars=…), gather into declared tensors (ClassStats.into), or return from "
    "collect what is needed and combine it afterwards"
)


def require_same_from_tape(eager: Played, taped: Played) -> None:
    """Compare a federation with its twin whose steps were captured. Play both in `double_precision`.

    There a frozen number stands out: the one in our tests changes a state by 6e-2, and rounding by less than 1e-10.
    """
    assert isinstance(eager.local, SerialEngine), "steps are taped in this process"
    moved = [name for client in eager.local.seats.live() for name in client.misplaced()]
    _require(not moved, f"{moved[:1]} of the state was replaced by another tensor: write to it in place")
    failures = [cohort.failures for cohort in taped.cohorts if cohort.failures]
    _require(not failures, f"a step cannot be captured: {failures}")
    _same(
        eager.states(),
        taped.states(),
        f"a captured step gives other values in later rounds: {_CAPTURED}",
        tolerance=1e-6,
    )


CHECKS: tuple[Check, ...] = (
    check_only_refuses,
    clients_of_every_kind_work,
    tasks_it_claims_work,
    no_global_randomness,  # before the others: it says more of the fault than they would
    only_training_rows_matter,
    state_survives,
    unsampled_clients_stay,
    only_declared_crosses,
    order_does_not_matter,
    comparisons_are_paired,
    faults_leave_no_trace,
    a_captured_step_is_right,
)


@front_door()
def check_method(
    method: AnyMethod, models: Any = DEFAULT_MODELS, *, verbose: bool | None = None, **settings: Any
) -> None:
    """Check the whole contract; an `AssertionError` says which part is broken and how.

    `method` is a name, a class or a mapping with options; `settings` are blocks of an experiment. `verbose` writes
    each check and its time to stderr, by default if that is a terminal.
    """
    bench = Bench(method, models, **settings)
    show = sys.stderr.isatty() if verbose is None else verbose
    for check in CHECKS:
        with _timed(f"{bench.options['name']}: {check.__name__}") if show else contextlib.nullcontext():
            _checked(bench, check)


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    sys.stderr.write(f"{what} … ")
    sys.stderr.flush()
    start, end = time.perf_counter(), "failed"
    try:
        yield
        end = f"{time.perf_counter() - start:.1f} s"
    finally:
        sys.stderr.write(f"{end}\n")


def _checked(bench: Bench, check: Check) -> None:
    """Run a check; what it finds gets the name of the method and of the check."""
    try:
        check(bench)
    except (AssertionError, RoundFailed) as error:
        sentence = f"{bench.options['name']}: {check.__name__}: {_said(error)}"
        raise AssertionError(sentence + _remembered(bench)) from error


def _said(error: Exception) -> str:
    """Our own sentence, or where the code of a method raised something."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, RoundFailed) or Path(frames[-1].filename).is_relative_to(Path(__file__).parent):
        return str(error)
    last, text = frames[-1], f" ({first_line(error)})" if str(error) else ""
    place = (
        f"{last.name} raised {type(error).__name__}{text} at {Path(last.filename).name}, line {last.lineno}"
    )
    return ", ".join([f"{place}: {last.line}", *getattr(error, "__notes__", ())])


def _remembered(bench: Bench) -> str:
    """The end of a sentence about a broken method: what changed outside the declared state."""
    played = bench.play([])
    method = played.federation.method
    places = {"attributes of the method": [method], "variables of its module": _own_modules(method)}
    before = {id(place): _attributes(place) for found in places.values() for place in found}
    with contextlib.suppress(RoundFailed, AssertionError):
        played.round(ALL)
    said = ""
    for what, found in places.items():
        changed = (name for place in found for name in _changed(before[id(place)], place))
        if names := ", ".join(name for name in changed if name not in _OF_THE_BASE):
            said += f"; {what} that changed after setup: {names}"
    return said and f"{said}: declare what is remembered in server_state or client_state"


def _own_modules(method: Method) -> list[Any]:
    """The modules a method of one's own is written in, and its classes."""
    kinds = [kind for kind in type(method).__mro__ if issubclass(kind, Method) and not _is_ours(kind)]
    modules = {
        kind.__module__: sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules
    }
    return [*modules.values(), *kinds]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "potluck"


_OF_THE_BASE = ("_contracts", "_sent")  # contracts that the base class resolves when they are first asked for


Contents = list[tuple[Any, int]]  # objects, and how often each was written to if it is a tensor


def _attributes(method: Any) -> dict[str, Contents]:
    """Each attribute with what it holds, to be compared later."""
    return {name: [*map(_noted, [value, *_items(value)])] for name, value in [*vars(method).items()]}


def _noted(value: Any) -> tuple[Any, int]:
    return value, value._version if isinstance(value, Tensor) else 0


def _items(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, list | set | tuple) else []


def _changed(before: Mapping[str, Contents], method: Any) -> list[str]:
    """The names of the attributes that were set, replaced, filled or written to since."""
    now = _attributes(method)
    return [name for name, contents in now.items() if not _same_objects(before.get(name, []), contents)]


def _same_objects(before: Contents, now: Contents) -> bool:
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(a[0] is b[0] and a[1] == b[1] for a, b in pairs)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


def _same(
    expected: Mapping[str, State | None],
    found: Mapping[str, State | None],
    sentence: str,
    tolerance: float = 0.0,
) -> None:
    for who, state in expected.items():
        other = found[who]
        _require((state is None) == (other is None), f"{sentence}: {who} was touched in one case only")
        if state is None or other is None:
            continue
        _require(set(state) == set(other), f"{sentence}: {who} has other tensors")
        for name, value in state.items():
            _require(_alike(value, other[name], tolerance), f"{sentence}: {name} of {who} differs")


def _alike(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not tolerance or not a.is_floating_point():
        return a.shape == b.shape and bool(torch.equal(a, b))
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance))


__all__ = ["CHECKS", "Bench", "Check", "Played", "check_method"]
