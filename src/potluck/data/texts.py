"""Text data sets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from potluck.core.dataset import Dataset
from potluck.core.task import Task
from potluck.data import parquet
from potluck.data.columns import LABEL_COLUMNS, TEXT_COLUMNS, labels_of_splits
from potluck.data.registry import register
from potluck.data.word_pieces import Pieces
from potluck.data.words import RESERVED, count_vocabulary, encode
from potluck.data.words import strip_headers as without_headers
from potluck.data.words import words as split_words
from potluck.errors import DataError, ModelError

VOCABULARY = 8_000  # words in the vocabulary


@register("sst2")
def _sst2(
    dir: Path | None,
    *,
    vocabulary: int | None = None,
    length: int = 64,
    tokenizer: str | None = None,
    labels_only: bool = False,
) -> Dataset:
    """SST-2. The validation split is the test part: the hub's copy hides the labels of the test split."""
    location = parquet.Location("sst2", "stanfordnlp/sst2", splits=("train", "validation"))
    train, test = parquet.find(location, dir)
    y, train_rows = labels_of_splits(train, test, LABEL_COLUMNS, 2)
    texts = () if labels_only else parquet.read_texts(train + test, TEXT_COLUMNS)
    class_names = parquet.read_class_names(train, LABEL_COLUMNS, 2)
    return text_dataset("sst2", texts, y, train_rows, class_names, vocabulary, length, tokenizer)


@register("newsgroups20")
def _newsgroups20(
    dir: Path | None,
    *,
    vocabulary: int | None = None,
    length: int = 256,
    strip_headers: bool = True,
    tokenizer: str | None = None,
    labels_only: bool = False,
) -> Dataset:
    """The 20 newsgroups, split by date. From a folder only: the hub's copies have other texts."""
    train, test = parquet.find(parquet.Location("newsgroups20", None), dir)
    y, train_rows = labels_of_splits(train, test, LABEL_COLUMNS, 20)
    texts = () if labels_only else parquet.read_texts(train + test, TEXT_COLUMNS)
    # A header names the sender, the institution and sometimes the newsgroup itself: a model that sees it
    # learns who writes where, not what the text is about.
    if strip_headers:
        texts = tuple(without_headers(posting) for posting in texts)
    class_names = parquet.read_class_names(train, LABEL_COLUMNS, 20)
    return text_dataset("newsgroups20", texts, y, train_rows, class_names, vocabulary, length, tokenizer)


def text_dataset(
    name: str,
    texts: tuple[str, ...],
    y: Tensor,
    train_rows: int,
    class_names: tuple[str, ...],
    vocabulary: int | None,
    length: int,
    tokenizer: str | None,
) -> Dataset:
    """A text data set with token ids: word numbers from the training part, or those of a tokenizer.

    Without `texts` only the labels are known, and all token ids are padding.
    """
    if length < 1 or (vocabulary is not None and vocabulary < 1):
        raise DataError(
            f"data set {name!r} needs vocabulary and length of at least 1, not {vocabulary}, {length}"
        )
    if tokenizer is not None and vocabulary is not None:
        raise DataError(f"data set {name!r}: the tokenizer has a vocabulary of its own: leave out vocabulary")
    words: Mapping[str, int] | None
    x, words, encoder = torch.zeros(1, length, dtype=torch.long).expand(len(y), length), {}, None
    if tokenizer is not None:
        pieces, encoder = encode_pieces(name, tokenizer, texts, length)
        x, words, tokens = pieces if texts else x, None, encoder.vocabulary
    elif texts:
        x, words = _encode(texts, train_rows, vocabulary or VOCABULARY, length)
        tokens = len(words) + RESERVED
    else:
        tokens = (vocabulary or VOCABULARY) + RESERVED
    task = Task("text-classification", len(class_names), (length,), tokens)
    return Dataset(
        name, task, x, y, train_rows, class_names, words=words, encoder=encoder, texts=texts or None
    )


def encode_pieces(name: str, source: str, texts: tuple[str, ...], length: int) -> tuple[Tensor, Pieces]:
    """The token ids of texts, and the tokenizer from a folder or hub repository that made them."""
    try:
        pieces = Pieces.of(source)
        return _encode_pieces(pieces, texts, length), pieces
    except ModelError as error:
        raise DataError(f"data set {name!r}, tokenizer: {error}") from error


@lru_cache(maxsize=4)
def _encode_pieces(pieces: Pieces, texts: tuple[str, ...], length: int) -> Tensor:
    return torch.from_numpy(pieces.encode(texts, length))


@lru_cache(maxsize=4)
def _encode(
    texts: tuple[str, ...], train_rows: int, vocabulary: int, length: int
) -> tuple[Tensor, dict[str, int]]:
    split = [split_words(text) for text in texts]
    numbers = count_vocabulary(split[:train_rows], vocabulary)
    return torch.from_numpy(encode(split, numbers, length)), numbers
