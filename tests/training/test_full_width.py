"""Linear layers by oneDNN give what PyTorch's give, gradients of gradients included."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from potluck.testing.double_precision import double_precision
from potluck.training import full_width as width
from potluck.training.full_width import WORTH_IT, full_width, has_product, linear, mkl_is_narrow

pytestmark = pytest.mark.skipif(not has_product(), reason="this build of torch has no oneDNN")


@pytest.fixture(autouse=True)
def wherever_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a CPU on which MKL is the slower one."""
    monkeypatch.setattr(width, "mkl_is_narrow", lambda: True)


def layer(into: int = 512, out: int = 160, bias: bool = True) -> nn.Linear:
    generator = torch.Generator().manual_seed(0)
    made = nn.Linear(into, out, bias=bias)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def rows(count: int, into: int = 512) -> Tensor:
    return torch.randn(count, into, generator=torch.Generator().manual_seed(1)).requires_grad_()


def by_oneDNN(x: Tensor, forward: Callable[[Tensor], Tensor]) -> bool:
    return type(forward(x).grad_fn).__name__ == "_LinearBackward"


def ours(made: nn.Linear) -> Callable[[Tensor], Tensor]:
    return functools.partial(linear, made)


@pytest.mark.parametrize("bias", [True, False])
def test_answers_and_gradients_are_those_of_the_layer(bias: bool) -> None:
    made, x = layer(bias=bias), rows(32)
    assert by_oneDNN(x, ours(made))
    exact = F.linear(x.double(), made.weight.double(), made.bias.double() if bias else None)
    values = [x, *made.parameters()]
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(2))
    for found, expected in zip(
        [linear(made, x), *torch.autograd.grad(linear(made, x), values, upstream)],
        [exact, *torch.autograd.grad(exact, values, upstream.double())],
        strict=True,
    ):
        assert (found - expected).norm() / expected.norm() < 1e-6


def test_only_what_needs_a_gradient_gets_one() -> None:
    made, x = layer(), rows(32).detach()
    made.bias.requires_grad_(False)
    linear(made, x).sum().backward()
    assert made.weight.grad is not None
    assert made.bias.grad is None
    assert x.grad is None


def test_gradients_of_gradients_are_those_of_the_layer() -> None:
    made, x = layer(), rows(32)

    def second(forward: functools.partial[Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), made.weight)
        return found

    found = second(ours(made))
    expected = second(functools.partial(F.linear, weight=made.weight, bias=made.bias))
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_what_is_small_or_of_another_kind_is_left_to_torch() -> None:
    made = layer()
    fewest = -(-WORTH_IT // made.weight.numel())
    assert by_oneDNN(rows(fewest), ours(made))
    assert not by_oneDNN(rows(fewest - 1), ours(made))
    assert not by_oneDNN(rows(fewest).unsqueeze(0), ours(made))
    assert not by_oneDNN(rows(fewest).double(), ours(made.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert not by_oneDNN(rows(fewest), ours(layer()))


def test_transforms_of_functions_see_the_layer_of_torch() -> None:
    made, x = layer(), rows(32).detach()
    found = torch.func.vmap(ours(made))(x.expand(2, *x.shape))
    torch.testing.assert_close(found[1], made(x))
    _, moved = torch.func.jvp(ours(made), (x,), (x,))
    torch.testing.assert_close(moved, made(x) - made.bias)


def test_operations_are_counted_and_recorded_as_those_of_torch() -> None:
    made, x = layer(), rows(32)
    with FlopCounterMode(display=False) as counted:
        linear(made, x)
    assert counted.get_total_flops() == 2 * 32 * made.weight.numel()
    with double_precision():  # float64 that calls itself float32
        assert linear(made.double(), x.detach().double()).isfinite().all()


def test_layers_are_as_before_afterwards_and_changed_ones_are_not_touched() -> None:
    plain, changed, computed = layer(), layer(), parametrizations.weight_norm(layer())
    changed.forward = lambda x: x  # type: ignore[method-assign]
    net = nn.ModuleList([plain, plain, changed, computed])
    with full_width([net, plain]):
        assert by_oneDNN(rows(32), plain.forward)
        assert "forward" not in vars(computed)
        assert changed(1) == 1
    assert "forward" not in vars(plain)
    assert changed(1) == 1


def test_layers_are_as_before_after_an_error() -> None:
    made = layer()
    with pytest.raises(RuntimeError), full_width([made]):
        made(rows(32, into=3))
    assert "forward" not in vars(made)


def test_nothing_changes_where_mkl_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width, "mkl_is_narrow", lambda: False)
    made = layer()
    with full_width([made]):
        assert "forward" not in vars(made)


def test_whatever_is_active_oneDNN_is_found() -> None:
    with double_precision(), FakeTensorMode():
        assert has_product()


@pytest.mark.parametrize(
    ("maker", "instructions", "narrow"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
        ("", "AVX512", False),
    ],
)
def test_it_depends_on_the_cpu(
    maker: str, instructions: str, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(width, "cpu_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert mkl_is_narrow.__wrapped__() == narrow
