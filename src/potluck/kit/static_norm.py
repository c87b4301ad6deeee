"""Static batch norm for sub-networks: batches normalise themselves in training, one pass measures the rest.

The statistics used in evaluation are the mean and variance of all samples. Every client measures its own; those of
several clients of one width give those of all their samples together, exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Shapes, state_of
from potluck.core.message import Content
from potluck.core.method import Clients, client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.task import Batch, Task
from potluck.kit.averaging import Index, put_slice
from potluck.kit.subnetworks import SubNetworks
from potluck.training.collect import collect

BATCH = 512  # samples that are normalised together in the pass
MEAN, VARIANCE = "running_mean", "running_var"
Moments = dict[str, Tensor]  # names of buffers with means and variances → values


def norms_in(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of a model that have statistics, by name."""
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, _BatchNorm) and part.running_mean is not None
    }


def statistics_among(names: Sequence[str]) -> list[str]:
    """Those of a model's tensors that are statistics of batch norm."""
    return [name for name in names if name.rpartition(".")[2] in (MEAN, VARIANCE)]


def stop_tracking(model: nn.Module) -> None:
    """Let batch norm use the batch's statistics in training, and leave those for evaluation alone."""
    for norm in norms_in(model).values():
        norm.track_running_stats = False


def measure_statistics(client: Client, part: str = "model") -> Moments:
    """The mean and variance of what comes to each batch norm, over the client's training samples.

    As in training, every batch of the pass is normalised by itself. The variance is that of all samples, divided by
    their number, so one sample has one too.
    """
    model = client[part].module
    assert model is not None
    sizes = [min(BATCH, client.samples - start) for start in range(0, client.samples, BATCH)]

    def measured(batch: Batch) -> Moments:
        with _measuring(model) as found:
            model(batch.x)
        return found

    return pooled(collect(client, measured, batch_size=BATCH), sizes)


@contextmanager
def _measuring(model: nn.Module) -> Iterator[Moments]:
    """Every batch norm normalises by the batch itself, and notes its mean and variance."""
    found: Moments = {}
    hooks = [norm.register_forward_hook(_Measured(name, found)) for name, norm in norms_in(model).items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class _Measured:
    def __init__(self, name: str, found: Moments) -> None:
        self.name, self.found = name, found

    def __call__(self, norm: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        variance, mean = batch_moments(inputs[0], 0)
        start = f"{self.name}." if self.name else ""
        self.found[f"{start}{MEAN}"], self.found[f"{start}{VARIANCE}"] = mean, variance
        return F.batch_norm(inputs[0], mean, variance, norm.weight, norm.bias, eps=norm.eps)


def batch_moments(x: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    """The variance and the mean of each channel; the variance divides by one less if `correction` is 1."""
    return torch.var_mean(x.float(), [0, *range(2, x.dim())], correction=correction)


def pooled(parts: Sequence[Mapping[str, Tensor]], samples: Sequence[int]) -> Moments:
    """The means and variances of all samples, from those of its parts.

    >>> one, two = ({"running_mean": torch.tensor(m), "running_var": torch.tensor(0.0)} for m in (1.0, 4.0))
    >>> {name: value.item() for name, value in pooled([one, two], [2, 1]).items()}
    {'running_mean': 2.0, 'running_var': 2.0}
    """
    total = max(sum(samples), 1)
    shares = [count / total for count in samples]
    found: Moments = {}
    for name in parts[0] if parts else ():
        if not name.endswith(MEAN):
            continue
        start = name.removesuffix(MEAN)
        means, variances = ([part[f"{start}{what}"] for part in parts] for what in (MEAN, VARIANCE))
        mean = sum_of(means, shares)
        spread = [value + (own - mean).square() for value, own in zip(variances, means, strict=True)]
        most = torch.finfo(mean.dtype).max
        found[f"{start}{MEAN}"] = mean
        found[f"{start}{VARIANCE}"] = sum_of(spread, shares).clamp_max(most)
    return found


def sum_of(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted sum, in order."""
    total = torch.zeros_like(values[0])
    for value, share in zip(values, shares, strict=True):
        total = total + share * value
    return total


class StaticNorm(SubNetworks):
    """Sub-networks with static batch norm as an option: measured at the end of a round, by those of each width.

    The part `statistics` of the server's state has what the clients of each width measured, where those channels
    are in the parent. A width without a client in the round keeps what it has; one that was never measured has what
    others measured last.
    """

    class Config(SubNetworks.Config):
        """Whether batch norm is static."""

        sbn: bool = option(
            default=True,
            description="static batch norm: no running statistics in training, measured at the end of a round; "
            "false: running statistics are averaged like weights",
            source="HeteroFL, paper; merged by width: ours",
        )
        buffers: Literal["average", "local"] = option(
            default="average",
            description="without sbn: batch-norm statistics are averaged, or kept at home (local)",
            source="ours",
        )

        @model_validator(mode="after")
        def _has_statistics(self) -> Self:
            if self.sbn:
                self.refuse_set("buffers", reason="with sbn: true, which keeps no running statistics")
            return self

    @property
    def statistics(self) -> list[str]:
        """The parent's tensors that are measured."""
        return statistics_among([*self.slices.shapes]) if self.config.sbn else []

    def setup(self, population: Population) -> None:
        """As for all sub-networks."""
        super().setup(population)
        self._width_keys: dict[ClientId, str] = {}

    def width_key(self, card: Card) -> str:
        """The key of clients whose slices have one shape; made once, as cards do not change."""
        if card.client not in self._width_keys:
            text = repr(sorted(card.names.items()))
            self._width_keys[card.client] = hashlib.sha256(text.encode()).hexdigest()[:12]
        return self._width_keys[card.client]

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The slice, whose batch norm keeps no running statistics, and those that were measured."""
        if not self.statistics:
            return {"model": model}
        stop_tracking(model)
        return {
            "model": model,
            "statistics": {name: model.get_buffer(name).clone() for name in self.statistics},
        }

    def expected(self, card: Card, part: str) -> Shapes | None:
        """Statistics have the shapes of the model's own."""
        if part != "statistics":
            return super().expected(card, part)
        return {name: card.names[name] for name in self.statistics}

    def repeats(self, population: Population) -> Mapping[str, tuple[int, int]]:
        """Without batch norm nothing is measured."""
        return {} if self.statistics else {"measure": (0, 0)}

    def server_state(self, task: Task) -> dict[str, Any]:
        """The whole network, and the statistics of each width."""
        return super().server_state(task) | ({"statistics": {}} if self.config.sbn else {})

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The client's slice, with the statistics of its width."""
        whole = server["parent"].state()
        if self.statistics:
            held, key = server["statistics"].tensors(), self.width_key(server.cards[client])
            whole |= {name: held[own] for name in self.statistics if (own := f"{key}:{name}") in held}
        return {"model": self.slices.cut(whole, self.index(server, client))}

    def round(self, server: Server, clients: Clients) -> None:
        """Train and average, then measure on the newest slices."""
        super().round(server, clients)
        if self.statistics:
            self.keep(server, clients.ask(self.measure))

    @client_step(
        up={
            "statistics": state_of(
                "statistics", "mean and variance of what comes to each batch norm", optional=True
            )
        }
    )
    def measure(self, client: Client) -> Content:
        """One pass over the training samples with the newest slice."""
        found = measure_statistics(client)
        for part in ("model", "statistics"):
            client[part].load(found)
        return {"statistics": found}

    def keep(self, server: Server, replies: Replies) -> None:
        """Merge what clients of one width measured."""
        groups: dict[str, list[ClientId]] = {}
        for client in (one for one in replies if replies[one].group("statistics")):
            groups.setdefault(self.width_key(server.cards[client]), []).append(client)
        for key, clients in groups.items():
            index, samples = self.index(server, clients[0]), [server.cards[one].samples for one in clients]
            found = pooled([replies[one].group("statistics") for one in clients], samples)
            held, whole = server["statistics"].tensors(), server["parent"].tensors()
            server["parent"].load(_placed(found, index, whole))
            before = {name: held.get(f"{key}:{name}", whole[name]) for name in found}
            placed = _placed(found, index, before)
            server["statistics"].load({f"{key}:{name}": value for name, value in placed.items()})


def _placed(found: Moments, index: Mapping[str, Index], whole: Mapping[str, Tensor]) -> Moments:
    """The whole tensors with what was found where an index says."""
    return {
        name: put_slice(whole[name].detach().clone(), index[name], value) for name, value in found.items()
    }
