"""Methods: one published method is one class, both halves in one file.

The server's half is `round`, a plain script that asks clients to do named steps. The clients' half are the steps.
A method holds no training loop, no device, no file and no global randomness.

What a method writes, from most to least common (`Method` has them in this order):

- always: `name`, `round`, and at least one function marked with `@client_step`;
- usually: `citation`, `Config`, `stays`; `server_state` and `client_state`; `down` with `downlink` and `receive`
  for what comes to a client; `loss`; `modes` with `predict`;
- where the clients must fit together: `models`, `tasks`, `card_fields`, `needs_public_data`, `setup`, `check`,
  `advice`;
- rarely: `server_needs`, `remedy`, `with_one_class`, `takes`, `client_options`, `open_option`, `repeats`,
  `as_published`, `symbols`, `expected`.

The engine calls the rest (`steps`, `up_contract`, `sent_by`, `down_contract`, `told`); no method overrides these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, overload

from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.card_fields import symbols_of
from potluck.core.client import Client
from potluck.core.contract import Contract, Shapes, shapes_below
from potluck.core.message import Content, Message
from potluck.core.model import Model, Models
from potluck.core.open_options import OpenOption
from potluck.core.options import as_written, option
from potluck.core.origin import home, is_ours
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import Settings
from potluck.core.state import BufferPolicy
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError

Purpose = Literal["train", "evaluate", "setup"]
Tasks = Literal["classes", "features", "one", "any"]
Needs = Literal["nothing", "head", "names", "architecture"]
Declared = Contract | Callable[[Any], Contract]


class MethodConfig(Settings):
    """A method's options; the name chooses the method. Every field says in its description what it means."""

    name: str = option(default="", description="the method", source="ours")
    buffers: BufferPolicy = option(
        default="average",
        description="batch-norm statistics: averaged with the parameters, or kept at home (local)",
        source="ours",
    )

    def refuse_idle(self, *options: str, needs: str, among: Sequence[str | bool]) -> None:
        """Refuse options that do nothing because `needs` has none of the values `among`."""
        value = getattr(self, needs)
        if value not in among:
            *others, last = map(as_written, among)
            known = f"{', '.join(others)} or {last}" if others else last
            self.refuse_set(*options, reason=f"with {needs}: {as_written(value)}; it is for {known}")

    def refuse_set(self, *options: str, reason: str) -> None:
        """Refuse options that were given a value though they do nothing; `reason` ends the sentence.

        An option at its default passes: a run folder and a site are given every option.
        """
        for name in options:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} does nothing {reason}")


class PrivateModelConfig(MethodConfig):
    """The options of a method in which no model crosses, whole or in part."""

    buffers: Literal["average"] = option(
        default="average",
        description="does nothing here, as no model crosses; for methods that share weights",
        source="ours",
    )


@dataclass(frozen=True)
class StepInfo:
    """What a client step declares: the message it sends, the one it takes (None: the downlink), its purpose."""

    up: Declared
    down: Declared | None
    purpose: Purpose


S = TypeVar("S", bound=Callable[..., Content | None])


@overload
def client_step(function: S, /) -> S: ...
@overload
def client_step(
    *, up: Declared = ..., down: Declared | None = ..., purpose: Purpose = ...
) -> Callable[[S], S]: ...
def client_step(
    function: S | None = None,
    /,
    *,
    up: Declared | None = None,
    down: Declared | None = None,
    purpose: Purpose = "train",
) -> S | Callable[[S], S]:
    """Mark a function as something clients can be asked to do, and declare what it sends.

    Without `down` the step gets the method's `downlink`, which `receive` has installed before. With `down` it takes
    a message of its own as second argument instead.
    """

    def mark(step: S) -> S:
        step.step_info = StepInfo(up or {}, down, purpose)  # type: ignore[attr-defined]
        return step

    return mark if function is None else mark(function)


Down = Message | Content | Callable[[ClientId], Content]


class Clients(Protocol):
    """The clients of a round, as the server's script sees them."""

    @property
    def ids(self) -> tuple[ClientId, ...]:
        """The clients that are still in the round, in client order."""

    @property
    def total(self) -> int:
        """All enrolled clients, not only the sampled ones."""

    @property
    def cards(self) -> Mapping[ClientId, Card]:
        """The card of every enrolled client."""

    def ask(
        self,
        step: Callable[..., Any] | Sequence[Callable[..., Any]],
        down: Down | None = None,
        only: Sequence[ClientId] | None = None,
        rows: Mapping[str, int] | None = None,
    ) -> Replies:
        """Have the clients do a step (or several in order, on one downlink) and wait for their replies.

        `rows` says how many rows a tensor of every reply must have, where the contract leaves that open.
        """

    def leave_out(self, client: ClientId, reason: str) -> None:
        """Leave a client out of the rest of the round, as if its reply had been refused.

        For what the server finds out only when it uses a reply: `replies.among(clients.ids)` has the others.
        """


class Method:
    """The base of every method. A subclass with a `name` of its own is registered under it."""

    # --- what the method is ---
    name: ClassVar[str] = ""
    citation: ClassVar[str] = ""

    class Config(MethodConfig):
        """No options."""

    config: Any

    # --- what crosses, and what does not ---
    down: ClassVar[Declared] = {}  # what `downlink` sends and `receive` installs
    # What never leaves a client: `data`, `labels`, `representations` (of its own samples), a part of its state
    # (`model`, `projector`), a module in one (`model/head`), or `model/features`, all of the model but its head. No
    # message may hold a copy, whatever its name there: `potluck.testing.check_method` compares values.
    stays: tuple[str, ...] = ("data", "labels", "model")
    card_fields: ClassVar[tuple[str, ...]] = ()  # what a client's card tells beside samples and task

    # --- what it asks of the clients ---
    models: ClassVar[str] = "any"  # what the clients' models must have in common, in words
    # One task for all: `classes`: with one class per sample; `features`: of a kind whose scores follow from the
    # features alone (classes, labels, regression); `one`: of any kind. Or `any`: each client its own.
    tasks: ClassVar[Tasks] = "classes"
    needs_public_data: ClassVar[bool] = False
    sends_changes: bool = False  # whether weights go up as differences, where a variance may be negative
    server_needs: ClassVar[Needs] = "nothing"  # what the server must know of the models

    # --- how it predicts, and what is said where it fails ---
    modes: tuple[str, ...] = ("model",)  # ways to predict; the first is the reported one
    # The advice where numbers grow without bound.
    remedy: str = "lower training.optimizer.lr or set training.clip"
    with_one_class: ClassVar[str] = ""  # ends the advice about clients that have samples of one class only

    def __init__(self, config: MethodConfig | None = None, pool: Models | None = None) -> None:
        self.config = config if config is not None else self.Config(name=self.name)
        self.pool = pool
        self._contracts: dict[int, Contract] = {}
        self._sent: dict[tuple[str, ...], Contract] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if vars(cls).get("name"):  # one that only inherits a name does not take the place of its base
            taken = _registry.get(cls.name)
            # Of files of the user's own the one loaded last counts: a plugin may have moved.
            if taken is not None and is_ours(taken) != is_ours(cls):
                raise ConfigError(
                    f"there is a method {cls.name!r} already ({home(taken)}); give {cls.__name__} another name"
                )
            _registry[cls.name] = cls

    # --- the server's half ---

    def round(self, server: Server, clients: Clients) -> None:
        """One round, as the server sees it."""
        raise NotImplementedError(f"{type(self).__name__} defines no round")

    def server_state(self, task: Task) -> Mapping[str, Any]:
        """The named modules and tensors of the server."""
        return {}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """What a client needs of the server's newest state."""
        return {}

    # --- the clients' half, beside the steps ---

    def client_state(self, task: Task, model: Model) -> Mapping[str, Any]:
        """The named modules and tensors of a client; `model` is the client's own."""
        return {"model": model}

    def receive(self, client: Client, down: Message) -> None:
        """Install a downlink; also done for clients that are only evaluated."""

    def loss(self, client: Client, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """What a client minimises, by default its task's own loss: a scalar, or named terms."""
        return client.task.loss(client["model"](batch.x), batch.y, batch.weight)

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """The scores of a batch, in one of the method's `modes`."""
        scores: Tensor = client["model"](batch.x)
        return scores

    # --- before anything runs ---

    def setup(self, population: Population) -> None:
        """Prepare what depends on who takes part; called once, before `check` and before anything else.

        Every attribute that the options alone do not give is set here, and nowhere else.
        """

    def check(self, population: Population) -> None:
        """Refuse settings that cannot work, before anything runs; changes nothing."""

    def advice(self, population: Population) -> Iterable[str]:
        """Sentences for the user before a run begins, on settings that are allowed but often a mistake."""
        return ()

    # --- for few methods ---

    @classmethod
    def takes(cls, task: Task) -> bool:
        """Whether the method can learn a task of this kind; by default as `tasks` says."""
        if cls.tasks == "features":
            return task.from_features
        return task.single_label or cls.tasks != "classes"

    def client_options(self, client: ClientId) -> Mapping[str, Any]:
        """Further arguments of `client_state`, for clients of one architecture whose state differs."""
        return {}

    def open_option(self, population: Population) -> OpenOption | None:
        """An option whose value pilot runs have to choose first; only asked after `check`."""
        return None

    def repeats(self, population: Population) -> Mapping[str, tuple[int, int]]:
        """How many messages a step sends and takes in a round, up and down, where that is not one of each."""
        return {}

    def as_published(self, direction: Literal["up", "down"], message: Message) -> int | None:
        """The scalars a paper counts for a message, shown beside what crosses; None: nothing to add."""
        return None

    def symbols(self, card: Card) -> dict[str, int]:
        """The symbols that shape formulas may use, as far as a card tells."""
        return symbols_of(card)

    def expected(self, card: Card, part: str) -> Shapes | None:
        """The tensors of a client's part as far as the server can know them from its card."""
        root, _, path = part.partition("/")
        return shapes_below(card.names, path) if root == "model" and "names" in card.extra else None

    def state_keys(self, card: Card) -> frozenset[str]:
        """The keys in mappings of the server's state from which a client with such a card is sent something.

        None where all clients get the same.
        """
        return frozenset()

    # --- what the engine calls ---

    @classmethod
    def told(cls) -> tuple[str, ...]:
        """What a card tells beside samples and task: the card fields, and which public samples are meant."""
        return (*cls.card_fields, *(("public",) if cls.needs_public_data else ()))

    @classmethod
    @functools.cache
    def steps(cls) -> dict[str, StepInfo]:
        """The client steps a method defines, by name."""
        found = {name: getattr(getattr(cls, name), "step_info", None) for name in dir(cls)}
        return {name: info for name, info in found.items() if isinstance(info, StepInfo)}

    def up_contract(self, step: str) -> Contract:
        """What a step may send."""
        return self._resolve(self.steps()[step].up)

    def sent_by(self, steps: tuple[str, ...]) -> Contract:
        """What several steps in a row may send together; made once."""
        if steps not in self._sent:
            contracts = map(self.up_contract, steps)
            self._sent[steps] = {name: field for contract in contracts for name, field in contract.items()}
        return self._sent[steps]

    def down_contract(self, step: str) -> Contract:
        """What a step may receive."""
        declared = self.steps()[step].down if step in self.steps() else None
        return self._resolve(type(self).down if declared is None else declared)

    def _resolve(self, declared: Declared) -> Contract:
        """The contract itself; one that depends on the options is made once."""
        if not callable(declared):
            return declared
        if id(declared) not in self._contracts:
            self._contracts[id(declared)] = declared(self)
        return self._contracts[id(declared)]


def check_tasks(method: Method, tasks: Mapping[ClientId, Task]) -> None:
    """Refuse clients whose tasks the method cannot learn, or cannot bring together."""
    first, task = next(iter(tasks.items()))
    for client, other in tasks.items():
        if not method.takes(other):
            needs = _NEEDS["features" if method.tasks == "features" else "classes"]
            raise ConfigError(
                f"{method.name} learns from {needs}; client {client} has {other}; methods that take it: "
                f"{_that_take(tasks.values())}"
            )
        if other != task and method.tasks != "any":
            raise ConfigError(
                f"{method.name} needs clients with the same task; client {client} has {other}, client {first} "
                f"has {task}; use a method that takes mixed tasks, such as local"
            )


_NEEDS = {"classes": "one class per sample", "features": "scores that follow from the features alone"}


def _that_take(tasks: Collection[Task]) -> str:
    """The names of the methods for clients with these tasks; last those that need public data."""
    mixed = len(set(tasks)) > 1
    found = {
        name: method
        for name, method in sorted(_registry.items())
        if all(map(method.takes, tasks)) and (method.tasks == "any" or not mixed)
    }
    alone = ", ".join(name for name, method in found.items() if not method.needs_public_data)
    public = ", ".join(name for name, method in found.items() if method.needs_public_data)
    return (alone or "none") + (f"; with public data also {public}" if public else "")


_registry: dict[str, type[Method]] = {}


def register_again(module: ModuleType) -> set[str]:
    """Let the methods of a plugin count again, whichever file took their names since; the names."""
    inside = (module.__name__, f"{module.__name__}.")
    classes = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Method)]
    own = {
        one.name: one
        for one in classes
        if vars(one).get("name") and (one.__module__ == inside[0] or one.__module__.startswith(inside[1]))
    }
    _registry.update(own)
    return {*own}


def register_made(method: type[Method]) -> None:
    """Register a method whose class was put together without its name, as unpickling does."""
    _registry[method.name] = method


def registered() -> Mapping[str, type[Method]]:
    """The methods defined so far, by name; importing `potluck.methods` defines those of this library."""
    return _registry
