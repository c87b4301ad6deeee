"""Settings of an evaluation that a method or the clients' tasks do not allow, and what clients are judged by."""

from __future__ import annotations

from collections.abc import Mapping

from potluck.core.card import ClientId
from potluck.core.method import Method
from potluck.core.metrics import MetricFacts, common_facts, metric_facts
from potluck.core.own_metrics import told_by
from potluck.engine.evaluation.settings import EvaluateSettings, chosen_modes
from potluck.errors import ConfigError, nearest
from potluck.federation.federation import Federation

# Tasks with predictions to keep.
PREDICTED = ("classification", "text-classification", "multi-label", "regression")


def check_evaluation(settings: EvaluateSettings, federation: Federation) -> None:
    """Refuse modes, a judge or predictions that the method or the clients' tasks do not have."""
    _check_modes(settings, federation.method)
    known = measured_by(federation)
    if settings.judge is not None and settings.judge not in known:
        raise ConfigError(
            f"evaluate.judge: no client is measured by {settings.judge!r} (further ones are named under "
            f"metrics); {nearest(settings.judge, known)}"
        )
    _check_directions(_judges(settings, federation))
    for client in federation.population.first_clients if settings.predictions != "none" else ():
        kind = federation.population.task_of(client).kind
        if kind not in PREDICTED:
            raise ConfigError(
                f"evaluate.predictions: none are kept for {kind}, the task of client {client}; leave it out"
            )


def measured_by(federation: Federation) -> list[str]:
    """The names in the log of all metrics that some client is measured by."""
    population = federation.population
    tasks = [population.task_of(client) for client in population.first_clients]
    told = [name for task in tasks for name in told_by(task.rules.told)]
    return list(dict.fromkeys([*federation.clients.metrics, *told]))


def _check_modes(settings: EvaluateSettings, method: Method) -> None:
    """Refuse an inference mode that the method does not have."""
    for mode in chosen_modes(settings, method.modes):
        if mode not in method.modes:
            raise ConfigError(
                f"evaluate.modes: {method.name} has no mode {mode!r}; {nearest(mode, method.modes)}"
            )


def judged_by(settings: EvaluateSettings, federation: Federation) -> MetricFacts:
    """Direction and range of what the clients of an experiment will be compared by."""
    return common_facts([*_judges(settings, federation).values()])


def _judges(settings: EvaluateSettings, federation: Federation) -> dict[ClientId, MetricFacts]:
    """What one client of each group will be judged by."""
    population, own = federation.population, federation.clients.metrics
    found = {}
    for client in population.first_clients:
        task = population.task_of(client)
        told = (*told_by(task.rules.told), *(name for name, metric in own.items() if metric.fits(task)))
        name = settings.judge if settings.judge in told else told[0]
        found[client] = own[name].facts if name in own else metric_facts(name)
    return found


def _check_directions(judges: Mapping[ClientId, MetricFacts]) -> None:
    """Refuse to judge some clients by a metric that is better high, and others by one that is better low."""
    first = {facts.higher_is_better: (client, facts.name) for client, facts in reversed([*judges.items()])}
    if len(first) == 2:
        (high, above), (low, below) = first[True], first[False]
        raise ConfigError(
            f"evaluate.judge: client {low} would be judged by {below}, where lower is better, and client {high} "
            f"by {above}, where higher is better: no mean says which round is best; leave judge out, or choose "
            "one that all clients have, such as loss"
        )
