"""Check a method against the contract every method keeps."""

from potluck.testing.bench import DEFAULT_MODELS, Bench
from potluck.testing.contract import CHECKS, Check, check_method

__all__ = ["CHECKS", "DEFAULT_MODELS", "Bench", "Check", "check_method"]
