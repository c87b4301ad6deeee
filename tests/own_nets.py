"""Models as a user writes them: plain modules with names of their own. Other processes can import them too."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    """A convolution with batch norm; `fc` is the last layer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(256, width)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.hidden(self.norm(self.conv(x)).relu().flatten(1)).relu())


class Other(nn.Module):
    """Two dense layers; `out` is the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh())
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))
