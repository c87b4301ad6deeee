"""An experiment as a YAML file with every default written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from potluck.core.dataset import Dataset
from potluck.core.own_metrics import MetricSettings
from potluck.data import Split
from potluck.experiment.blocks import AnyData, AnyPartition, IndexFile
from potluck.experiment.plain import plain
from potluck.experiment.settings import ExperimentSettings
from potluck.files import in_home
from potluck.plugins import split_name

APART = {
    "data",
    "partition",
    "federation",
    "public",
    "metrics",
}  # blocks with objects or paths, written one by one


def to_yaml(experiment: ExperimentSettings) -> str:
    """The whole experiment. Paths become absolute, Python objects become their names."""
    return yaml.safe_dump(to_values(experiment), sort_keys=False, default_flow_style=None, width=110)


def to_values(experiment: ExperimentSettings) -> dict[str, Any]:
    """The whole experiment as values that JSON and YAML can hold; see `to_yaml`."""
    values = experiment.model_dump(mode="json", exclude=APART, fallback=plain)
    values["plugins"] = [_absolute(experiment, name) for name in experiment.plugins]
    values["metrics"] = [_metric_block(experiment, metric) for metric in experiment.metrics]
    if experiment.federation:
        del values["models"]["pool"]
    clients = _client_blocks(experiment)
    if experiment.public is not None:
        data = _data_block(experiment, experiment.public.data)
        clients["public"] = {"data": data, "samples": experiment.public.samples}
    return {"name": values.pop("name"), **clients, **values}


def _absolute(experiment: ExperimentSettings, plugin: str) -> str:
    return str((experiment.folder / plugin).resolve()) if plugin.endswith(".py") else plugin


def _metric_block(experiment: ExperimentSettings, metric: MetricSettings) -> Any:
    """A metric as a file writes it: its name alone where nothing else is said."""
    said = {key: value for key, value in metric.model_dump().items() if value not in (None, {})}
    block = plain(said)
    home, function = split_name(str(block["name"]))
    if home.endswith(".py"):
        block["name"] = f"{(experiment.folder / home).resolve()}:{function}"
    return block if len(block) > 1 else block["name"]


def _client_blocks(experiment: ExperimentSettings) -> dict[str, Any]:
    """`federation`, or `data` and `partition` where there is one group."""
    written = [
        {
            "data": _data_block(experiment, group.data),
            "partition": _partition_block(experiment, group.partition),
            "models": plain(group.models),
        }
        for group in experiment.groups
    ]
    if experiment.federation:
        return {"federation": written}
    return {key: value for key, value in written[0].items() if key != "models"}


def _partition_block(experiment: ExperimentSettings, partition: AnyPartition) -> dict[str, Any]:
    if isinstance(partition, Split):
        return {"file": "split.json"}  # the run folder keeps it beside this file
    if isinstance(partition, IndexFile):
        return {"file": str((experiment.folder / partition.file).resolve())}
    return partition.model_dump(mode="json")


def _data_block(experiment: ExperimentSettings, data: AnyData) -> dict[str, Any]:
    if isinstance(data, Dataset):
        return {"name": data.name}
    block = data.model_dump(mode="json", exclude_defaults=True) | {"name": data.name}
    if data.dir is not None:
        block["dir"] = str((experiment.folder / in_home(data.dir)).resolve())
    if data.path is not None:
        block["path"] = _absolute_paths(experiment.folder / (data.dir or ""), data.path)
    if data.tokenizer is not None:
        block["tokenizer"] = data.tokenizer_from(experiment.folder)
    return block


def _absolute_paths(folder: Path, path: Any) -> Any:
    if isinstance(path, dict):
        return {key: _absolute_paths(folder, one) for key, one in path.items()}
    if isinstance(path, list):
        return [_absolute_paths(folder, one) for one in path]
    return str((folder / in_home(path)).absolute())
