"""Options that would do nothing are refused by name; a file that spells out every default loads again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from potluck import Experiment
from potluck.errors import ConfigError
from potluck.methods.registry import find_method, method_names
from potluck.runs.advice import advice
from potluck.runs.pilots import with_option

NO_MODEL_CROSSES = ("local", "fedproto", "cofed", "creamfl", "fedhenn", "fedmd", "fedmuscle", "simclr")
NO_MODEL_CROSSES += ("fd", "fedhe", "fedl2g", "fedtgp")
NO_MODEL_CROSSES += ("fccl", "gramian", "pairwise", "rhfl")


def asked(method: Any, models: Any = "mlp-small", **values: Any) -> Experiment:
    values = {"data": "digits", "partition": {"kind": "iid", "clients": 4}} | values
    return Experiment.make(**values, models=models, method=method, engine={"device": "cpu"})


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        *((name, {"buffers": "local"}, "method.buffers: ") for name in NO_MODEL_CROSSES),
        ("fedmuscle", {"loss": "gramian", "normalize": False}, "normalize does nothing with loss: gramian"),
        ("fedmuscle", {"peers": 1, "tau_prev": 0.1}, "tau_prev does nothing with one peer"),
        ("fedmuscle", {"peers": 1, "positive": "plain"}, "positive does nothing with one peer"),
        ("fedmuscle", {"loss": "pairwise", "positive": "plain"}, "positive does nothing with loss: pairwise"),
        ("fedmuscle", {"tau_prev": 0.2, "positive": "plain"}, "positive does nothing where tau_prev is tau"),
        ("fedmrl", {"d1": 8, "tune": {"rounds": 2}}, "tune does nothing with d1: 8; it is for auto"),
        ("fedmrl", {"weight_widths": 0.5}, "weight_widths does nothing without widths"),
        ("creamfl", {"distil": 0.1}, "distil does nothing without server_model"),
        ("creamfl", {"muscle_tau": 0.3}, "muscle_tau does nothing without the Muscle loss"),
        ("creamfl", {"regularizer": "muscle", "tau": 0.3}, "tau does nothing with regularizer: muscle"),
        ("fedgen", {"buffers": "local"}, "method.buffers: "),
        ("fedgen", {"answer": 0, "generated": 8}, "generated does nothing at answer: 0"),
        ("fedtgp", {"server_epochs": 0, "margin_cap": 5}, "margin_cap does nothing at server_epochs: 0"),
        ("lg-fedavg", {"layers": [], "weights": "samples"}, "weights does nothing with layers: []"),
        ("moon", {"width": 64}, "width does nothing with projector: between; it is for beside"),
        ("fccl", {"own": "mean"}, "own does nothing with exchange: round"),
        ("feddf", {"validation": 0, "patience": 5}, "patience does nothing at validation: 0"),
    ],
)
def test_an_option_without_effect_is_refused(method: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked({"name": method, **options})
    assert sentence in str(error.value)


def test_options_about_samples_that_nobody_has_are_refused() -> None:
    public = {"data": "digits", "samples": 40}
    with pytest.raises(
        ConfigError, match=r"method\.drop does nothing here, as no client has samples other than"
    ):
        asked({"name": "simclr", "drop": 0.5}, public=public).build()
    asked("simclr", public=public).build()


@pytest.mark.parametrize("method", method_names())
def test_what_a_run_writes_down_loads_again(method: str) -> None:
    config = find_method(method).Config(name=method)
    assert type(config)(**config.model_dump()) == config


def test_how_d1_was_chosen_is_forgotten_once_it_is() -> None:
    """The options with the value in place, as a site is given them, must pass."""
    chosen = with_option(asked({"name": "fedmrl", "d1": "auto", "tune": {"rounds": 2}}), "d1", 8).method
    assert type(chosen)(**chosen.model_dump()) == chosen


# --- pairing ----------------------------------------------------------------------------------------------


def initial(**options: Any) -> dict[str, torch.Tensor]:
    """The first state of a client and of the server."""
    built = asked({"name": "fedmrl", **options}, {"pool": ["mlp-small", "mlp-large"], "rep_dim": 24}).build()
    server = {f"server/{name}": value for name, value in built.server()["small"].state().items()}
    return server | dict(built.clients.build_client("1").snapshot())


def test_without_mrl_everything_but_the_header_is_drawn_as_with_it() -> None:
    nested, full = initial(d1=8), initial(d1=8, mrl="full")
    same = [name for name in nested if not name.startswith(("server/head", "small/head"))]
    assert {"server/fc1.weight", "projector/weight"} <= set(same)
    assert [name for name in same if not torch.equal(nested[name], full[name])] == []


def test_where_both_headers_see_everything_the_variants_are_one() -> None:
    nested, full = initial(d1=24), initial(d1=24, mrl="full")
    assert nested.keys() == full.keys()
    assert [name for name in nested if not torch.equal(nested[name], full[name])] == []


# --- what is averaged -------------------------------------------------------------------------------------


class Renamed(nn.Module):
    """Layers of the same shapes as those of `Plain`, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.into(x.flatten(1))))


class Plain(Renamed):
    """The other one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.into
        del self.into

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.first(x.flatten(1))))


def said(method: Any, models: Any) -> str:
    return " ".join(sentence for sentence in advice(asked(method, models).build()) if "averaged" in sentence)


def test_models_that_share_but_the_head_are_spoken_of() -> None:
    by_layers = {"name": "fedavg", "share": "layers"}
    assert "(as of 2 of 2 models) unlike models have only the head" in said(by_layers, [Plain, Renamed])
    assert said(by_layers, [Plain]) == ""
    assert said("fedavg", [Plain, Renamed]) == ""  # within groups, as asked
    assert said({"name": "fedin", "noise": 0.8}, ["resnet10", "resnet14"]) == ""


def test_where_nothing_is_averaged_it_is_said() -> None:
    four = ["mlp-small", "mlp-large", "conv-small", "conv-large"]
    assert "no two clients have a tensor in common under method.share: groups" in said("fedavg", four)
