"""The tokenizer of a pretrained text model, with word pieces and special tokens, from a folder or the hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from potluck.errors import ModelError
from potluck.hub import folder_of, library, loaded

FILES = ("tokenizer.json", "vocab.txt")
PAD = 0  # as in data and models


@dataclass(frozen=True)
class Pieces:
    """A tokenizer by its folder or hub repository; `Pieces.of` checks that it exists and fits."""

    source: str
    changed: tuple[
        int, ...
    ] = ()  # modification times of a folder's files: changed files are a different tokenizer

    @classmethod
    def of(cls, source: str) -> Pieces:
        """The tokenizer of a folder with `tokenizer.json` or `vocab.txt`, or of a repository of the hub."""
        library("transformers")
        folder = folder_of(source)
        if folder is not None and not any((folder / name).is_file() for name in FILES):
            raise ModelError(f"the folder {folder} has no tokenizer ({' or '.join(FILES)}); save one there")
        pieces = cls(source) if folder is None else cls(str(folder.resolve()), _times(folder))
        if pieces._tokenizer.pad_token_id != PAD:
            raise ModelError(
                f"the tokenizer of {source} pads with id {pieces._tokenizer.pad_token_id}, expected {PAD}; "
                "choose another tokenizer"
            )
        return pieces

    @cached_property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return len(self._tokenizer)

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Token ids (N, length), int64, with special tokens; long texts are cut, short ones padded."""
        special = self._tokenizer.num_special_tokens_to_add()
        if length <= special:
            raise ModelError(
                f"a length of {length} leaves no room beside the {special} special tokens of {self.source}; "
                "raise length"
            )
        if not texts:
            return np.zeros((0, length), dtype=np.int64)
        encoded = self._tokenizer(list(texts), padding="max_length", truncation=True, max_length=length)
        return np.array(encoded["input_ids"], dtype=np.int64)

    @property
    def _tokenizer(self) -> Any:
        return _load(self.source, self.changed)


def _times(folder: Path) -> tuple[int, ...]:
    return tuple(path.stat().st_mtime_ns for name in FILES if (path := folder / name).is_file())


@lru_cache(maxsize=4)
def _load(source: str, changed: tuple[int, ...]) -> Any:
    # The tokenizer's threads do not survive forking a worker, and the library would warn about it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return loaded(library("transformers").AutoTokenizer.from_pretrained, source)
