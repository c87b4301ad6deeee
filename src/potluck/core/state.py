"""Declared state: the named modules and tensors of a client or of the server.

What is declared is saved, restored, undone and resumed; nothing else survives a step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from potluck.core.packed import ALIGNMENT, Layout, Packed, State, row_major, views
from potluck.core.public import Public
from potluck.core.rng import Rng
from potluck.core.settings import ClientTraining
from potluck.core.task import Task
from potluck.errors import ConfigError, MessageError, nearest

BufferPolicy = Literal["average", "local"]
Precision = Literal["float32", "tf32", "bfloat16"]


class Moments(dict[str, Tensor]):
    """The state of an optimiser that outlives one `fit`: declare it, pass it as `fit(…, moments=…)`.

    `lifetime="run"` keeps it for good, `"round"` sets it to zero, a new optimiser's, when a new round begins.
    """

    def __init__(self, lifetime: Literal["run", "round"] = "run") -> None:
        super().__init__()
        self.lifetime = lifetime


class Part:
    """One named piece of state: a module, one tensor, or a mapping of tensors.

    A module's own names (`features`, `head`, …) are reached through the part: `client["model"].features(x)`.
    """

    def __init__(self, value: Any, buffers: BufferPolicy = "average", remember: bool = False) -> None:
        self.content = value
        self.buffers = buffers
        self.remember = remember
        self.block: tuple[Tensor, Layout] | None = None
        self._sent: tuple[tuple[int, ...], dict[str, Tensor]] | None = None
        self._parameters, self._saved, self._made = (
            _places(value) if isinstance(value, nn.Module) else ((), (), ())
        )

    def __call__(self, *args: Any) -> Any:
        """Call the module."""
        return self.content(*args)

    def __getattr__(self, name: str) -> Any:
        if name == "content":
            raise AttributeError(name)
        return getattr(self.content, name)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors()[name]

    @property
    def module(self) -> nn.Module | None:
        """The module, None for plain tensors."""
        return self.content if isinstance(self.content, nn.Module) else None

    @property
    def value(self) -> Tensor:
        """The tensor, of a part that is a single tensor."""
        if not isinstance(self.content, Tensor):
            raise TypeError(f"this part of the state is a {type(self.content).__name__}, not one tensor")
        return self.content

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the part itself, not a copy: parameters and buffers of a module."""
        if isinstance(self.content, nn.Module):
            return _found(self._parameters) | _found(self._saved) | _found(self._made)
        if isinstance(self.content, Tensor):
            return {"": self.content}
        return dict(self.content)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters a training step may change."""
        found = _found(self._parameters)
        return {name: value for name, value in found.items() if value.requires_grad}  # type: ignore[misc]

    def wire(self) -> dict[str, Tensor]:
        """The tensors that may cross: parameters, and saved floating-point buffers unless they stay at home."""
        if not isinstance(self.content, nn.Module):
            return self.tensors()
        named = _found(self._parameters)
        if self.buffers == "average":
            saved = _found(self._saved)
            named |= {name: value for name, value in saved.items() if value.is_floating_point()}
        return named

    def state(self) -> dict[str, Tensor]:
        """A copy of what may cross, in one piece of memory. Later training does not change it.

        The server's is asked for once per client; it is copied again only when something was written since.
        """
        if not self.remember:
            return self._copied()
        if self._sent is None or self._sent[0] != _versions(self.wire(), self._sent[1]):
            copied = self._copied()
            self._sent = _versions(self.wire(), copied), copied
        return dict(self._sent[1])

    def _copied(self) -> dict[str, Tensor]:
        if self.block is not None:
            return views(self.block[0].clone(), self.block[1])
        wire = self.wire()
        if len({value.dtype for value in wire.values()}) != 1:
            return {name: value.detach().clone() for name, value in wire.items()}
        flat = torch.cat([value.detach().reshape(-1) for value in wire.values()])
        parts = torch.split(flat, [value.numel() for value in wire.values()])
        return {name: part.view(value.shape) for (name, value), part in zip(wire.items(), parts, strict=True)}

    def load(self, state: Mapping[str, Tensor] | Tensor) -> None:
        """Copy values in place. Names not given keep their values; a mapping of tensors takes new names."""
        if isinstance(state, Tensor):
            state = {"": state}
        own = self.tensors()
        if _shapes(state).items() <= _shapes(own).items():
            _copy_each(own, state)
        else:
            self._load_each(own, state)

    @torch.no_grad()
    def _load_each(self, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)
            elif isinstance(self.content, dict):
                self.content[name] = row_major(value.detach().clone())
            elif name in own:
                shapes = f"shape {tuple(value.shape)}, expected {tuple(own[name].shape)}"
                raise MessageError(f"tensor {name!r} of this part of the state has {shapes}")
            else:
                raise MessageError(f"tensor {name!r} does not belong to this part of the state")


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}


def _copy_each(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into the tensors of the same names, in one operation."""
    if values:
        with torch.no_grad():
            torch._foreach_copy_([places[name] for name in values], [*values.values()])


def _versions(*states: Mapping[str, Tensor]) -> tuple[int, ...]:
    """How often each tensor was written to."""
    return tuple(value._version for state in states for value in state.values())


def _is_dense(value: Tensor) -> bool:
    return value.is_contiguous() or (
        value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    )


def _block(name: str, part: Part, flat: Tensor, layout: Layout) -> tuple[Tensor, Layout] | None:
    """The piece of packed memory with a part's tensors that may cross; None if some are not packed."""
    if part.module is None or not part.wire():
        return None
    placed = {entry[0]: entry for entry in layout}
    wanted = {f"{name}/{key}" for key in part.wire()}
    if not wanted <= placed.keys():
        return None
    entries = [placed[key] for key in placed if key in wanted]
    begin = entries[0][1]
    end = max(start + math.prod(shape) for _, start, shape, _ in entries)
    cut = len(name) + 1
    inside = tuple((key[cut:], start - begin, shape, strides) for key, start, shape, strides in entries)
    return flat.narrow(0, begin, end - begin), inside


Place = tuple[str, dict[str, Any], str]  # a tensor's full name, the table of its module, its key there


def _places(module: nn.Module) -> tuple[tuple[Place, ...], tuple[Place, ...], tuple[Place, ...]]:
    """Where a module keeps its parameters, its saved buffers, and the buffers it does not save.

    Walking a module is slow and its structure does not change; what stands in the places may.
    """
    parameters: list[Place] = []
    saved: list[Place] = []
    made: list[Place] = []
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for table, kept in ((owner._parameters, parameters), (owner._buffers, saved)):
            for key, value in table.items():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    own = made if key in owner._non_persistent_buffers_set else kept
                    own.append((f"{start}{key}", table, key))
    return tuple(parameters), tuple(saved), tuple(made)


def _found(places: tuple[Place, ...]) -> dict[str, Tensor]:
    return {name: table[key] for name, table, key in places}


@dataclass
class Report:
    """What comes with a reply: steps done, the mean of each loss term, metrics. On the device until it is read.

    `errors` says how a metric failed; its value is then NaN.
    """

    steps: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outline:
    """What is known of a state before it is read: the shapes of its tensors, but for those of mappings."""

    shapes: Mapping[str, tuple[int, ...]]
    mappings: frozenset[str]  # parts in which names and shapes come and go

    def misfit(self, found: Mapping[str, tuple[int, ...]]) -> str | None:
        """Why tensors of these shapes are no such state, None if they may be."""
        known = {name: shape for name, shape in found.items() if name.partition("/")[0] not in self.mappings}
        for name in dict.fromkeys([*self.shapes, *known]):
            there, here = (_told(shapes.get(name)) for shapes in (known, self.shapes))
            if there != here:
                return f"tensor {name!r} is {there}, and {here} in the model"
        return None


def _told(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


class Holder:
    """Named state on a device, with randomness and counters of a round: the base of client and server."""

    def __init__(
        self, task: Task, device: torch.device | str = "cpu", precision: Precision = "float32"
    ) -> None:
        self.parts: dict[str, Part] = {}
        self._inner: dict[str, Part] = {}  # parts of parts that were asked for
        self.flat: Tensor | None = None
        self.layout: Layout = ()
        self._fixed: dict[str, Tensor] = {}  # tensors of modules, and single ones, that `pack` left alone
        self._mappings: tuple[str, ...] = ()
        self._addresses: dict[str, int] = {}
        self.task = task
        self.device = torch.device(device)
        self.precision: Precision = precision
        self.training = ClientTraining()
        self.workspaces: dict[Any, Any] = {}  # what each `fit` call keeps between rounds
        self.mode: object = None  # what the modules' training flags were last set for
        self.public_data: Public | None = None
        self.enter(0, Rng(0), {})

    @property
    def public(self) -> Public:
        """The public data, in the form that the models here can read."""
        if self.public_data is None:
            raise ConfigError("there is no public data here; set needs_public_data in the method")
        return self.public_data

    def enter(self, round_: int, rng: Rng, counters: dict[str, int], step: str = "") -> None:
        """Begin a step of a round with its own randomness and the round's counters so far."""
        self.round, self.rng, self.counters, self.step = round_, rng, counters, step
        self.report = Report()
        self.fits = self.collections = 0

    def count(self, what: str) -> int:
        """Count one more use of a name in this round; gives how many came before."""
        self.counters[what] = self.counters.get(what, 0) + 1
        return self.counters[what] - 1

    def draw(self, purpose: str) -> torch.Generator:
        """A generator for one purpose of this step, from the seed everyone knows."""
        return self.rng.child(self.step, purpose, self.count(f"{self.step}:{purpose}")).generator(self.device)

    def numbers(self, values: Sequence[int]) -> Tensor:
        """A tensor of a few whole numbers on this device, made without waiting for it."""
        return torch.tensor(list(values), dtype=torch.long).to(self.device, non_blocking=True)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast to the precision of forward passes. Nothing is cached: captured graphs must not share casts."""
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16", cache_enabled=False
        ):
            yield

    def declare(
        self, state: Mapping[str, Any], buffers: BufferPolicy = "average", remember: bool = False
    ) -> None:
        """Take over the declared state of a method."""
        self.parts = {name: Part(value, buffers, remember) for name, value in state.items()}
        self._inner = {}
        self.flat, self.layout = None, ()

    @torch.no_grad()
    def pack(self) -> None:
        """Move every float32 tensor of the state into one piece of memory; names and objects stay."""
        floats = {
            name: value
            for name, value in self.tensors().items()
            if value.dtype == torch.float32 and value.numel() and _is_dense(value)
        }
        starts = itertools.accumulate(
            (-(-value.numel() // ALIGNMENT) * ALIGNMENT for value in floats.values()), initial=0
        )
        *places, total = [*starts]
        self.layout = tuple(
            (name, start, tuple(value.shape), value.stride())
            for (name, value), start in zip(floats.items(), places, strict=True)
        )
        self.flat = torch.zeros(total, device=self.device)
        for name, view in views(self.flat, self.layout).items():
            view.copy_(floats[name])
            floats[name].data = view
        for name, part in self.parts.items():
            part.block = _block(name, part, self.flat, self.layout)
        self._addresses = self._places()
        self._mappings = tuple(name for name, part in self.parts.items() if isinstance(part.content, dict))
        inside = tuple(f"{name}/" for name in self._mappings)
        self._fixed = {
            name: value
            for name, value in self.tensors().items()
            if name not in self._addresses and not name.startswith(inside)
        }

    def memory(self) -> list[Tensor]:
        """Tensors that together cover all memory of the state."""
        return [*self._loose().values()] + ([] if self.flat is None else [self.flat])

    def misplaced(self) -> list[str]:
        """Names of tensors that `pack` placed and that were replaced since, instead of written in place."""
        now = self.tensors() if self.flat is not None else {}
        return [name for name, place in self._places().items() if now[name].data_ptr() != place]

    def _places(self) -> dict[str, int]:
        """The address `pack` gave to each tensor."""
        if self.flat is None:
            return {}
        begin, size = self.flat.data_ptr(), self.flat.element_size()
        return {name: begin + size * start for name, start, _, _ in self.layout}

    def tensors(self) -> dict[str, Tensor]:
        """Every declared tensor by its full name; the tensors themselves, not copies."""
        return {
            f"{name}/{key}" if key else name: value
            for name, part in self.parts.items()
            for key, value in part.tensors().items()
        }

    def outline(self) -> Outline:
        """The shapes that a state of this holder has."""
        free = frozenset(name for name, part in self.parts.items() if isinstance(part.content, dict))
        fixed = {name: value for name, value in self.tensors().items() if name.partition("/")[0] not in free}
        return Outline({name: tuple(value.shape) for name, value in fixed.items()}, free)

    def _loose(self) -> dict[str, Tensor]:
        """The tensors that are not packed: integers, and what was added to a mapping later.

        Modules and single tensors stay where `pack` put them; only a mapping has to be looked through again.
        """
        if self.flat is None:
            return self.tensors()
        if not self._mappings:
            return self._fixed
        named = (
            (f"{part}/{key}", value)
            for part in self._mappings
            for key, value in self.parts[part].content.items()
        )
        packed = self._addresses
        return self._fixed | {name: value for name, value in named if packed.get(name) != value.data_ptr()}

    def __getitem__(self, name: str) -> Part:
        """A part, or a module inside one: `client["model/head"]`."""
        if name in self.parts:
            return self.parts[name]
        if name not in self._inner:
            self._inner[name] = self._part_of_a_part(name)
        return self._inner[name]

    def _part_of_a_part(self, name: str) -> Part:
        root, _, path = name.partition("/")
        whole = self.parts[root]
        modules = dict(whole.module.named_modules()) if whole.module is not None else {}
        modules.pop("", None)  # the whole itself
        if path not in modules:
            raise ConfigError(
                f"the part {root!r} of the state has no module {path!r}; {nearest(path, modules)}"
            )
        return Part(modules[path], whole.buffers, whole.remember)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.partition("/")[0] in self.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def modules(self) -> dict[str, nn.Module]:
        """The parts that are modules."""
        return {name: part.module for name, part in self.parts.items() if part.module is not None}

    def snapshot(self) -> State:
        """A copy of every declared tensor."""
        loose = {name: value.detach().clone() for name, value in self._loose().items()}
        return loose if self.flat is None else Packed(self.flat.clone(), self.layout, loose)

    def restore(self, state: State) -> None:
        """Go back to a snapshot, in place."""
        if self.flat is not None and isinstance(state, Packed) and state.layout == self.layout:
            loose = self._loose()
            # What a mapping holds may have other shapes from client to client.
            if _shapes(loose) == _shapes(state.loose):
                self.flat.copy_(state.flat)
                _copy_each(loose, state.loose)
                return
        self._restore_parts(state)

    @torch.no_grad()
    def _restore_parts(self, state: State) -> None:
        """Go back to a snapshot tensor by tensor."""
        for name, part in self.parts.items():
            if isinstance(part.content, Tensor):
                part.content.copy_(state[name])
            elif isinstance(part.content, nn.Module):
                for key, value in part.tensors().items():
                    value.copy_(state[f"{name}/{key}"])
            else:
                self._restore_mapping(name, part.content, state)

    def _restore_mapping(self, name: str, content: dict[str, Tensor], state: State) -> None:
        """Names may come and go in a mapping; a tensor that stays keeps its place in memory."""
        prefix = f"{name}/"
        wanted = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        for key in [key for key in content if key not in wanted]:
            del content[key]
        for key, value in wanted.items():
            if key in content and content[key].shape == value.shape:
                content[key].copy_(value)
            else:
                content[key] = row_major(value.detach().clone())
