"""The clients of a finished run: their scores, and their trained models to use elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.method import Method
from potluck.core.streams import Source
from potluck.core.task import Batch, Task
from potluck.core.trial import sample_batch
from potluck.engine.evaluation.examined import score_of
from potluck.errors import ConfigError, DataError, nearest
from potluck.federation.groups import GroupData
from potluck.federation.predictor import own_state, predictor
from potluck.files import write_anew
from potluck.front_door import front_door
from potluck.runs.kept_models.opened import OpenedModels
from potluck.runs.results.export import exported, write_onnx
from potluck.runs.results.samples import as_stored
from potluck.training.collect import collect

Line = Mapping[str, Any]  # of metrics.jsonl
Reported = tuple[str | None, str | None]  # moment and mode; None where nothing was measured


class ClientResult:
    """A client of a finished run.

    Its model and scores are those of `round`: the last one, or with `keep: best` the best one, while the main table
    is always about the last. The moment and the way to predict (the mode) are those that the run reports; `moment=`
    and `mode=` choose others: the moments that the run measured, and the method's modes.
    """

    def __init__(
        self, client: ClientId, models: OpenedModels, reported: Reported, lines: Sequence[Line] = ()
    ) -> None:
        """`reported` is the moment and mode of the main table; `lines` are the log lines of the model's round."""
        self.id, (self.moment, self.mode) = client, reported
        self._models, self._lines = models, lines
        self._live: dict[str, Client] = {}  # by moment, for `predict`

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in self.scores.items() if name != "samples")
        kept = self._models.kept_round
        when = "no model is kept" if kept is None else f"round {kept}"
        return f"<client {self.id}: {scores or 'not measured'} ({when}, {self.moment}, {self.mode})>"

    # --- what is known of it ---

    @property
    def scores(self) -> dict[str, float]:
        """Its test measures as logged in the round of its model: accuracy (or its task's own), loss, samples."""
        numbers = {name: value for name, value in self._test.items() if isinstance(value, int | float)}
        return {name: value for name, value in numbers.items() if name != "score"}

    @property
    def score(self) -> float | None:
        """What it is judged by: its accuracy, or the first measure of its task; None if it was not measured."""
        return score_of(self._test)

    @property
    def _test(self) -> Mapping[str, Any]:
        reported = (line for line in self._lines if (line["when"], line["mode"]) == (self.moment, self.mode))
        found: Mapping[str, Any] = next(reported, {}).get("test", {})
        return found

    @property
    def task(self) -> Task:
        """Its task."""
        return self._models.federation.population.task_of(self.id)

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the classes of its task are called."""
        return self._models.class_names(self.id)

    @property
    def modes(self) -> tuple[str, ...]:
        """The ways to predict that the method has, the reported one first."""
        return self._method.modes

    @property
    def round(self) -> int:
        """The round after which its model was kept."""
        return self._models.round

    # --- its model, here ---

    @front_door()
    def model(self, *, moment: str | None = None, mode: str | None = None) -> nn.Module:
        """What it predicts with: prepared samples in, scores out; a new module in evaluation mode.

        Where one model predicts alone this is the model as its author wrote it, of the author's class. Otherwise it
        is one module of all that takes part: in FedMRL both models, of their authors' classes, and the projector.
        What `save` writes, its `load_state_dict` reads.
        """
        return predictor(self._method, self._client(moment), self._mode(mode))

    def prepare(self, x: Any) -> Tensor:
        """Samples as the data set holds them (uint8 images, raw vectors, token ids) as the model takes them."""
        stored, prepare = self._seen(x), self._group.prepare
        return stored if prepare is None else prepare(stored, None)

    @front_door()
    def predict(self, x: Any, *, moment: str | None = None, mode: str | None = None) -> Tensor:
        """The scores of samples as the data set holds them, prepared and computed as for the reported test."""
        moment, mode = self._moment(moment), self._mode(mode)
        if moment not in self._live:
            self._live[moment] = self._client(moment)
        client = self._live[moment]
        samples = self._seen(x)
        source = Source(samples, torch.zeros(len(samples), dtype=torch.long), self._group.prepare)
        function = partial(_scores, self._method, client, mode)
        parts = collect(client, function, rows=np.arange(len(samples)), source=source)
        return torch.cat(parts) if parts else torch.empty(0, *self.task.scores)

    @front_door()
    def classify(self, x: Any, *, moment: str | None = None, mode: str | None = None) -> list[str]:
        """The name of the class with the highest score, for every sample."""
        if not self.task.single_label:
            raise ConfigError(
                f"client {self.id} has a task of the kind {self.task.kind}, where a sample has no single class; "
                "use predict, which gives its scores"
            )
        scores = self.predict(x, moment=moment, mode=mode)
        wrong = scores.isnan().flatten(1).any(1).nonzero().flatten().tolist()
        if wrong:
            raise DataError(
                f"client {self.id}: sample {wrong[0]} has no class, as its scores are NaN: clean x first"
            )
        chosen = scores.argmax(1)
        return [self.class_names[number] for number in chosen.tolist()]

    # --- its model, elsewhere ---

    @front_door()
    def state_dict(self, *, moment: str | None = None, mode: str | None = None) -> dict[str, Tensor]:
        """The tensors of its model by the names that its author gave them.

        Where several parts predict together, each has its name in front: `model.fc.weight`, `small.fc.weight`.
        """
        return own_state(self.model(moment=moment, mode=mode))

    @front_door()
    def save(self, path: Path | str, *, moment: str | None = None, mode: str | None = None) -> Path:
        """Write `state_dict` as a safetensors file, which says where it comes from."""
        tensors = self.state_dict(moment=moment, mode=mode)
        about = {"method": self._method.name, "client": self.id, "round": str(self.round)}
        about |= {"moment": self._moment(moment), "mode": self._mode(mode)}
        own = {
            name: value.detach().clone(memory_format=torch.contiguous_format)
            for name, value in tensors.items()
        }
        write_anew(Path(path), safetensors.torch.save(own, about))
        return Path(path)

    @front_door()
    def export(self, *, moment: str | None = None, mode: str | None = None) -> ExportedProgram:
        """Its model as a program of `torch.export`, for batches of prepared samples of any size."""
        module = self.model(moment=moment, mode=mode)
        return exported(module, sample_batch(self.task, module), f"the model of client {self.id}")

    @front_door()
    def to_onnx(self, path: Path | str, *, moment: str | None = None, mode: str | None = None) -> Path:
        """Write its model as an ONNX file: prepared samples `x` in, `scores` out, batches of any size."""
        if not Path(path).parent.is_dir():
            raise ConfigError(f"there is no folder {Path(path).parent} to write {Path(path).name} into")
        module = self.model(moment=moment, mode=mode)
        x = sample_batch(self.task, module)
        write_onnx(module, x, Path(path), f"the model of client {self.id}")
        return Path(path)

    # --- inside ---

    @property
    def _method(self) -> Method:
        return self._models.federation.method

    @property
    def _group(self) -> GroupData:
        federation = self._models.federation
        return federation.clients.groups[federation.population[self.id].group]

    def _seen(self, x: Any) -> Tensor:
        """Samples as the client sees them: standardised by its own training rows, or with its feature shift."""
        return self._models.federation.split[self.id].sees(as_stored(x, self._group.data, self.id))

    def _client(self, moment: str | None) -> Client:
        return self._models.client(self.id, self._moment(moment))

    def _moment(self, moment: str | None) -> str:
        return moment or self.moment or "after_aggregation"

    def _mode(self, mode: str | None) -> str:
        chosen = mode or self.mode or self.modes[0]
        if chosen not in self.modes:
            raise ConfigError(f"{self._method.name} has no mode {chosen!r}; {nearest(chosen, self.modes)}")
        return chosen


def _scores(method: Method, client: Client, mode: str, batch: Batch) -> Tensor:
    return method.predict(client, batch, mode).float()


class ClientResults(Mapping[ClientId, ClientResult]):
    """All clients of a finished run, by id, in client order."""

    def __init__(
        self,
        models: OpenedModels,
        ids: tuple[ClientId, ...],
        reported: Reported,
        lines: Mapping[ClientId, Sequence[Line]],
    ) -> None:
        self.models, self.ids, self._reported, self._lines = models, ids, reported, lines

    def __getitem__(self, client: ClientId | int) -> ClientResult:
        name = str(client)
        if name not in self.ids:
            hint = nearest(name, self.ids) if len(self.ids) <= 20 else f"there are {len(self.ids)}"
            raise UnknownClient(f"the run has no client {name!r}; {hint}")
        return ClientResult(name, self.models, self._reported, self._lines.get(name, ()))

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        shown = ", ".join(self.ids[:10]) + (", …" if len(self.ids) > 10 else "")
        return f"<{len(self.ids)} clients: {shown}>"


class UnknownClient(ConfigError, KeyError):
    """There is no such client; also a `KeyError`, as of any mapping."""

    def __str__(self) -> str:
        return str(self.args[0])
