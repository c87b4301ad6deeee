"""How each kind of task is learnt and scored: its loss, what evaluation gathers, and the numbers made of it.

Everything is tensor operations of fixed shapes on the device, and nothing is read back. What is gathered of a batch
is either a sum of fixed shape (`sums`), added up over the batches, or a row per sample (`whole`), put together: a
mean average precision is not a sum over batches. Both stay on the client; only the numbers leave it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.errors import ConfigError

Reduction = Literal["mean", "sum", "none"]
Numbers = dict[str, Tensor]
RECALLS = (1, 5, 10)
TEMPERATURE = 0.07  # of the contrastive loss; ours
CHUNK = 1024  # rows of a similarity matrix at a time


class TaskKind:
    """One kind of task. The first number of `conclude` is what a client is judged by."""

    whole: ClassVar[tuple[str, ...]] = ()  # gathered a row per sample
    told: ClassVar[tuple[str, ...]]  # the names of what `conclude` gives, and a client tells

    def sums(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what is added up."""
        return {"loss": ()}

    def loss(self, scores: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The loss of a batch; `none`: of every sample."""
        each = self.per_sample(scores, y)
        return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()

    def weighted(self, scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """The mean loss of a batch whose samples count by their weight; 0 leaves one out."""
        return (self.loss(scores, y, "none") * weight).sum() / weight.sum().clamp_min(1e-12)

    def per_sample(self, scores: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample."""
        raise NotImplementedError

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """What a batch contributes."""
        raise NotImplementedError

    def conclude(self, found: Numbers) -> Numbers:
        """The numbers of a split: fractions, and the sum of the losses."""
        raise NotImplementedError

    def held(self, y: np.ndarray) -> tuple[int, ...]:
        """The classes that samples with these labels have."""
        return tuple(int(label) for label in np.unique(y))


class OneClass(TaskKind):
    """One class per sample. The two sums cross as they are: they can be added up over clients."""

    told = ("correct", "loss")

    def sums(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Right answers and losses."""
        return {"correct": (), "loss": ()}

    def loss(self, scores: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(scores, y, reduction=reduction)

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """Sums over the batch."""
        return {"correct": (scores.argmax(1) == y).sum(), "loss": self.loss(scores, y, "sum")}

    def conclude(self, found: Numbers) -> Numbers:
        """The sums."""
        return found


class MultiLabel(TaskKind):
    """Any number of labels per sample: y is (batch, classes), 1 where a label holds."""

    whole = ("scores", "labels")
    told = ("mean_ap", "f1", "loss")

    def per_sample(self, scores: Tensor, y: Tensor) -> Tensor:
        """Binary cross-entropy, the mean over labels."""
        return F.binary_cross_entropy_with_logits(scores, y.to(scores.dtype), reduction="none").mean(1)

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """The scores and labels themselves: a ranking needs all of them."""
        return {"scores": scores, "labels": y.to(scores.dtype), "loss": self.loss(scores, y, "sum")}

    def conclude(self, found: Numbers) -> Numbers:
        """Mean average precision and F1, both means over labels."""
        scores, labels = found["scores"], found["labels"]
        return {
            "mean_ap": mean_average_precision(scores, labels),
            "f1": macro_f1(scores > 0, labels > 0),
            "loss": found["loss"],
        }

    def held(self, y: np.ndarray) -> tuple[int, ...]:
        """The labels that hold for at least one sample."""
        return tuple(int(label) for label in np.flatnonzero(y.any(axis=0)))


class Segmentation(TaskKind):
    """A class per pixel: scores are (batch, classes, height, width), y (batch, height, width)."""

    told = ("mean_iou", "pixel_accuracy", "loss")

    def sums(self, classes: int) -> dict[str, tuple[int, ...]]:
        """How often each class was taken for each other, and losses."""
        return {"confusion": (classes, classes), "loss": ()}

    def per_sample(self, scores: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy, the mean over pixels."""
        return F.cross_entropy(scores, y.long(), reduction="none").mean((1, 2))

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """Pixels by true class (row) and answer (column)."""
        classes = scores.shape[1]
        cells = y.long() * classes + scores.argmax(1)
        counts = torch.zeros(classes * classes, device=scores.device, dtype=torch.float64)
        counts.index_add_(0, cells.flatten(), torch.ones_like(cells, dtype=torch.float64).flatten())
        return {"confusion": counts.view(classes, classes), "loss": self.loss(scores, y, "sum")}

    def conclude(self, found: Numbers) -> Numbers:
        """Mean intersection over union, and the share of pixels that are right."""
        confusion = found["confusion"]
        right = confusion.diagonal()
        return {
            "mean_iou": mean_iou(confusion),
            "pixel_accuracy": right.sum() / confusion.sum(),
            "loss": found["loss"],
        }


class Retrieval(TaskKind):
    """Images and captions: scores are (batch, 2·d), the image's embedding beside its caption's; y is not used."""

    whole = ("pairs",)
    told = ("mean_recall", *(f"{way}_r{k}" for way in ("i2t", "t2i") for k in RECALLS), "loss")

    def per_sample(self, scores: Tensor, y: Tensor) -> Tensor:
        """Contrastive: of all captions of the batch the image's own, and the other way round."""
        return self._contrast(scores, torch.ones(len(scores), dtype=torch.bool, device=scores.device))

    def weighted(self, scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """As for other tasks; a pair that is left out is no negative of the others either."""
        return (self._contrast(scores, weight > 0) * weight).sum() / weight.sum().clamp_min(1e-12)

    def _contrast(self, scores: Tensor, there: Tensor) -> Tensor:
        images, texts = embeddings(scores)
        with torch.autocast(
            scores.device.type, enabled=False
        ):  # half precision is too coarse at this temperature
            similarity = images @ texts.T / TEMPERATURE
        own = torch.arange(len(scores), device=scores.device)
        # Each pair keeps its own place, for a finite loss where it is not there itself.
        hidden = ~(there | (own[:, None] == own))
        similarity, mirrored = (one.masked_fill(hidden, -torch.inf) for one in (similarity, similarity.T))
        both = [F.cross_entropy(one, own, reduction="none") for one in (similarity, mirrored)]
        return (both[0] + both[1]) / 2

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """All embeddings: a rank is among the whole split. The loss is that within batches."""
        return {"pairs": scores, "loss": self.loss(scores, y, "sum")}

    def conclude(self, found: Numbers) -> Numbers:
        """R@1, 5, 10 from image to text and from text to image, and before them their mean."""
        images, texts = embeddings(found["pairs"])
        recalls = {
            f"{name}_r{k}": value
            for name, one, other in (("i2t", images, texts), ("t2i", texts, images))
            for k, value in zip(RECALLS, recalls_at(one, other, RECALLS), strict=True)
        }
        return {"mean_recall": torch.stack([*recalls.values()]).mean(), **recalls, "loss": found["loss"]}

    def held(self, y: np.ndarray) -> tuple[int, ...]:
        """There are no classes."""
        return ()


def embeddings(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of retrieval scores, each of length one."""
    images, texts = scores.float().chunk(2, 1)
    return F.normalize(images), F.normalize(texts)


def mean_average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels of Σ (R_n − R_{n−1})·P_n, equal scores being one threshold.

    A label that no sample has is left out; NaN where that is all of them.
    """
    ranked, order = scores.double().T.contiguous().sort(dim=1, descending=True)
    hits = labels.double().T.gather(1, order)
    last = torch.searchsorted(
        -ranked, -ranked, right=True
    )  # samples down to the last of those that score alike
    precision = hits.cumsum(1).gather(1, last - 1) / last
    positives = hits.sum(1)
    each = (precision * hits).sum(1) / positives
    return each.nanmean()


def macro_f1(answers: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels of 2·TP / (2·TP + FP + FN); 0 for a label nobody has and nobody is given."""
    right = (answers & labels).sum(0).double()
    named = answers.sum(0).double() + labels.sum(0).double()
    return (2 * right / named.clamp_min(1)).mean()


def mean_iou(confusion: Tensor) -> Tensor:
    """The mean of TP / (TP + FP + FN) over the classes that appear, in truth or in the answers."""
    right = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - right
    return (right / union).nanmean()


def recalls_at(queries: Tensor, answers: Tensor, ks: tuple[int, ...]) -> list[Tensor]:
    """How often the answer of a query's own row is among the k most similar.

    Answers that are equally similar stand in random order, and the expectation over it is taken: embeddings that
    are all the same reach k/n, not 1.
    """
    found = torch.zeros(len(ks), dtype=torch.float64, device=queries.device)
    for start in range(0, len(queries), CHUNK):
        similarity = queries[start : start + CHUNK] @ answers.T
        own = similarity.diagonal(start).unsqueeze(1)
        above = (similarity > own).sum(1).double()
        alike = (similarity == own).sum(1).double()
        chances = [((k - above) / alike).clamp(0, 1).sum() for k in ks]
        found += torch.stack(chances)
    return list((found / len(queries)).unbind())


TASK_KINDS: dict[str, TaskKind] = {
    "classification": OneClass(),
    "text-classification": OneClass(),
    "multi-label": MultiLabel(),
    "segmentation": Segmentation(),
    "retrieval": Retrieval(),
}


def task_kind(kind: str) -> TaskKind:
    """The measure of a kind of task."""
    if kind not in TASK_KINDS:
        raise ConfigError(f"there is no task {kind!r}; choose from {', '.join(TASK_KINDS)}")
    return TASK_KINDS[kind]
