"""What a client predicts with, as one module: `Method.predict` on the client's state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.method import Method
from potluck.core.state import Part
from potluck.core.task import Batch
from potluck.core.trial import sample_batch
from potluck.models.outputs import giving_scores
from potluck.models.unwrap import own_module, own_view


class Predictor(nn.Module):
    """A method's way to predict: prepared samples in, scores out.

    Its submodules are the parts of the client's state that the method predicts with, under their own names, and
    models are of their authors' classes. They share layers and tensors with the models that the method works with.
    Parts that are plain tensors, such as prototypes, are buffers: the module moves, saves and exports as a whole.
    """

    def __init__(self, method: Method, client: Client, mode: str, parts: Iterable[str]) -> None:
        super().__init__()
        self.mode = mode
        self._method, self._client = method, client
        self._tensors: list[tuple[str, str, str]] = []  # buffer, part, name inside the part
        for name in parts:
            self._take(name, client.parts[name])

    def _take(self, name: str, part: Part) -> None:
        if part.module is not None:
            self.add_module(name, own_view(part.module))
            return
        for key, value in part.tensors().items():
            buffer = f"{name}_{key}".replace(".", "_") if key else name
            self.register_buffer(buffer, value)
            self._tensors.append((buffer, name, key))

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, also of the models that the method works with."""
        for module in self._client.modules().values():
            module.train(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of a batch of prepared samples."""
        for buffer, name, key in self._tensors:  # they may have moved to another device
            part, value = self._client.parts[name], getattr(self, buffer)
            if key:
                part.content[key] = value
            else:
                part.content = value
        nobody = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        return self._method.predict(self._client, Batch(x, nobody), self.mode).float()


def predictor(method: Method, client: Client, mode: str) -> nn.Module:
    """What predicts in a mode, in evaluation mode.

    That is a model as its author wrote it, where this one alone gives the same scores; else a `Predictor` of every
    part that the method uses. The client must be used for nothing else afterwards.
    """
    for module in client.modules().values():
        module.eval()
    x = sample_batch(client.task, next(iter(client.modules().values()), nn.Identity()))
    parts, scores = _watched(method, client, mode, x)
    only = client.parts[parts[0]].module if len(parts) == 1 else None
    if only is not None:
        for alone in (giving_scores(own_module(only), x), only):  # the first may want to be told of padding
            if _gives(alone, x, scores):
                return alone
    return Predictor(method, client, mode, parts).eval()


def own_state(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of what `predictor` gave, by the names that the authors of the models gave them."""
    return dict(own_view(module).state_dict())


class _Noting(dict[str, Part]):
    """Parts that remember which of them were asked for."""

    def __init__(self, parts: dict[str, Part]) -> None:
        super().__init__(parts)
        self.used: dict[str, None] = {}

    def __getitem__(self, name: str) -> Part:
        self.used[name] = None
        return super().__getitem__(name)


@torch.no_grad()
def _watched(method: Method, client: Client, mode: str, x: Tensor) -> tuple[list[str], Tensor]:
    """Which parts of its state a client uses to predict, found on a made-up batch, and the scores."""
    parts, noting = client.parts, _Noting(client.parts)
    client.parts = noting
    try:
        scores = method.predict(client, Batch(x, torch.zeros(len(x), dtype=torch.long)), mode)
    finally:
        client.parts = parts
    return [name for name in parts if name in noting.used] or list(client.modules()), scores.float()


@torch.no_grad()
def _gives(module: nn.Module, x: Tensor, scores: Tensor) -> bool:
    """Whether a module by itself gives these scores."""
    found = module.eval()(x)
    return isinstance(found, Tensor) and torch.equal(found.float(), scores)
