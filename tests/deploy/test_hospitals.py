"""The three hospitals of the example: their files work as they stand."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from potluck.core.model import Model
from potluck.data import ClientSplit, Split, from_arrays
from potluck.deploy.agreement import Agreement
from potluck.deploy.rehearsal import rehearse
from potluck.experiment.overrides import read_yaml
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals"
SITES = ("north", "east", "west")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example elsewhere, with its data."""
    folder = tmp_path_factory.mktemp("federation") / "hospitals"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("data", "keys", "runs", "homes"))
    runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    return folder


def arrays(part: Any) -> tuple[np.ndarray, np.ndarray]:
    """A pair of arrays, or a map-style data set of pairs."""
    pairs = (
        part if isinstance(part, tuple) else tuple(zip(*(part[row] for row in range(len(part))), strict=True))
    )
    return np.stack([np.asarray(one) for one in pairs[0]]), np.asarray(pairs[1])


def federation_of(hospitals: Path, site: str) -> Federation:
    """A hospital on its own, under the method of the experiment file."""
    own = runpy.run_path(str(hospitals / site / "site.py"))
    parts = {split: arrays(part) for split, part in own["load"]().items()}
    x, y = (np.concatenate([parts[split][number] for split in ("train", "test")]) for number in (0, 1))
    rows = np.split(np.arange(len(y)), [len(parts["train"][1])])
    experiment = Experiment.make(
        data=from_arrays(x, y, classes=10),
        partition=Split.of([ClientSplit(site, rows[0], np.arange(0), rows[1])]),
        models={site: own["build"]},
        method=read_yaml(hospitals / "experiment.yaml")["method"],
        engine={"device": "cpu"},
    )
    return experiment.build()


def test_the_hospitals_are_those_of_the_experiment() -> None:
    assert read_yaml(EXAMPLE / "experiment.yaml")["partition"] == {"sites": list(SITES), "classes": 10}


def test_the_guide_shows_the_experiment() -> None:
    guide = (EXAMPLE.parents[1] / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert f"```yaml\n{(EXAMPLE / 'experiment.yaml').read_text(encoding='utf-8')}```" in guide


def test_no_sample_is_at_two_hospitals_and_they_differ(hospitals: Path) -> None:
    seen: list[bytes] = []
    held = set()
    for site in SITES:
        federation = federation_of(hospitals, site)
        seen += [image.numpy().tobytes() for image in federation.data.x]
        held.add(federation.population.classes_held(site))
    assert len(seen) == 320 + 320 + 100
    assert len(set(seen)) == len(seen)
    assert len(held) > 1


@pytest.mark.parametrize("site", SITES)
def test_a_hospital_can_do_its_part_and_pin_it(hospitals: Path, site: str) -> None:
    federation = federation_of(hospitals, site)
    agreement = Agreement.of(federation.method, federation.clients.build_client(site))
    (exchange,) = rehearse(federation, site)
    assert exchange.up
    assert agreement.let_out(exchange.steps, 1, exchange.up) == agreement.bytes_per_round


def test_three_hospitals_have_three_models_and_send_the_same(hospitals: Path) -> None:
    federations = {site: federation_of(hospitals, site) for site in SITES}
    models = {site: federations[site].population.build_model(site) for site in SITES}
    assert all(isinstance(model, Model) for model in models.values())
    assert len({tuple(value.shape for value in model.parameters()) for model in models.values()}) == 3
    clients = {site: federations[site].clients.build_client(site) for site in SITES}
    sent = [Agreement.of(federations[site].method, clients[site]).steps for site in SITES]
    assert sent[0] == sent[1] == sent[2]
    assert all(model(torch.zeros(2, 1, 8, 8)).shape == (2, 10) for model in models.values())
