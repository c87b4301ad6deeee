"""Nested slices: clients hold the first columns of a shared module, each as many as it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from potluck.core.card import ClientId
from potluck.core.contract import Shapes, shapes_of
from potluck.core.packed import State
from potluck.core.replies import Replies
from potluck.core.state import BufferPolicy, Part
from potluck.errors import ConfigError
from potluck.kit.averaging import Index, Weights, average, nested_index, take_slice


class Nested:
    """How wide a slice of a shared module each client holds; `build` gives the module in any width.

    Which entries a narrower module has follows from the shapes: the first ones along every dimension.
    """

    def __init__(
        self, widths: Mapping[ClientId, int], build: Callable[[int], nn.Module], buffers: BufferPolicy
    ) -> None:
        self.widths, self._build, self._buffers = dict(widths), build, buffers
        self._sizes = sorted(set(widths.values()), reverse=True)
        self._shapes: dict[int, Shapes] = {}
        self._index: dict[int, dict[str, Index]] = {}

    @property
    def widest(self) -> int:
        """The width of the whole module."""
        return self._sizes[0]

    def shapes(self, client: ClientId) -> Shapes:
        """The tensors of a client's slice."""
        return self._at(self.widths[client])

    def _at(self, width: int) -> Shapes:
        if width not in self._shapes:
            self._shapes[width] = shapes_of(Part(self._build(width), self._buffers).wire())
        return self._shapes[width]

    def index(self, whole: State, client: ClientId) -> dict[str, Index]:
        """Where a client's entries are in the whole; made once per width."""
        width = self.widths[client]
        if width not in self._index:
            self._index[width] = nested_index(whole, self.shapes(client))
        return self._index[width]

    def cut(self, whole: State, client: ClientId) -> dict[str, Tensor]:
        """A client's slice of the whole."""
        if self.widths[client] == self.widest:
            return dict(whole)
        index = self.index(whole, client)
        return {name: take_slice(value, index[name]) for name, value in whole.items()}

    def average(self, replies: Replies, group: str, weights: Weights, base: State) -> dict[str, Tensor]:
        """Average each entry over the clients that hold it; an entry nobody holds keeps its value in `base`."""
        if len(self._sizes) == 1:
            return average(replies, group, weights)
        index = {client: self.index(base, client) for client in replies}
        return average(replies, group, weights, base=base, index=index)

    def check(self, key: str) -> None:
        """Refuse a module that gains or loses tensors with its width: it has no nested slices."""
        whole = self._at(self.widest)
        for width in self._sizes:
            for name in sorted(whole.keys() ^ self._at(width).keys()):
                raise ConfigError(
                    f"{key}: the tensor {name!r} is there at only one of the widths {width} and {self.widest}, so "
                    "neither is a slice of the other; choose another model, or one width for all clients"
                )
