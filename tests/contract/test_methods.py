"""Every method against the whole contract."""

from __future__ import annotations

import pytest

from potluck.method import method_names
from potluck.testing import CHECKS, Bench, Check

VARIANTS = {
    "fedavg": {},
    "fedavg by layers": {"name": "fedavg", "share": "layers", "weights": "uniform"},
    "fedavg, buffers at home": {"name": "fedavg", "buffers": "local"},
    "fedmrl": {"d1": 16},
    "fedproto, online": {
        "name": "fedproto",
        "online": True,
        "distance": "l2",
        "weight": 0.01,
        "weights": "count",
    },
    "scaffold, option II": {"name": "scaffold", "variate": "option2"},
}
METHODS = [*method_names(), *(name for name in VARIANTS if name not in method_names())]


@pytest.fixture(scope="module", params=METHODS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench({"name": request.param} | VARIANTS.get(request.param, {}))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(bench: Bench, check: Check) -> None:
    check(bench)
