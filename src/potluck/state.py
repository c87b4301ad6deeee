"""Declared state: the named modules and tensors of a client or of the server.

What is declared is saved, restored, undone and resumed; nothing else survives a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from potluck.errors import MessageError
from potluck.rng import Rng
from potluck.settings import ClientTraining
from potluck.task import Task

BufferPolicy = Literal["average", "local"]
Precision = Literal["float32", "tf32", "bfloat16"]
State = dict[str, Tensor]


class Moments(dict[str, Tensor]):
    """The state of an optimiser that outlives one `fit`: declare it, pass it as `fit(…, moments=…)`.

    `lifetime="run"` keeps it for good, `"round"` forgets it when a new round begins.
    """

    def __init__(self, lifetime: Literal["run", "round"] = "run") -> None:
        super().__init__()
        self.lifetime = lifetime


class Part:
    """One named piece of state: a module, one tensor, or a mapping of tensors.

    A module's own names (`features`, `head`, …) are reached through the part: `client["model"].features(x)`.
    """

    def __init__(self, value: Any, buffers: BufferPolicy = "average") -> None:
        self.content = value
        self.buffers = buffers

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
        """The tensor of a part that is a single one."""
        if not isinstance(self.content, Tensor):
            raise TypeError(f"this part of the state is a {type(self.content).__name__}, not one tensor")
        return self.content

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the part, live: parameters and buffers of a module."""
        if isinstance(self.content, nn.Module):
            named = dict(self.content.named_parameters())
            return named | dict(self.content.named_buffers())
        if isinstance(self.content, Tensor):
            return {"": self.content}
        return dict(self.content)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters a training step may change."""
        if not isinstance(self.content, nn.Module):
            return {}
        return {name: value for name, value in self.content.named_parameters() if value.requires_grad}

    def wire(self) -> dict[str, Tensor]:
        """The live tensors that may cross: parameters, and saved floating buffers where they are averaged."""
        if not isinstance(self.content, nn.Module):
            return self.tensors()
        named: dict[str, Tensor] = dict(self.content.named_parameters())
        if self.buffers == "average":
            saved = self.content.state_dict(keep_vars=True)  # without masks and tables a model makes itself
            named |= {
                key: value
                for key, value in self.content.named_buffers()
                if key in saved and value.is_floating_point()
            }
        return named

    def state(self) -> dict[str, Tensor]:
        """A copy of what may cross; later training does not reach it."""
        return {name: value.detach().clone() for name, value in self.wire().items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor] | Tensor) -> None:
        """Copy values in, in place; names not given stay as they are, and a mapping takes new ones."""
        if isinstance(state, Tensor):
            state = {"": state}
        own = self.tensors()
        for name, value in state.items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)
            elif isinstance(self.content, dict):
                self.content[name] = value.detach().clone()
            elif name in own:
                shapes = f"shape {tuple(value.shape)}, expected {tuple(own[name].shape)}"
                raise MessageError(f"tensor {name!r} of this part of the state has {shapes}")
            else:
                raise MessageError(f"tensor {name!r} does not belong to this part of the state")


@dataclass
class Report:
    """The small record beside a reply: steps done and the mean loss, on the device until it is read."""

    steps: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> Tensor | None:
        """The sum of the named terms."""
        return torch.stack(list(self.losses.values())).sum() if self.losses else None


class Holder:
    """Named state and the place it works in: what a client and the server have in common."""

    def __init__(
        self, task: Task, device: torch.device | str = "cpu", precision: Precision = "float32"
    ) -> None:
        self.parts: dict[str, Part] = {}
        self.task = task
        self.device = torch.device(device)
        self.precision: Precision = precision
        self.training = ClientTraining()
        self.workspaces: dict[Any, Any] = {}
        self.enter(0, Rng(0), {})

    def enter(self, round_: int, rng: Rng, counters: dict[str, int], step: str = "") -> None:
        """Begin a step of a round: its own randomness, and what was counted in the round so far."""
        self.round, self.rng, self.counters, self.step = round_, rng, counters, step
        self.report = Report()
        self.fits = 0

    def count(self, what: str) -> int:
        """How often this was asked for before, in this round."""
        self.counters[what] = self.counters.get(what, 0) + 1
        return self.counters[what] - 1

    def draw(self, purpose: str) -> torch.Generator:
        """A generator for one purpose of this step, from the seed everyone knows."""
        return self.rng.child(self.step, purpose, self.count(f"{self.step}:{purpose}")).generator(self.device)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision of forward passes."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            yield

    def declare(self, state: Mapping[str, Any], buffers: BufferPolicy = "average") -> None:
        """Take over the declared state of a method."""
        self.parts = {name: Part(value, buffers) for name, value in state.items()}

    def __getitem__(self, name: str) -> Part:
        return self.parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def modules(self) -> dict[str, nn.Module]:
        """The parts that are modules."""
        return {name: part.module for name, part in self.parts.items() if part.module is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Every declared tensor, live, by its full name."""
        return {
            f"{name}/{key}" if key else name: value
            for name, part in self.parts.items()
            for key, value in part.tensors().items()
        }

    def snapshot(self) -> State:
        """A copy of every declared tensor."""
        return {name: value.detach().clone() for name, value in self.tensors().items()}

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Go back to a snapshot, in place."""
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
                content[key] = value.detach().clone()
