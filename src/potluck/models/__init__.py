"""Models: the contract, the registered models, and models of users.

>>> from potluck.core.task import Task
>>> model = build("cnn5", Task("classification", classes=10, input=(3, 32, 32)), rep_dim=100)
>>> model.rep_dim, sum(p.numel() for p in model.parameters())
(100, 465658)
"""

from potluck.core.model import Model
from potluck.models import zoo  # noqa: F401  importing it registers its models
from potluck.models.adapt import adapt
from potluck.models.adapted import Adapted
from potluck.models.build import Entry, build
from potluck.models.check import check_model
from potluck.models.parts import ADAPTERS, FeaturePool, make_adapter
from potluck.models.pool import Entries, ModelPool, Order
from potluck.models.registry import POOLS, Registered, input_kind, lookup, names, register

__all__ = [
    "ADAPTERS",
    "POOLS",
    "Adapted",
    "Entries",
    "Entry",
    "FeaturePool",
    "Model",
    "ModelPool",
    "Order",
    "Registered",
    "adapt",
    "build",
    "check_model",
    "input_kind",
    "lookup",
    "make_adapter",
    "names",
    "register",
]
