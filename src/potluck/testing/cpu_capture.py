"""A captured step on a CPU: the tensor operations of one training step, played again without its Python.

It stands for a CUDA graph where there is no GPU: addresses are fixed, Python numbers are frozen, nothing may be
read back. What goes wrong here would go wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    """Notes every operation with the very tensors it read and wrote."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _depends_on_values(func, args):
            raise StepFailed(
                f"a training step reads a value back or lets values decide a shape ({func.__name__}): "
                "it cannot be captured"
            )
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tree_leaves(result)))
        return result


def _depends_on_values(func: Any, args: Any) -> bool:
    """Indexing by numbers has a known shape; torch marks it only because indexing by a mask has not."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


class Recording:
    """One step, ready to be played again with other values at the same places."""

    def __init__(self, step: Step, rows: Rows) -> None:
        self.rows = {name: value.clone() for name, value in rows.items()}
        recorder = _Recorder()
        with recorder:
            step(self.rows)
        self._operations = recorder.operations

    @torch.no_grad()
    def replay(self, rows: Mapping[str, Tensor]) -> None:
        """Do the same operations on what now stands in the same tensors."""
        for name, value in rows.items():
            self.rows[name].copy_(value)
        for func, args, kwargs, outputs in self._operations:
            results = tree_leaves(func(*args, **kwargs))
            for output, result in zip(outputs, results, strict=True):
                if isinstance(output, Tensor) and output.data_ptr() != result.data_ptr():
                    output.copy_(result)


class Reading:
    """One batch of a `collect`, ready to be read again from other rows."""

    def __init__(self, function: Callable[[Tensor], Any], rows: Tensor) -> None:
        self.outputs: Any = None

        def step(places: Rows) -> None:
            self.outputs = function(places["rows"])

        self._recording = Recording(step, {"rows": rows})

    def replay(self, rows: Tensor) -> Any:
        """The outputs for other rows, in memory of their own."""
        self._recording.replay({"rows": rows})
        return self.copies()

    def copies(self) -> Any:
        """The outputs as they stand."""
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, self.outputs)


def collect_from_tape(
    holder: Client, function: Callable[[Tensor], Any], parts: Sequence[np.ndarray]
) -> list[Any]:
    """A collector for `collecting_with`: records a batch once per size, then replays it, in later rounds too."""
    found = []
    for part in parts:
        rows = torch.from_numpy(np.ascontiguousarray(part))
        key = ("tape", holder.step, holder.collections, len(part))
        reading = holder.workspaces.get(key)
        if reading is None:
            reading = holder.workspaces[key] = Reading(function, rows)
            found.append(reading.copies())
        else:
            found.append(reading.replay(rows))
    return found


def run_from_tape(workspace: Workspace, step: Step, plan: Plan) -> None:
    """A runner for `running_with`: records a step once per batch size, then replays it, in later rounds too.

    The very first step is not recorded: it makes the sums of the loss terms, as the warm-up before a capture does.
    """
    for rows in plan:
        if not workspace.totals:
            step(rows)
            continue
        key = ("tape", tuple(value.shape for value in rows.values()))
        if key in workspace.recordings:
            workspace.recordings[key].replay(rows)
        else:
            workspace.recordings[key] = Recording(step, rows)
