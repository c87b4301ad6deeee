"""The split of a data set among clients: made from a seed, saved as an index file with a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from potluck.core.dataset import Dataset
from potluck.core.plain_values import harmless
from potluck.core.rng import Rng
from potluck.data.client_splits import PARTS, ClientSplit, ClientSplits
from potluck.data.filling import Filling
from potluck.data.natural import NaturalConfig, natural_held_out, natural_rows
from potluck.data.partition import (
    PartitionConfig,
    Rows,
    ShareTable,
    cut_client,
    cut_sizes,
    deal,
    match,
    partition,
    redraw,
)
from potluck.data.scaling import Scaling
from potluck.data.shift import FeatureShiftConfig, Shift, check_shift
from potluck.data.split_lines import read_lines
from potluck.errors import DataError, first_twice
from potluck.files import LARGEST_JSON, check_values, read_bounded, write_whole
from potluck.front_door import front_door


@dataclass(frozen=True, eq=False)
class Split:
    """Which client has which rows. Two splits are equal if their hashes are."""

    clients: ClientSplits
    held_out: tuple[str, ...]  # ids of clients that never train
    hash: str  # sha256 over ids, rows, shifts and held-out ids, the same on every platform
    rows_known: bool = True  # else the rows are elsewhere, and those here are as many zeros

    @classmethod
    def of(cls, clients: Iterable[ClientSplit], held_out: Iterable[str] = ()) -> Split:
        """Make a split and compute its hash."""
        clients, held_out = ClientSplits.of(clients), tuple(held_out)
        return cls(clients, held_out, _hash(clients, held_out))

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, Mapping[str, int]]) -> Split:
        """A split of which only the sizes are known, as the rows are elsewhere; it costs no memory."""
        told = [[id, *(own[part] for part in PARTS)] for id, own in sizes.items()]
        known = np.array([one[1:] for one in told], dtype=np.int64).reshape(-1, len(PARTS))
        clients = ClientSplits(tuple(sizes), np.broadcast_to(np.int64(0), known.sum()), known)
        return cls(clients, (), hashlib.sha256(json.dumps(told).encode()).hexdigest(), rows_known=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Split) and other.hash == self.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, id: str) -> ClientSplit:
        place = self.clients.places.get(id)
        if place is None:
            raise DataError(
                f"the split has no client {id!r}: it has {len(self)} clients, the first {self.ids[0]!r}; "
                "choose one of split.ids"
            )
        return self.clients[place]

    @property
    def ids(self) -> tuple[str, ...]:
        """The client ids in order."""
        return self.clients.ids

    def counts(self, y: Any, classes: int) -> np.ndarray:
        """Training rows of each client and class, (clients, classes)."""
        rows, owner = self.clients.part("train")
        return _count(owner, np.asarray(y)[rows], len(self), classes)

    def save(self, path: Path | str, dataset: Dataset | Sequence[tuple[Dataset, int]] | None = None) -> None:
        """Write the index file, whole or not at all; given the data set, also each client's rows per class.

        If groups of clients have their own data sets, `dataset` lists the data set and the size of each group.
        """
        path = Path(path)
        about: dict[str, Any] = {"hash": self.hash, "held_out": self.held_out}
        groups = [(dataset, len(self))] if isinstance(dataset, Dataset) else list(dataset or ())
        about |= _about_groups(groups)
        clients = ",\n".join(self._lines(groups))
        content = f'{json.dumps(about)[:-1]},\n"clients": [\n{clients}\n]}}\n'
        write_whole(path, content.encode())

    def _lines(self, groups: Sequence[tuple[Dataset, int]]) -> Iterator[str]:
        """A client per line, as JSON; a million of them must not take long."""
        clients = self.clients
        parts = clients.row_lists() if self.rows_known else clients.sizes.tolist()
        counts = chain.from_iterable(
            own.counts(part.labels, part.label_count).tolist() for part, own in self.by_group(groups)
        )
        for place, (id, (train, validation, test)) in enumerate(zip(clients.ids, parts, strict=True)):
            rows = f'"train":{train},"validation":{validation},"test":{test}'.replace(" ", "")
            view = clients[place].view if place in clients.changes and self.rows_known else None
            seen = f",{json.dumps(view, separators=(',', ':'))[1:-1]}" if view else ""
            held = f',"counts":{row}'.replace(" ", "") if (row := next(counts, None)) is not None else ""
            yield f'{{"id":{json.dumps(id)},{rows}{seen}{held}}}'

    def by_group(self, groups: Iterable[tuple[Dataset, int]]) -> list[tuple[Dataset, Split]]:
        """The clients of each group, in order, with the data set their rows belong to."""
        groups = list(groups)
        if len(groups) == 1:
            return [(groups[0][0], self)]
        rest, found = self.clients, []
        for dataset, size in groups:
            own, rest = rest[:size], rest[size:]
            found.append((dataset, Split.of(own, (one for one in self.held_out if one in own.places))))
        return found

    @classmethod
    def load(cls, path: Path | str) -> Split:
        """Read an index file that `save` wrote, and check its hash."""
        path = Path(path)
        large = read_lines(path) if path.is_file() else None
        if large is not None:
            about, clients = large
            split = cls.of(clients, _held_out(about, clients.places, path))
            if split.hash == about.get("hash"):
                return split  # else the usual way says what is wrong
        content = _read_json(path)
        split = _from_json(content, path)
        if content.get("hash") != split.hash:
            raise DataError(f"{path} was changed after it was written: its rows lack its hash; make it anew")
        _check_counts(content, split, path)
        return split


def _check_counts(content: Mapping[str, Any], split: Split, path: Path | str) -> None:
    """The rows per class, which the hash leaves out: of every client as many as it has training rows."""
    told = {str(entry["id"]): entry["counts"] for entry in content.get("clients", ()) if "counts" in entry}
    for client, counts in told.items():
        whole = isinstance(counts, list) and all(type(one) is int and one >= 0 for one in counts)
        if not whole or sum(counts) != len(split[client].train):
            raise DataError(
                f"{path}: the counts of client {client!r} are not those of its rows; make it anew"
            )
    if "groups" not in content and len({len(counts) for counts in told.values()}) > 1:
        raise DataError(f"{path}: the clients' counts are not of the same classes; make it anew")


def _about_groups(groups: Sequence[tuple[Dataset, int]]) -> dict[str, Any]:
    """The index file's description of the data: one data set, or one per group."""
    known = [
        {"data": part.name, "clients": size, "class_names": part.label_names}
        | ({"features": part.encoding.names} if part.encoding is not None else {})
        for part, size in groups
    ]
    if len(known) == 1:
        return {key: value for key, value in known[0].items() if key != "clients"}
    return {"groups": known} if known else {}


def _hash(clients: ClientSplits, held_out: Sequence[str]) -> str:
    digest, rows, start = hashlib.sha256(), clients.rows.astype("<i8").view(np.uint8).data, 0
    for place, (id, sizes) in enumerate(zip(clients.ids, clients.sizes.tolist(), strict=True)):
        end = start + 8 * sum(sizes)
        digest.update(f"[{json.dumps(id)}, {sizes[0]}, {sizes[1]}, {sizes[2]}]".encode())
        digest.update(rows[start:end])
        shift = clients.changes[place].get("shift") if place in clients.changes else None
        if shift is not None:
            digest.update(json.dumps(shift.to_json()).encode())
        start = end
    digest.update(json.dumps(list(held_out)).encode())
    return digest.hexdigest()


AnyConfig = PartitionConfig | FeatureShiftConfig | NaturalConfig


def make_split(dataset: Dataset, config: AnyConfig, rng: Rng) -> Split:
    """Divide a data set among clients; the result depends only on labels, configuration and seed."""
    if isinstance(config, NaturalConfig):
        return _natural(dataset, config, rng)
    if isinstance(config, FeatureShiftConfig):
        whole, shifts = make_split(dataset, config.ordinary, rng), config.deal(dataset, rng.child("shift"))
        shifted = (replace(one, shift=shift) for one, shift in zip(whole.clients, shifts, strict=True))
        return Split.of(shifted, whole.held_out)
    labels, classes = dataset.labels.numpy(), dataset.label_count
    official = _official_parts(dataset, config)
    if config.variant == "fedmrl":
        dealt = _by_share_table(labels, official, classes, config, rng)
    elif official.train_rows < len(labels):
        dealt = _separate(labels, official, classes, config, rng)
    else:
        dealt = _merged(labels, classes, config, rng)
    clients = ClientSplits.dealt(map(str, range(config.clients)), *dealt)
    chosen = rng.child("held_out").numpy().choice(config.clients, config.held_out_count, replace=False)
    return Split.of(clients, (str(client) for client in sorted(chosen.tolist())))


def _natural(dataset: Dataset, config: NaturalConfig, rng: Rng) -> Split:
    parts = natural_rows(dataset, config, rng)
    held_out = natural_held_out(config, parts, rng.child("held_out"))
    return Split.of((ClientSplit(name, *rows) for name, rows in parts.items()), held_out)


Dealt = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # whose row it is, of which part, and its number; one per row


@dataclass(frozen=True)
class _Official:
    """The rows [0, train_rows) that are partitioned, and the official parts that follow them, unless merged in."""

    train_rows: int
    validation: np.ndarray
    test: np.ndarray

    def cut(self, rows: np.ndarray, config: PartitionConfig) -> Rows:
        """Cut from a client's rows the parts that have no official rows."""
        return cut_client(rows, *self.shares(config))

    def shares(self, config: PartitionConfig) -> tuple[float, float]:
        """The shares of a client's rows that are cut off for validation and test: none where rows are official."""
        validation = 0.0 if len(self.validation) else config.validation
        return validation, 0.0 if len(self.test) else config.test


def _official_parts(dataset: Dataset, config: PartitionConfig) -> _Official:
    rows = np.arange(len(dataset))
    if config.source == "separate" and dataset.test_start == len(dataset):
        raise DataError(f"data set {dataset.name!r} has no official test part: use source merged")
    if config.source == "merged" or (config.source == "auto" and config.variant == "fedre"):
        return _Official(len(rows), rows[:0], rows[:0])
    start, end = dataset.train_rows, dataset.test_start
    return _Official(start, rows[start:end], rows[end:])


def _merged(labels: np.ndarray, classes: int, config: PartitionConfig, rng: Rng) -> Dealt:
    owner = partition(labels, classes, config, rng.child("partition").numpy())
    return _cut_all(owner, config.clients, config.validation, config.test, rng.child("parts").numpy())


def _separate(
    labels: np.ndarray, official: _Official, classes: int, config: PartitionConfig, rng: Rng
) -> Dealt:
    seen = labels[: official.train_rows]
    owner = partition(seen, classes, config, rng.child("partition").numpy())
    counts = _count(owner, seen, config.clients, classes)
    held, tested = (
        match(labels[rows], counts, rng.child(name).numpy())
        for name, rows in (("validation", official.validation), ("test", official.test))
    )
    own = _cut_all(owner, config.clients, *official.shares(config), rng.child("parts").numpy())
    return _together(own, _as_part(1, held, official.validation), _as_part(2, tested, official.test))


def _cut_all(
    owner: np.ndarray, clients: int, validation: float, test: float, generator: np.random.Generator
) -> Dealt:
    """What `cut_client` does to the rows of every client, which come in random order, all at once."""
    order = generator.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    bounds = np.searchsorted(owner[order], np.arange(clients + 1))
    order, owner = order[bounds[0] :], owner[order[bounds[0] :]]
    tested, held = cut_sizes(np.diff(bounds), validation, test)
    place = np.arange(len(order)) - (bounds[:-1] - bounds[0])[owner]
    part = np.where(place < tested[owner], 2, np.where(place < (tested + held)[owner], 1, 0))
    return owner, part, order


def _as_part(part: int, owner: np.ndarray, rows: np.ndarray) -> Dealt:
    return owner, np.full(len(rows), part), rows


def _together(*dealt: Dealt) -> Dealt:
    owner, part, rows = (np.concatenate(each) for each in zip(*dealt, strict=True))
    return owner, part, rows


def _by_share_table(
    labels: np.ndarray, official: _Official, classes: int, config: PartitionConfig, rng: Rng
) -> Dealt:
    """FedMRL's split: rows are cut into train, validation and test first; one table of shares divides each."""
    pools = _pools(official, config, rng.child("parts").numpy())
    sizes = np.bincount(labels[pools[0]], minlength=classes)
    generator = rng.child("partition").numpy()
    tables: list[ShareTable] = []

    def draw() -> np.ndarray:
        tables[:] = [ShareTable.draw(classes, config, generator)]
        return tables[0].counts(sizes)

    redraw(draw, len(pools[0]), classes, config)
    divided = []
    for part, (name, pool) in enumerate(zip(PARTS, pools, strict=True)):
        mine = labels[pool]
        counts = tables[0].counts(np.bincount(mine, minlength=classes))
        divided.append(_as_part(part, deal(mine, counts, rng.child("deal", name).numpy()), pool))
    return _together(*divided)


def _pools(official: _Official, config: PartitionConfig, generator: np.random.Generator) -> Rows:
    train, validation, test = official.cut(generator.permutation(official.train_rows), config)
    return (
        train,
        official.validation if len(official.validation) else validation,
        official.test if len(official.test) else test,
    )


def join_splits(splits: Sequence[Split], renumber: Sequence[bool]) -> Split:
    """Join the splits of several groups; those marked in `renumber` continue the count of client ids."""
    clients: list[ClientSplit] = []
    held_out: list[str] = []
    for split, anew in zip(splits, renumber, strict=True):
        names = {id: str(len(clients) + place) if anew else id for place, id in enumerate(split.ids)}
        clients += [replace(client, id=names[client.id]) for client in split.clients]
        held_out += [names[id] for id in split.held_out]
    ids = [client.id for client in clients]
    if (repeated := first_twice(ids)) is not None:
        raise DataError(f"two groups of the federation have a client {repeated!r}: give each its own id")
    return Split.of(clients, held_out)


def _count(owner: np.ndarray, labels: np.ndarray, clients: int, classes: int) -> np.ndarray:
    mine = owner >= 0
    cells = owner[mine] * classes + labels[mine]
    return np.bincount(cells, minlength=clients * classes).reshape(clients, classes)


@front_door(DataError)
def from_index_file(path: Path | str, dataset: Dataset) -> Split:
    """A user's own split, from JSON.

    Either `{"clients": [{"id": "a", "train": [0, 1], "test": [2]}, …], "held_out": ["a"]}`
    or `{"a": {"train": [0, 1], "test": [2]}, …}`; `validation`, `test` and `held_out` may be left out, and
    a client may have a `shift`, for example `{"kind": "rotation", "value": 90}`.
    Every row belongs to one part of one client at most.
    """
    path = Path(path)
    content = _read_json(path)
    split = _from_json(content, path)
    # A split that Potluck wrote is checked by its hash, and may have clients without rows (min_size 0).
    if "hash" in content:
        split = Split.load(path)
    elif not split.clients:
        raise DataError(f"{path} names no client: give at least one with training rows")
    for client in split.clients:
        _check_client(path, client, len(dataset), "hash" in content or client.id in split.held_out)
        if client.shift is not None:
            check_shift(dataset, client.shift.kind)
    _check_overlap(path, split)
    return split


def _check_client(path: Path, client: ClientSplit, rows: int, may_be_empty: bool) -> None:
    if harmless(client.id) != client.id:
        raise DataError(
            f"{path}: {client.id!a} has letters that cannot be printed: give the client another id"
        )
    if not len(client.train) and not may_be_empty:
        raise DataError(f"{path}: client {client.id!r} has no training rows: give it some or leave it out")
    mine = np.concatenate(client.parts)
    outside = mine[(mine < 0) | (mine >= rows)]
    if len(outside):
        raise DataError(
            f"{path}: client {client.id!r} has row {outside[0]}, but the data has rows 0 to {rows - 1}; "
            "use the split with the data it was made for"
        )
    values, counts = np.unique(mine, return_counts=True)
    if (counts > 1).any():
        row = values[counts > 1][0]
        raise DataError(f"{path}: client {client.id!r} has row {row} more than once: list it once")


def _check_overlap(path: Path, split: Split) -> None:
    rows = split.clients.rows
    owners = np.repeat(np.arange(len(split)), split.clients.sizes.sum(axis=1))
    order = np.argsort(rows, kind="stable")
    twice = np.flatnonzero(rows[order][1:] == rows[order][:-1])
    if len(twice):
        first, second = (split.clients[owners[order[twice[0] + step]]].id for step in (0, 1))
        row = rows[order[twice[0]]]
        raise DataError(
            f"{path}: row {row} belongs to client {first!r} and to {second!r}: give it to one of them"
        )


def _read_json(path: Path) -> Any:
    try:
        content = read_bounded(path, LARGEST_JSON)
        check_values(content)
        return json.loads(content.decode("utf-8"), object_pairs_hook=_no_key_twice)
    except OSError as error:
        raise DataError(
            f"the split {path} cannot be read ({error.strerror or error}): check the path"
        ) from error
    except _TwiceError as error:
        raise DataError(
            f"the split {path} has the key {error.args[0]!r} twice in one object: give each client its own id"
        ) from error
    except ValueError as error:
        raise DataError(f"the split {path} is not JSON ({error}): write it anew") from error
    except RecursionError as error:
        raise DataError(f"the split {path} is nested too deeply: write it anew") from error


class _TwiceError(ValueError):
    """A key that stands twice in a JSON object; Python's reader would keep the last value without a word."""


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(key)
        found[key] = value
    return found


def _from_json(content: Any, path: Path) -> Split:
    if not isinstance(content, Mapping):
        raise DataError(f'{path} is not a split: it must be {{"clients": [{{"id": …, "train": […]}}, …]}}')
    entries = content.get("clients") if "clients" in content else _named_entries(content)
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise DataError(f"{path}: every client must be an object with train, validation and test rows")
    clients = tuple(_client_from_json(entry, path) for entry in entries)
    ids = [client.id for client in clients]
    if (repeated := first_twice(ids)) is not None:
        raise DataError(f"{path} has two clients with the id {repeated!r}: give each its own")
    return Split.of(clients, _held_out(content, ids, path))


def _named_entries(content: Mapping[str, Any]) -> list[Any]:
    named = {key: value for key, value in content.items() if key not in ("held_out", "hash")}
    return [
        {"id": key} | dict(value) if isinstance(value, Mapping) else value for key, value in named.items()
    ]


def _client_from_json(entry: Mapping[str, Any], path: Path) -> ClientSplit:
    unknown = set(entry) - {"id", "counts", "shift", "scaling", "filling", *PARTS}
    if "id" not in entry or unknown:
        what = f"an unknown entry {sorted(unknown)[0]!r}" if unknown else "no id"
        raise DataError(
            f"{path}: a client has {what}; the entries are id, train, validation, test, shift, scaling, filling"
        )
    id = str(entry["id"])
    if not id.strip():
        raise DataError(f"{path}: a client has an empty id: give it a name")
    rows = (_rows_from_json(entry.get(part, []), path, id, part) for part in PARTS)
    try:
        return ClientSplit(id, *rows, **view_of(entry))
    except ValueError as error:
        raise DataError(f"{path}: client {id!r}: {error}") from error


def view_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What `ClientSplit.view` gave as plain values, as arguments of `ClientSplit`."""
    read = {"shift": Shift.from_json, "scaling": Scaling.from_json, "filling": Filling.from_json}
    return {key: make(entry[key]) for key, make in read.items() if key in entry}


def _rows_from_json(values: Any, path: Path, client: str, part: str) -> np.ndarray:
    whole = isinstance(values, list) and all(type(value) is int for value in values)
    if not whole or any(abs(value) >= 2**63 for value in values):
        raise DataError(f"{path}: the {part} rows of client {client!r} are not a list of row numbers")
    return np.sort(np.array(values, dtype=np.int64))


def _held_out(content: Mapping[str, Any], ids: Collection[str], path: Path) -> tuple[str, ...]:
    values = content.get("held_out", [])
    held_out = tuple(map(str, values)) if isinstance(values, list) else ("?",)
    stray = [id for id in held_out if id not in ids]
    if stray or len(set(held_out)) == len(ids) > 0:
        reason = f"names {stray[0]!r}, which is no client" if stray else "leaves no client to train"
        raise DataError(f"{path}: held_out {reason}: list ids of some of the clients")
    return held_out
