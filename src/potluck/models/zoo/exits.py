"""ResNets with early exits, cut by width and depth: the four levels of ScaleFL (Ilhan et al., CVPR 2023).

`scalefl4` is a whole residual network (`depth`, default 18) with three early exits: classifiers of three 3×3
convolutions with batch norm, the mean over positions and a linear layer. `scalefl1` to `scalefl3` end at their own
exit, the first to the third, and have 0.7, 0.7 and 0.75 of the channels (`ratio` of `width`, rounded down). Tensors
have the same names at every level, and a smaller level's are the first entries of a larger one's.

Exits stand behind blocks 30, 38 and 46 of 54 in the released ResNet-110; here behind the same shares of the
blocks (of 8: 4, 6 and 7), or where `after` says. The released code divides the outputs of narrow convolutions by
the ratio; batch norm follows each of them and undoes it, so it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from potluck.core.task import Task
from potluck.errors import ModelError, nearest
from potluck.models.check import check_width
from potluck.models.parts import scale_convolutions
from potluck.models.registry import register
from potluck.models.zoo.resnet import RESNETS, ResNet

CONVOLUTIONS = 3  # of an early exit
PLACES = (30 / 54, 38 / 54, 46 / 54)  # of the early exits among the blocks
RATIOS = (0.7, 0.7, 0.75, 1.0)  # of the levels


class Exit(nn.Module):
    """A classifier: convolutions with batch norm (none at the end of the network), the mean, a linear layer."""

    def __init__(self, inputs: int, width: int, classes: int, convolutions: int) -> None:
        super().__init__()
        widths = [inputs] + [width] * convolutions
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(widths[-1], classes)

    def features(self, s: Tensor) -> Tensor:
        """What the linear layer sees."""
        features: Tensor = self.layers(s).mean((2, 3))
        return features

    def forward(self, s: Tensor) -> Tensor:
        """The scores of this exit."""
        scores: Tensor = self.head(self.features(s))
        return scores


class ExitResNet(ResNet):
    """A residual network up to one of its exits; its own head is that of its last exit."""

    def __init__(
        self, task: Task, depth: int, exits: int, after: Sequence[int], stem: str, width: int
    ) -> None:
        block, blocks = RESNETS[depth]
        super().__init__(task, block, blocks, stem=stem, width=width)
        del self.head
        self.after = (*after, sum(blocks))[:exits]
        self._end_after(self.after[-1])
        made = [self._exit(task, place, place == sum(blocks), block.expansion) for place in self.after]
        self.exits = nn.ModuleList(made)
        self.head = made[-1].head  # registered last, so that its tensors are called as in the exit
        self.rep_dim = made[-1].head.in_features
        scale_convolutions(self)

    def _exit(self, task: Task, place: int, is_end: bool, reduction: int) -> Exit:
        """The exit behind a number of blocks."""
        inputs = _outputs(self._blocks()[place - 1])
        if is_end:
            return Exit(inputs, inputs, task.classes, convolutions=0)
        return Exit(inputs, inputs // reduction, task.classes, CONVOLUTIONS)

    def _end_after(self, last: int) -> None:
        """Leave out the blocks behind the last exit."""
        for name in ("layer1", "layer2", "layer3", "layer4"):
            stage = getattr(self, name)
            setattr(self, name, stage[: max(last, 0)])
            last -= len(stage)

    def _blocks(self) -> list[nn.Module]:
        return [*self.layer1, *self.layer2, *self.layer3, *self.layer4]

    def _seen(self, s: Tensor) -> list[Tensor]:
        """What each exit sees."""
        seen = []
        for number, block in enumerate(self._blocks(), start=1):
            s = block(s)
            if number in self.after:
                seen.append(s)
        return seen

    def body(self, s: Tensor) -> Tensor:
        """All blocks, and the last exit up to its linear layer."""
        return cast(Exit, self.exits[-1]).features(self._seen(s)[-1])

    def exit_scores(self, x: Tensor) -> list[Tensor]:
        """The scores of every exit, the last one's last."""
        return [leave(s) for leave, s in zip(self.exits, self._seen(self.stem(x)), strict=True)]


def _outputs(block: nn.Module) -> int:
    """The channels that a block gives."""
    convolutions = [part for part in block.modules() if isinstance(part, nn.Conv2d)]
    return convolutions[-1].out_channels


def _places(depth: int, after: Sequence[int] | None) -> tuple[int, ...]:
    """The number of blocks before each early exit."""
    total = sum(RESNETS[depth][1])
    if after is None:
        return tuple(min(round(total * share), total - 3 + level) for level, share in enumerate(PLACES))
    places = (0, *after, total)
    if len(after) != len(PLACES) or not all(isinstance(place, int) for place in after):
        raise ModelError(f"after is {list(after)}, expected three numbers of blocks, one for each early exit")
    if any(one >= other for one, other in pairwise(places)):
        raise ModelError(f"after is {list(after)}, expected rising numbers of blocks from 1 to {total - 1}")
    return tuple(after)


def _register(level: int) -> None:
    @register(f"scalefl{level}", takes=("image",))
    def scalefl(
        task: Task,
        depth: int = 18,
        width: int = 64,
        ratio: float = RATIOS[level - 1],
        after: Sequence[int] | None = None,
        stem: str = "imagenet",
    ) -> ExitResNet:
        check_width(width, "width")
        if depth not in RESNETS:
            raise ModelError(
                f"there is no resnet of depth {depth!r}; {nearest(str(depth), map(str, RESNETS))}"
            )
        if isinstance(ratio, bool) or not 0 < ratio <= 1 or int(width * ratio) < 1:
            raise ModelError(f"ratio is {ratio!r}; give a share of the width {width} that leaves a channel")
        return ExitResNet(task, depth, level, _places(depth, after), stem, int(width * ratio))


for _level in (1, 2, 3, 4):
    _register(_level)
