"""What a server tells a client of its experiment when it introduces its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from potluck.core.own_metrics import MetricSettings
from potluck.data import DataConfig
from potluck.deploy.bounds import SENT, WEIGHTS
from potluck.errors import ConfigError
from potluck.experiment.blocks import Sites
from potluck.experiment.schema import Experiment
from potluck.methods.registry import find_method
from potluck.version import __version__


def welcome(experiment: Experiment, run: str) -> dict[str, Any]:
    """What a server tells a client of its experiment: no path, no plugin, nothing of its data.

    Of a model a client hears what it is built like; weights that it begins with come with the messages.
    """
    if not experiment.portable or not isinstance(experiment.partition, Sites):
        raise ConfigError(
            "a federation needs to know its sites; write partition: {sites: […], classes: …} in its file"
        )
    assert isinstance(experiment.data, DataConfig)
    values = experiment.model_dump(mode="json", include=set(SENT))
    values["models"] = without_weights(values["models"])
    values["method"] = {key: without_weights(value) for key, value in values["method"].items()}
    augment = experiment.data.augment.model_dump(mode="json")
    engine = {"threads": experiment.engine.threads, "precision": experiment.engine.precision}
    partition = experiment.partition.model_dump(mode="json")
    values |= {"data": {"augment": augment}, "engine": engine, "partition": partition}
    if experiment.metrics:
        values["metrics"] = [told_metric(metric) for metric in experiment.metrics]
    if find_method(experiment.method.name).needs_public_data and experiment.public is not None:
        assert isinstance(experiment.public.data, DataConfig)
        name = Path(experiment.public.data.name).name
        values["public"] = {"data": {"name": name}, "samples": experiment.public.samples}
    return {"potluck": __version__, "run": run, "experiment": values}


def without_weights(value: Any) -> Any:
    """Models as they are described, without the files or repositories that hold their first weights."""
    if isinstance(value, Mapping):
        return {key: without_weights(inner) for key, inner in value.items() if key != WEIGHTS}
    return [without_weights(inner) for inner in value] if isinstance(value, list) else value


def told_metric(metric: MetricSettings) -> str:
    """What a site hears of a metric: its name. A function of the server's is known by its own name alone."""
    if not metric.library:
        return metric.key
    if metric.options or metric.called or metric.takes:
        raise ConfigError(
            f"metrics: sites know {metric.name} by its name alone; for one with options let every site bring a "
            "function (potluck join --metric)"
        )
    return str(metric.name)
