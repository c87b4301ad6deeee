"""Every method against the whole contract."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

from potluck.core.settings import Settings
from potluck.methods.registry import find_method, method_names
from potluck.testing.bench import DEFAULT_MODELS, Bench
from potluck.testing.contract import CHECKS, Check
from staged_nets import OneBlock, ThreeExits, TwoBlocks, TwoExits

VARIANTS = {
    "fedavg": {},
    "fedapen, mutual learning alone": {
        "name": "fedapen",
        "variant": "learned_adaptive",
        "held_out": 0.3,
        "passes": 2,
    },
    "fedavg by layers": {"name": "fedavg", "share": "layers", "weights": "uniform"},
    "fedavg by layers, of low rank": {
        "name": "fedavg",
        "share": "layers",
        "compress": {"start": 0.9, "end": 0.9},
    },
    "fedavg, weights of low rank": {"name": "fedavg", "compress": {"of": "weights"}},
    "fedavg, buffers at home": {"name": "fedavg", "buffers": "local"},
    "cofed": {"threshold": 0.2, "margin": 0.1, "batch": 60},
    "cofed, weighted": {"name": "cofed", "weights": "samples", "batch": 30, "margin": 0.0},
    "creamfl, muscle": {"name": "creamfl", "regularizer": "muscle", "aggregation": "muscle", "batch": 20},
    "creamfl, a server model": {"name": "creamfl", "server_model": "mlp-large", "batch": 20},
    "fd, without oneself": {"name": "fd", "exclude_self": True, "distance": "mse", "weights": "count"},
    "fedhe, running sums": {"name": "fedhe", "forget": 2},
    "fccl": {"pretrain_epochs": 1, "batch": 20, "public_lr": 0.005},
    "fccl, batch by batch": {"name": "fccl", "pretrain_epochs": 3, "batch": 30, "exchange": "batch"},
    "fed-et": {"steps": 5, "batch": 20},
    "fed-et, a larger server": {
        "name": "fed-et",
        "server": "mlp-large",
        "steps": 3,
        "weights": "samples",
    },
    "feddf": {"steps": 5, "every": 2, "batch": 20},
    "feddf, nothing held back": {"name": "feddf", "steps": 3, "validation": 0, "weights": "uniform"},
    "fedhenn": {"weight": 0.1, "samples": 20},
    "fedhenn, kernels of parts": {"name": "fedhenn", "samples": 16, "batch": 5, "send": "kernel"},
    "fedkd, of weights": {"name": "fedkd", "compress": {"of": "weights", "start": 0.8, "end": 0.9}},
    "fedkd, not compressed": {"name": "fedkd", "compress": None, "clip": None, "small_lr": 0.01},
    "fedapen, of low rank": {"name": "fedapen", "compress": {"start": 0.5, "end": 0.5}, "passes": 2},
    "fedmd, few samples": {
        "name": "fedmd",
        "samples": 20,
        "digest_epochs": 2,
        "digest_batch": 8,
        "initial": 2,
    },
    "fedin": {"noise": 0.8, "batch": 4},
    "fedin, without features": {"name": "fedin", "intermediate": False, "noise": 0.8, "noise_per": "channel"},
    "fedin, literal": {
        "name": "fedin",
        "alleviate": "exact",
        "combine": "replace",
        "schedule": "alternate",
        "noise": 0.8,
        "noise_per": "channel",
        "batch": 4,
        "batches": 2,
        "pool": "all",
    },
    "fedin by groups, projected": {
        "name": "fedin",
        "share": "groups",
        "noise": 0.8,
        "weights": "samples",
        "buffers": "average",
        "project": "averaged",
        "project_in": [8, 2, 2],
        "project_out": 16,
        "batch": 4,
    },
    "fedmrl": {"d1": 16},
    "fedmrl, d1 per client": {"name": "fedmrl", "d1": [16, 8, 4], "widths": [6, 32], "weights": "uniform"},
    "fedmrl, MRL-E": {"name": "fedmrl", "d1": 16, "global_header": False, "projector": "deep"},
    "fedmrl, full width": {"name": "fedmrl", "d1": 16, "mrl": "full"},
    "fedmrl, local only": {"name": "fedmrl", "d1": 16, "mrl": "local_only", "lr": {"small": 0.01}},
    "fedmrl, tied headers": {
        "name": "fedmrl",
        "d1": 16,
        "tie_headers": True,
        "projector": "none",
        "weight_small": lambda report: 1 / (1 + report["large"]),
    },
    "fml, weights of its own": {"name": "fml", "alpha": 0.2, "weights": "samples", "small_lr": 0.01},
    "fedmuscle": {"batch": 30, "peers": 2},
    "fedmuscle, plain positive": {"name": "fedmuscle", "batch": 30, "peers": 2, "positive": "plain"},
    "fedmuscle, bundled": {
        "name": "fedmuscle",
        "batch": 15,
        "bundle": 3,
        "peers": 1,
        "redraw": "round",
        "learned": True,
        "first": "alignment",
        "accounting": "paper",
    },
    "fedproto, online": {
        "name": "fedproto",
        "online": True,
        "distance": "l2",
        "weight": 0.01,
        "weights": "count",
    },
    "fedre, kept weights of samples": {
        "name": "fedre",
        "mechanism": "RAR",
        "weights": "gaussian",
        "fixed": True,
    },
    "fedre, single samples, noise, coarse labels": {
        "name": "fedre",
        "mechanism": "RSR",
        "noise": 0.5,
        "levels": 2,
        "server_loss": "mean",
    },
    "fedtgp": {"server_epochs": 3},
    "fedtgp, plain means": {"name": "fedtgp", "server_epochs": 0, "weight": 0.01, "distance": "l2"},
    "fednova by layers": {"name": "fednova", "share": "layers", "mu": 0.1, "server_momentum": 0.5},
    "lg-fedavg, two layers": {"name": "lg-fedavg", "layers": ["fc", "head"], "weights": "samples"},
    "moon by layers, beside": {
        "name": "moon",
        "share": "layers",
        "projector": "beside",
        "width": 8,
        "previous": 2,
        "buffers": "local",
    },
    "moon without a projector": {"name": "moon", "projector": "none", "mu": 5.0},
    "gramian": {"batch": 30, "peers": 2},
    "pairwise": {"batch": 30, "peers": 2},
    "rhfl": {"pretrain_epochs": 3, "batch": 20},
    "rhfl, batch by batch": {
        "name": "rhfl",
        "pretrain_epochs": 0,
        "batch": 30,
        "exchange": "batch",
        "private_epochs": "published",
    },
    "fedrolex, a parent nobody holds": {
        "name": "fedrolex",
        "parent": {"name": "conv-large", "scale": 0.3},
        "window": "random",
        "sbn": False,
        "scaler": False,
        "mask": False,
        "label_split": False,
        "clip": None,
    },
    "fjord, distilled": {"name": "fjord", "distil": True, "alpha": 0.5, "temperature": 2.0},
    "inclusivefl, all shared": {
        "name": "inclusivefl",
        "local_last": "none",
        "local_head": False,
        "weights": "samples",
    },
    "inco, negative products": {"name": "inco", "sign": "negative", "server_lr": 0.5},
    "scalefl": {"warmup": 1},
    "scalefl, as released": {"name": "scalefl", "warmup": 0, "compat": True, "weights": "samples"},
    "fedgen": {"steps": 4},
    "fedgen, HtFLlib": {
        "name": "fedgen",
        "steps": 4,
        "teacher": "mean_logits",
        "diversity": 0,
        "answer": 1,
        "distil": 0,
        "decay": 1,
        "student": 0.1,
    },
    "fedgen, few guided epochs": {"name": "fedgen", "steps": 4, "guided_epochs": 1},
    "fedl2g": {"warm_up": 1},
    "fedl2g, features": {"name": "fedl2g", "warm_up": 0, "space": "feature", "study": 2, "clip": 1.0},
    "heterofl, by samples": {
        "name": "heterofl",
        "weights": "samples",
        "sbn": False,
        "buffers": "local",
        "scaler": False,
    },
    "scaffold, option II": {"name": "scaffold", "variate": "option2"},
}
WIDTHS = [{"name": "conv-large", "scale": 0.2}, {"name": "conv-large", "scale": 0.1}]  # of one architecture
STAGED = (OneBlock, TwoBlocks)
MODELS: dict[str, Any] = {
    "fed-et": {"pool": list(DEFAULT_MODELS), "rep_dim": 16},
    "fed-et, a larger server": {"pool": ["mlp-small"], "rep_dim": 16},
    **dict.fromkeys(("heterofl", "heterofl, by samples", "fedrolex", "fjord", "fjord, distilled"), WIDTHS),
    "fedrolex, a parent nobody holds": WIDTHS,
    "fedin": ("conv-small", "conv-large"),  # their features must have one shape
    "fedin, literal": ("mlp-small", "mlp-large"),
    "fedin, without features": ("mlp-small", "mlp-large"),
    **dict.fromkeys(("inclusivefl", "inclusivefl, all shared"), STAGED),
    "inco": STAGED,
    "inco, negative products": STAGED,
    **dict.fromkeys(("scalefl", "scalefl, as released"), (TwoExits, ThreeExits)),
    "fedmrl, full width": {"pool": ["mlp-small", "mlp-large"], "rep_dim": 24},
    "fedmuscle": {"pool": list(DEFAULT_MODELS), "rep_dim": 16},
    "fedmuscle, plain positive": {"pool": ["mlp-small", "mlp-large"], "rep_dim": 16},
    "fedmuscle, bundled": {"pool": ["mlp-small", "mlp-large"], "rep_dim": 16},
    "lg-fedavg, two layers": ("mlp-small", "mlp-large"),
    "gramian": {"pool": ["mlp-small", "mlp-large"], "rep_dim": 16},
    "pairwise": {"pool": ["mlp-small", "mlp-large"], "rep_dim": 16},
    **dict.fromkeys(
        ("cofed, weighted", "fccl, batch by batch", "fedmd, few samples", "rhfl", "rhfl, batch by batch"),
        ("mlp-small", "mlp-large"),
    ),  # quick ones
}
METHODS = [*method_names(), *(name for name in VARIANTS if name not in method_names())]


@pytest.fixture(scope="module", params=METHODS)
def bench(request: pytest.FixtureRequest) -> Bench:
    options = {"name": request.param} | VARIANTS.get(request.param, {})
    return Bench(options, MODELS.get(request.param, DEFAULT_MODELS))


def undescribed(settings: type[Settings], path: str = "") -> list[str]:
    """The fields of a block of settings, and of blocks inside, that do not say what they mean."""
    found = []
    for name, field in settings.model_fields.items():
        if not field.description:
            found.append(f"{path}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            found += undescribed(field.annotation, f"{path}{name}.")
    return found


@pytest.mark.parametrize("method", method_names())
def test_every_option_says_what_it_means(method: str) -> None:
    assert undescribed(find_method(method).Config) == []


def test_an_option_without_a_description_is_found() -> None:
    class Inner(Settings):
        rate: float = 0.1

    class Outer(Settings):
        inner: Inner = Field(default=Inner(), description="a block inside")

    assert undescribed(Outer) == ["inner.rate"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(bench: Bench, check: Check) -> None:
    check(bench)
