"""What a user's module answers: the scores themselves, or an object that holds them as `logits`.

The models of Hugging Face's `transformers` answer with such an object (`ImageClassifierOutput`,
`SequenceClassifierOutput`). Those that read token ids also want to be told which of them are padding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PADDING = 0  # the token id that fills a short text


def scores_of(module: nn.Module, x: Tensor) -> Tensor:
    """The scores of a batch, from whatever the module answers with."""
    masked = not x.is_floating_point() and _takes_mask(type(module).forward)
    answer: Any = module(x, attention_mask=(x != PADDING).long()) if masked else module(x)
    scores: Tensor = _scores_in(answer)
    return scores


def _scores_in(answer: Any) -> Any:
    return answer if isinstance(answer, Tensor) else getattr(answer, "logits", answer)


@torch.no_grad()
def giving_scores(module: nn.Module, x: Tensor) -> nn.Module:
    """A module that answers `x` with an object, made to answer with the scores in it; any other as it is."""
    if not isinstance(module.eval()(x), Tensor):
        module.register_forward_hook(_leave_scores)
    return module


def _leave_scores(module: nn.Module, given: Any, answer: Any) -> Any:
    return _scores_in(answer)


@functools.cache
def _takes_mask(forward: Callable[..., Any]) -> bool:
    return "attention_mask" in inspect.signature(forward).parameters


def chosen_positions(everywhere: Tensor, chosen: Tensor) -> Tensor | None:
    """The position of each sample whose row of `everywhere`, (batch, tokens, width), is its row of `chosen`.

    None where some sample has no such position. A module that scores every token and returns the scores of one of
    them, as generative transformers do to classify a text, chooses in this way.
    """
    if everywhere.ndim != 3 or everywhere.shape[::2] != chosen.shape:
        return None
    gaps = (everywhere - chosen[:, None]).abs().amax(2)
    nearest = gaps.min(1)
    return nearest.indices if bool((nearest.values <= 1e-5).all()) else None


def at_positions(everywhere: Tensor, positions: Tensor) -> Tensor:
    """The rows of a (batch, tokens, width) tensor at one position per sample."""
    return everywhere[torch.arange(len(everywhere), device=everywhere.device), positions]
