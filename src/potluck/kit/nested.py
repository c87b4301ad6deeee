"""Nested slices: clients hold the first columns of a shared module, each as many as it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from potluck.core.card import ClientId
from potluck.core.contract import Shapes
from potluck.core.packed import State
from potluck.core.replies import Replies
from potluck.core.state import BufferPolicy, Part
from potluck.errors import ConfigError
from potluck.kit.averaging import Index, Weights, average, nested_index, take_slice


class Nested:
    """Who holds how wide a slice of a shared module; `build` gives the module in any of the widths.

    Which entries a narrower module has follows from the shapes: the first ones along every dimension.
    """

    def __init__(
        self,
        widths: Mapping[ClientId, int],
        build: Callable[[int], nn.Module],
        buffers: BufferPolicy,
        key: str,
    ) -> None:
        self.widths = dict(widths)
        self._shapes: dict[int, Shapes] = {}
        self._index: dict[int, dict[str, Index]] = {}
        for width in sorted(set(widths.values()), reverse=True):
            wire = Part(build(width), buffers).wire()
            self._shapes[width] = {name: tuple(value.shape) for name, value in wire.items()}
            self._check(width, key)

    @property
    def widest(self) -> int:
        """The width of the whole."""
        return next(iter(self._shapes))

    def shapes(self, client: ClientId) -> Shapes:
        """The tensors of a client's slice."""
        return self._shapes[self.widths[client]]

    def index(self, whole: State, client: ClientId) -> dict[str, Index]:
        """Where a client's entries stand in the whole; made once per width."""
        width = self.widths[client]
        if width not in self._index:
            self._index[width] = nested_index(whole, self.shapes(client))
        return self._index[width]

    def cut(self, whole: State, client: ClientId) -> dict[str, Tensor]:
        """What a client receives of the whole."""
        if self.widths[client] == self.widest:
            return dict(whole)
        index = self.index(whole, client)
        return {name: take_slice(value, index[name]) for name, value in whole.items()}

    def average(self, replies: Replies, group: str, weights: Weights, base: State) -> dict[str, Tensor]:
        """Each entry averaged over those who hold it; where nobody does it stays as it is in `base`."""
        if len(self._shapes) == 1:
            return average(replies, group, weights)
        index = {client: self.index(base, client) for client in replies}
        return average(replies, group, weights, base=base, index=index)

    def _check(self, width: int, key: str) -> None:
        """A module that gains or loses tensors with its width has no nested slices."""
        whole, own = self._shapes[self.widest], self._shapes[width]
        for name in sorted(whole.keys() ^ own.keys()):
            raise ConfigError(
                f"{key}: the tensor {name!r} is there at only one of the widths {width} and {self.widest}, so "
                "neither is a slice of the other; choose another model, or one width for all clients"
            )
