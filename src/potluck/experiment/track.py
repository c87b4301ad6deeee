"""Which trackers are told how a run goes: `track: [tensorboard, {wandb: {project: digits}}]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from potluck.core.settings import Settings


class TrackerSettings(Settings):
    """What every tracker can be told."""

    clients: bool = True  # log every client too, not the means alone


class TensorBoardSettings(TrackerSettings):
    """TensorBoard: event files on this machine."""

    folder: str | None = None  # where the event files go; default: tensorboard/ in the run folder


class WandbSettings(TrackerSettings):
    """Weights & Biases; what is left out follows from its own settings and `WANDB_…` variables."""

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None  # default: the name of the run folder
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None


class MlflowSettings(TrackerSettings):
    """MLflow; without `uri` the store is the one that `MLFLOW_TRACKING_URI` names, or MLflow's default."""

    uri: str | None = None
    experiment: str | None = None  # default: the name of the experiment
    name: str | None = None  # default: the name of the run folder


class TrackSettings(Settings):
    """The trackers of a run; none by default."""

    tensorboard: TensorBoardSettings | None = None
    wandb: WandbSettings | None = None
    mlflow: MlflowSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        """One name, or a list of names and of names with options, each once."""
        listed = [values] if isinstance(values, str) else values
        if not isinstance(listed, list | tuple):
            return values
        found: dict[str, Any] = {}
        for one in listed:
            named = {one: {}} if isinstance(one, str) else one
            if not isinstance(named, Mapping) or len(named) != 1:
                raise ValueError("give names of trackers, or one name with its options in each entry")
            ((name, options),) = named.items()
            if name in found:
                raise ValueError(f"{name} is named twice; name it once")
            found[name] = {} if options is None else options
        return found
