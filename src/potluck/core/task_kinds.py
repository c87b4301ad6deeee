"""The kinds of tasks: the loss of each, what evaluation gathers from a batch, and the metrics computed from that.

All of it is tensor operations of fixed shapes on the device, so that it can be captured. A batch gives either sums,
which are added up over batches (`sums`), or one row per sample, which are concatenated (`whole`): a mean average
precision, for example, cannot be added up. Both stay on the client; only the metrics leave it.
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
TEMPERATURE = 0.07  # of the contrastive loss; our choice
CHUNK = 1024  # rows of a similarity matrix at a time


class TaskKind:
    """One kind of task. The first metric that `conclude` returns is the one clients are compared by."""

    whole: ClassVar[tuple[str, ...]] = ()  # names gathered as one row per sample
    told: ClassVar[tuple[str, ...]]  # names of the metrics that `conclude` returns and a client reports

    def sums(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the sums that are added up over batches."""
        return {"loss": ()}

    def loss(self, scores: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The loss of a batch; with reduction "none", one loss per sample."""
        each = self.per_sample(scores, y)
        return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()

    def weighted(self, scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """The weighted mean loss of a batch; a weight of 0 leaves a sample out."""
        return (self.loss(scores, y, "none") * weight).sum() / weight.sum().clamp_min(1e-12)

    def per_sample(self, scores: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample."""
        raise NotImplementedError

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """The sums and rows of one batch."""
        raise NotImplementedError

    def conclude(self, found: Numbers) -> Numbers:
        """The metrics of a whole split: fractions, and the sum of the losses."""
        raise NotImplementedError

    def held(self, y: np.ndarray) -> tuple[int, ...]:
        """The classes that appear in these labels."""
        return tuple(int(label) for label in np.unique(y))


class OneClass(TaskKind):
    """One class per sample. Its two sums are also its metrics, as they can be added up over clients."""

    told = ("correct", "loss")

    def sums(self, classes: int) -> dict[str, tuple[int, ...]]:
        """The number of right answers and the sum of losses."""
        return {"correct": (), "loss": ()}

    def loss(self, scores: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(scores, y, reduction=reduction)

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """Sums over the batch."""
        return {"correct": (scores.argmax(1) == y).sum(), "loss": self.loss(scores, y, "sum")}

    def conclude(self, found: Numbers) -> Numbers:
        """The sums, unchanged."""
        return found


class MultiLabel(TaskKind):
    """Any number of labels per sample: y is (batch, classes), 1 where the sample has the label."""

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
        """The labels that at least one sample has."""
        return tuple(int(label) for label in np.flatnonzero(y.any(axis=0)))


class Segmentation(TaskKind):
    """A class per pixel: scores are (batch, classes, height, width), y (batch, height, width)."""

    told = ("mean_iou", "pixel_accuracy", "loss")

    def sums(self, classes: int) -> dict[str, tuple[int, ...]]:
        """The confusion matrix of pixels, and the sum of losses."""
        return {"confusion": (classes, classes), "loss": ()}

    def per_sample(self, scores: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy, the mean over pixels."""
        return F.cross_entropy(scores, y.long(), reduction="none").mean((1, 2))

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """The confusion matrix: pixels by true class (row) and predicted class (column)."""
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
    """Images and captions: scores are (batch, 2·d), an image's embedding, then its caption's; y is not used."""

    whole = ("pairs",)
    told = ("mean_recall", *(f"{way}_r{k}" for way in ("i2t", "t2i") for k in RECALLS), "loss")

    def per_sample(self, scores: Tensor, y: Tensor) -> Tensor:
        """Contrastive: find an image's own caption among those of the batch, and a caption's own image."""
        return self._contrast(scores, torch.ones(len(scores), dtype=torch.bool, device=scores.device))

    def weighted(self, scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """As for other tasks; a pair that is left out is also not used as a negative of the others."""
        return (self._contrast(scores, weight > 0) * weight).sum() / weight.sum().clamp_min(1e-12)

    def _contrast(self, scores: Tensor, there: Tensor) -> Tensor:
        images, texts = embeddings(scores)
        with torch.autocast(
            scores.device.type, enabled=False
        ):  # half precision is too coarse at this temperature
            similarity = images @ texts.T / TEMPERATURE
        own = torch.arange(len(scores), device=scores.device)
        # A pair that is left out still sees itself: with nothing to see its loss would not be finite.
        hidden = ~(there | (own[:, None] == own))
        similarity, mirrored = (one.masked_fill(hidden, -torch.inf) for one in (similarity, similarity.T))
        both = [F.cross_entropy(one, own, reduction="none") for one in (similarity, mirrored)]
        return (both[0] + both[1]) / 2

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """All embeddings, as ranks are computed over the whole split; the loss is computed within batches."""
        return {"pairs": scores, "loss": self.loss(scores, y, "sum")}

    def conclude(self, found: Numbers) -> Numbers:
        """Recall at 1, 5 and 10 from image to text and from text to image; their mean comes first."""
        images, texts = embeddings(found["pairs"])
        recalls = {
            f"{name}_r{k}": value
            for name, one, other in (("i2t", images, texts), ("t2i", texts, images))
            for k, value in zip(RECALLS, recalls_at(one, other, RECALLS), strict=True)
        }
        return {"mean_recall": torch.stack([*recalls.values()]).mean(), **recalls, "loss": found["loss"]}

    def held(self, y: np.ndarray) -> tuple[int, ...]:
        """None: pairs have no classes."""
        return ()


class Regression(TaskKind):
    """Numbers: scores are (batch, outputs), y (batch, outputs), or (batch,) where there is one output."""

    whole = ("scores", "labels")
    told = ("r2", "mse", "mae", "loss")

    def per_sample(self, scores: Tensor, y: Tensor) -> Tensor:
        """The squared error, the mean over outputs."""
        return (scores - y.to(scores.dtype).view_as(scores)).square().mean(1)

    def gather(self, scores: Tensor, y: Tensor) -> Numbers:
        """The predictions and labels themselves: the variance of y from sums of squares would cancel."""
        labels = y.to(scores.dtype).view_as(scores)
        return {"scores": scores, "labels": labels, "loss": self.loss(scores, y, "sum")}

    def conclude(self, found: Numbers) -> Numbers:
        """R², the mean squared and the mean absolute error, all means over outputs."""
        scores, labels = found["scores"].double(), found["labels"].double()
        errors = scores - labels
        return {
            "r2": r_squared(errors, labels),
            "mse": errors.square().mean(),
            "mae": errors.abs().mean(),
            "loss": found["loss"],
        }

    def held(self, y: np.ndarray) -> tuple[int, ...]:
        """None: numbers have no classes."""
        return ()


def r_squared(errors: Tensor, labels: Tensor) -> Tensor:
    """The mean over outputs of 1 − Σ error² / Σ (y − ȳ)², from rows of float64.

    Outputs whose y is everywhere the same are left out; NaN where no output is left, as for a single sample.
    """
    spread = (labels - labels.mean(0)).square().sum(0)
    return torch.where(spread > 0, 1 - errors.square().sum(0) / spread, torch.nan).nanmean()


def embeddings(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings of images and captions in retrieval scores, normalised to length 1."""
    images, texts = scores.float().chunk(2, 1)
    return F.normalize(images), F.normalize(texts)


def mean_average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels of Σ (R_n − R_{n−1})·P_n; samples with equal scores share one threshold.

    Labels that no sample has are left out; NaN where no label is left.
    """
    ranked, order = scores.double().T.contiguous().sort(dim=1, descending=True)
    hits = labels.double().T.gather(1, order)
    last = torch.searchsorted(-ranked, -ranked, right=True)  # how many samples score at least as high
    precision = hits.cumsum(1).gather(1, last - 1) / last
    positives = hits.sum(1)
    each = (precision * hits).sum(1) / positives
    return each.nanmean()


def macro_f1(answers: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels of 2·TP / (2·TP + FP + FN); 0 for a label that is never true nor predicted."""
    right = (answers & labels).sum(0).double()
    named = answers.sum(0).double() + labels.sum(0).double()
    return (2 * right / named.clamp_min(1)).mean()


def mean_iou(confusion: Tensor) -> Tensor:
    """The mean of TP / (TP + FP + FN) over the classes that are true or predicted somewhere."""
    right = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - right
    return (right / union).nanmean()


def recalls_at(queries: Tensor, answers: Tensor, ks: tuple[int, ...]) -> list[Tensor]:
    """The share of queries whose own answer (the same row) is among the k most similar ones.

    Ties count as their expectation over a random order: if all embeddings are the same, the recall is k/n, not 1.
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
    "regression": Regression(),
}


def task_kind(kind: str) -> TaskKind:
    """The task kind of that name."""
    if kind not in TASK_KINDS:
        raise ConfigError(f"there is no task {kind!r}; choose from {', '.join(TASK_KINDS)}")
    return TASK_KINDS[kind]
