"""The tables of docs/models.md are those of the registry."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from potluck.core.task import Task
from potluck.models import POOLS, build, lookup, names

TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^\| (`.*) \|$", TEXT, re.MULTILINE)]
MODELS = {row[0].strip("`"): row[1:] for row in ROWS if len(row) == 7}
IMAGES = Task("classification", 10, (3, 32, 32))
TOKENS = Task("text-classification", 10, (64,), vocabulary=10_000)
PIXELS = Task("segmentation", 10, (3, 32, 32))
PAIRS = Task("retrieval", 10, (3 * 32 * 32 + 64,), vocabulary=10_000, image=(3, 32, 32))
WINDOWS = Task("classification", 10, (6, 128))
TASKS = {"tokens": TOKENS, "pixels": PIXELS, "pair": PAIRS, "window": WINDOWS}


def test_every_model_has_one_row():
    own = [name for name in names() if lookup(name).builder.__module__.startswith("potluck.models")]
    assert sorted(row[0].strip("`") for row in ROWS if len(row) == 7) == own


@pytest.mark.parametrize("name", MODELS)
def test_a_row_says_what_the_model_is(name):
    registered = lookup(name)
    if registered.builder.__module__ == "potluck.models.zoo.hf":
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    with torch.device("meta"):
        model = build(name, TASKS.get(registered.takes[0], IMAGES), check=False)
    options = set(inspect.signature(registered.builder).parameters) - {"task", "rep_dim"}
    assert MODELS[name][:5] == [
        str(model.rep_dim),
        f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "yes" if model.has_stem else "no",
        str(registered.smallest),
        ", ".join(f"`{option}`" for option in sorted(options)),
    ]


def test_what_is_said_of_segmentation():
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    with torch.device("meta"):
        model = build("hf-segformer", PIXELS, check=False)
    trained = [part for part in model.parameters() if part.requires_grad]
    for parts, words in (
        (model.parameters(), "{:,} parameters then"),
        (trained, "With LoRA {:,} parameters are trained"),
        (model.head.parameters(), "{:,} of them the head's"),
    ):
        assert words.format(sum(part.numel() for part in parts)) in TEXT


def test_every_pool_has_its_row():
    shown = {row[0].strip("`"): tuple(re.findall(r"`([^`]+)`", row[1])) for row in ROWS if len(row) == 3}
    assert shown == POOLS
