"""Trained models as programs that need no Python class: `torch.export` and ONNX."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from potluck.errors import ConfigError, ModelError, first_line
from potluck.files import write_anew
from potluck.version import install_command


def exported(module: nn.Module, x: Tensor, who: str) -> ExportedProgram:
    """The program of a module for batches of any size; `x` is an example with two samples or more."""
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad(), _quietly(), _PlainDistances():
            program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
    except Exception as error:  # a user's forward pass may raise anything
        raise ModelError(
            f"{who} cannot be exported by torch.export ({_reason(error)}); take the module itself with model()"
        ) from error
    _forget_lines(program)
    return program


def _forget_lines(program: ExportedProgram) -> None:
    """Take out what `torch.export.save` would write of every node: lines of code, with the paths of their files."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)


def _reason(error: Exception) -> str:
    """What torch says: the first line, and the one below that explains it."""
    said = [line.strip() for line in str(error).splitlines()]
    if any("specialized it to be a constant" in line for line in said):
        return (
            "its forward pass fixes the size of a batch, as len(x), int(…) or an `if` on the size do; "
            f"use x.shape[0] (torch: {next(line for line in said if 'specialized' in line).lstrip('- ')})"
        )
    return first_line(error)


def write_onnx(module: nn.Module, x: Tensor, path: Path, who: str) -> None:
    """Write a module as an ONNX file with an input `x` and an output `scores`, for batches of any size."""
    if not path.parent.is_dir():
        raise ConfigError(f"to_onnx: there is no folder {path.parent}; make it first")
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"to_onnx needs {error.name}: {install_command('export')}") from error
    program = exported(module, x, who)
    try:
        with _quietly(), tempfile.TemporaryDirectory() as folder:
            names: dict[str, Any] = {"input_names": ["x"], "output_names": ["scores"]}
            made = torch.onnx.export(program, dynamo=True, dynamic_shapes=({0: "batch"},), **names)
            assert made is not None
            _forget_source(made.model)
            made.save(Path(folder) / "model.onnx", external_data=False)
            content = (Path(folder) / "model.onnx").read_bytes()
    except Exception as error:
        raise ModelError(
            f"{who} cannot be written as ONNX ({first_line(error)}); take the module itself with model()"
        ) from error
    write_anew(path, content)


def _forget_source(model: Any) -> None:
    """Take out what torch notes at every node: lines of the user's code, with the paths of their files."""
    from onnx_ir.traversal import RecursiveGraphIterator

    for graph in (model.graph, *model.functions.values()):
        for node in RecursiveGraphIterator(graph):
            node.metadata_props.clear()


class _PlainDistances(TorchFunctionMode):
    """`torch.cdist` chooses its way to compute by the size of the batch, which a program must leave open."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.cdist and (kwargs or {}).get("p", 2.0) == 2:
            one, other = args
            return (one.unsqueeze(-2) - other.unsqueeze(-3)).square().sum(-1).sqrt()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep to one sentence: the exporters print and warn about their own affairs."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
