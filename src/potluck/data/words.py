"""A small word tokenizer: lower-case words, numbered by frequency, cut or padded to one length."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

PAD, UNKNOWN = 0, 1
RESERVED = 2
_WORD = re.compile(r"\w+(?:'\w+)*")


def words(text: str) -> list[str]:
    """The words of a text in order.

    >>> words("It isn't BAD, 3/4 fun!")
    ['it', "isn't", 'bad', '3', '4', 'fun']
    """
    return _WORD.findall(text.lower())


def count_vocabulary(samples: Sequence[Sequence[str]], size: int) -> dict[str, int]:
    """Number the `size` most frequent words from 2 on; ties in alphabetical order."""
    counter: Counter[str] = Counter()
    for sample in samples:
        counter.update(sample)
    ranked = sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:size]
    return {word: number for number, (word, _) in enumerate(ranked, start=RESERVED)}


def encode(samples: Sequence[Sequence[str]], vocabulary: Mapping[str, int], length: int) -> np.ndarray:
    """Token ids (N, length), int64: the first `length` words of each sample, padded on the right."""
    tokens = np.full((len(samples), length), PAD, dtype=np.int64)
    for row, sample in enumerate(samples):
        ids = [vocabulary.get(word, UNKNOWN) for word in sample[:length]]
        tokens[row, : len(ids)] = ids
    return tokens


def strip_headers(text: str) -> str:
    """A posting without its header block, which ends at the first blank line."""
    _, blank, body = text.partition("\n\n")
    return body if blank else text
