"""What the stages of kept models give for the same samples, and how alike that is among clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.model import Model
from potluck.errors import ConfigError, RunError, nearest
from potluck.kit.kernels import TINY, centred
from potluck.models.adapted import Adapted
from potluck.runs.pictures.asked import Asked
from potluck.runs.pictures.samples import Samples
from potluck.runs.results.run_result import RunResult

BATCH = 256
MOST_FEATURES = 1 << 27  # numbers of one stage: 512 MiB
STEM, FEATURES = "stem", "features"
Floats = npt.NDArray[np.float64]


class Staged:
    """The private model of a client, and what its stages give for samples.

    The stages are `stem` where the model has one, the blocks of layers after it by name (those of a residual
    network are `layer1` to `layer4`), and `features`, what the head gets.
    """

    def __init__(self, client: Client) -> None:
        part = client.parts.get("model")
        if part is None or not isinstance(part.module, Model):
            raise RunError(
                f"client {client.id} has no private model of its own to look into; choose others with clients"
            )
        self.model = part.module.eval()

    @cached_property
    def network(self) -> nn.Module:
        """The network whose layers have the names of their author."""
        return self.model.trunk if isinstance(self.model, Adapted) else self.model

    def stages(self, x: Tensor) -> list[str]:
        """The names of the stages, in the order in which they are reached."""
        blocks = [
            name
            for name, layer in self.network.named_children()
            if isinstance(layer, nn.Sequential) and any(True for _ in layer.parameters())
        ]
        with self._watching(blocks) as seen:
            self._features(x[:2], seen)
        names = list(seen)
        return [STEM, *names[names.index(STEM) + 1 :]] if STEM in names else names

    @torch.no_grad()
    def outputs(self, x: Tensor, stages: Sequence[str]) -> dict[str, Tensor]:
        """What the stages give for all samples, flattened: (samples, any width)."""
        layers = [name for name in stages if name not in (STEM, FEATURES)]
        known = dict(self.network.named_modules())
        for name in layers:
            if name not in known:
                hint = nearest(name, [STEM, FEATURES, *filter(None, known)])
                raise ConfigError(f"{type(self.network).__name__} has no stage {name!r}; {hint}")
        parts: dict[str, list[Tensor]] = {name: [] for name in stages}
        for start in range(0, len(x), BATCH):
            with self._watching(layers) as seen:
                self._features(x[start : start + BATCH], seen)
            for name in stages:
                if name not in seen:
                    raise ConfigError(f"the stage {name!r} gives nothing; {nearest(name, seen)}")
                parts[name].append(seen[name].flatten(1).float())
                _refuse_wide(name, parts[name][0].shape[1], len(x))
        return {name: torch.cat(own) for name, own in parts.items()}

    def _features(self, x: Tensor, seen: dict[str, Tensor]) -> None:
        with torch.no_grad():
            if self.model.has_stem:
                stem = self.model.stem(x)
                seen[STEM] = stem
                seen[FEATURES] = self.model.body(stem)
            else:
                seen[FEATURES] = self.model.features(x)

    @contextmanager
    def _watching(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Note what layers give while models are called inside."""
        seen: dict[str, Tensor] = {}
        layers = dict(self.network.named_modules())
        hooks = [layers[name].register_forward_hook(_noting(name, seen)) for name in names]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()


def _noting(name: str, seen: dict[str, Tensor]) -> Callable[[nn.Module, object, object], None]:
    def note(module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor):
            seen[name] = output

    return note


def _refuse_wide(stage: str, width: int, samples: int) -> None:
    if width * samples > MOST_FEATURES:
        fewer = max(2, MOST_FEATURES // width)
        raise ConfigError(
            f"the stage {stage!r} has {width:,} numbers a sample; ask for fewer samples: samples={fewer}"
        )


# --- over clients ---------------------------------------------------------------------------------------


def stage_similarity(
    result: RunResult, clients: Sequence[ClientId], samples: Samples, asked: Asked
) -> dict[str, Floats]:
    """The linear CKA of every two clients on the same samples, by stage."""
    staged = {client: Staged(_live(result, client, asked)) for client in clients}
    seen = {client: _prepared(result, client, samples) for client in clients}
    stages = list(asked.options.stages or ())
    if not stages:
        each = [staged[client].stages(seen[client]) for client in clients]
        stages = [name for name in each[0] if all(name in other for other in each)]
    kernels: dict[str, list[Tensor]] = {}
    for client in clients:
        for name, output in staged[client].outputs(seen[client], stages).items():
            kernels.setdefault(name, []).append(_kernel(output.double()))
    return {name: _alignment(own) for name, own in kernels.items()}


def _kernel(output: Tensor) -> Tensor:
    """The centred kernel of some samples, flat and of length 1: the product of two of them is their CKA."""
    kernel = output @ output.T
    flat = centred(kernel, kernel.new_ones(len(kernel))).flatten()
    length: Tensor = flat.square().sum().sqrt()
    return flat / length.clamp_min(TINY)


def _alignment(kernels: Sequence[Tensor]) -> Floats:
    every = torch.stack(list(kernels))
    return (every @ every.T).clamp(0, 1).numpy()


def features_of(
    result: RunResult, clients: Sequence[ClientId], samples: Samples, asked: Asked
) -> list[Floats]:
    """The features of the same samples, or what another stage gives, for each client."""
    stages = asked.options.stages or (FEATURES,)
    if len(stages) != 1:
        raise ConfigError(f"{asked.kind} shows one stage; give one, not {len(stages)}")
    found = []
    for client in clients:
        outputs = Staged(_live(result, client, asked)).outputs(_prepared(result, client, samples), stages)
        found.append(outputs[stages[0]].double().numpy())
    return found


def _prepared(result: RunResult, client: ClientId, samples: Samples) -> Tensor:
    """Samples as the model of a client takes them."""
    return result.clients[client].prepare(samples.data.x[samples.rows])


def _live(result: RunResult, client: ClientId, asked: Asked) -> Client:
    """A client in the state that it was measured in."""
    moment = asked.options.moment or result.clients[client].moment or "after_aggregation"
    return result.clients.models.client(client, moment)
