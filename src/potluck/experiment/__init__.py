"""The validated configuration of a run."""

from potluck.experiment.schema import Experiment

__all__ = ["Experiment"]
