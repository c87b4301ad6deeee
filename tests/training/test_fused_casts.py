"""Operations done together give what they give one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from potluck.training.fused_casts import gathered


class Net(nn.Module):
    """Convolutions, batch norm and linear layers, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.plain = nn.Conv2d(4, 4, 1, bias=False)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        made: Tensor = self.head(self.plain(self.norm(self.stem(x)).relu()).mean((2, 3)))
        return made


def images() -> Tensor:
    return torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def gradients(
    net: Net, together: bool, loss: Callable[[Net], Tensor], train: tuple[str, ...] = ("",)
) -> dict[str, Tensor | None]:
    trained = {name: value for name, value in net.named_parameters() if name.startswith(train)}
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        gathered([net], trained.values(), lower=True) if together else contextlib.nullcontext(),
    ):
        value = loss(net)
    found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    return dict(zip(trained, found, strict=True))


def same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0, msg=name)
    return True


@pytest.mark.parametrize("train", [("",), ("head",), ("stem", "norm")])
def test_gradients_and_statistics_are_those_of_layer_by_layer(train: tuple[str, ...]) -> None:
    apart, together = Net(), Net()

    def loss(net: Net) -> Tensor:
        return net(images()).float().square().sum()

    assert same(gradients(together, True, loss, train), gradients(apart, False, loss, train))
    for name, value in apart.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], value, rtol=0, atol=0)
    assert together.norm.num_batches_tracked == 1


def test_a_weight_is_itself_to_everybody_but_its_layer() -> None:
    apart, together = Net(), Net()

    def loss(net: Net) -> Tensor:
        assert net.head.weight.dtype == torch.float32
        assert dict(net.named_parameters())["head.weight"] is net.head.weight
        return net(images()).float().sum() + net.head.weight.square().sum()

    assert same(gradients(together, True, loss), gradients(apart, False, loss))


def test_what_is_not_trained_takes_no_part() -> None:
    net = Net()
    with torch.autocast("cpu", torch.bfloat16), gathered([net], [net.head.weight], lower=True):
        assert "forward" not in vars(net.stem)
        assert "forward" not in vars(
            net.head
        )  # its bias stays as it is, and the two are cast together or not
    with torch.autocast("cpu", torch.bfloat16), gathered([net], net.head.parameters(), lower=True):
        assert "forward" in vars(net.head)
        assert net.head(torch.ones(1, 4)).dtype == torch.bfloat16


def test_batches_are_counted_as_often_as_they_come() -> None:
    net = Net()
    counter = net.norm.num_batches_tracked
    with gathered([net], [], lower=False):
        for _ in range(3):
            net(images())
        assert counter == 0
    assert net.norm.num_batches_tracked is counter
    assert counter == 3
    net.eval()
    with gathered([net], [], lower=False):
        net(images())
    assert counter == 3


def test_a_mean_over_all_batches_needs_its_counter_at_once() -> None:
    apart, together = Net(), Net()
    apart.norm.momentum = together.norm.momentum = None
    for _ in range(2):
        apart(images())
        with gathered([together], [], lower=False):
            together(images())
    torch.testing.assert_close(apart.norm.running_var, together.norm.running_var, rtol=0, atol=0)
    assert together.norm.num_batches_tracked == 2


def test_an_error_leaves_the_layers_as_they_were() -> None:
    net = Net()
    counter = net.norm.num_batches_tracked
    with pytest.raises(ZeroDivisionError), gathered([net], net.parameters(), lower=True):
        raise ZeroDivisionError
    assert net.norm.num_batches_tracked is counter
    assert all("forward" not in vars(layer) for layer in net.modules())


def test_a_layer_with_a_forward_pass_of_its_own_keeps_it() -> None:
    net = Net()
    net.head.forward = lambda x: x.sum(1)  # type: ignore[method-assign]
    with gathered([net], net.parameters(), lower=True):
        assert net.head(torch.ones(2, 4)).tolist() == [4, 4]
    assert net.head(torch.ones(2, 4)).tolist() == [4, 4]
