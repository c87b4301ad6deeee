"""Two small networks for windows of sensors, (channels, time): convolutions along time, and a recurrent one.

Both have the same stem, a convolution that halves the time, and the same representation width (64 unless `rep_dim`
says otherwise). After the stem a sample is (time, channels), as tokens are (tokens, width).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.models.registry import register

CHANNELS = 32
WIDTH = 64


class WindowModel(Model):
    """A convolution over five moments with stride 2, layers of the subclass, and a linear layer."""

    has_stem = True

    def __init__(self, task: Task, rep_dim: int, pooled: int) -> None:
        super().__init__()
        self.rep_dim = rep_dim
        self.conv1 = nn.Conv1d(task.input[0], CHANNELS, 5, stride=2, padding=2)
        self.fc = nn.Linear(pooled, rep_dim)
        self.head = nn.Linear(rep_dim, task.classes)

    def stem(self, x: Tensor) -> Tensor:
        """The first convolution, as (time / 2, channels)."""
        return F.relu(self.conv1(x)).transpose(1, 2)

    def pool(self, s: Tensor) -> Tensor:
        """(batch, time, channels) to (batch, width)."""
        raise NotImplementedError

    def body(self, s: Tensor) -> Tensor:
        """The further layers and the one that gives the representation."""
        return F.relu(self.fc(self.pool(s)))


class WindowConv(WindowModel):
    """Two further convolutions, then the mean and the maximum over time."""

    def __init__(self, task: Task, rep_dim: int) -> None:
        super().__init__(task, rep_dim, 4 * CHANNELS)
        self.conv2 = nn.Conv1d(CHANNELS, CHANNELS, 5, padding=2)
        self.conv3 = nn.Conv1d(CHANNELS, 2 * CHANNELS, 5, padding=2)

    def pool(self, s: Tensor) -> Tensor:
        """The mean and the maximum of each channel."""
        found = F.relu(self.conv3(F.relu(self.conv2(s.transpose(1, 2)))))
        return torch.cat([found.mean(2), found.amax(2)], dim=1)


class WindowGru(WindowModel):
    """A gated recurrent unit (Cho et al., 2014) reads the window; its state at the end is what counts."""

    def __init__(self, task: Task, rep_dim: int) -> None:
        super().__init__(task, rep_dim, WIDTH)
        self.cell = nn.GRUCell(CHANNELS, WIDTH)

    def pool(self, s: Tensor) -> Tensor:
        """The last state. A loop over cells: cuDNN's unit wants its weights in memory of its own."""
        state = s.new_zeros(s.shape[0], WIDTH)  # len(s) would fix the batch in torch.export
        for moment in s.unbind(1):
            state = self.cell(moment, state)
        return state


@register("conv1d-small", takes=("window",))
def conv1d_small(task: Task, rep_dim: int | None = None) -> WindowConv:
    """Three convolutions along time."""
    return WindowConv(task, rep_dim or WIDTH)


@register("gru-small", takes=("window",))
def gru_small(task: Task, rep_dim: int | None = None) -> WindowGru:
    """A convolution and a gated recurrent unit."""
    return WindowGru(task, rep_dim or WIDTH)
