"""Two small networks for token ids: the mean of embeddings, and a convolution over them. Id 0 is padding."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.errors import ModelError
from potluck.models.outputs import PADDING
from potluck.models.registry import register

EMBEDDING = 64
WIDTH = 64


class TextModel(Model):
    """Embeds the tokens, pools them to one vector without the padding, and maps it to the representation."""

    def __init__(self, task: Task, rep_dim: int) -> None:
        super().__init__()
        if task.vocabulary is None:
            raise ModelError(
                "a text model needs a task with a vocabulary; give it texts, or choose another model"
            )
        self.rep_dim = rep_dim
        self.embedding = nn.Embedding(task.vocabulary, EMBEDDING, padding_idx=PADDING)
        self.fc = nn.Linear(EMBEDDING, rep_dim)
        self.head = nn.Linear(rep_dim, task.classes)

    def pool(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, width); `kept` (batch, tokens, 1) is 0 on padding."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """The representation of a batch of token ids."""
        embedded = self.embedding(x)
        kept = (x != PADDING).unsqueeze(-1).to(embedded.dtype)
        return F.relu(self.fc(self.pool(embedded, kept)))


class TextMean(TextModel):
    """The mean embedding of a text's tokens."""

    def pool(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """The mean over tokens that are not padding; zero for an empty text."""
        return (tokens * kept).sum(1) / kept.sum(1).clamp_min(1)


class TextConv(TextModel):
    """A convolution over three neighbouring tokens, then the maximum of each channel."""

    def __init__(self, task: Task, rep_dim: int) -> None:
        super().__init__(task, rep_dim)
        self.conv = nn.Conv1d(EMBEDDING, EMBEDDING, 3, padding=1)

    def pool(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """The maximum over tokens that are not padding; values are not negative, so zero hides padding."""
        answers = F.relu(self.conv((tokens * kept).transpose(1, 2))).transpose(1, 2)
        return (answers * kept).amax(1)


@register("text-mean", takes=("tokens",))
def text_mean(task: Task, rep_dim: int | None = None) -> TextMean:
    """The mean embedding and one linear layer."""
    return TextMean(task, rep_dim or WIDTH)


@register("text-conv", takes=("tokens",))
def text_conv(task: Task, rep_dim: int | None = None) -> TextConv:
    """A convolution over tokens and one linear layer."""
    return TextConv(task, rep_dim or WIDTH)
