"""Modules that answer with an object whose `.logits` are the scores, as those of Hugging Face do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from potluck import Experiment, from_arrays, run
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.errors import ModelError
from potluck.models import adapt

IMAGES = Task("classification", 3, (3, 16, 16))
TEXTS = Task("text-classification", 3, (12,), vocabulary=40)


@dataclass
class Output:
    """Stands in for `transformers.modeling_outputs.SequenceClassifierOutput`."""

    logits: Tensor
    hidden_states: None = None


class Classifier(nn.Module):
    """Answers as a classifier of images or texts does; padded tokens count only where the mask is not used."""

    def __init__(self, tokens: bool = False, outputs: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8) if tokens else nn.Conv2d(3, 8, 8, stride=8)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(8, outputs)
        self.masks: list[Tensor | None] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        self.masks.append(attention_mask)
        places = self.embedding(input_ids)
        if attention_mask is None:
            return Output(self.classifier(self.dropout(places.flatten(2).mean(2))))
        kept = attention_mask.unsqueeze(2)
        return Output(self.classifier(self.dropout((places * kept).sum(1) / kept.sum(1).clamp_min(1))))


class LastToken(nn.Module):
    """Scores every token and returns the scores of the last one that is no padding, as generative models do."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding, self.score, self.after = nn.Embedding(40, 8), nn.Linear(8, 3), after or nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        scores = self.score(self.embedding(input_ids))
        places = torch.arange(input_ids.shape[1]) * (input_ids != 0)
        return Output(self.after(scores[torch.arange(len(scores)), places.argmax(1)]))


def texts() -> Tensor:
    return torch.from_numpy(Rng(1).numpy().integers(0, 40, size=(6, 12)))


def test_the_head_is_found_and_features_are_what_goes_into_it() -> None:
    module = Classifier().eval()
    model, x = adapt(module, task=IMAGES).eval(), torch.ones(2, *IMAGES.input)
    assert torch.equal(model(x), module(x).logits)
    assert torch.equal(model.head(model.features(x)), module(x).logits)
    assert (model.rep_dim, model.head_path) == (8, "classifier")  # type: ignore[attr-defined]
    assert module.masks[0] is None  # images have no padding


def test_token_ids_come_with_a_mask_of_their_padding() -> None:
    model, x = adapt(Classifier(tokens=True), task=TEXTS).eval(), texts()
    model(x)
    assert torch.equal(model.trunk.masks[-1], (x != 0).long())  # type: ignore[union-attr, index, arg-type]


def test_a_head_on_every_token_gives_features_of_the_token_that_counts() -> None:
    module = LastToken()
    model, x = adapt(module, task=TEXTS), texts()
    assert torch.equal(model(x), module(x).logits)
    assert model.features(x).shape == (6, 8)


def test_what_follows_such_a_head_is_found() -> None:
    with pytest.raises(ModelError, match=r"LastToken changes the scores after layer 'score'"):
        adapt(LastToken(nn.Tanh()), head="score", task=TEXTS)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Classifier(outputs=4), "client 0: the head gives 4 scores, the task has 3 classes"),
        (nn.Sequential(nn.Flatten(), nn.LSTM(768, 3)), "client 0: Sequential .*"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(module: nn.Module, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        adapt(module, task=IMAGES, who="client 0")


def test_an_object_without_logits_is_named() -> None:
    class Backbone(Classifier):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            return {"last_hidden_state": super().forward(input_ids).logits}

    with pytest.raises(ModelError, match=r"Backbone gave a dict, expected one tensor .*as \.logits"):
        adapt(Backbone(), task=IMAGES)


def federation(module: nn.Module, tokens: bool) -> Experiment:
    draw, y = Rng(2).numpy(), np.arange(40) % 3
    images = draw.normal(size=(40, *IMAGES.input)).astype(np.float32)
    data = from_arrays(texts().repeat(7, 1)[:40], y, vocabulary=40) if tokens else from_arrays(images, y)
    return Experiment.make(
        data=data,
        partition={"kind": "iid", "clients": 2},
        models=[module],
        method={"name": "fedmrl", "d1": 4},
        training={"rounds": 1, "batch_size": 8},
        engine={"device": "cpu"},
    )


@pytest.mark.parametrize("tokens", [False, True])
def test_they_train_in_a_federation(tokens: bool, tmp_path: Path) -> None:
    result = run(federation(Classifier(tokens), tokens), out=tmp_path / "run")
    assert result.summary["rounds"] == 1


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}


@pytest.mark.parametrize("family", ["ViT", "ResNet", "Bert", "Roberta", "DistilBert", "GPT2"])
def test_those_of_the_library_work_as_they_are(family: str, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    wide = {"hidden_size": 16, "intermediate_size": 16, **SMALL}
    settings: dict[str, dict[str, Any]] = {
        "ViT": {"image_size": 16, "patch_size": 8, **wide},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3},
        "Bert": {"vocab_size": 40, **wide},
        "Roberta": {"vocab_size": 40, "pad_token_id": 0, **wide},
        "DistilBert": {
            "vocab_size": 40,
            "dim": 16,
            "n_layers": 1,
            "n_heads": 2,
            "hidden_dim": 16,
            "num_labels": 3,
        },
        "GPT2": {
            "vocab_size": 40,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "pad_token_id": 0,
            "num_labels": 3,
        },
    }
    images = family in ("ViT", "ResNet")
    kind = f"{family}For{'Image' if images else 'Sequence'}Classification"
    module = getattr(library, kind)(getattr(library, f"{family}Config")(**settings[family]))
    model = adapt(module, task=IMAGES if images else TEXTS).eval()
    x = torch.ones(2, *IMAGES.input) if images else texts()
    told = {} if images else {"attention_mask": (x != 0).long()}
    torch.testing.assert_close(model(x), module.eval()(x, **told).logits)
    assert run(federation(module, tokens=not images), out=tmp_path / "run").summary["rounds"] == 1
