"""A method of one's own may keep infinities or NaN at the server; a round spoils what was finite before it."""

import pytest
import sites
import torch
from links import Link, Told, serve

from potluck.core import method
from potluck.errors import RoundFailed
from potluck.methods.fedproto import FedProto

NOTHING = torch.nan


@pytest.fixture(autouse=True)
def own_methods(monkeypatch):
    """Two methods that only these tests know."""
    monkeypatch.setattr(method, "_registry", dict(method._registry))

    class Noting(FedProto):
        """FedProto that notes the least loss so far, infinite at first, and a number for each class it has seen."""

        name = "noting-proto"

        def server_state(self, task):
            unseen = torch.full((task.classes,), NOTHING)
            unseen[0] = 1.0
            return {**super().server_state(task), "least": torch.full((), torch.inf), "seen": unseen}

    class Spoiling(Noting):
        """The same, which loses in round 2 what it knew of class 0."""

        name = "spoiling-proto"

        def round(self, server, clients):
            super().round(server, clients)
            if server.round == 2:
                server["seen"].value.fill_(NOTHING)


def test_it_runs_in_a_federation_as_in_a_simulation(tmp_path):
    noting = {"name": "noting-proto"}
    serve(Link(tmp_path / "sites"), tmp_path / "run", sites.federated(noting))
    assert sites.log(tmp_path / "run") == sites.serial(noting, tmp_path / "simulation")


def test_a_number_that_is_lost_spoils_the_round(tmp_path):
    told = Told()
    with pytest.raises(RoundFailed, match=r"round 2: the server's state \(seen\) is not finite after it"):
        serve(Link(tmp_path / "sites"), tmp_path / "run", sites.federated({"name": "spoiling-proto"}), told)
    assert [end.round for end in told.ends] == [1]
