"""Reading what a run folder says of itself: a folder may come from anywhere, so its files are checked first.

The forms have what is read here and nothing more; further keys are left alone.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from potluck.core.state import Precision
from potluck.core.task import KindName, Task, sample_shape
from potluck.core.validation import checked
from potluck.data.split import view_of
from potluck.errors import RunError
from potluck.files import read_json
from potluck.report.split_file import read_ids
from potluck.runs.folder import FORMAT, RunFolder

LARGEST = 100_000_000  # of any size: what is larger takes memory for nothing
MOST_PUBLIC = 10_000_000  # public samples, of which each group has a list
Size = Annotated[int, Field(ge=0, le=LARGEST)]


def read_summary(home: Path, onward: str) -> dict[str, Any]:
    """The summary of a finished run; `onward` is how to go on with the run, which writes it anew."""
    path, remedy = home / "summary.json", f"{onward} writes it anew"
    return checked(_Summary, read_json(path, remedy), path, "the summary of a run", remedy)


def read_client_ids(home: Path) -> tuple[str, ...]:
    """The ids of all clients, in client order."""
    path = home / "split.json"
    remedy = RunFolder(home).remedy
    ids = read_ids(path) if path.is_file() else None
    if ids is not None:
        return ids
    found = checked(_Clients, read_json(path, remedy), path, "the split of a run", remedy)
    return tuple(str(client["id"]) for client in found["clients"])


def read_about(path: Path, remedy: str) -> dict[str, Any]:
    """What `about.json` says of the kept models of a round; `remedy` is what to do if it is damaged."""
    found = read_json(path, remedy)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RunError(
            f"{path} was not written by this version of potluck, so its models cannot be opened; {remedy}"
        )
    return checked(_About, found, path, "the outline of a run", remedy)


# --- summary.json and split.json ------------------------------------------------------------------------


class _Accuracy(BaseModel):
    when: str | None
    mode: str | None
    last: float | None
    rounds: dict[str, int | None] = {}
    per_client: dict[str, float | None] = {}
    metrics: dict[str, str] | None = None
    metric_facts: dict[str, dict[str, Any]] | None = None
    further: dict[str, dict[str, float | None]] | None = None
    measured: list[_Measured] | None = None


class _Measured(BaseModel):
    when: str
    mode: str
    worst_tenth: float | None


class _Summary(BaseModel):
    method: str
    rounds: int
    accuracy: _Accuracy
    messages: dict[str, dict[str, Any] | None] | None = None
    seconds_per_round: float | None = None
    advice: list[str] = []
    stopped: str | None = None


class _Id(BaseModel):
    id: str | int


class _Clients(BaseModel):
    clients: list[_Id]


# --- about.json -----------------------------------------------------------------------------------------


class _Architecture(BaseModel):
    source: str
    options: dict[str, Any]


class _Pool(BaseModel):
    rep_dim: Size | None
    adapter: str | None
    architectures: dict[str, _Architecture]


class _Task(BaseModel):
    kind: KindName
    classes: Size
    input: list[Size]
    vocabulary: Size | None = None
    image: list[Size] = []

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        Task.from_json(self.model_dump(exclude_defaults=True))
        return self


class _Stored(BaseModel):
    type: Literal["bool", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    shape: list[Size]

    @model_validator(mode="after")
    def _fits_in_memory(self) -> Self:
        sample_shape(self.shape, "the shape of a stored sample")
        return self


class _Group(BaseModel):
    name: str
    clients: Size
    task: _Task
    class_names: list[str]
    stored: _Stored
    mean: list[float]
    std: list[float]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, 1, self.stored.shape[0]):
            raise ValueError("mean and std do not fit the samples")
        if 0 < len(self.class_names) < self.task.classes:
            raise ValueError("there are fewer class names than classes")
        return self


class _Public(BaseModel):
    name: str
    samples: Annotated[int, Field(ge=0, le=MOST_PUBLIC)]
    lacking: list[list[Size]]


class _Client(BaseModel):
    architecture: str
    model: str
    group: Size
    samples: dict[str, Size]
    classes_held: list[Size]
    view: dict[str, Any]

    @model_validator(mode="after")
    def _has_a_view(self) -> Self:
        view_of(self.view)
        return self


class _Method(BaseModel):
    name: str


class _Seeds(BaseModel, extra="forbid"):
    split: int
    init: int
    cohort: int
    training: int


class _Outline(BaseModel):
    method: _Method
    precision: Precision
    seeds: _Seeds
    independent_init: bool
    pool: _Pool
    groups: list[_Group]
    public: _Public | None
    held_out: list[str]
    clients: dict[str, _Client]
    places: list[Size] | None = None  # of the clients among all, where not all are listed
    total: Size = 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for client, one in self.clients.items():
            if one.group >= len(self.groups) or one.architecture not in self.pool.architectures:
                raise ValueError(f"client {client} has a group or an architecture that is not there")
        if self.places is not None:
            _check_places(self.places, len(self.clients), self.total, sum(one.clients for one in self.groups))
        if not set(self.held_out) <= self.clients.keys():
            raise ValueError("held_out names somebody who is not a client")
        if self.public is not None:
            rows = [row for lacking in self.public.lacking for row in lacking]
            if len(self.public.lacking) != len(self.groups) or max(rows, default=-1) >= self.public.samples:
                raise ValueError("the public samples do not fit the groups")
        return self


def _check_places(places: list[int], listed: int, total: int, grouped: int) -> None:
    ascending = all(one < other for one, other in pairwise([*places, total]))
    if len(places) != listed or not places or not ascending or total != grouped:
        raise ValueError("the places of the clients do not fit their number")


class _About(BaseModel):
    round: Size
    moments: list[str]
    files: dict[str, str]
    outline: _Outline
