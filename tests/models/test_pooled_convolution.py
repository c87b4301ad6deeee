"""A convolution, ReLU and pooling as one layer: the same as torch's own three, on a CPU and in our kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.rng import Rng
from potluck.engine.numerics import precision
from potluck.models.fused import pooled_convolution
from potluck.models.fused.pooled_convolution import convolved_and_pooled, kernels

SHAPES = [  # samples, channels, output channels, kernel, height, width
    (4, 3, 32, 5, 32, 32),
    (50, 3, 16, 5, 32, 32),
    (7, 1, 5, 3, 13, 12),
    (2, 40, 16, 3, 9, 17),
    (50, 32, 64, 5, 14, 14),
    (3, 16, 200, 5, 15, 15),
    (1, 3, 130, 1, 2, 2),
]
EXACT = {"float32": 1e-5, "tf32": 2e-3}  # of a result's norm
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def layer_and_input(shape: Sequence[int], device: str) -> tuple[nn.Conv2d, Tensor]:
    samples, channels, out, side, height, width = shape
    with Rng(1).child(*shape).as_default():
        layer, x = nn.Conv2d(channels, out, side), torch.randn(samples, channels, height, width)
    return layer.to(device), x.to(device)


def plain(layer: nn.Conv2d, x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(layer(x)), 2)


def as_chosen(layer: nn.Conv2d, x: Tensor, choice: Tensor) -> Tensor:
    """Pooling that takes those answers of the convolution that our kernels took: rounding decides near ties."""
    answers = layer(x)[:, :, : 2 * choice.shape[2], : 2 * choice.shape[3]]
    four = answers.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).transpose(3, 4).flatten(4)
    taken = four.gather(4, choice.long().clamp(max=3).unsqueeze(4)).squeeze(4)
    return torch.where(choice < 4, taken, 0.0)


def gradients(y: Tensor, of: Sequence[Tensor], seed: int = 2) -> tuple[Tensor, ...]:
    with Rng(seed).as_default():
        direction = torch.randn(y.shape, dtype=torch.float64)
    return torch.autograd.grad(y, of, direction.to(y))


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_cpu_it_is_torch_s_own(shape: Sequence[int], layout: torch.memory_format) -> None:
    layer, x = layer_and_input(shape, "cpu")
    layer, x = layer.to(memory_format=layout), x.to(memory_format=layout).requires_grad_()
    of = [x, *layer.parameters()]
    found, expected = ([y, *gradients(y, of)] for y in (convolved_and_pooled(layer, x), plain(layer, x)))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("needs", ["weights", "everything"])
@pytest.mark.parametrize("mode", ["float32", "tf32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.cuda
@needs_gpu
def test_our_kernels_agree_with_float64(shape: Sequence[int], mode: str, needs: str) -> None:
    layer, x = layer_and_input(shape, "cuda")
    x.requires_grad_(needs == "everything")
    with precision(mode):
        assert pooled_convolution._is_ours(layer, x)
        y = convolved_and_pooled(layer, x)
        of = [*layer.parameters(), *([x] if x.requires_grad else [])]
        found = [y, *gradients(y, of)]
        ours = pooled_convolution._ours()
        _, choice = pooled_convolution.pooled_answers(
            ours, x, layer.weight, layer.bias, pooled_convolution.multiplied()
        )
        by_torch = as_chosen(layer, x, choice)
        torchs = [by_torch, *gradients(by_torch, of)]
    exact, x64 = layer.double(), x.detach().double().requires_grad_(x.requires_grad)
    y64 = as_chosen(exact, x64, choice)
    assert distance(y64, plain(exact, x64)) < EXACT[mode]
    of64 = [*exact.parameters(), *([x64] if x64.requires_grad else [])]
    for one, other, expected in zip(found, torchs, [y64, *gradients(y64, of64)], strict=True):
        assert distance(one, expected) < max(EXACT[mode], 2 * distance(other, expected))


@pytest.mark.cuda
@needs_gpu
def test_a_value_that_is_not_a_number_goes_through_as_in_torch() -> None:
    layer, x = layer_and_input(SHAPES[0], "cuda")
    x[1, 0, 7, 9] = torch.nan
    assert torch.equal(convolved_and_pooled(layer, x).isnan(), plain(layer, x).isnan())


@pytest.mark.cuda
@needs_gpu
def test_ties_go_to_the_first_and_zeros_get_no_gradient() -> None:
    layer, x = layer_and_input((2, 3, 8, 3, 8, 8), "cuda")
    for flat in (x.new_ones(x.shape), x.new_zeros(x.shape)):
        with torch.no_grad():
            assert layer.bias is not None
            layer.bias.zero_()
        flat.requires_grad_()
        with precision("float32"):
            ours, torchs = ([*gradients(f(layer, flat), [flat])] for f in (convolved_and_pooled, plain))
        torch.testing.assert_close(ours[0], torchs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("frozen", [True, False])
def test_what_needs_no_gradient_gets_none(frozen: bool) -> None:
    layer, x = layer_and_input(SHAPES[4], "cuda")
    layer.requires_grad_(not frozen)
    x.requires_grad_(frozen)
    convolved_and_pooled(layer, x).sum().backward()
    assert (x.grad is not None) == frozen
    assert all((value.grad is None) == frozen for value in layer.parameters())


@pytest.mark.cuda
@needs_gpu
def test_gradients_of_gradients_are_torch_s() -> None:
    layer, x = layer_and_input((2, 3, 8, 3, 8, 8), "cuda")
    x.requires_grad_()

    def twice(y: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [layer.weight])[0]

    with precision("float32"):
        assert distance(twice(convolved_and_pooled(layer, x)), twice(plain(layer, x)).double()) < 1e-4


@pytest.mark.cuda
@needs_gpu
def test_the_same_numbers_every_time_also_from_a_graph() -> None:
    layer, x = layer_and_input(SHAPES[0], "cuda")

    def step() -> list[Tensor]:
        y = convolved_and_pooled(layer, x)
        return [y, *torch.autograd.grad(y.sum(), [*layer.parameters()])]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        first = [value.clone() for value in step()]
        again = step()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, captured))


@pytest.mark.cuda
@needs_gpu
def test_layers_that_are_watched_padded_or_in_bfloat16_are_torch_s() -> None:
    layer, x = layer_and_input(SHAPES[0], "cuda")
    assert pooled_convolution._is_ours(layer, x)
    assert not pooled_convolution._is_ours(layer, x.bfloat16())
    assert not pooled_convolution._is_ours(layer, x.to(memory_format=torch.channels_last))
    assert not pooled_convolution._is_ours(nn.Conv2d(3, 32, 5, padding=1).cuda(), x)
    with torch.autocast("cuda", torch.bfloat16):
        assert not pooled_convolution._is_ours(layer, x)
    handle = layer.register_forward_hook(lambda *_: None)
    assert not pooled_convolution._is_ours(layer, x)
    handle.remove()


def test_without_triton_there_is_one_warning_and_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no compiler\nand more")

    kernels.cache_clear()
    monkeypatch.setattr(pooled_convolution, "_try_out", broken)
    try:
        with pytest.warns(UserWarning, match="Triton does not work"):
            assert kernels() is None
        assert kernels() is None
    finally:
        kernels.cache_clear()
