"""What a site agrees to send and do, pinned in a file at the site.

The wire contract of a method depends on options that the server chooses. A site that has read what would leave it
(`potluck join --check`) saves that as an `Agreement`. From then on the site refuses, in one sentence, another
method, an option outside its bounds, a further step, tensor or card field, another shape, or more bytes. Everything
here is data and comparisons: no clock, no network, no state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, ValidationError, field_validator

from potluck.core.card_fields import own_card
from potluck.core.client import Client
from potluck.core.message import Message
from potluck.core.method import Method, MethodConfig
from potluck.core.plain_values import read_json
from potluck.core.settings import Settings
from potluck.core.validation import one_sentence
from potluck.deploy.tensor_specs import Spec, Specs, specs_allowed, specs_of
from potluck.errors import ConfigError, PinError
from potluck.files import is_shallow, read_given, write_whole

ALWAYS_TOLD = ("samples", "task")  # fields of every card
EVALUATE = "evaluate"  # the library's own step, in addition to those of the method
PROTECTING = ("noise",)  # options where more is safer: an agreement pins their lower bound
BOUNDS = {"least", "most"}
ROUNDS = 1000  # of a run
RUNS = 10  # that a site joins: each has private noise of its own, on the same samples
EVALUATIONS = 24  # in a round, with other questions each: three moments of eight attempts
ATTEMPTS = 8  # at a round, with other bytes each: a server that is disturbed again and again needs some


def check_new(path: Path) -> None:
    """Refuse a file that exists: an agreement is never overwritten, as somebody decided on it."""
    if path.exists():
        raise ConfigError(f"{path} exists; move it away, or write the agreement to another file")


# --- the agreement --------------------------------------------------------------------------------------


class Crossing(Settings):
    """What may cross in one step, by the full name of each tensor (`small/conv1.weight`)."""

    up: dict[str, Spec] = {}
    down: dict[str, Spec] = {}


IF_MEANT = "change its contract if that is meant"
ANEW = "write it anew with potluck join --check EXPERIMENT.yaml --write FILE"


class Agreement(Settings):
    """Everything that a site will do and send; saved as `contract.json`, which can be edited by hand.

    An option is pinned to a value, or bounded by `{"least": 0.8}`, `{"most": 4}` or both; an option that is not
    listed is up to the server.
    """

    method: str = Field(min_length=1)
    options: dict[str, Any] = {}
    steps: dict[str, Crossing]
    card: tuple[str, ...] = ALWAYS_TOLD  # what the site tells about itself at enrolment
    bytes_per_round: int = Field(ge=0)  # at most, in one attempt at a round
    attempts_per_round: int = Field(default=ATTEMPTS, ge=1)  # with other bytes each; a repeated reply is none
    evaluations_per_round: int = Field(default=EVALUATIONS, ge=0)  # with other questions each
    most_rounds: int = Field(default=ROUNDS, ge=1)  # that a run may have
    most_runs: int = Field(default=RUNS, ge=1)  # that the site joins in all, whatever their names
    metrics: tuple[str, ...] = ()  # what may be measured and told beside the metrics of its task

    @field_validator("options")
    @classmethod
    def _bounds_are_numbers(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, pin in options.items():
            for bound in pin if _is_bounds(pin) else ():
                if not _is_number(pin[bound]):
                    raise ValueError(f"option {name!r}: {bound} must be a number (given: {pin[bound]!r})")
        return options

    @classmethod
    def of(
        cls,
        method: Method,
        client: Client,
        sent: Sequence[Message] = (),
        metrics: Sequence[str] = (),
        rounds: int = ROUNDS,
    ) -> Self:
        """The agreement that allows exactly what this method, with its options, does with this client.

        `sent` are the messages of a rehearsed round, as a method may ask for a step more than once; `rounds` are
        those of the run.
        """
        steps = {step: _crossing(method, client, step) for step in (*method.steps(), EVALUATE)}
        most = sum(Message(_largest(crossing.up)).nbytes for crossing in steps.values() if crossing.up)
        return cls(
            method=method.name,
            options={name: _proposed(name, value) for name, value in options_of(method.config).items()},
            steps=steps,
            card=(*ALWAYS_TOLD, *method.told()),
            bytes_per_round=max(most, sum(message.nbytes for message in sent if message)),
            most_rounds=rounds,
            metrics=tuple(metrics),
        )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read an agreement from a file; anything wrong with it is one sentence."""
        try:
            values = read_json(read_given(Path(path), "agreement"))
            if not is_shallow(values):
                raise RecursionError
            if not isinstance(values, dict):
                raise ConfigError(f"{path} is no agreement: it must be a block of keys with values; {ANEW}")
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{path} is no agreement: {one_sentence(error, cls)}; {ANEW}") from error
        except RecursionError as error:
            raise ConfigError(f"{path} is no agreement: it is nested too deeply; {ANEW}") from error
        except ValueError as error:
            deep = isinstance(error.__cause__, RecursionError)
            why = "it is nested too deeply" if deep else f"it is not JSON ({error})"
            raise ConfigError(f"{path} is no agreement: {why}; {ANEW}") from error

    def write(self, path: Path | str) -> None:
        """Write the agreement to a new file."""
        check_new(Path(path))
        write_whole(Path(path), (self.model_dump_json(indent=2) + "\n").encode())

    # --- before anything runs ---

    def admit_options(self, method: str, config: MethodConfig | Mapping[str, Any]) -> None:
        """Refuse another method, or options outside the pins, before the method's code sees them."""
        if method != self.method:
            raise PinError(f"the server runs {method!r}, this site agreed to {self.method!r}; {IF_MEANT}")
        given = options_of(config)
        for name, pin in self.options.items():
            if name not in given:
                raise PinError(f"option {name!r} is not given, this site agreed to {_words(pin)}; {IF_MEANT}")
            if not fits(pin, given[name]):
                raise PinError(
                    f"option {name!r} is {given[name]!r}, this site agreed to {_words(pin)}; {IF_MEANT}"
                )

    def admit(self, method: Method, client: Client) -> None:
        """Refuse a method that, with the server's options, would do anything beyond the agreement."""
        self.admit_options(method.name, method.config)
        self.covers(Agreement.of(method, client))

    def covers(self, offer: Agreement) -> None:
        """Refuse steps, tensors, card fields or bytes of an offer that go beyond this agreement."""
        told = next((field for field in offer.card if field not in self.card), None)
        if told is not None:
            raise PinError(
                f"the card would tell {told!r}, this site agreed to: {', '.join(self.card)}; {IF_MEANT}"
            )
        self.let_measure(offer.metrics)
        for step, crossing in offer.steps.items():
            if step == EVALUATE and step not in self.steps:
                continue  # each order to evaluate is refused then; the site trains all the same
            self._known([step])
            _compare(self.steps[step].down, crossing.down, f"step {step} would receive")
            _compare(self.steps[step].up, crossing.up, f"step {step} would send")
        if offer.bytes_per_round > self.bytes_per_round:
            raise PinError(_too_much("a round", offer.bytes_per_round, self.bytes_per_round))

    def let_join(self, joined: int) -> None:
        """Refuse a new run if the site has joined as many as agreed."""
        if joined >= self.most_runs:
            raise PinError(
                f"this site has joined {joined} runs, and agreed to {self.most_runs}; raise most_runs in its "
                "contract to allow more"
            )

    def let_play(self, rounds: int) -> None:
        """Refuse a run of more rounds than agreed."""
        if rounds > self.most_rounds:
            raise PinError(
                f"the run has {rounds:,} rounds, this site agreed to {self.most_rounds:,}; raise most_rounds in "
                "its contract if that is meant"
            )

    # --- at every message ---

    def let_in(self, steps: Sequence[str], message: Message) -> None:
        """Refuse a request for a step, or with a tensor, that was not agreed to."""
        self._known(steps)
        _compare(self.steps[steps[0]].down, specs_of(message), f"step {'+'.join(steps)} receives")

    def let_measure(self, metrics: Sequence[str]) -> None:
        """Refuse a metric that was not agreed to."""
        unknown = next((name for name in metrics if name not in self.metrics), None)
        if unknown is not None:
            known = ", ".join(self.metrics) or "those of its task"
            raise PinError(
                f"the metric {unknown!r} would be measured, this site agreed to: {known}; {IF_MEANT}"
            )

    def let_try(self, round_: int, attempt: int) -> None:
        """Refuse an attempt at a round beyond the agreed number, before anything is done."""
        refuse_attempt(round_, attempt, self.attempts_per_round)

    def let_examine(self, round_: int, asked: int) -> None:
        """Refuse an evaluation beyond the agreed number in a round, before anything is measured."""
        refuse_evaluation(round_, asked, self.evaluations_per_round)

    def let_out(self, steps: Sequence[str], round_: int, message: Message, spent: int = 0) -> int:
        """Refuse a reply beyond the agreement; else return the bytes that have left in this attempt so far.

        `spent` is what this returned for the previous message of the same attempt at the round; the caller's record
        has it. A stored reply that is sent again holds nothing new and is not counted again.
        """
        self._known(steps)
        agreed = {name: spec for step in steps for name, spec in self.steps[step].up.items()}
        _compare(agreed, specs_of(message), f"step {'+'.join(steps)} sends")
        total = spent + (message.nbytes if message else 0)
        if total > self.bytes_per_round:
            raise PinError(_too_much(f"round {round_}", total, self.bytes_per_round))
        return total

    def _known(self, steps: Sequence[str]) -> None:
        if not steps:
            raise PinError("a message came that names no step; tell whoever runs the server")
        for step in steps:
            if step not in self.steps:
                known = ", ".join(self.steps) or "none"
                raise PinError(f"step {step!r} is asked for, this site agreed to: {known}; {IF_MEANT}")


# --- comparisons ----------------------------------------------------------------------------------------


def options_of(config: MethodConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The options of a method as plain values, without its name."""
    values = config.model_dump(mode="json", fallback=str) if isinstance(config, MethodConfig) else config
    return {name: value for name, value in values.items() if name != "name"}


def fits(pin: Any, value: Any) -> bool:
    """Whether an option's value is the pinned one, or within the pinned bounds.

    >>> fits({"least": 0.8}, 1), fits({"least": 0.8}, 0.5), fits(32, 32.0), fits(1, True)
    (True, False, True, False)
    """
    if not _is_bounds(pin):
        return _same(pin, value)
    return _is_number(value) and pin.get("least", -math.inf) <= value <= pin.get("most", math.inf)


def _compare(agreed: Specs, other: Specs, what: str) -> None:
    """Refuse a tensor that was not agreed to; tensors may be missing."""
    for name, spec in other.items():
        if name not in agreed:
            raise PinError(f"{what} {name!r}, which this site has not agreed to; {IF_MEANT}")
        if not agreed[name].holds(spec):
            raise PinError(f"{what} {name!r} as {spec}, this site agreed to {agreed[name]}; {IF_MEANT}")


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, but true does not equal 1."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _is_bounds(pin: Any) -> bool:
    return isinstance(pin, Mapping) and bool(pin) and BOUNDS.issuperset(pin)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _words(pin: Any) -> str:
    if not _is_bounds(pin):
        return repr(pin)
    return " and ".join(f"at {bound} {pin[bound]}" for bound in ("least", "most") if bound in pin)


def _too_much(what: str, total: int, most: int) -> str:
    return f"{what} would send {total:,} bytes, this site agreed to {most:,}; {IF_MEANT}"


def refuse_attempt(round_: int, attempt: int, most: int) -> None:
    """Refuse an attempt at a round whose number is above the most that are allowed."""
    if attempt > most:
        raise PinError(
            f"round {round_} was asked for {most} times, each time with another question, and this site agreed to "
            f"{most} attempts at a round; raise attempts_per_round in its contract if that is meant"
        )


def refuse_evaluation(round_: int, asked: int, most: int) -> None:
    """Refuse an evaluation whose number in a round is above the most that are allowed."""
    if asked > most:
        raise PinError(
            f"round {round_} was measured {most} times, each time with another question, and this site agreed to "
            f"{most}; raise evaluations_per_round in its contract if that is meant"
        )


# --- what a method would do -----------------------------------------------------------------------------


def _proposed(name: str, value: Any) -> Any:
    return {"least": value} if name in PROTECTING and _is_number(value) else value


def _crossing(method: Method, client: Client, step: str) -> Crossing:
    """What a step's wire contract lets cross for this client."""
    up = method.up_contract(step) if step in method.steps() else {}
    symbols = method.symbols(own_card(client, method.card_fields))
    return Crossing(
        up=dict(specs_allowed(up, client, symbols)),
        down=dict(specs_allowed(method.down_contract(step), client, symbols)),
    )


def certain_message(method: Method, client: Client, steps: Sequence[str]) -> Message:
    """The tensors that a reply to these steps has in any case, where their sizes are known, without memory."""
    symbols = method.symbols(own_card(client, method.card_fields))
    contract = {
        name: field
        for name, field in method.sent_by(tuple(steps)).items()
        if not (field.optional or field.partial or field.low_rank)
    }
    specs = dict(specs_allowed(contract, client, symbols))
    return Message(_largest({name: spec for name, spec in specs.items() if spec.is_exact}))


def _largest(specs: Specs) -> dict[str, torch.Tensor]:
    return {name: spec.largest() for name, spec in specs.items()}
