"""Partitioners: which client gets which rows, by common schemes and by the exact ones of papers.

Every partitioner draws a table of counts, clients by classes (one column if labels do not matter): how many rows of
each class a client gets. Which rows those are is drawn at random within the class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, field_validator, model_validator

from potluck.core.settings import Strict
from potluck.errors import DataError

Kind = Literal["iid", "dirichlet", "pathological", "shards", "quantity"]
Variant = Literal["plain", "fedin", "fedre", "fedmrl"]
Source = Literal["auto", "merged", "separate"]

_VARIANTS: dict[str, tuple[str, ...]] = {
    "dirichlet": ("plain", "fedin", "fedre"),
    "pathological": ("plain", "fedmrl", "fedre"),
}
_NEEDS = {
    "dirichlet": "alpha",
    "quantity": "alpha",
    "pathological": "classes_per_client",
    "shards": "shards_per_client",
}
# FedRE demands ten rows in a client's test part; flwr-datasets and FedIN ten rows in total.
_FEW = 10

Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # of one client: for training, validation and test


def check_shares(validation: float, test: float) -> None:
    """Refuse shares of a client's rows that leave none for training."""
    if validation + test >= 1:
        raise ValueError(
            f"validation {validation} and test {test} leave nothing to train on; lower one of them"
        )


class PartitionConfig(Strict):
    """How the rows are divided among clients.

    `iid`: equal parts at random. `dirichlet`: per class, shares drawn from Dirichlet(alpha) over the clients.
    `pathological`: each client holds `classes_per_client` classes. `shards`: rows sorted by class, cut into
    shards, `shards_per_client` dealt to each. `quantity`: sizes from Dirichlet(alpha), labels at random.

    Variants. `dirichlet/fedin` and `dirichlet/fedre` go through the classes and skip clients that already
    hold a fair share of the rows; they differ in `min_size` and `source`. `pathological/plain` uses all
    classes equally often. `pathological/fedre` fills the clients in order with parts of random size and stops
    when they are full. `pathological/fedmrl` draws a table of shares and applies it to training, validation
    and test rows alike, rounding down, so a few rows stay unused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    clients: int = Field(ge=1, le=10**9)  # including held-out clients; a share of them is a float
    variant: Variant = "plain"
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # dirichlet, quantity
    classes_per_client: int | None = Field(default=None, ge=1)  # pathological
    shards_per_client: int | None = Field(default=None, ge=1)  # shards
    min_size: int | None = Field(default=None, ge=0)  # rows per client; none: 10 for kinds with alpha, else 1
    validation: Fraction = 0.0  # fraction of a client's rows (merged) or of its training rows (separate)
    test: Fraction = 0.25  # fraction of a client's rows; not used with official test rows
    source: Source = "auto"  # auto: separate where there is an official test part, merged for fedre
    held_out: int | float = 0  # clients that never train: a number or a fraction
    redraws: int = Field(default=1000, ge=1)  # draws before giving up on min_size

    @field_validator("held_out", mode="before")
    @classmethod
    def _no_names(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise ValueError("give a number or a share of the clients; names are for kind natural")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_variant()
        self._check_needs()
        check_shares(self.validation, self.test)
        if not 0 <= self.held_out < self.clients or self.held_out_count >= self.clients:
            raise ValueError(
                f"held_out {self.held_out} of {self.clients} clients leaves none to train: "
                f"give a smaller number, or a fraction below 1"
            )
        return self

    def _check_variant(self) -> None:
        known = _VARIANTS.get(self.kind, ("plain",))
        if self.variant not in known:
            raise ValueError(f"kind {self.kind} has no variant {self.variant!r}: it has {', '.join(known)}")

    def _check_needs(self) -> None:
        needed = _NEEDS.get(self.kind)
        for field in sorted(set(_NEEDS.values())):
            if field == needed and getattr(self, field) is None:
                raise ValueError(f"kind {self.kind} needs {field}")
            if field != needed and getattr(self, field) is not None:
                kinds = [kind for kind, wanted in _NEEDS.items() if wanted == field]
                raise ValueError(
                    f"{field} has no meaning for kind {self.kind}: choose kind {' or '.join(kinds)}, or leave "
                    f"{field} out (on the command line, 'partition={{kind: {self.kind}, clients: {self.clients}}}' "
                    "replaces the whole block)"
                )

    @property
    def held_out_count(self) -> int:
        """The number of held-out clients."""
        fraction = isinstance(self.held_out, float)
        return round(self.held_out * self.clients) if fraction else int(self.held_out)

    def smallest(self, rows: int) -> int:
        """The least number of rows per client, out of `rows`."""
        if self.min_size is not None:
            return self.min_size
        if self.kind not in ("dirichlet", "quantity"):
            return 1
        return _fedre_smallest(self, rows) if self.variant == "fedre" else _FEW


def _fedre_smallest(config: PartitionConfig, rows: int) -> int:
    half_fair = rows / config.clients / 2
    return int(min(_FEW / config.test, half_fair) if config.test else half_fair)


def partition(
    labels: np.ndarray, classes: int, config: PartitionConfig, generator: np.random.Generator
) -> np.ndarray:
    """The client of every row, or -1 for a row nobody gets."""
    groups = labels if config.kind in ("dirichlet", "pathological", "shards") else np.zeros_like(labels)
    sizes = np.bincount(groups, minlength=classes if groups is labels else 1)
    draw = _DRAWS[config.kind, config.variant]
    counts = redraw(lambda: draw(sizes, config, generator), len(labels), classes, config)
    return deal(groups, counts, generator)


def redraw(
    draw: Callable[[], np.ndarray | None], rows: int, classes: int, config: PartitionConfig
) -> np.ndarray:
    """Draw tables of counts until every client has enough rows, up to `redraws` times."""
    check_against_data(rows, classes, config)
    smallest = config.smallest(rows)
    if smallest * config.clients <= rows:
        for _ in range(config.redraws):
            counts = draw()
            if counts is not None and counts.sum(axis=1).min() >= smallest:
                return counts
    raise DataError(_gave_up(rows, smallest, config))


def check_against_data(rows: int, classes: int, config: PartitionConfig) -> None:
    """Refuse a configuration that the data cannot satisfy, before anything is drawn."""
    if config.clients > rows:
        raise DataError(f"{rows} rows cannot be divided among {config.clients} clients: lower clients")
    if (config.classes_per_client or 0) > classes:
        raise DataError(
            f"classes_per_client is {config.classes_per_client}, but the data has {classes} classes; lower it"
        )
    if config.clients * (config.shards_per_client or 0) > rows:
        raise DataError(
            f"{rows} rows cannot be cut into {config.clients} x {config.shards_per_client} shards: "
            f"lower clients or shards_per_client"
        )


def _gave_up(rows: int, smallest: int, config: PartitionConfig) -> str:
    tail = f"lower clients ({config.clients}) or min_size ({smallest})"
    if config.alpha is not None:
        tail = f"raise alpha ({config.alpha:g}), {tail}"
    return (
        f"no {config.kind} split of {rows} rows gave each of {config.clients} clients at least {smallest} "
        f"in {config.redraws} draws: {tail}"
    )


def deal(groups: np.ndarray, counts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The client of every row, or -1: random rows, as many as `counts` (clients by groups) says."""
    order = generator.permutation(len(groups))
    order = order[np.argsort(groups[order], kind="stable")]
    left_over = np.bincount(groups, minlength=counts.shape[1]) - counts.sum(axis=0)
    table = np.vstack([counts, left_over])
    clients = np.append(np.arange(len(counts)), -1)
    owner = np.empty(len(groups), dtype=np.int64)
    owner[order] = np.repeat(np.tile(clients, table.shape[1]), table.T.ravel())
    return owner


def match(labels: np.ndarray, counts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Distribute further rows in the proportions of `counts`, for test rows that match the training rows.

    A client's expected number of rows of a class is its exact share; the actual number differs by less than one.
    The random offset per class keeps leftover rows from always going to the same clients.
    """
    totals = counts.sum(axis=0)
    sizes = np.where(totals > 0, np.bincount(labels, minlength=counts.shape[1]), 0)
    bounds = np.cumsum(counts, axis=0) / np.maximum(totals, 1) * sizes
    start = generator.uniform(1e-6, 1 - 1e-6, size=len(sizes))
    bounds = np.minimum(np.floor(bounds + start), sizes).astype(np.int64)
    return deal(labels, np.diff(bounds, axis=0, prepend=0), generator)


def cut_client(rows: np.ndarray, validation: float, test: float) -> Rows:
    """Training, validation and test rows of one client; the test part is rounded up, as scikit-learn does.

    A client that is too small keeps all its rows for training.
    """
    tested, held = (int(size) for size in cut_sizes(np.array(len(rows)), validation, test))
    cut = np.split(rows, [tested, tested + held])
    return np.sort(cut[2]), np.sort(cut[1]), np.sort(cut[0])


def cut_sizes(rows: np.ndarray, validation: float, test: float) -> tuple[np.ndarray, np.ndarray]:
    """How many of its rows a client keeps for test and for validation, for many numbers of rows at once."""
    tested = np.ceil(rows * test - 1e-9).astype(np.int64)
    held = np.floor(rows * validation + 1e-9).astype(np.int64)
    tested = np.where(tested + held < rows, tested, 0)
    return tested, np.where(tested + held < rows, held, 0)


def _cut(shares: np.ndarray, sizes: np.ndarray | int) -> np.ndarray:
    """Whole numbers proportional to `shares` along the first axis, adding up to `sizes`."""
    # The small addend makes up for rounding where a sum should be a whole number.
    bounds = np.floor(np.cumsum(shares, axis=0) * sizes + 1e-9).astype(np.int64)
    bounds[-1] = sizes
    return np.diff(bounds, axis=0, prepend=0)


def _iid(sizes: np.ndarray, config: PartitionConfig, generator: np.random.Generator) -> np.ndarray:
    rows, extra = divmod(int(sizes[0]), config.clients)
    return rows + (np.arange(config.clients) < extra)[:, None]


def _shares(groups: int, config: PartitionConfig, generator: np.random.Generator) -> np.ndarray | None:
    """Dirichlet shares, groups by clients; None if an extreme alpha under- or overflows."""
    shares = generator.dirichlet(np.full(config.clients, config.alpha), size=groups)
    return shares if np.allclose(shares.sum(axis=1), 1) else None


def _dirichlet(
    sizes: np.ndarray, config: PartitionConfig, generator: np.random.Generator
) -> np.ndarray | None:
    shares = _shares(len(sizes), config, generator)
    return None if shares is None else _cut(shares.T, sizes)


def _dirichlet_fair(
    sizes: np.ndarray, config: PartitionConfig, generator: np.random.Generator
) -> np.ndarray | None:
    """Dirichlet shares, class by class, only for clients still below the mean size."""
    shares = _shares(len(sizes), config, generator)
    if shares is None:
        return None
    counts = np.zeros((config.clients, len(sizes)), dtype=np.int64)
    held = np.zeros(config.clients, dtype=np.int64)
    fair = sizes.sum() / config.clients
    for label, size in enumerate(sizes):
        open_shares = shares[label] * (held < fair)
        total = open_shares.sum()
        if not total > 0:
            return None
        counts[:, label] = _cut(open_shares / total, int(size))
        held += counts[:, label]
    return counts


def _pathological(sizes: np.ndarray, config: PartitionConfig, generator: np.random.Generator) -> np.ndarray:
    """Random classes, the least used first, so that no class is left out if there is room for all."""
    holds = np.zeros((config.clients, len(sizes)), dtype=bool)
    used = np.zeros(len(sizes), dtype=np.int64)
    for client in range(config.clients):
        least_used_first = np.lexsort((generator.random(len(sizes)), used))
        holds[client, least_used_first[: config.classes_per_client]] = True
        used += holds[client]
    rows, extra = np.divmod(sizes, np.maximum(used, 1))
    counts: np.ndarray = holds * (rows + (np.cumsum(holds, axis=0) <= extra))
    return counts


def _pathological_fedre(
    sizes: np.ndarray, config: PartitionConfig, generator: np.random.Generator
) -> np.ndarray:
    """Give each class to the first clients with room; all but the last get a random part of it."""
    counts = np.zeros((config.clients, len(sizes)), dtype=np.int64)
    room = np.full(config.clients, config.classes_per_client)
    holders = -(-config.clients * int(config.classes_per_client or 0) // len(sizes))
    least = _fedre_smallest(config, int(sizes.sum())) / len(sizes)
    for label, size in enumerate(sizes):
        chosen = np.flatnonzero(room > 0)[:holders]
        if not len(chosen):
            break
        counts[chosen, label] = _uneven(int(size), len(chosen), least, generator)
        room[chosen] -= 1
    return counts


def _uneven(size: int, parts: int, least: float, generator: np.random.Generator) -> np.ndarray:
    """Part sizes uniform from a tenth of the mean (or `least`) to the mean; the rest to the last part."""
    mean = size // parts
    low = min(int(max(size / parts / 10, least)), mean)
    drawn = generator.integers(low, max(mean, low + 1), size=parts - 1)
    return np.append(drawn, size - drawn.sum())


def _shards(sizes: np.ndarray, config: PartitionConfig, generator: np.random.Generator) -> np.ndarray:
    per_client = int(config.shards_per_client or 0)
    number = config.clients * per_client
    edges = np.arange(number + 1) * int(sizes.sum()) // number
    ends = np.cumsum(sizes)
    overlap = np.minimum(edges[1:, None], ends) - np.maximum(edges[:-1, None], ends - sizes)
    dealt = np.maximum(overlap, 0)[generator.permutation(number)]
    counts: np.ndarray = dealt.reshape(config.clients, per_client, len(sizes)).sum(axis=1)
    return counts


_DRAWS: dict[tuple[str, str], Callable[..., np.ndarray | None]] = {
    ("iid", "plain"): _iid,
    ("quantity", "plain"): _dirichlet,
    ("dirichlet", "plain"): _dirichlet,
    ("dirichlet", "fedin"): _dirichlet_fair,
    ("dirichlet", "fedre"): _dirichlet_fair,
    ("pathological", "plain"): _pathological,
    ("pathological", "fedre"): _pathological_fedre,
    ("shards", "plain"): _shards,
}


@dataclass(frozen=True)
class ShareTable:
    """FedMRL's table: the classes each client picked (one may come twice) and its share of each."""

    labels: np.ndarray  # (clients, classes_per_client)
    shares: np.ndarray  # the same shape; the shares of a class add up to 1

    @classmethod
    def draw(cls, classes: int, config: PartitionConfig, generator: np.random.Generator) -> ShareTable:
        """Cut every class into equally many shares; each client in turn picks from the fullest classes."""
        shape = (config.clients, int(config.classes_per_client or 0))
        per_class, odd = divmod(shape[0] * shape[1], classes)
        if odd:
            raise DataError(
                f"variant fedmrl needs clients x classes_per_client ({shape[0]} x {shape[1]}) to be a "
                f"multiple of the {classes} classes: change clients or classes_per_client"
            )
        drawn = generator.uniform(0.4, 0.6, size=(classes, per_class))
        drawn /= drawn.sum(axis=1, keepdims=True)
        left = np.full(classes, per_class)
        labels, shares = np.empty(shape, dtype=np.int64), np.empty(shape)
        for place in np.ndindex(shape):
            fullest = np.flatnonzero(left == left.max())
            label = fullest[generator.integers(len(fullest))]
            left[label] -= 1
            labels[place], shares[place] = label, drawn[label, left[label]]
        return cls(labels, shares)

    def counts(self, sizes: np.ndarray) -> np.ndarray:
        """Rows of each class for each client, every share rounded down."""
        counts = np.zeros((len(self.labels), len(sizes)), dtype=np.int64)
        rows = np.floor(sizes[self.labels] * self.shares).astype(np.int64)
        np.add.at(counts, (np.arange(len(self.labels))[:, None], self.labels), rows)
        return counts
