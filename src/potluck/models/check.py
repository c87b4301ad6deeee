"""Checks that a model keeps the contract, by running it on a made-up batch."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.modest import MOST_WIDTH
from potluck.core.plain_values import shown
from potluck.core.task import Task
from potluck.core.trial import agree, attempt, blame, kind, sample_batch, trial_copy
from potluck.errors import HeadError, ModelError
from potluck.models.adapted import Adapted, find_layer, replace_layer
from potluck.models.outputs import at_positions, chosen_positions, scores_of


def check_model(model: Model, task: Task, who: str = "model") -> None:
    """Run a model on a made-up batch of the task, and refuse it if it breaks the contract."""
    with blame(who):
        if isinstance(model, Adapted):
            head_input_width(model.trunk, model.head_path, model.source, task)
        check_contract(model, task)


def check_width(width: int | None, option: str = "rep_dim") -> None:
    """Refuse a width that is neither None nor a positive whole number, or that no model has."""
    if width is not None and (not isinstance(width, int) or isinstance(width, bool) or width < 1):
        raise ModelError(f"{option} is {width!r}; give a whole number from 1 on")
    if width is not None and width > MOST_WIDTH:
        raise ModelError(f"{option} is {shown(width)}; give at most {MOST_WIDTH:,}")


def check_complete(model: Model) -> None:
    """Refuse a model without a feature width or a head."""
    width, head = getattr(model, "rep_dim", None), getattr(model, "head", None)
    if not isinstance(width, int) or not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} must set rep_dim (a whole number) and head (a module)")


class _StandIn:
    """Replaces the output of a layer by known scores, and records its input."""

    def __init__(self, layer: nn.Module, classes: int) -> None:
        self.classes = classes
        self.seen: list[Tensor] = []
        self.answer = torch.empty(0)
        layer.register_forward_hook(self._speak)

    def _speak(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Scores that any activation, scaling or average would change; of every token or pixel if it has some."""
        features = inputs[0]
        self.seen.append(features)
        tokens, pixels = output.shape[1:-1] if output.ndim == 3 else (), output.shape[2:]
        shape = (len(features), *tokens, self.classes, *(pixels if output.ndim == 4 else ()))
        line = torch.linspace(-5, 7, math.prod(shape), dtype=features.dtype, device=features.device)
        self.answer = line.view(shape)
        return self.answer.clone()


def head_input_width(net: nn.Module, path: str, name: str, task: Task, maps: bool = False) -> int:
    """The width of the head's input (`maps`: its channels). The net must run the head once and return its output.

    Whatever a net does after its head, it would also do to the features once the head is taken out. The stand-in's
    scores reveal that whatever the head's weights are; a second pass reveals what depends on the width.
    """
    trial = trial_copy(net)
    x = sample_batch(task, trial)
    attempt(trial, partial(scores_of, trial), x)
    stand_in = _StandIn(find_layer(trial, path), task.classes)
    scores = _result(trial, x)
    if len(stand_in.seen) != 1:
        raise ModelError(
            f"layer {path!r} ran {len(stand_in.seen)} times in one pass of {name}, expected once"
        )
    features = _result(replace_layer(trial, path, nn.Identity()), x)
    seen = _seen_at(stand_in, scores)
    if seen is None or not agree(features, seen):
        raise ModelError(
            f"{name} changes the scores after layer {path!r} (a softmax, for example); "
            "its output must be that layer's output"
        )
    return int(seen.shape[1] if maps else seen.flatten(1).shape[1])


def _seen_at(stand_in: _StandIn, scores: Tensor) -> Tensor | None:
    """The head's input that belongs to the scores: all of it, or one token of each sample; None if they differ."""
    if agree(scores, stand_in.answer):
        return stand_in.seen[0]
    positions = chosen_positions(stand_in.answer, scores)
    return None if positions is None else at_positions(stand_in.seen[0], positions)


def _result(trial: nn.Module, x: Tensor) -> Tensor:
    """The output of a pass; empty if layers after the head fail on what now replaces its output."""
    try:
        return attempt(trial, partial(scores_of, trial), x)
    except ModelError:
        return x.new_empty(0)


def check_contract(model: Model, task: Task) -> None:
    """Features, head and parts give the right shapes, agree with each other and are finite."""
    check_complete(model)
    trial = trial_copy(model)
    x = sample_batch(task, trial)
    features = attempt(trial, trial.features, x)
    wanted = (len(x), model.rep_dim)
    if tuple(features.shape) != wanted:
        raise ModelError(f"features() gave {tuple(features.shape)}, expected {wanted}; return that")
    _check_parts(trial, x, features)
    dense = task.kind == "segmentation"  # pixel scores depend on more than the features
    scores = attempt(trial, trial, x) if dense else attempt(trial, trial.head, features)
    _expect_scores(scores, len(x), task)
    if not dense and type(model).forward is not Model.forward and not agree(attempt(trial, trial, x), scores):
        raise ModelError(f"forward(x) differs from head(features(x)) in {kind(model)}; make them the same")
    for part, values in (("features()", features), ("the head", scores)):
        if not bool(values.isfinite().all()):
            raise ModelError(
                f"{part} gave values that are not finite; look for a division by zero, or load other weights"
            )


def _check_parts(trial: Model, x: Tensor, features: Tensor) -> None:
    """If there is a stem, body(stem(x)) must be the features."""
    if not trial.has_stem:
        return
    parts = attempt(trial, lambda batch: trial.body(trial.stem(batch)), x)
    if not agree(parts, features):
        source = trial.source if isinstance(trial, Adapted) else kind(trial)
        raise ModelError(
            f"body(stem(x)) differs from features(x) in {source}; name other layers, and make what forward does "
            "between them (F.relu, flatten) layers too, such as nn.ReLU()"
        )


def _expect_scores(scores: Tensor, samples: int, task: Task) -> None:
    wanted = (samples, *task.scores)
    if scores.ndim != len(wanted) or len(scores) != samples:
        raise ModelError(f"the head gave {tuple(scores.shape)}, expected {wanted}; return that")
    if scores.shape[1] != task.classes:
        raise HeadError(
            f"the head gives {scores.shape[1]} scores, the task has {task.counted}; change the model's last layer, "
            f"or give the model as {{model: …, classes: {task.classes}}} for a new one"
        )
    if tuple(scores.shape) != wanted:
        raise ModelError(f"the scores are {tuple(scores.shape)}, expected {wanted}; return that")
