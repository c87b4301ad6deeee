"""A perceptron in several widths, for methods that cut one network by width."""

import functools

import torch.nn.functional as F
from torch import nn

from potluck.core.model import Model


class WidthNet(Model):
    """Two hidden layers, the second `growth` times as wide, with or without batch norm between them."""

    def __init__(self, task, width, norm=False, growth=1):
        super().__init__()
        self.rep_dim = growth * width
        self.fc1 = nn.Linear(task.input[0], width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.fc2 = nn.Linear(width, growth * width)
        self.head = nn.Linear(growth * width, task.classes)

    def features(self, x):
        return F.relu(self.fc2(F.relu(self.norm(self.fc1(x)))))


def net(width, norm=False, growth=1):
    """An entry for a pool of models."""
    return functools.partial(WidthNet, width=width, norm=norm, growth=growth)
