"""Public data: unlabelled samples that the server and all clients have, each in the modality it can read.

A sample's id is its row in the data set. An id means the same sample to everyone: an image and its caption
share one. A sample that is missing in a client's modality is masked there, never replaced by another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.core.streams import Source, Stream, shuffled_batches
from potluck.errors import ConfigError

MODALITIES = ("images", "texts", "vectors", "windows")


@dataclass(frozen=True)
class Public:
    """The public samples as the server or one client sees them; `source`, `ids` and `mask` have the same rows.

    In a batch of `stream`, `batch.id` holds rows: `public.mask[batch.id]` says which samples exist on this side.
    """

    data: Dataset  # as this side has it, with all its samples
    ids: np.ndarray  # sample ids, ascending, the same on every side
    source: Source
    mask: Tensor  # on the device; false where a sample is missing in this side's modality
    rng: Rng  # shared: the order is the same on every side

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def name(self) -> str:
        """The name of the data set."""
        return self.data.name

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes by which two sides check that they have the same samples."""
        return fingerprint_of(self.data, self.ids)

    def order(self, round_: int, batch_size: int, passes: int = 1) -> list[np.ndarray]:
        """The rows of every batch of a round, the same on every side; a short last batch is dropped."""
        key = round_, batch_size, passes
        if key not in self._orders:
            self.check_batch(batch_size, "a public batch")
            rows, rng = np.arange(len(self)), self.rng.child("round", round_)
            self._orders.clear()  # every client asks for it in every exchange, and of one round only
            self._orders[key] = shuffled_batches(rows, batch_size, passes, "drop", rng)
        return [rows.copy() for rows in self._orders[key]]

    @cached_property
    def _orders(self) -> dict[tuple[int, int, int], list[np.ndarray]]:
        return {}

    def stream(self, round_: int, batch_size: int, passes: int = 1) -> Stream:
        """The batches of `order` as a stream for `fit`."""
        return Stream(self.source, self.order(round_, batch_size, passes))

    def check_batch(self, size: int, key: str) -> None:
        """Refuse a batch larger than the public data; `key` names the option for the error."""
        if size > len(self):
            raise ConfigError(
                f"{key} of {size} samples is larger than the public data, which has {len(self)}; lower it, or "
                "raise public.samples"
            )


def fingerprint_of(data: Dataset, ids: np.ndarray, lacking: str = "") -> dict[str, str]:
    """Hashes of the data set's name, of the ids, and of the samples in each modality it has.

    `lacking` lists ids whose texts another side does not have: they are left out of the hash of the texts.
    """
    rows = torch.from_numpy(ids)
    found = {"name": _hash([data.name.encode()]), "ids": _hash([ids.astype("<i8").tobytes()])}
    stored = data.x if data.images is None else data.images
    if stored.ndim == 4:
        found["images"] = _hash(_grey_levels(stored[piece]) for piece in torch.split(rows, 256))
    elif stored.ndim in (2, 3) and stored.is_floating_point():
        found["vectors" if stored.ndim == 2 else "windows"] = _hash(
            [stored[rows].cpu().numpy().astype("<f4").tobytes()]
        )
    if data.texts is not None:
        left_out = set(lacking.split())
        texts = {id_: data.texts[id_] for id_ in ids.tolist() if str(id_) not in left_out}
        found["lacking"] = " ".join(str(id_) for id_ in ids.tolist() if not texts.get(id_))
        found["texts"] = _hash(f"{id_} {text}\n".encode() for id_, text in texts.items() if text)
    return found


def _grey_levels(images: Tensor) -> bytes:
    """Shape and colours in 256ths of a level, so that uint8 images and floats from 0 to 1 give the same bytes."""
    levels = images.long() * 256 if images.dtype == torch.uint8 else (images.double() * 255 * 256).round()
    return str(tuple(images.shape[1:])).encode() + levels.cpu().numpy().astype("<i4").tobytes()


def _hash(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:16]


def check_same_samples(own: Public, cards: Mapping[ClientId, Card]) -> None:
    """Refuse a client whose public samples differ from the server's.

    A modality that the server does not have is compared with the first client that has it.
    """
    met: dict[str, tuple[ClientId, str]] = {}
    for client, card in cards.items():
        theirs: Mapping[str, str] = card.extra.get("public") or {}
        gaps = theirs.get("lacking", "")
        same = gaps == own.fingerprint.get("lacking", "")
        ours = own.fingerprint if same else fingerprint_of(own.data, own.ids, gaps)
        if (difference := _difference(ours, theirs)) is not None:
            raise _other_samples(client, difference, "the server")
        for what in (what for what in MODALITIES if what in theirs and what not in ours):
            first, known = met.setdefault(what, (client, theirs[what]))
            if known != theirs[what]:
                raise _other_samples(client, f"with other {what}", f"client {first}")


def _difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """How two sides differ in the modalities that both have; None where they agree."""
    if ours["ids"] != theirs.get("ids"):
        return "with other ids"
    common = [what for what in MODALITIES if what in ours and what in theirs]
    if not common and ours["name"] != theirs.get("name"):
        return "of another name"
    return next((f"with other {what}" for what in common if ours[what] != theirs[what]), None)


def _other_samples(client: ClientId, difference: str, whose: str) -> ConfigError:
    return ConfigError(
        f"client {client} has public samples {difference} than {whose}; give all sides the same public.data, in "
        "the same order, and the same public.samples and seed"
    )
