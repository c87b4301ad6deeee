"""Rounds that ask some of the clients only: others are asked in place of those over whom a round failed."""

import pytest
import sites
from links import EndsAfter, Killed, Time, Told, serve
from test_unlike_groups import IDS, FiveSites
from test_unlike_groups import experiment as five

from potluck.deploy import wire
from potluck.engine.protocol import Failure, Request
from potluck.errors import RoundFailed

ALIKE = dict.fromkeys(IDS, "mlp-small")
FEDMRL = {"name": "fedmrl", "d1": 8}


def experiment(share, rounds=8, **training):
    return five(FEDMRL, ALIKE, rounds, participation=share, **training)


def refusing(*clients):
    def tamper(order, data):
        refused = isinstance(order, Request) and order.client in clients
        return wire.pack_reply(Failure(order.client, "no")) if refused else data

    return tamper


@pytest.mark.parametrize(("share", "liars"), [(0.2, "1"), (0.4, "13"), (0.6, "13")])
def test_a_minority_that_answers_no_does_not_end_the_run(tmp_path, share, liars):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper = refusing(*liars)
    serve(link, tmp_path / "run", experiment(share, quorum=1.0), told)
    assert len(told.ends) == 8
    assert [one for one in told.notices if "is played again with" in one and "in the place of" in one]


def test_a_client_that_is_gone_is_replaced_after_the_waits(tmp_path):
    link, told, time = FiveSites(tmp_path, ALIKE), Told(), Time()
    link.lose = lambda order: "no answer" if isinstance(order, Request) and order.client == "1" else None
    serve(link, tmp_path / "run", experiment(0.2), told, time)
    assert len(told.ends) == 8
    assert time.waits  # it might have come back


def test_a_server_that_starts_again_has_the_same_cohorts(tmp_path):
    logs = []
    for name in ("through", "restarted"):
        link = FiveSites(tmp_path / name, ALIKE)
        link.tamper = refusing("1", "3")
        if name == "restarted":
            with pytest.raises(Killed):
                serve(link, tmp_path / name / "run", experiment(0.4), EndsAfter(3))
        serve(link, tmp_path / name / "run", experiment(0.4))
        logs.append([sites.log(tmp_path / name / "run", one) for one in ("metrics.jsonl", "ledger.jsonl")])
    assert logs[0] == logs[1]


def test_rounds_without_a_failure_ask_those_who_were_drawn(tmp_path):
    links = [FiveSites(tmp_path / name, ALIKE) for name in ("honest", "other")]
    links[1].tamper = refusing("1")
    for link in links:
        serve(link, link.home / "run", experiment(0.4))
    for round_ in range(1, 9):
        drawn, asked = (sorted(link.asked(round_)) for link in links)
        assert set(drawn) <= set(asked), round_
        assert drawn == asked or "1" in drawn, round_


def test_others_do_not_make_up_for_a_majority(tmp_path):
    """With quorum 1 two of three must be found among those who are left, and there is but one."""
    link = FiveSites(tmp_path, ALIKE)
    link.tamper = refusing("0", "1", "2", "3")
    with pytest.raises(RoundFailed, match="2 are needed"):
        serve(link, tmp_path / "run", experiment(0.4, quorum=1.0))
