"""Transformers of the Hugging Face library with LoRA: `hf-vit`, `hf-segformer`, `hf-bert`, `hf-distilbert`.

They need `pip install "potluck[transformers]"`; nothing of it is imported before such a model is built.
`weights` is a folder with `config.json` and safetensors, or a repository of the hub; without it the network
starts from the seed, in the family's default size or with the settings in `config`. LoRA (Hu et
al., ICLR 2022) goes to queries and values, `lora` is its rank (16 in FedMuscle, 0: no LoRA, everything is
trained); with it only LoRA's adapters, the projection to `rep_dim` and the head are trained. Its scale of 1
(alpha equal to the rank) and the choice of layers are our decisions.

Representation: the class token's last state in a vision transformer, the mean over all positions in SegFormer, the
mean over the tokens that are not padding (id 0) in text. Weights for images expect colours normalised as they were
trained with: see `data.normalize`. Weights for text expect the ids of their own tokenizer: see
`data.tokenizer` and `tokenize`.

SegFormer also does segmentation: see `PixelTransformer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.core.modest import MOST_SIDE
from potluck.core.plain_values import shown
from potluck.core.task import Task
from potluck.data.word_pieces import Pieces
from potluck.errors import ModelError
from potluck.models.hugging_face import add_lora, check_options, make_network, network_settings, network_width
from potluck.models.outputs import PADDING
from potluck.models.parts import Backbone
from potluck.models.registry import InputKind, input_kind, register
from potluck.models.zoo.dense import MapsHead

RANK = 16  # FedMuscle
MASKED = -1e9  # finite in bfloat16 too: a text of nothing but padding must not become NaN


class Transformer(Backbone):
    """A network of the library, an adapter to `rep_dim` and a linear head."""

    has_stem = False

    def __init__(
        self,
        task: Task,
        family: str,
        rep_dim: int | None = None,
        adapter: str = "linear",
        weights: str | None = None,
        config: Mapping[str, Any] | None = None,
        lora: int = RANK,
    ) -> None:
        super().__init__()
        check_options(config, lora)
        settings = network_settings(family, weights, config)
        self.prepare(settings, task, fixed=weights is not None)
        self.network = make_network(settings, weights)
        if lora:
            add_lora(self.network, lora)
        self.finish(network_width(settings), task, rep_dim, adapter)

    def prepare(self, settings: Any, task: Task, fixed: bool) -> None:
        """Fit the settings to the task; with weights they are `fixed`, and a task that does not fit is refused."""
        raise NotImplementedError


class ImageTransformer(Transformer):
    """A vision transformer or SegFormer; images are enlarged to the size its patches or weights need."""

    def prepare(self, settings: Any, task: Task, fixed: bool) -> None:
        """Channels as in the task or the weights (grey images are repeated), and sides of whole patches."""
        colours, *sides = task.input
        self.family = settings.model_type
        if not fixed:
            settings.num_channels = colours
        elif colours not in (1, settings.num_channels):
            raise ModelError(
                f"the weights are for {settings.num_channels} channels, the images have {colours}; choose others"
            )
        self.colours = settings.num_channels
        self.size: tuple[int, ...]
        if self.family == "vit" and fixed:
            self.size = _pair(settings.image_size)
        else:
            step = _step(settings)
            self.size = tuple(math.ceil(side / step) * step for side in sides)
        if self.family == "vit":
            settings.image_size = self.size
        else:
            settings.reshape_last_stage = True

    def features(self, x: Tensor) -> Tensor:
        """The representation of a batch of images."""
        return self.represent(self.network(pixel_values=self.fitted(x)).last_hidden_state)

    def fitted(self, x: Tensor) -> Tensor:
        """The images with the network's channels and size."""
        x = x.expand(-1, self.colours, -1, -1)
        return x if x.shape[2:] == self.size else F.interpolate(x, self.size, mode="bilinear")

    def represent(self, last: Tensor) -> Tensor:
        """The features from the last hidden states."""
        features: Tensor = self.resize(last[:, 0] if self.family == "vit" else last.mean((2, 3)))
        return features


class PixelTransformer(ImageTransformer):
    """SegFormer with a class for every pixel, at the resolution of the images.

    Its features describe the whole image, as in classification: encoder, mean, projection. The head is SegFormer's
    decoder over the maps of all stages and, as in `conv-dense`, the features, as one more map with a single
    position, so that methods that align features reach the head. The decoder always starts from the seed.
    """

    def finish(self, native: int, task: Task, rep_dim: int | None, adapter: str) -> None:
        """The adapter, and the decoder in place of a linear head."""
        super().finish(native, task, rep_dim, adapter)
        known: Any = self.network.config
        widths = [*known.hidden_sizes, self.rep_dim]
        self.head = MapsHead(widths, known.decoder_hidden_size, task.classes, known.classifier_dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of every pixel, (batch, classes, height, width)."""
        found = self.network(pixel_values=self.fitted(x), output_hidden_states=True)
        view = self.represent(found.last_hidden_state)[:, :, None, None]
        return F.interpolate(self.head([*found.hidden_states, view]), x.shape[2:], mode="bilinear")


class TextTransformer(Transformer):
    """BERT or DistilBERT on token ids; 0 is padding."""

    def prepare(self, settings: Any, task: Task, fixed: bool) -> None:
        """The task's vocabulary, and enough positions for its texts."""
        if task.vocabulary is None:
            raise ModelError(
                "a text model needs a task with a vocabulary; give it texts, or choose another model"
            )
        if not fixed:
            settings.vocab_size = task.vocabulary
        elif settings.vocab_size != task.vocabulary:
            raise ModelError(
                f"the weights know {settings.vocab_size} token ids, the task has {task.vocabulary}: "
                "make the ids with the tokenizer of the weights (data.tokenizer, or potluck.models.zoo.hf.tokenize)"
            )
        if task.input[0] > settings.max_position_embeddings:
            longest = settings.max_position_embeddings
            raise ModelError(
                f"the texts have {task.input[0]} tokens, the network takes {longest} at most; lower data.length"
            )

    def features(self, x: Tensor) -> Tensor:
        """The representation of a batch of token ids."""
        kept = (x != PADDING).float()
        mask = (1 - kept) * MASKED
        # Expanded, because the library uses such a mask as it is; for a mask per text it would read values back.
        mask = mask[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        last: Tensor = self.network(input_ids=x, attention_mask=mask).last_hidden_state
        weight = kept[..., None].to(last.dtype)
        features: Tensor = self.resize((last * weight).sum(1) / weight.sum(1).clamp_min(1))
        return features


def tokenize(source: str, texts: Sequence[str], length: int) -> tuple[Tensor, Pieces]:
    """Token ids (texts × length) from the tokenizer of a folder or hub repository, and that tokenizer.

    `from_arrays(ids, y, vocabulary=tokenizer)` is a data set whose clients can also read public texts.
    """
    pieces = Pieces.of(source)
    return torch.from_numpy(pieces.encode(texts, length)), pieces


def _step(settings: Any) -> int:
    """The sides of an image are multiples of this: a patch, or what SegFormer's first attention reduces."""
    vit = settings.model_type == "vit"
    step = int(settings.patch_size if vit else settings.strides[0] * settings.sr_ratios[0])
    if not 1 <= step <= MOST_SIDE:
        option = "patch_size" if vit else "strides times sr_ratios, of the first stage,"
        raise ModelError(f"config: {option} is {shown(step)}; give 1 to {MOST_SIDE:,}")
    return step


def _pair(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def _register(name: str, family: str, kinds: Mapping[InputKind, type[Transformer]]) -> None:
    @register(name, takes=tuple(kinds))
    def transformer(
        task: Task,
        rep_dim: int | None = None,
        adapter: str = "linear",
        weights: str | None = None,
        config: Mapping[str, Any] | None = None,
        lora: int = RANK,
    ) -> Transformer:
        made = next(made for kind, made in kinds.items() if kind == input_kind(task))
        return made(task, family, rep_dim, adapter, weights, config, lora)


_register("hf-vit", "vit", {"image": ImageTransformer})
_register("hf-segformer", "segformer", {"image": ImageTransformer, "pixels": PixelTransformer})
_register("hf-bert", "bert", {"tokens": TextTransformer})
_register("hf-distilbert", "distilbert", {"tokens": TextTransformer})
