"""Metrics that an experiment asks for beside those of the task: by name, or functions of one's own.

They are computed on the host, from the scores and labels of a whole split. scikit-learn, torchmetrics and users'
modules are imported when an experiment names them.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, field_serializer, field_validator, model_validator

from potluck.core.metrics import DECLARED, Declared, MetricFacts, Takes, metric_facts
from potluck.core.settings import Settings
from potluck.core.task import Task
from potluck.core.task_kinds import TASK_KINDS
from potluck.errors import ConfigError, RunError, first_line, nearest
from potluck.plugins import find_function, load_function, split_name
from potluck.version import install_command

ONE_CLASS = frozenset({"classification", "text-classification"})
LABELS = ONE_CLASS | {"multi-label"}
CLASSES = LABELS | {"segmentation"}
REGRESSION = frozenset({"regression"})
LIBRARIES = ("sklearn", "torchmetrics")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED = ("correct", "samples", "score", "metric")  # other things in the log, or on the way to it
LONGEST = 200  # characters of a function's error that are told
TRIAL = 4  # made-up samples per class on which a metric is tried before a run
MOST_TRIED = 1 << 22  # made-up scores in all: 1,024 classes; a task that needs more is not tried

Function = Callable[[Any, np.ndarray], Any]  # of what a metric takes, and the labels


# --- what an experiment says ----------------------------------------------------------------------------


class MetricSettings(Settings):
    """One metric: a name, `sklearn:function`, `torchmetrics:Class`, `module:function`, or a function itself."""

    name: Any
    # Its name in logs and tables.
    called: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")
    higher_is_better: bool | None = None
    low: float | None = Field(default=None, allow_inf_nan=True)
    high: float | None = Field(default=None, allow_inf_nan=True)
    takes: Takes | None = None
    options: dict[str, Any] = {}  # further arguments of a library's metric

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, values: Any) -> Any:
        return values if isinstance(values, Mapping | MetricSettings) else {"name": values}

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: Any) -> Any:
        if callable(name):
            return name
        if not isinstance(name, str):
            raise ValueError("give the name of a metric, module:function, or a function of scores and labels")
        home, key = split_name(name)
        if key == name and name.endswith(".py"):
            raise ValueError(f"{name!r} is a file; name the function in it: {name}:function")
        if key == name and name not in PLAIN and name not in measured_anyway():
            raise ValueError(f"there is no metric {name!r}; {nearest(name, [*PLAIN, *measured_anyway()])}")
        if key != name and not (home and key):
            raise ValueError(f"{name!r} names no function; write {home or 'module'}:{key or 'function'}")
        return name

    @model_validator(mode="after")
    def _options_are_for_libraries(self) -> MetricSettings:
        if self.options and not self.library:
            raise ValueError(
                f"options go with sklearn:… and torchmetrics:…, not with {self.key!r}: "
                "write a function that has them set"
            )
        return self

    @field_serializer("low", "high")
    def _infinity_as_text(self, value: float | None) -> float | str | None:
        """JSON has no infinity; pydantic reads this text back."""
        return value if value is None or math.isfinite(value) else str(value)

    @property
    def key(self) -> str:
        """Its name in the log, in tables and in a site's agreement."""
        given = self.name if isinstance(self.name, str) else getattr(self.name, "__name__", "metric")
        return self.called or split_name(given)[1]

    @property
    def library(self) -> str:
        """The library that a name such as `sklearn:f1_score` points into, else nothing."""
        home = split_name(self.name)[0] if isinstance(self.name, str) else ""
        return home if home in LIBRARIES else ""


def runs_no_other_code(name: str) -> bool:
    """Whether a name means a metric of this package or of one of the libraries, and no module or file.

    >>> runs_no_other_code("macro_f1"), runs_no_other_code("sklearn:f1_score"), runs_no_other_code("os:system")
    (True, True, False)
    >>> runs_no_other_code("sklearn:/../mine.py:f"), runs_no_other_code("sklearn:a.py:f")
    (False, False)
    """
    home, key = split_name(name)
    if key == name:
        return name in PLAIN or name in measured_anyway()
    return home in LIBRARIES and _WORD.fullmatch(key) is not None


def measured_anyway() -> set[str]:
    """The names of what the tasks measure without being asked; `correct` is logged as accuracy."""
    return {name for kind in TASK_KINDS.values() for name in told_by(kind.told)}


def told_by(told: Iterable[str]) -> tuple[str, ...]:
    """The names in the log of what a task tells."""
    return tuple("accuracy" if name == "correct" else name for name in told)


# --- one metric -----------------------------------------------------------------------------------------


class TrialFailed(ConfigError):
    """A metric failed on made-up scores; the message has the error of its function."""


class MetricFailed(RunError):
    """A metric could not be computed for a client; the message is the error of its function."""


@dataclass(frozen=True)
class OwnMetric:
    """A metric that can be computed."""

    facts: MetricFacts
    function: Function
    takes: Takes = "scores"
    kinds: frozenset[str] | None = None  # the kinds of tasks it is for; None: any
    least_labels: int = 1  # it is undefined where fewer different labels appear
    above_classes: int = 0  # it says nothing for a task with so few classes

    def fits(self, task: Task) -> bool:
        """Whether it says anything about a task."""
        return (self.kinds is None or task.kind in self.kinds) and task.classes > self.above_classes

    def value(self, scores: torch.Tensor, labels: torch.Tensor, task: Task) -> float:
        """Its value over a whole split; NaN where it is undefined. Raises `MetricFailed` for any other error."""
        given, answers = in_form(scores.numpy(), labels.numpy(), task, self.takes)
        if self.least_labels > 1 and answers.ndim == 1 and len(np.unique(answers)) < self.least_labels:
            return math.nan
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is undefined is said once, by the run
                return _number(self.function(given, answers))
        except (ValueError, ZeroDivisionError, FloatingPointError):
            return math.nan
        except Exception as error:
            raise MetricFailed(f"{type(error).__name__}: {first_line(error)}"[:LONGEST]) from error


def _number(found: Any) -> float:
    """A metric's answer as a number; None counts as undefined."""
    return math.nan if found is None else float(found)


def in_form(
    scores: np.ndarray, labels: np.ndarray, task: Task, takes: Takes
) -> tuple[np.ndarray, np.ndarray]:
    """Scores in the form a metric takes, and the labels: copies, as a function may write into them."""
    labels = labels.copy()
    if task.kind in REGRESSION:
        return (scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 1 else scores).copy(), (
            labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
        )
    if task.kind != "retrieval":
        labels = labels.astype(np.int64)
    if takes == "scores":
        return scores.copy(), labels
    if takes == "probabilities":
        whole = torch.from_numpy(scores).double()
        shares = whole.sigmoid() if task.kind == "multi-label" else whole.softmax(1)
        return shares.numpy(), labels
    if task.kind == "multi-label":
        return (scores > 0).astype(np.int64), labels
    return scores.argmax(1).reshape(-1), labels.reshape(-1)


# --- metrics by name ------------------------------------------------------------------------------------


def _library(name: str) -> Any:
    return importlib.import_module("sklearn.metrics" if name == "sklearn" else name)


def _check_package(settings: MetricSettings) -> None:
    """Refuse a metric whose library is not installed."""
    of_sklearn = settings.name in PLAIN and settings.name != "expected_calibration_error"
    needed = settings.library or ("sklearn" if of_sklearn else "torchmetrics")
    try:
        _library(needed)
    except ImportError as error:
        raise ConfigError(
            f"metrics: {settings.name} needs the package {needed}, install it with: "
            f"{install_command('metrics')}"
        ) from error


def _sklearn(function: str, **options: Any) -> Function:
    """A function of scikit-learn; it takes the labels first."""

    def compute(given: Any, labels: np.ndarray) -> Any:
        return getattr(_library("sklearn"), function)(labels, given, **options)

    return compute


def _one_against_rest(function: str) -> Function:
    """The mean over the classes that some samples have and others lack; with two classes, of the second alone."""
    compute = _sklearn(function)

    def over_classes(given: np.ndarray, labels: np.ndarray) -> float:
        single = labels.ndim == 1
        classes = [1] if single and given.shape[1] == 2 else range(given.shape[1])
        columns = {one: (labels == one) if single else labels[:, one] > 0 for one in classes}
        values = [
            compute(given[:, one], there) for one, there in columns.items() if 0 < there.sum() < len(there)
        ]
        return float(np.mean(values)) if values else math.nan

    return over_classes


def _of_all_classes(function: str, **options: Any) -> Function:
    """A function of scikit-learn that must be told the classes, as a client may not have all."""

    def compute(given: np.ndarray, labels: np.ndarray) -> Any:
        return _sklearn(function, labels=np.arange(given.shape[1]), **options)(given, labels)

    return compute


def _calibration_error(given: np.ndarray, labels: np.ndarray) -> Any:
    """The mean gap between confidence and accuracy in 15 bins of confidence, weighted by samples."""
    return _library("torchmetrics").functional.classification.multiclass_calibration_error(
        torch.from_numpy(given), torch.from_numpy(labels), given.shape[1], n_bins=15, norm="l1"
    )


def _plain(
    name: str, function: Function, kinds: frozenset[str], takes: Takes = "answers", **others: int
) -> OwnMetric:
    return OwnMetric(metric_facts(name), function, takes, kinds, **others)


_AVERAGED = {"f1": "f1_score", "precision": "precision_score", "recall": "recall_score"}
PLAIN: dict[str, OwnMetric] = {
    metric.facts.name: metric
    for metric in (
        *(
            _plain(f"{way}_{word}", _sklearn(function, average=way, zero_division=0), CLASSES)
            for word, function in _AVERAGED.items()
            for way in ("macro", "micro", "weighted")
        ),
        _plain("macro_jaccard", _sklearn("jaccard_score", average="macro", zero_division=0), CLASSES),
        _plain("balanced_accuracy", _sklearn("balanced_accuracy_score"), ONE_CLASS | {"segmentation"}),
        _plain("cohen_kappa", _sklearn("cohen_kappa_score"), ONE_CLASS | {"segmentation"}, least_labels=2),
        _plain(
            "matthews_corrcoef", _sklearn("matthews_corrcoef"), ONE_CLASS | {"segmentation"}, least_labels=2
        ),
        _plain("subset_accuracy", _sklearn("accuracy_score"), frozenset({"multi-label"})),
        _plain("auroc", _one_against_rest("roc_auc_score"), LABELS, "probabilities", least_labels=2),
        _plain(
            "average_precision",
            _one_against_rest("average_precision_score"),
            LABELS,
            "probabilities",
            least_labels=2,
        ),
        _plain("log_loss", _of_all_classes("log_loss"), ONE_CLASS, "probabilities"),
        *(
            _plain(
                f"top{k}_accuracy",
                _of_all_classes("top_k_accuracy_score", k=k),
                ONE_CLASS,
                "scores",
                above_classes=k,
            )
            for k in (2, 3, 5, 10)
        ),
        _plain("expected_calibration_error", _calibration_error, ONE_CLASS, "probabilities"),
        _plain("rmse", _sklearn("root_mean_squared_error"), REGRESSION),
        _plain("median_absolute_error", _sklearn("median_absolute_error"), REGRESSION),
        _plain("mean_absolute_percentage_error", _sklearn("mean_absolute_percentage_error"), REGRESSION),
        _plain("max_error", _sklearn("max_error"), REGRESSION),
        _plain("explained_variance", _sklearn("explained_variance_score"), REGRESSION),
    )
}


# --- metrics of libraries and of one's own --------------------------------------------------------------

_LOWER = ("_loss", "_error", "_deviance")  # how scikit-learn ends the names of metrics where lower is better
_ANY = {"low": -math.inf, "high": math.inf}


def _from_sklearn(settings: MetricSettings) -> OwnMetric:
    """Any metric of scikit-learn. What it takes is told by its second argument: `y_pred`, `y_score`, `y_proba`."""
    name, library = split_name(settings.name)[1], _library("sklearn")
    known = [key for key in library.__all__ if "y_true" in _parameters(getattr(library, key))]
    if name not in known:
        raise ConfigError(f"metrics: scikit-learn has no metric {name!r}; {_nearest_few(name, known)}")
    options = _parameters(getattr(library, name))
    unknown = next((one for one in settings.options if one not in options), None)
    if unknown is not None:
        raise ConfigError(f"metrics: {name} has no option {unknown!r}; {nearest(unknown, options[2:])}")
    second = options[1]
    takes: Takes = "answers" if second == "y_pred" and not name.endswith("log_loss") else "probabilities"
    facts = MetricFacts(settings.key, not name.endswith(_LOWER), **_ANY)
    return OwnMetric(facts, _sklearn(name, **settings.options), takes)


def _nearest_few(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name where far too many are known to list them all."""
    few = difflib.get_close_matches(name, known, n=5, cutoff=0.0)
    hint = nearest(name, few)
    return hint if hint.startswith("did you mean") else f"the nearest are {', '.join(few)}"


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _from_torchmetrics(settings: MetricSettings) -> OwnMetric:
    """Any metric of torchmetrics that gives one number; what it must know of the task is filled in."""
    name, library = split_name(settings.name)[1], _library("torchmetrics")
    homes = [
        library,
        *(importlib.import_module(f"torchmetrics.{one}") for one in ("classification", "regression")),
    ]
    known = {key: getattr(home, key) for home in homes for key in home.__all__ if key[0].isupper()}
    if name not in known:
        raise ConfigError(f"metrics: torchmetrics has no metric {name!r}; {_nearest_few(name, known)}")
    kind = known[name]
    wanted = {*_parameters(kind), *_parameters(kind.__new__)}

    def make(classes: int, several: bool) -> Any:
        about: dict[str, Any] = {"task": "multilabel" if several else "multiclass"}
        about |= dict.fromkeys(("num_classes", "num_labels", "num_outputs"), classes)
        return kind(**{key: about[key] for key in about if key in wanted} | settings.options)

    def compute(given: np.ndarray, labels: np.ndarray) -> Any:
        metric = make(given.shape[1] if given.ndim > 1 else 1, labels.ndim > 1)
        metric.update(torch.from_numpy(given), torch.from_numpy(labels))
        return metric.compute()

    try:
        like = make(3, several=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metrics: {settings.name} cannot be made: {first_line(error)}") from error
    return OwnMetric(_facts_of(like, settings.key), compute, "probabilities")


def _facts_of(metric: Any, key: str) -> MetricFacts:
    """Direction and range as an object of torchmetrics declares them; what it does not say is open."""
    low, high = (getattr(metric, f"plot_{end}_bound", None) for end in ("lower", "upper"))
    return MetricFacts(
        key,
        getattr(metric, "higher_is_better", None) is not False,
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )


def _from_function(settings: MetricSettings, function: Callable[..., Any]) -> OwnMetric:
    """A function of one's own, with what its decorator says."""
    said = getattr(function, DECLARED, Declared(True, 0.0, 1.0, "scores"))
    facts = MetricFacts(settings.key, said.higher_is_better, said.low, said.high)
    return OwnMetric(facts, function, said.takes)


def _function(name: Any, folder: Path) -> Callable[..., Any]:
    if callable(name):
        found: Callable[..., Any] = name
        return found
    home, key = split_name(name)
    if not home.endswith(".py"):
        return find_function(name)
    file = (folder / home).resolve()
    if not file.is_file():
        raise ConfigError(f"metrics: there is no file {file}; check the path of {name}")
    return load_function(f"{file}:{key}")


def _made(settings: MetricSettings, folder: Path) -> OwnMetric:
    """The metric that settings describe; what they declare themselves counts most."""
    if settings.library == "sklearn":
        found = _from_sklearn(settings)
    elif settings.library == "torchmetrics":
        found = _from_torchmetrics(settings)
    elif settings.name in PLAIN:
        found = PLAIN[settings.name]
    else:
        found = _from_function(settings, _function(settings.name, folder))
    said = {name: getattr(settings, name) for name in ("higher_is_better", "low", "high")}
    facts = replace(
        found.facts, name=settings.key, **{key: one for key, one in said.items() if one is not None}
    )
    if not facts.low < facts.high:
        raise ConfigError(
            f"metrics: {facts.name} goes from low={facts.low} to high={facts.high}: low must be below high"
        )
    return replace(found, facts=facts, takes=settings.takes or found.takes)


OwnMetrics = Mapping[str, OwnMetric]


def own_metrics(
    wanted: Sequence[MetricSettings], tasks: Mapping[str, Task], folder: Path
) -> dict[str, OwnMetric]:
    """The metrics of an experiment by their names, tried on made-up scores; `tasks` has one client of each group.

    A metric that fits no client's task is refused. One that a task measures anyway needs nothing.
    """
    found: dict[str, OwnMetric] = {}
    for settings in wanted:
        anyway = {name for task in tasks.values() for name in told_by(task.rules.told)}
        if settings.key in found or (settings.key in anyway and settings.name != settings.key):
            raise ConfigError(f"metrics: two are called {settings.key!r}; {_other_name(settings)}")
        if settings.key in RESERVED:
            raise ConfigError(f"metrics: {settings.key!r} has a meaning in the log; {_other_name(settings)}")
        if settings.name in anyway:
            continue
        found[settings.key] = _fitting(settings, tasks, folder)
    return found


def _other_name(settings: MetricSettings) -> str:
    given = settings.name if isinstance(settings.name, str) else settings.key
    return f"write {{name: {given}, called: …}}"


def _fitting(settings: MetricSettings, tasks: Mapping[str, Task], folder: Path) -> OwnMetric:
    """The metric, if it fits some client's task."""
    if settings.name in measured_anyway() and settings.name not in PLAIN:
        raise ConfigError(f"metrics: {settings.name} does not fit {_each(tasks)}{_that_fit(tasks)}")
    if settings.library or settings.name in PLAIN:
        _check_package(settings)
    metric = _made(settings, folder)
    fitting = [task for task in tasks.values() if metric.fits(task)]
    if not fitting:
        few = f", which needs more than {metric.above_classes} classes," if metric.above_classes else ""
        raise ConfigError(f"metrics: {settings.key}{few} does not fit {_each(tasks)}{_that_fit(tasks)}")
    [(usual, _)] = Counter(fitting).most_common(1)
    _try(metric, settings, usual)
    return metric


def _that_fit(tasks: Mapping[str, Task]) -> str:
    """Some metrics that would fit, to end a sentence with."""
    fit = [name for name, metric in PLAIN.items() if any(metric.fits(task) for task in tasks.values())]
    return f"; these fit: {', '.join(fit[:5])}{' …' * (len(fit) > 5)}" if fit else ""


def _each(tasks: Mapping[str, Task]) -> str:
    return "; ".join(dict.fromkeys(f"the task of client {client}: {task}" for client, task in tasks.items()))


def _try(metric: OwnMetric, settings: MetricSettings, task: Task) -> None:
    """Compute a metric on made-up scores, so that what cannot work is said before a run and not after a round.

    Classes and sizes may be a stranger's word: a task that would take much memory is not tried.
    """
    count = _trial_rows(task)
    if count * math.prod(task.scores) > MOST_TRIED:
        return
    scores, labels = _made_up(task, count)
    given, answers = in_form(scores.numpy(), labels.numpy(), task, metric.takes)
    who = settings.name if isinstance(settings.name, str) else settings.key
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _number(metric.function(given, answers))
    except Exception as error:
        raise TrialFailed(
            f"metrics: {who} fails on {metric.takes} {given.shape} and labels {answers.shape}: "
            f"{type(error).__name__}: {first_line(error)}; fix the metric, or leave it out"
        ) from error


def _trial_rows(task: Task) -> int:
    """How many made-up samples a metric is tried on; an image of labels shows many classes at once."""
    return math.ceil(TRIAL * task.classes / math.prod(task.scores[1:]))


def _made_up(task: Task, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and labels of a task's shapes, with every class among the labels."""
    numbers = torch.arange(count * math.prod(task.scores), dtype=torch.float32)
    scores = torch.sin(numbers).reshape(count, *task.scores)
    places = torch.arange(count)
    if task.kind == "multi-label":
        return scores, (places[:, None] % (torch.arange(task.classes) + 2) == 0).float()
    if task.kind in REGRESSION:
        return scores, torch.cos(scores) + 1.5
    pixels = torch.arange(count * math.prod(task.scores[1:]))
    return scores, (pixels % task.classes).reshape(count, *task.scores[1:])
