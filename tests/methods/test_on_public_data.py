"""Methods on public data in federations of unlike clients: every engine, what crosses, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from potluck.core.dataset import Dataset
from potluck.data import from_arrays, load
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.federation.explain import explain
from potluck.runs.api import run
from potluck.testing.bench import Played
from potluck.testing.contract import require_same_from_tape
from potluck.testing.double_precision import double_precision
from potluck.testing.faulty_engines import Taped

PARTITION = {"kind": "iid", "clients": 1, "test": 0.3}
WORDS = {"zero": 2, "one": 3, "two": 4, "the": 5, "digit": 6}
ANY = {
    "simclr": {"batch": 8},
    "fedhenn": {"weight": 0.5, "samples": 12},
    "creamfl": {"batch": 8},
    "creamfl with muscle": {"name": "creamfl", "regularizer": "muscle", "aggregation": "muscle", "batch": 8},
}
ONE_CLASS = {
    "fedmd": {"samples": 20},
    "cofed": {"margin": 0.05},
    "fccl": {"samples": 20, "pretrain_epochs": 2},
    "rhfl": {"samples": 20, "pretrain_epochs": 2},
    "fed-et": {"steps": 4, "batch": 10},
    "feddf": {"steps": 4, "every": 2, "batch": 10},
}


def few(name: str, rows: int = 40) -> Dataset:
    data = load(name)
    strata = data.strata[:rows] if data.strata is not None else None
    return replace(data, x=data.x[:rows], y=data.y[:rows], strata=strata, train_rows=rows)


def texts() -> Dataset:
    y = np.arange(40) % 3
    data = from_arrays(np.stack([y + 2, y + 5], 1), y, vocabulary=8, name="texts")
    return replace(data, words=WORDS)


def paired() -> Dataset:
    """Captioned digits of which every fourth has lost its caption."""
    data = load("digits-captions")
    kept = tuple("" if row % 4 == 0 else text for row, text in enumerate(data.texts or ()))
    return replace(data, texts=kept)


def experiment(method: dict[str, Any], sets: list[tuple[Dataset, str]], **changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "federation": [{"data": data, "partition": PARTITION, "models": model} for data, model in sets],
        "models": {"rep_dim": 16},
        "method": method,
        "public": {"data": paired(), "samples": 24},
        "training": {"rounds": 2, "batch_size": 16},
        "engine": {"device": "cpu", "workers": 1},
    }
    return Experiment.make(**values | changes)


def mixed(name: str, **changes: Any) -> Experiment:
    """Labels, segments, words and pairs."""
    sets = [(few("digits-attributes"), "conv-small"), (few("digits-segments"), "conv-dense")]
    sets += [(texts(), "text-mean"), (few("digits-captions"), "dual-small")]
    return experiment({"name": name} | ANY[name], sets, **changes)


def alike(name: str, **changes: Any) -> Experiment:
    """Three clients of one task and two architectures."""
    sets = [(few("digits"), model) for model in ("mlp-small", "conv-small", "mlp-small")]
    return experiment({"name": name} | ONE_CLASS[name], sets, **changes)


def asked(name: str, **changes: Any) -> Experiment:
    return mixed(name, **changes) if name in ANY else alike(name, **changes)


@pytest.mark.parametrize("name", [*ANY, *ONE_CLASS])
def test_two_workers_give_the_bits_of_one_process(tmp_path, name):
    one = run(asked(name), out=tmp_path / "one").folder
    two = run(asked(name, engine={"device": "cpu", "workers": 2}), out=tmp_path / "two").folder
    for file in ("metrics.jsonl", "ledger.jsonl"):
        assert (one / file).read_bytes() == (two / file).read_bytes()


@pytest.mark.parametrize("name", ANY)
def test_steps_of_all_tasks_can_be_captured(name):
    with double_precision():
        plain, taped = Played(mixed(name).build()), Played(mixed(name).build(), Taped)
        for played in (plain, taped):
            for _ in range(3):
                assert not played.round(played.federation.population.ids).failures
    require_same_from_tape(plain, taped)


def test_a_sample_one_has_not_got_is_sent_as_zeros_and_counts_nowhere():
    """Texts and pairs lack every fourth caption: their rows of the global table are zero, those of images not."""
    federation = mixed("creamfl").build()
    played = Played(federation)
    for _ in range(2):
        played.round(federation.population.ids)
    tables = played.rounds.server["tables"].tensors()
    assert sorted(tables) == ["image", "pair", "text"]
    missing = federation.population.public().ids % 4 == 0
    assert missing.any()
    for name, table in tables.items():
        empty = (table.abs().sum(1) == 0).numpy()
        assert (empty == (missing & (name != "image"))).all(), name


def test_the_mean_kernel_of_unlike_clients_has_all_samples():
    federation = mixed("fedhenn").build()
    played = Played(federation)
    played.round(federation.population.ids)
    kernel = played.rounds.server["kernel"]["kernel"]
    assert kernel.shape == (12, 12)
    assert bool((kernel.diagonal() > 0).all())  # images have those that lack a caption


SIZES = {  # of client 0: 24 public samples, width 16, 10 classes; |θ| of mlp-small, 128 hidden
    "simclr": (0, 0),
    "fedhenn": (12 * 12, 12 * 12),
    "creamfl": (24 * 16, 3 * 24 * 16),
    "fedmd": (20 * 10, 20 * 10),
    "fccl": (20 * 10, 20 * 10),
    "rhfl": (20 * 10 + 1, 20 * 10),
    "fed-et": (64 * 128 + 128 + 128 * 16 + 16 + 16 * 10 + 10,) * 2,
    "feddf": (64 * 128 + 128 + 128 * 16 + 16 + 16 * 10 + 10,) * 2,
}


@pytest.mark.parametrize(
    ("method", "count"),
    [
        ({"name": "fccl", "samples": 23, "batch": 11}, 2),
        ({"name": "rhfl", "samples": 23, "batch": 11}, 2),
        ({"name": "rhfl", "samples": 24, "batch": 11}, 3),
        ({"name": "rhfl", "samples": 1}, 1),
        ({"name": "fedmuscle", "peers": 1, "batch": 11, "bundle": 3}, 2),
    ],
)
def test_exchanges_are_counted_without_drawing_them(method, count):
    """A million passes are counted as fast as two."""
    name = "passes" if "peers" in method else "public_epochs"
    options = method if "peers" in method else method | {"exchange": "batch"}

    def built(passes):
        sets = [(few("digits"), model) for model in ("mlp-small", "conv-small")]
        return experiment(options | {name: passes}, sets).build()

    federation = built(2)
    public, method_ = federation.population.public(), federation.method
    drawn = method_.exchange.bundles(public, 1) if name == "passes" else method_.pieces(public, 1)
    ((_, exchanges),) = method_.repeats(federation.population).values()
    assert exchanges == len(drawn)
    ((_, many),) = (federation := built(10**6)).method.repeats(federation.population).values()
    assert many == -(-count * 10**6 // method.get("bundle", 1))


@pytest.mark.parametrize("name", SIZES)
def test_what_is_explained_is_the_size_the_papers_count(name):
    told = explain(asked(name).build())
    assert (told["up_scalars"], told["down_scalars"]) == SIZES[name]


def test_what_is_explained_of_cofed_is_a_bound():
    """|P| votes up; at most |P| rows per class held and the counts down."""
    federation = alike("cofed").build()
    held = len(federation.population.classes_held("0"))
    told = explain(federation)
    assert (told["up_scalars"], told["down_scalars"]) == (24, 24 * held + held)


@pytest.mark.parametrize("name", [*ANY, *ONE_CLASS])
def test_without_public_data_they_are_refused(name):
    with pytest.raises(
        ConfigError, match=r"needs public data; name some, .* needs none, such as (local|fedmrl)$"
    ):
        asked(name, public=None).build()


@pytest.mark.parametrize("name", ONE_CLASS)
def test_tasks_that_do_not_agree_are_refused(name):
    sets = [(few("digits-attributes"), "conv-small"), (few("digits"), "mlp-small")]
    refused = "learns from one class per sample; client 0 has multi-label"
    refused = "needs clients with the same task" if name == "fedmd" else refused
    with pytest.raises(ConfigError, match=f"{name} {refused}"):
        experiment({"name": name}, sets).build()


@pytest.mark.parametrize("name", ["fedmd", "feddf", "fed-et", "fccl", "rhfl"])
def test_other_label_sets_are_refused_where_scores_are_averaged(name):
    sets = [(few("digits"), "mlp-small"), (texts(), "text-mean")]
    with pytest.raises(ConfigError, match=f"{name} needs clients with the same task; client 1 has text"):
        experiment({"name": name}, sets).build()


def test_clients_with_other_label_sets_and_modalities_agree_by_votes():
    sets = [(few("digits"), "mlp-small"), (replace(texts(), class_names=("0", "1", "two")), "text-mean")]
    federation = experiment({"name": "cofed", "margin": 0.0}, sets).build()
    assert len(federation.method.numbers) == 11
    played = Played(federation)
    for _ in range(2):
        assert not played.round(federation.population.ids).failures
