"""Experiments: validated settings from a file or from Python, and what is built from them."""

from potluck.experiment.schema import Experiment

__all__ = ["Experiment"]
