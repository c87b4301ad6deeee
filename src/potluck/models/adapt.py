"""Splitting a module a user brings into features and head, and checking that any model keeps the contract."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.core.trial import agree, attempt, blame, duplicate, kind, sample_batch, trial_copy
from potluck.errors import ModelError, nearest
from potluck.models.parts import check_complete, check_width, make_adapter


class Adapted(Model):
    """A user's module, the `trunk`, with its last layer taken out and set as `head`.

    `head_path` is where the head was. `stem_paths` and `body_paths` name the layers that, run one after the
    other, are the first and the middle part; they are empty if the module was not split that far.
    """

    def __init__(
        self, trunk: nn.Module, head_path: str, head: nn.Module, width: int, rep_dim: int, adapter: str
    ):
        super().__init__()
        self.source = kind(trunk)
        self.head_path = head_path
        self.rep_dim = rep_dim
        self.has_stem = isinstance(trunk, Model) and trunk.has_stem
        self.stem_paths: tuple[str, ...] = ()
        self.body_paths: tuple[str, ...] = ()
        self.trunk = replace_layer(trunk, head_path, nn.Identity())
        self.resize, self.adapter = make_adapter(adapter, width, rep_dim)
        self.head = head
        like = next(trunk.parameters(), torch.empty(0))
        self.resize.to(like.device, like.dtype)

    def stem(self, x: Tensor) -> Tensor:
        """The first part of the module."""
        if not self.stem_paths and isinstance(self.trunk, Model):
            return self.trunk.stem(x)
        return self._through(self.stem_paths, x)

    def body(self, s: Tensor) -> Tensor:
        """From the first part to the features."""
        if not self.stem_paths and isinstance(self.trunk, Model):
            return self._resized(self.trunk.body(s))
        return self._resized(self._through(self.body_paths, s))

    def features(self, x: Tensor) -> Tensor:
        """What the head used to see, flattened, and brought to `rep_dim` if it has another width."""
        return self._resized(self.trunk(x))

    def _resized(self, inner: Tensor) -> Tensor:
        features: Tensor = self.resize(inner.flatten(1))
        return features

    def _through(self, paths: tuple[str, ...], x: Tensor) -> Tensor:
        if not self.has_stem:
            raise ModelError(
                f"{self.source} has no stem(x) and body(s); name their layers with stem= and body="
            )
        for path in paths:
            x = self.trunk.get_submodule(path)(x)
        return x


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
    """A `Model` made of a copy of `module`, which itself is left as it is.

    `head` is the dotted path of the last layer; None finds the linear layer that gives the output. Where
    `rep_dim` differs from the width that layer sees, an adapter ("linear", "pool" or "max-pool") and a new
    head follow. `classes` asks for a new head where the present one gives another number of scores. `stem`
    and `body` name the layers of the first and the middle part, in order; without `body` it is every
    top-level layer after the stem. With a `task` all of it is tried at once on a made-up batch; without one
    that is done in `build`. `check=False` leaves the trial out where the same module has passed it before.
    """
    with blame(who):
        model = _adapted(duplicate(module), head, rep_dim, task, classes, adapter, check)
        if stem is not None or body is not None:
            _name_parts(model, _paths(stem), _paths(body))
        if task is not None and check:
            _probe(model, task)
        return model


def probe(model: Model, task: Task, who: str = "model") -> None:
    """Try a model on a made-up batch of the task; one sentence if it breaks the contract."""
    with blame(who):
        if isinstance(model, Adapted):
            _probe_trunk(model.trunk, model.head_path, model.source, task)
        _probe(model, task)


def find_layer(module: nn.Module, path: str) -> nn.Module:
    """The layer at a dotted path ("" is the module itself)."""
    layers: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if path not in layers:
        top = [name for name, _ in module.named_children()]
        hint = nearest(path, difflib.get_close_matches(path, list(layers), n=1, cutoff=0.5) or top)
        raise ModelError(f"layer {path!r} not found in {kind(module)}; {hint}")
    return layers[path]


def replace_layer(module: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    """The module with another layer at a dotted path, changed in place unless the path is ""."""
    if not path:
        return layer
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, layer)
    return module


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
        raise ModelError(f"classes={classes} was asked for, the task has {task.classes} classes")
    check_width(rep_dim)
    if isinstance(net, Model):
        check_complete(net)
    path = _head_path(net, head, task)
    old = find_layer(net, path)
    width = _width(net, path, task, check)
    rep_dim = rep_dim or width
    new = _head(old, width, rep_dim, classes, task)
    if isinstance(net, Model) and new is old and path == "head" and rep_dim == width:
        return net
    return Adapted(net, path, new, width, rep_dim, adapter)


class _StandIn:
    """Speaks for a layer: notes what the layer sees and has it answer known scores instead of its own."""

    def __init__(self, layer: nn.Module, classes: int) -> None:
        self.classes = classes
        self.seen: list[Tensor] = []
        self.answer = torch.empty(0)
        layer.register_forward_hook(self._speak)

    def _speak(self, _layer: nn.Module, inputs: tuple[Tensor, ...], _output: object) -> Tensor:
        """Scores that no activation, scaling or average leaves as they are."""
        features = inputs[0]
        self.seen.append(features)
        line = torch.linspace(
            -5, 7, len(features) * self.classes, dtype=features.dtype, device=features.device
        )
        self.answer = line.view(len(features), self.classes)
        return self.answer.clone()


def _probe_trunk(net: nn.Module, path: str, name: str, task: Task) -> int:
    """How wide the head's input is, provided that the net runs the head once and hands out what it gives.

    A net that goes on after its head would do so to the features too once the head is out. The stand-in's
    answer shows it whatever the head's weights are; the second pass shows what depends on the width.
    """
    trial = trial_copy(net)
    x = sample_batch(task, trial)
    attempt(trial, trial, x)
    stand_in = _StandIn(find_layer(trial, path), task.classes)
    scores = _result(trial, x)
    if len(stand_in.seen) != 1:
        raise ModelError(
            f"layer {path!r} ran {len(stand_in.seen)} times in one pass of {name}, expected once"
        )
    features = _result(replace_layer(trial, path, nn.Identity()), x)
    if not (agree(scores, stand_in.answer) and agree(features, stand_in.seen[0])):
        raise ModelError(
            f"{name} changes the scores after layer {path!r} (a softmax, for example); "
            "its output must be that layer's output"
        )
    return int(stand_in.seen[0].flatten(1).shape[1])


def _result(trial: nn.Module, x: Tensor) -> Tensor:
    """What a pass gives; nothing if layers after the head cannot bear what the head's place now gives."""
    try:
        return attempt(trial, trial, x)
    except ModelError:
        return x.new_empty(0)


def _probe(model: Model, task: Task) -> None:
    check_complete(model)
    trial = trial_copy(model)
    x = sample_batch(task, trial)
    features = attempt(trial, trial.features, x)
    wanted = (len(x), model.rep_dim)
    if tuple(features.shape) != wanted:
        raise ModelError(f"features() gave {tuple(features.shape)}, expected {wanted}")
    _probe_parts(trial, x, features)
    dense = task.kind == "segmentation"  # a pixel's class is not in the representation alone
    scores = attempt(trial, trial, x) if dense else attempt(trial, trial.head, features)
    _expect_scores(scores, len(x), task)
    if not dense and type(model).forward is not Model.forward and not agree(attempt(trial, trial, x), scores):
        raise ModelError(f"forward(x) differs from head(features(x)) in {kind(model)}")
    for part, values in (("features()", features), ("the head", scores)):
        if not bool(values.isfinite().all()):
            raise ModelError(f"{part} gave values that are not finite")


def _probe_parts(trial: Model, x: Tensor, features: Tensor) -> None:
    """Where there is a stem, stem and body together must be the features."""
    if not trial.has_stem:
        return
    parts = attempt(trial, lambda batch: trial.body(trial.stem(batch)), x)
    if not agree(parts, features):
        source = trial.source if isinstance(trial, Adapted) else kind(trial)
        raise ModelError(f"body(stem(x)) differs from features(x) in {source}; name other layers")


def _expect_scores(scores: Tensor, samples: int, task: Task) -> None:
    wanted = (samples, *task.scores)
    if scores.ndim != len(wanted) or len(scores) != samples:
        raise ModelError(f"the head gave {tuple(scores.shape)}, expected {wanted}")
    if scores.shape[1] != task.classes:
        raise ModelError(f"the head gives {scores.shape[1]} scores, the task has {task.classes} classes")
    if tuple(scores.shape) != wanted:
        raise ModelError(f"the scores are {tuple(scores.shape)}, expected {wanted}")


def _head_path(net: nn.Module, head: str | None, task: Task | None) -> str:
    if head is not None:
        return head
    if isinstance(net, Model):
        return "head"
    linears = [name for name, part in net.named_modules() if isinstance(part, nn.Linear)]
    if not linears:
        raise ModelError(f"{kind(net)} has no linear layer; name its last layer with head=")
    return linears[-1] if task is None else _producer(net, linears, task)


def _producer(net: nn.Module, linears: list[str], task: Task) -> str:
    """The last of the linear layers whose output is the net's output."""
    trial = trial_copy(net)
    outputs: dict[str, Tensor] = {}

    def watch(name: str) -> None:
        def keep(_layer: nn.Module, _inputs: object, output: Tensor) -> None:
            outputs[name] = output

        trial.get_submodule(name).register_forward_hook(keep)

    for name in linears:
        watch(name)
    scores = attempt(trial, trial, sample_batch(task, trial))
    found = [name for name in linears if name in outputs and agree(outputs[name], scores)]
    if not found:
        raise ModelError(
            f"no linear layer of {kind(net)} gives its output; name the last layer with head=, "
            "and let nothing (a softmax, for example) follow it"
        )
    return found[-1]


def _width(net: nn.Module, path: str, task: Task | None, check: bool) -> int:
    """How many values the head sees: what a trial shows, else what is written in the net."""
    declared = _declared_width(net, path)
    if task is not None and (check or declared is None):
        width = _probe_trunk(net, path, kind(net), task)
        if isinstance(net, Model) and width != declared:
            raise ModelError(f"features() of {kind(net)} gave {width} columns, expected {declared}")
        return width
    if declared is None:
        raise ModelError(f"layer {path!r} holds no linear layer; pass task= so that its width can be probed")
    return declared


def _declared_width(net: nn.Module, path: str) -> int | None:
    if isinstance(net, Model) and path == "head":
        return net.rep_dim
    linears = _linears(find_layer(net, path))
    return linears[0].in_features if linears else None


def _head(old: nn.Module, width: int, rep_dim: int, classes: int | None, task: Task | None) -> nn.Module:
    """The net's own head, or a new one where the width or, if asked for, the number of classes differs."""
    linears = _linears(old)
    present = linears[-1].out_features if linears else None
    if rep_dim == width and classes in (None, present):
        return old
    wanted = classes or (task.classes if task else present)
    if wanted is None:
        raise ModelError("a new head is needed; pass classes= or task=")
    like = next(old.parameters(), torch.empty(0))
    return nn.Linear(rep_dim, wanted, device=like.device, dtype=like.dtype)


def _linears(layer: nn.Module) -> list[nn.Linear]:
    return [part for part in layer.modules() if isinstance(part, nn.Linear)]


def _paths(paths: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if paths is None else (paths,) if isinstance(paths, str) else tuple(paths)


def _name_parts(model: Model, stem: tuple[str, ...], body: tuple[str, ...]) -> None:
    """Note which layers are the stem and which the body."""
    if not isinstance(model, Adapted):
        raise ModelError(
            f"{kind(model)} is a Model: it defines stem(x) and body(s) itself, stem= is not for it"
        )
    top = [name for name, _ in model.trunk.named_children()]
    for path in (*stem, *body):
        find_layer(model.trunk, path)
    if not stem:
        raise ModelError("stem= names no layer; a body needs one before it")
    last = stem[-1].partition(".")[0]
    model.stem_paths = stem
    model.body_paths = body or tuple(top[top.index(last) + 1 :])
    model.has_stem = True
