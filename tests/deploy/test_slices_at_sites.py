"""Methods that cut one network by width, among sites: each knows its own model and, from the pool, the parent."""

import pytest
import sites
from test_sites import Courier, play

from potluck.deploy.run import open_folder
from potluck.runs.api import run

WIDTHS = tuple({"name": "conv-large", "scale": scale} for scale in (0.08, 0.04, 0.08))


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", {"name": "fjord", "distil": True}], ids=str)
def test_sites_play_what_a_simulation_plays(method, tmp_path, monkeypatch):
    monkeypatch.setattr(sites, "MODELS", WIDTHS)
    play(sites.federated(method), Courier(tmp_path), open_folder(tmp_path / "run"))
    run(sites.simulated(method), out=tmp_path / "serial")
    assert sites.log(tmp_path / "run") == sites.log(tmp_path / "serial")
