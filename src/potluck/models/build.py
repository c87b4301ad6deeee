"""Building a model from a name, a name with options, a callable or a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.core.trial import blame, duplicate, kind, now_or_later
from potluck.errors import ModelError, first_line, nearest
from potluck.front_door import front_door
from potluck.models.adapt import adapt
from potluck.models.check import check_complete, check_model, check_width
from potluck.models.registry import lookup

Source = str | Callable[..., nn.Module] | nn.Module
Entry = Source | Mapping[str, Any]

ADAPT_OPTIONS = frozenset({"head", "classes", "stem", "body", "adapter"})


@front_door(ModelError)
def build(
    model: Entry,
    task: Task,
    rep_dim: int | None = None,
    *,
    who: str = "model",
    check: bool = True,
    default_adapter: str | None = None,
    **options: Any,
) -> Model:
    """A fresh model for a task, with features of width `rep_dim` (None: the width of the entry or the network).

    `model` is one of

    - a registered name, `"cnn1"`;
    - a mapping with options beside the name, `{"name": "resnet18", "stem": "cifar"}`, or beside a callable or
      module, `{"model": Net, "head": "fc"}`;
    - a callable: it gets as many of task=, input=, classes= and rep_dim= as it has parameters for;
    - a module: it is copied, so all its users start from the same weights.

    What is not a `Model` goes through `adapt`, which takes the options head, classes, stem, body and adapter.
    `check=False` skips the trial on a made-up batch, for an entry that has passed it before. `default_adapter`
    is for entries that name none; it is used only where the width must change.
    """
    with blame(who):
        source, entry_options = unpack(model)
        options = entry_options | options
        entry_rep_dim = options.pop("rep_dim", None)
        rep_dim = entry_rep_dim if rep_dim is None else rep_dim
        check_width(rep_dim)
        made, rest = _make(source, _offers(task, rep_dim, default_adapter), task, options)
        if isinstance(made, Model):
            check_complete(made)
        _refuse_unknown(source, made, rep_dim, rest)
    if isinstance(made, Model) and rep_dim in (None, made.rep_dim):
        if check:
            now_or_later(partial(check_model, made, task, who))
        return made
    if default_adapter is not None:
        rest = {"adapter": default_adapter} | rest
    return adapt(made, rep_dim=rep_dim, task=task, who=who, check=check, **rest)


def _offers(task: Task, rep_dim: int | None, adapter: str | None) -> dict[str, Any]:
    """The arguments for a builder, each passed only if it has a parameter of that name."""
    return {
        "task": task,
        "input": task.input,
        "classes": task.classes,
        "rep_dim": rep_dim,
        "adapter": adapter,
    }


def unpack(entry: Entry) -> tuple[Source, dict[str, Any]]:
    """The source of a model (a name, callable or module) and its options."""
    if not isinstance(entry, Mapping):
        source, options = entry, {}
    else:
        options = dict(entry)
        given = [options.pop(key) for key in ("name", "model") if key in options]
        if len(given) != 1:
            raise ModelError(
                f"a model given as a mapping needs one of 'name' and 'model', not {sorted(entry)}"
            )
        source = given[0]
    if isinstance(source, str):
        lookup(source)
    elif not callable(source):
        raise ModelError(f"a model is a name, a mapping, a callable or a module, not {source!r}")
    return source, options


def source_name(source: Source) -> str:
    """A readable name: the registered name, the class or the function."""
    if isinstance(source, str):
        return source
    if isinstance(source, partial):
        return source_name(source.func)
    return kind(source) if isinstance(source, nn.Module) else getattr(source, "__name__", kind(source))


def _make(
    source: Source, offered: Mapping[str, Any], task: Task, options: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """The module and the unused options. Only a registered builder is trusted to return a new module."""
    if isinstance(source, nn.Module):
        return _owned(source), options
    if not isinstance(source, str):
        made, rest = _call(source, source_name(source), offered, options)
        return _owned(made), rest
    registered = lookup(source)
    registered.require(task)
    return _call(registered.builder, source, offered, options)


def _owned(made: nn.Module) -> nn.Module:
    """A copy of a module that others may hold too; `adapt` copies by itself."""
    return duplicate(made) if isinstance(made, Model) else made


def _call(
    builder: Callable[..., nn.Module], name: str, offered: Mapping[str, Any], options: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    parameters, others = _parameters(builder)
    arguments = {key: offered[key] for key in parameters if offered.get(key) is not None}
    taken = {key for key in options if key in parameters or (others and key not in ADAPT_OPTIONS)}
    arguments |= {key: options[key] for key in taken}
    _refuse_missing(name, parameters, arguments)
    return _run(builder, name, arguments), {key: options[key] for key in options if key not in taken}


def _run(builder: Callable[..., nn.Module], name: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        made = builder(**arguments)
    except ModelError:
        raise
    except Exception as error:  # a user's builder may raise anything
        raise ModelError(
            f"{name} could not be built ({kind(error)}: {first_line(error)}); check its options"
        ) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{name} gave a {kind(made)}, expected a torch.nn.Module")
    return made


def _parameters(builder: Callable[..., nn.Module]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The named parameters, and whether there is a `**kwargs`: it gets options, never the task."""
    try:
        found = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):
        return {}, False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    others = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found)
    return {parameter.name: parameter for parameter in found if parameter.kind not in variadic}, others


def _refuse_missing(name: str, parameters: dict[str, inspect.Parameter], arguments: dict[str, Any]) -> None:
    for key, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ModelError(f"{name} takes {key!r} by position only; let it be passed by name")
        if parameter.default is inspect.Parameter.empty and key not in arguments:
            hint = (
                "set it"
                if key == "rep_dim"
                else "give it as an option, or take task, input, classes or rep_dim"
            )
            raise ModelError(f"{name} needs {key!r}; {hint}")


def _refuse_unknown(source: Source, made: nn.Module, rep_dim: int | None, rest: dict[str, Any]) -> None:
    """Refuse options that neither the builder nor `adapt` takes."""
    known = set(ADAPT_OPTIONS)
    if isinstance(made, Model):
        # A named model that already has the right width needs no adapter.
        known = {"adapter"} if rep_dim not in (None, made.rep_dim) or not isinstance(source, str) else set()
    unknown = sorted(set(rest) - known)
    if unknown:
        known |= _builder_options(source)
        raise ModelError(f"{source_name(source)} has no option {unknown[0]!r}; {nearest(unknown[0], known)}")


def _builder_options(source: Source) -> set[str]:
    builder = lookup(source).builder if isinstance(source, str) else source
    own = set() if isinstance(builder, nn.Module) else set(_parameters(builder)[0])
    return {"rep_dim"} | own - {"task", "input", "classes"}
