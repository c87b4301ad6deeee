"""Every method against the whole contract."""

from __future__ import annotations

import pytest

from potluck.method import method_names
from potluck.testing import CHECKS, DEFAULT_MODELS, Bench, Check

VARIANTS = {
    "fedavg": {},
    "fedavg by layers": {"name": "fedavg", "share": "layers", "weights": "uniform"},
    "fedavg, buffers at home": {"name": "fedavg", "buffers": "local"},
    "fedin": {"batch": 4},
    "fedin, literal": {
        "name": "fedin",
        "alleviate": "exact",
        "combine": "replace",
        "schedule": "alternate",
        "noise_per": "channel",
        "batch": 4,
        "batches": 2,
        "pool": "all",
    },
    "fedin by groups, projected": {
        "name": "fedin",
        "share": "groups",
        "weights": "samples",
        "buffers": "average",
        "project": "averaged",
        "project_in": [8, 2, 2],
        "project_out": 16,
        "batch": 4,
    },
    "fedmrl": {"d1": 16},
    "fedmrl, d1 per client": {"name": "fedmrl", "d1": [16, 8, 4], "widths": [6, 32], "weights": "uniform"},
    "fedmrl, MRL-E": {"name": "fedmrl", "d1": 16, "global_header": False, "projector": "deep"},
    "fedmrl, local only": {"name": "fedmrl", "d1": 16, "mrl": "local_only", "lr": {"small": 0.01}},
    "fedmrl, tied headers": {
        "name": "fedmrl",
        "d1": 16,
        "tie_headers": True,
        "projector": "none",
        "weight_small": lambda report: 1 / (1 + report["large"]),
    },
    "fedproto, online": {
        "name": "fedproto",
        "online": True,
        "distance": "l2",
        "weight": 0.01,
        "weights": "count",
    },
    "fedre, kept weights of samples": {
        "name": "fedre",
        "mechanism": "RAR",
        "weights": "gaussian",
        "fixed": True,
    },
    "fedre, single samples, noise, coarse labels": {
        "name": "fedre",
        "mechanism": "RSR",
        "noise": 0.5,
        "levels": 2,
        "server_loss": "mean",
    },
    "scaffold, option II": {"name": "scaffold", "variate": "option2"},
}
MODELS = {  # their features must have one shape
    "fedin": ("conv-small", "conv-large"),
    "fedin, literal": ("mlp-small", "mlp-large"),
}
METHODS = [*method_names(), *(name for name in VARIANTS if name not in method_names())]


@pytest.fixture(scope="module", params=METHODS)
def bench(request: pytest.FixtureRequest) -> Bench:
    options = {"name": request.param} | VARIANTS.get(request.param, {})
    return Bench(options, MODELS.get(request.param, DEFAULT_MODELS))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(bench: Bench, check: Check) -> None:
    check(bench)
