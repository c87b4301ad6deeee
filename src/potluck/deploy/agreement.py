"""What a site agrees to: pinned in a file of its own, and kept whatever the server says.

The wire contract of a method follows from the options the server chooses. A site that has read what would leave
it (`potluck join --check`) writes that down as an `Agreement`; from then on another method, an option outside its
bounds, a further step, tensor or card field, another shape or more bytes are refused at the site, in one sentence.
Everything here is data and comparisons: no clock, no network, nothing that changes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, field_validator

from potluck.core.card_fields import own_card
from potluck.core.client import Client
from potluck.core.contract import Contract
from potluck.core.contract import Field as WireField
from potluck.core.formulas import evaluate
from potluck.core.message import Message
from potluck.core.method import Method, MethodConfig
from potluck.core.settings import Settings
from potluck.errors import ConfigError, MessageError, PinError

ALWAYS_TOLD = ("samples", "task")  # on every card
EVALUATE = "evaluate"  # the library's own step, beside those of the method
PROTECTING = ("noise",)  # options of which more is safer: a proposal pins the least
BOUNDS = {"least", "most"}

_SPEC = re.compile(r"([a-z][a-z0-9_]*)\[((?:\d+|<=\d+|\*)(?:, ?(?:\d+|<=\d+|\*))*)?\]")


# --- one tensor -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor, written `float32[<=10, 64]`: a size is exact, at most (`<=`) or open (`*`).

    >>> TensorSpec.read("float32[<=10, 64]").holds(TensorSpec.read("float32[3, 64]"))
    True
    """

    dtype: str
    shape: tuple[str, ...]

    @classmethod
    def read(cls, text: object) -> TensorSpec:
        """The inverse of `str`."""
        if isinstance(text, TensorSpec):
            return text
        found = _SPEC.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError("write type and shape of a tensor as in float32[<=10, 64]")
        return cls(found[1], tuple(size.strip() for size in found[2].split(",")) if found[2] else ())

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """What a tensor is."""
        return cls(_name(tensor.dtype), tuple(map(str, tensor.shape)))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.shape)}]"

    def holds(self, other: TensorSpec) -> bool:
        """Whether all that `other` allows is allowed here too."""
        alike = self.dtype == other.dtype and len(self.shape) == len(other.shape)
        return alike and all(map(_size_holds, self.shape, other.shape))

    def largest(self) -> torch.Tensor:
        """A tensor without memory of the largest shape; open sizes count as nothing."""
        sizes = [0 if size == "*" else int(size.removeprefix("<=")) for size in self.shape]
        return torch.empty(sizes, dtype=getattr(torch, self.dtype), device="meta")


def _size_holds(agreed: str, other: str) -> bool:
    if agreed == "*" or agreed == other:
        return True
    most = agreed.removeprefix("<=")
    return most != agreed and other != "*" and int(other.removeprefix("<=")) <= int(most)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Spec = Annotated[TensorSpec, BeforeValidator(TensorSpec.read), PlainSerializer(str)]
Specs = Mapping[str, TensorSpec]


# --- the agreement --------------------------------------------------------------------------------------


class Crossing(Settings):
    """What may cross in one step, by the full name of each tensor (`small/conv1.weight`)."""

    up: dict[str, Spec] = {}
    down: dict[str, Spec] = {}


class Agreement(Settings):
    """All that a site will do and let out. `contract.json` is this, and can be edited by hand.

    An option is pinned by its value, or by `{"least": 0.8}`, `{"most": 4}` or both; an option that is not listed is
    left to the server.
    """

    method: str = Field(min_length=1)
    options: dict[str, Any] = {}
    steps: dict[str, Crossing]
    card: tuple[str, ...] = ALWAYS_TOLD  # what the site tells of itself at enrolment
    bytes_per_round: int = Field(ge=0)  # most that may leave in a round, over all attempts at it

    @field_validator("options")
    @classmethod
    def _bounds_are_numbers(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, pin in options.items():
            for bound in pin if _is_bounds(pin) else ():
                if not _is_number(pin[bound]):
                    raise ValueError(f"option {name!r}: {bound} must be a number (given: {pin[bound]!r})")
        return options

    @classmethod
    def of(cls, method: Method, client: Client, sent: Sequence[Message] = (), attempts: int = 1) -> Self:
        """The agreement that allows just what this method, with these options, does for this client.

        `sent` are the messages of a rehearsed round: a method may ask for a step more than once. `attempts` is how
        often the server may try at a round; each counts.
        """
        steps = {step: _crossing(method, client, step) for step in (*method.steps(), EVALUATE)}
        most = sum(Message(_largest(crossing.up)).nbytes for crossing in steps.values() if crossing.up)
        return cls(
            method=method.name,
            options={name: _proposed(name, value) for name, value in options_of(method.config).items()},
            steps=steps,
            card=(*ALWAYS_TOLD, *method.told()),
            bytes_per_round=attempts * max(most, sum(message.nbytes for message in sent if message)),
        )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The agreement in a file; whatever is wrong with the file is told in one sentence."""
        from potluck.experiment.schema import one_sentence

        try:
            return cls.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        except ValidationError as error:
            raise ConfigError(f"{path} is no agreement: {one_sentence(error, cls)}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is no agreement: it is not JSON: {error}") from error

    def write(self, path: Path | str) -> None:
        """Write the file; one that exists is somebody's decision and is left alone."""
        from potluck.files import write_whole

        if Path(path).exists():
            raise ConfigError(f"{path} exists; move it away, or write the agreement to another file")
        write_whole(Path(path), (self.model_dump_json(indent=2) + "\n").encode())

    # --- before anything runs ---

    def admit_options(self, method: str, config: MethodConfig | Mapping[str, Any]) -> None:
        """Refuse another method, or options outside the pins: before the method's code sees them."""
        if method != self.method:
            raise PinError(f"the server runs {method!r}, this site agreed to {self.method!r}")
        given = options_of(config)
        for name, pin in self.options.items():
            if name not in given:
                raise PinError(f"option {name!r} is not given, this site agreed to {_words(pin)}")
            if not fits(pin, given[name]):
                raise PinError(f"option {name!r} is {given[name]!r}, this site agreed to {_words(pin)}")

    def admit(self, method: Method, client: Client) -> None:
        """Refuse a method that, with the server's options, would do anything not agreed to with this client."""
        self.admit_options(method.name, method.config)
        self.covers(Agreement.of(method, client))

    def covers(self, offer: Agreement) -> None:
        """Refuse steps, tensors, card fields or bytes of an offer that go beyond this agreement."""
        told = next((field for field in offer.card if field not in self.card), None)
        if told is not None:
            raise PinError(f"the card would tell {told!r}, this site agreed to: {', '.join(self.card)}")
        for step, crossing in offer.steps.items():
            self._known([step])
            _compare(self.steps[step].down, crossing.down, f"step {step} would receive")
            _compare(self.steps[step].up, crossing.up, f"step {step} would send")
        if offer.bytes_per_round > self.bytes_per_round:
            raise PinError(_too_much("a round", offer.bytes_per_round, self.bytes_per_round))

    # --- at every message ---

    def let_in(self, steps: Sequence[str], message: Message) -> None:
        """Refuse a request for a step, or with a tensor, that was not agreed to."""
        self._known(steps)
        _compare(self.steps[steps[0]].down, specs_of(message), f"step {'+'.join(steps)} receives")

    def let_out(self, steps: Sequence[str], round_: int, message: Message, spent: int = 0) -> int:
        """Refuse a reply that tells more than agreed; otherwise the bytes that have left in this round.

        `spent` is what this gave after the round's message before: whoever keeps it beside the reply on disk keeps
        the count through a restart. A stored reply that is sent again tells nothing new and is not counted again.
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
            raise PinError("a message came that names no step")
        for step in steps:
            if step not in self.steps:
                known = ", ".join(self.steps) or "none"
                raise PinError(f"step {step!r} is asked for, this site agreed to: {known}")


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


def specs_of(message: Message) -> dict[str, TensorSpec]:
    """Type and shape of every tensor of a message."""
    return {name: TensorSpec.of(tensor) for name, tensor in message.items()}


def _compare(agreed: Specs, other: Specs, what: str) -> None:
    """Refuse a tensor that was not agreed to; fewer than agreed are no harm."""
    for name, spec in other.items():
        if name not in agreed:
            raise PinError(f"{what} {name!r}, which this site has not agreed to")
        if not agreed[name].holds(spec):
            raise PinError(f"{what} {name!r} as {spec}, this site agreed to {agreed[name]}")


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is 1.0, but true is not 1."""
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
    return f"{what} would send {total:,} bytes, this site agreed to {most:,}"


# --- what a method would do -----------------------------------------------------------------------------


def _proposed(name: str, value: Any) -> Any:
    return {"least": value} if name in PROTECTING and _is_number(value) else value


def _crossing(method: Method, client: Client, step: str) -> Crossing:
    """A step's wire contract with the client's own names and sizes."""
    up = method.up_contract(step) if step in method.steps() else {}
    symbols = method.symbols(own_card(client, method.card_fields))

    def resolved(contract: Contract) -> dict[str, TensorSpec]:
        return dict(_resolve(contract, symbols, lambda part: _wire(client, part), f"{method.name}, {step}"))

    return Crossing(up=resolved(up), down=resolved(method.down_contract(step)))


def _wire(client: Client, part: str) -> dict[str, torch.Tensor] | None:
    return client[part].wire() if part in client else None


def _resolve(
    contract: Contract,
    symbols: Mapping[str, int],
    parts: Callable[[str], Mapping[str, torch.Tensor] | None],
    who: str,
) -> Iterator[tuple[str, TensorSpec]]:
    for name, field in contract.items():
        if field.like is None:
            yield name, TensorSpec(_name(field.dtype), _sizes(field, symbols))
            continue
        tensors = parts(field.like)
        if tensors is None:
            raise PinError(
                f"{who}: {name!r} is like {field.like!r}, which the client has not, so it cannot be pinned"
            )
        yield from ((f"{name}/{key}", TensorSpec.of(tensor)) for key, tensor in tensors.items())


def _sizes(field: WireField, symbols: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(_size(formula.strip(), symbols) for formula in field.shape.split(",") if formula.strip())


def _size(formula: str, symbols: Mapping[str, int]) -> str:
    """One size of a shape: exact where its symbols are known, else at most its bound, else open."""
    symbol, _, bound = (piece.strip() for piece in formula.partition("<="))
    try:
        return str(evaluate(symbol, symbols))
    except MessageError:
        return f"<={evaluate(bound, symbols)}" if bound else "*"


def _largest(specs: Specs) -> dict[str, torch.Tensor]:
    return {name: spec.largest() for name, spec in specs.items()}
