"""Captured steps on a CPU: the tensor operations of a training step, replayed without its Python code.

This stands in for CUDA graphs where there is no GPU. As there, addresses are fixed, Python numbers are frozen,
and no value may be read back: what goes wrong here would go wrong on a GPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from potluck.core.client import Client
from potluck.errors import StepFailed
from potluck.training.fit import Step, Workspace
from potluck.training.plan import Plan, Rows


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation with the very tensors it reads and writes."""

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.what = what
        self.operations: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _depends_on_values(func, args):
            raise StepFailed(
                f"{self.what} reads a value back or lets values decide a shape ({func.__name__}, {_caller()}): it "
                "cannot be captured"
            )
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tree_leaves(result)))
        return result


def _caller() -> str:
    """The line that asked torch for the operation which is recorded now."""
    frames = traceback.extract_stack()
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    outer = next((frame for frame in reversed(frames) if not frame.filename.startswith(inside)), frames[0])
    return f"{Path(outer.filename).name}, line {outer.lineno}"


def _depends_on_values(func: Any, args: Any) -> bool:
    """Whether values decide a shape: torch marks all indexing as such, but only indexing by a mask is."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


class RecordedStep:
    """One training step, ready to be replayed with other values in the same tensors."""

    def __init__(self, step: Step, rows: Rows, what: str = "a training step") -> None:
        self.rows = {name: value.clone() for name, value in rows.items()}
        recorder = _Recorder(what)
        with recorder:
            step(self.rows)
        self._operations = recorder.operations

    @torch.no_grad()
    def replay(self, rows: Mapping[str, Tensor]) -> None:
        """Do the same operations on what is in the same tensors now."""
        for name, value in rows.items():
            self.rows[name].copy_(value)
        for func, args, kwargs, outputs in self._operations:
            results = tree_leaves(func(*args, **kwargs))
            for output, result in zip(outputs, results, strict=True):
                if isinstance(output, Tensor) and output.data_ptr() != result.data_ptr():
                    output.copy_(result)


class RecordedCollect:
    """One batch of a `collect`, ready to be replayed for other rows."""

    def __init__(self, function: Callable[[Tensor], Any], rows: Tensor) -> None:
        self.outputs: Any = None

        def step(places: Rows) -> None:
            self.outputs = function(places["rows"])

        self._recorded = RecordedStep(step, {"rows": rows}, "the function given to collect")

    def replay(self, rows: Tensor) -> Any:
        """The outputs for other rows, copied."""
        self._recorded.replay({"rows": rows})
        return self.copies()

    def copies(self) -> Any:
        """Copies of the outputs as they are now."""
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, self.outputs)


class Tape:
    """Records steps and collections once per batch size and replays them, in later rounds too.

    A recording lives as long as the workspace or the client it is of.
    """

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[Workspace, dict[Any, RecordedStep]] = WeakKeyDictionary()
        self._collects: WeakKeyDictionary[Client, dict[Any, RecordedCollect]] = WeakKeyDictionary()

    def train(self, workspace: Workspace, step: Step, plan: Plan) -> None:
        """A runner for `running_with`.

        The very first step is not recorded: it creates the sums of the loss terms, as the warm-up before a
        capture does.
        """
        recorded = self._steps.setdefault(workspace, {})
        for rows in plan:
            key = tuple(value.shape for value in rows.values())
            if not workspace.totals:
                step(rows)
            elif key in recorded:
                recorded[key].replay(rows)
            else:
                recorded[key] = RecordedStep(step, rows)

    def collect(
        self, holder: Client, function: Callable[[Tensor], Any], parts: Sequence[np.ndarray]
    ) -> list[Any]:
        """A collector for `collecting_with`."""
        recorded = self._collects.setdefault(holder, {})
        found = []
        for part in parts:
            rows = torch.from_numpy(np.ascontiguousarray(part))
            key = (holder.step, holder.collections, len(part))
            if key in recorded:
                found.append(recorded[key].replay(rows))
            else:
                recorded[key] = RecordedCollect(function, rows)
                found.append(recorded[key].copies())
        return found
