"""`adapt`: turns a user's module into a `Model` with features and a head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.core.trial import agree, attempt, blame, duplicate, kind, sample_batch, trial_copy
from potluck.errors import ModelError
from potluck.front_door import front_door
from potluck.models.adapted import Adapted, AdaptedMaps, find_layer
from potluck.models.check import check_complete, check_contract, check_width, head_input_width
from potluck.models.outputs import chosen_positions, scores_of


@front_door(ModelError, apart=("module",))
def adapt(
    module: nn.Module,
    head: str | None = None,
    rep_dim: int | None = None,
    *,
    task: Task | None = None,
    classes: int | None = None,
    stem: str | Sequence[str] | None = None,
    body: str | Sequence[str] | None = None,
    adapter: str = "linear",
    who: str = "model",
    check: bool = True,
) -> Model:
    """A `Model` made from a copy of `module`, which itself is not changed.

    `head` is the dotted path of the last layer; None finds the linear layer whose output is the module's. A module
    that segments ends in a convolution instead, and the features are the mean over pixels of its input. If
    `rep_dim` differs from that layer's input width, an adapter ("linear", "pool" or "max-pool") and a new head
    are added. `classes` asks for a new head if the present one has another number of outputs. `stem` and `body`
    name the layers of the first and the middle part, in order; the default body is every top-level layer after
    the stem. With a `task` the result is tried on a made-up batch; otherwise `build` does that. `check=False`
    skips the trial, for a module that has passed it before.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"{who}: {module!r} is a {type(module).__name__}; give adapt a torch module")
    with blame(who):
        model = _adapted(duplicate(module), head, rep_dim, task, classes, adapter, check)
        if stem is not None or body is not None:
            _name_parts(model, _paths(stem), _paths(body))
        if task is not None and check:
            check_contract(model, task)
        return model


def _adapted(
    net: nn.Module,
    head: str | None,
    rep_dim: int | None,
    task: Task | None,
    classes: int | None,
    adapter: str,
    check: bool,
) -> Model:
    if task is not None and classes not in (None, task.classes):
        raise ModelError(f"classes={classes} was asked for, the task has {task.counted}; leave out classes")
    check_width(rep_dim)
    if isinstance(net, Model):
        check_complete(net)
    path = _head_path(net, head, task)
    old = find_layer(net, path)
    maps = _segments(net, old, task)
    width = _width(net, path, task, check, maps)
    rep_dim = rep_dim or width
    new = _head(old, width, rep_dim, classes, task, maps)
    if isinstance(net, Model) and new is old and path == "head" and rep_dim == width:
        return net
    return (AdaptedMaps if maps else Adapted)(net, path, new, width, rep_dim, adapter)


def _segments(net: nn.Module, head: nn.Module, task: Task | None) -> bool:
    """Whether a head gives every pixel a class: the task says so, or without one the kind of its layers."""
    if isinstance(net, Model):
        return isinstance(net, AdaptedMaps)
    if task is not None:
        return task.kind == "segmentation"
    return bool(_convolutions(head)) and not _linears(head)


def _head_path(net: nn.Module, head: str | None, task: Task | None) -> str:
    if head is not None:
        return head
    if isinstance(net, Model):
        return "head"
    maps = _segments(net, net, task)
    found = _convolutions(net) if maps else _linears(net)
    if not found:
        what = "convolution" if maps else "linear layer"
        raise ModelError(f"{kind(net)} has no {what}; name its last layer with head=")
    names = [name for name, part in net.named_modules() if part in found]
    return names[-1] if task is None else _producer(net, names, task, maps)


def _producer(net: nn.Module, layers: list[str], task: Task, maps: bool) -> str:
    """The last of these layers whose output is the net's output."""
    trial = trial_copy(net)
    outputs: dict[str, Tensor] = {}

    def watch(name: str) -> None:
        def keep(_layer: nn.Module, _inputs: object, output: Tensor) -> None:
            outputs[name] = output

        trial.get_submodule(name).register_forward_hook(keep)

    for name in layers:
        watch(name)
    x = sample_batch(task, trial)
    scores = attempt(trial, partial(scores_of, trial), x)
    found = [name for name in layers if name in outputs and _gives(outputs[name], scores)]
    wanted = (len(x), *task.scores)
    if not found and (scores.ndim != len(wanted) or len(scores) != len(x)):
        raise ModelError(
            f"{kind(net)} gave shape {tuple(scores.shape)} for a batch of {len(x)}, expected {wanted}; return that "
            "from forward(x)"
        )
    if not found and maps:
        raise ModelError(
            f"no convolution of {kind(net)} gives its output; let nothing (an enlargement, for example) follow the "
            "last one, or derive the class from potluck.Model and define features(x) and forward(x)"
        )
    if not found:
        raise ModelError(
            f"no linear layer of {kind(net)} gives its output; name the last layer with head=, "
            "and let nothing (a softmax, for example) follow it"
        )
    return found[-1]


def _gives(output: Tensor, scores: Tensor) -> bool:
    """Whether a layer's output is the net's, or holds it at one token of each sample."""
    return agree(output, scores) or chosen_positions(output, scores) is not None


def _width(net: nn.Module, path: str, task: Task | None, check: bool, maps: bool) -> int:
    """The input width of the head: measured in a trial, or else read from its layer."""
    declared = _declared_width(net, path, maps)
    if task is not None and (check or declared is None):
        width = head_input_width(net, path, kind(net), task, maps)
        if isinstance(net, Model) and width != declared:
            raise ModelError(
                f"features() of {kind(net)} gave {width} columns, expected {declared}; set its rep_dim to {width}"
            )
        return width
    if declared is None:
        raise ModelError(f"layer {path!r} holds no linear layer; pass task= so that its width can be probed")
    return declared


def _declared_width(net: nn.Module, path: str, maps: bool) -> int | None:
    if isinstance(net, Model) and path == "head":
        return net.rep_dim
    layer = find_layer(net, path)
    widths = (
        [part.in_channels for part in _convolutions(layer)]
        if maps
        else [part.in_features for part in _linears(layer)]
    )
    return widths[0] if widths else None


def _head(
    old: nn.Module, width: int, rep_dim: int, classes: int | None, task: Task | None, maps: bool
) -> nn.Module:
    """The net's own head, or a new one if the width or the number of classes asked for differs."""
    linears, convolutions = _linears(old), _convolutions(old)
    outputs = (
        [part.out_channels for part in convolutions] if maps else [part.out_features for part in linears]
    )
    present = outputs[-1] if outputs else None
    if (maps or rep_dim == width) and classes in (None, present):
        return old
    wanted = classes or (task.classes if task else present)
    if wanted is None:
        raise ModelError("a new head is needed; pass classes= or task=")
    like = next(old.parameters(), torch.empty(0))
    if maps:
        return nn.Conv2d(width, wanted, 1, device=like.device, dtype=like.dtype)
    return nn.Linear(rep_dim, wanted, device=like.device, dtype=like.dtype)


def _linears(layer: nn.Module) -> list[nn.Linear]:
    return [part for part in layer.modules() if isinstance(part, nn.Linear)]


def _convolutions(layer: nn.Module) -> list[nn.Conv2d | nn.ConvTranspose2d]:
    return [part for part in layer.modules() if isinstance(part, nn.Conv2d | nn.ConvTranspose2d)]


def _paths(paths: str | Sequence[str] | None) -> tuple[str, ...]:
    if not isinstance(paths, str | list | tuple | None):
        raise ModelError(f"stem and body are the name of a layer or a list of names, not {paths!r}")
    return () if paths is None else (paths,) if isinstance(paths, str) else tuple(paths)


def _name_parts(model: Model, stem: tuple[str, ...], body: tuple[str, ...]) -> None:
    """Set the layers of stem and body."""
    if not isinstance(model, Adapted):
        raise ModelError(f"{kind(model)} is a Model: it defines stem(x) and body(s) itself; leave out stem=")
    top = [name for name, _ in model.trunk.named_children()]
    for path in (*stem, *body):
        find_layer(model.trunk, path)
    if not stem:
        raise ModelError("stem= names no layer; a body needs one before it")
    last = stem[-1].partition(".")[0]
    model.stem_paths = stem
    model.body_paths = body or tuple(top[top.index(last) + 1 :])
    model.has_stem = True
