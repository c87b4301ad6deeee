"""Every method against the whole contract."""

from __future__ import annotations

import pytest
from pydantic import Field

from contract_cases import VARIANTS_ALONE, contract_case
from potluck.core.settings import Settings
from potluck.methods.registry import find_method, method_names
from potluck.testing.bench import Bench
from potluck.testing.contract import (
    CHECKS,
    Check,
    a_captured_step_is_right,
    clients_of_every_kind_work,
    only_declared_crosses,
    state_survives,
)

# An option changes what is trained, kept and sent; the other checks are about the script of the method.
OF_A_VARIANT = (clients_of_every_kind_work, state_survives, only_declared_crosses, a_captured_step_is_right)


@pytest.fixture(scope="module", params=method_names())
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(*contract_case(request.param))


def undescribed(settings: type[Settings], path: str = "") -> list[str]:
    """The fields of a block of settings, and of blocks inside, that do not say what they mean."""
    found = []
    for name, field in settings.model_fields.items():
        if not field.description:
            found.append(f"{path}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            found += undescribed(field.annotation, f"{path}{name}.")
    return found


@pytest.mark.parametrize("method", method_names())
def test_every_option_says_what_it_means(method: str) -> None:
    assert undescribed(find_method(method).Config) == []


def test_an_option_without_a_description_is_found() -> None:
    class Inner(Settings):
        rate: float = 0.1

    class Outer(Settings):
        inner: Inner = Field(default=Inner(), description="a block inside")

    assert undescribed(Outer) == ["inner.rate"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(bench: Bench, check: Check) -> None:
    check(bench)


@pytest.fixture(scope="module", params=VARIANTS_ALONE)
def variant(request: pytest.FixtureRequest) -> Bench:
    return Bench(*contract_case(request.param))


@pytest.mark.parametrize("check", OF_A_VARIANT, ids=lambda check: check.__name__)
def test_contract_of_a_variant(variant: Bench, check: Check) -> None:
    check(variant)
