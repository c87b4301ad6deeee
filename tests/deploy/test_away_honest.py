"""Liars just under half of the clients: as many as the honest in a round one missed, or found one by one."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import sites
from links import Told, is_training, serve
from test_named_twice import ALIKE, both, left_out, says_not_finite
from test_small_cohorts import RANGED, largest
from test_unlike_groups import IDS, FiveSites, dropped, experiment, lie, part

from potluck.core.contract import tensor
from potluck.core.message import Message
from potluck.deploy import wire
from potluck.deploy.evidence import Evidence
from potluck.deploy.site import Site
from potluck.engine.protocol import Answer, Request
from potluck.engine.yardsticks import Yardsticks
from potluck.errors import RoundFailed
from potluck.experiment.schema import Experiment
from potluck.files import read_json


def away(client, round_, times=1):
    """No answer comes from a client when it is asked to train in a round, so many times."""
    asked = []

    def lose(order):
        if is_training(order, client, round_) and len(asked) < times:
            asked.append(order)
            return "no answer came"
        return None

    return lose


def liars(*rounds, factor):
    return both(lie(*rounds, factor=factor), lie(*rounds, client="3", factor=factor))


def test_who_was_away_speaks_by_what_it_sent_last(tmp_path):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper, link.lose = liars(2, factor=1e30), away("4", 2)
    asked = experiment("fedavg", ALIKE, 4, quorum=0.6, max_norm="none")
    result = serve(link, tmp_path / "run", asked, told)
    assert sorted(left_out(result)) == [(2, "1"), (2, "3")]
    assert told.ends[-1].round == 4


def test_where_it_has_sent_nothing_yet_the_round_is_played_again_with_it(tmp_path):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper, link.lose = liars(1, factor=1e30), away("4", 1)
    result = serve(link, tmp_path / "run", experiment("fedavg", ALIKE, 3, quorum=0.6, max_norm="none"), told)
    (again,) = [one for one in told.notices if "nobody stood out" in one]
    assert again.endswith("going back, round 1 is played again, also with 4, who had no part in it")
    assert sorted(left_out(result)) == [(1, "1"), (1, "3")]


def test_one_that_stays_away_ends_it_in_the_sentence_about_both_halves(tmp_path):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper, link.lose = liars(1, factor=1e30), away("4", 1, times=99)
    with pytest.raises(RoundFailed, match="neither are a majority"):
        serve(link, tmp_path / "run", experiment("fedavg", ALIKE, 3, quorum=0.6, max_norm="none"), told)
    assert len([one for one in told.notices if "nobody stood out" in one]) == 2


def test_a_spoiled_state_has_the_round_played_again_once_the_lost_are_back(tmp_path):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper, link.lose = largest("1", "3"), away("4", 1)
    result = serve(link, tmp_path / "run", experiment("fedgh", ALIKE, 2, quorum=0.6, max_norm="none"), told)
    assert {client for _, client in left_out(result)} == {"1", "3"}
    assert told.ends[-1].round == 2


SEVEN = tuple("0123456")


class SevenSites(FiveSites):
    """Seven sites with one model that take a round only so often, as real ones."""

    def __init__(self, home):
        super().__init__(home, ALIKE)
        self.make = lambda client: Site(
            client, "mlp-small", partial(sites.part, client, SEVEN), home / client
        )
        self.sites = {number: self.make(client) for number, client in enumerate(SEVEN)}


def test_many_liars_do_not_use_up_the_attempts_that_sites_allow(tmp_path, monkeypatch):
    """Each of three sends less than the one before, so that all seem to be found one by one."""
    monkeypatch.setattr("potluck.deploy.resident.ATTEMPTS", 3)
    link, told, tamper = SevenSites(tmp_path), Told(), lie(1, factor=1e30)
    for client, factor in (("3", 1e26), ("5", 1e22)):
        tamper = both(tamper, lie(1, client=client, factor=factor))
    link.tamper = tamper
    values = sites.settings(
        "fedavg",
        3,
        SEVEN,
        models={"pool": "mlp-small", "rep_dim": 16},
        training={
            "rounds": 3,
            "batch_size": 64,
            "optimizer": {"lr": 0.05},
            "max_norm": "none",
            "quorum": 0.5,
        },
    )
    asked = Experiment.make(partition={"sites": SEVEN, "classes": 10}, **values)
    result = serve(link, tmp_path / "run", asked, told)
    assert left_out(result) == [(1, "1"), (1, "3"), (1, "5")]
    assert told.ends[-1].round == 3
    assert [one for one in told.notices if "messages of client 3, 5 were up to" in one]


def test_an_early_message_that_did_no_harm_does_not_end_the_run_when_two_lie_later(tmp_path):
    """The first one is left out of round 4, and what it did in round 1 cannot be taken back any more."""
    link, told, tamper = FiveSites(tmp_path, ALIKE), Told(), lie(1, factor=12.0)
    for client, factor in (("1", 1e30), ("3", 1e26)):
        tamper = both(tamper, lie(4, client=client, factor=factor))
    link.tamper = tamper
    asked = experiment("fedavg", ALIKE, 5, max_norm="none", optimizer={"lr": 1e-4})
    result = serve(link, tmp_path / "run", asked, told)
    assert left_out(result) == [(4, "1"), (4, "3")]
    assert told.ends[-1].round == 5


def test_the_start_is_not_gone_back_to_once_sites_have_forgotten_it(tmp_path):
    """After round 3 they have states of rounds 1 to 3, also if round 3 was taken back since."""
    link, told, asked = FiveSites(tmp_path, ALIKE), Told(), Counter()
    large = both(lie(1, factor=20.0), lie(3, client="3", factor=1e30))

    def tamper(order, data):
        third = isinstance(order, Request) and order.stamp.round == 3
        asked[order.client] += third
        spoiled = third and (order.client in "02" or (order.client == "1" and asked["1"] > 1))
        return says_not_finite(order) if spoiled else large(order, data)

    link.tamper = lambda order, data: tamper(order, data) if hasattr(order, "client") else data
    with pytest.raises(RoundFailed, match="start a new run without client 1 ") as error:
        serve(
            link,
            tmp_path / "run",
            experiment("fedavg", ALIKE, 4, max_norm="none", quorum=0.4, attempts=1, optimizer={"lr": 1e-4}),
            told,
        )
    assert "client 1 stood out in round 1, and what came of that is not taken back" in str(error.value)
    assert not [one for one in told.notices if "older than its clients" in one]


def test_few_that_send_next_to_nothing_have_no_honest_client_named(tmp_path):
    """Two liars and one honest client play round 1, and everybody diverges after it for another reason."""
    link, little = FiveSites(tmp_path, ALIKE), liars(1, factor=1e-10)

    def tamper(order, data):
        later = isinstance(order, Request) and order.stamp.round == 2
        return says_not_finite(order) if later else little(order, data)

    link.tamper = tamper
    asked = experiment("fedavg", ALIKE, 2, participation=0.6, attempts=1).variant(seed=135)
    told = Told()
    with pytest.raises(RoundFailed, match=r"lower training\.optimizer\.lr"):
        serve(link, tmp_path / "run", asked, told)
    assert not dropped(told, "0")  # nor refused
    assert link.asked(1)[:3] == ["0", "1", "3"]
    assert "went_back" not in read_json(tmp_path / "run" / "federation.json")


def test_what_is_no_weight_is_measured_by_what_others_sent_last_where_few_are_asked():
    contract, means = {"means": tensor("C, d", "means")}, part("means", ["means"], [(2, 3)])
    sent = {client: [(means, size)] for client, size in (("0", 1.0), ("1", 1e-30), ("3", 1e-30))}

    def size(**heard):
        return Yardsticks().sizes(sent, contract, **heard)["0"]

    assert size() == pytest.approx(1e30)  # where these are all there are
    assert size(others={means.form: [1.2, 0.8]}) == pytest.approx(1.25)
    assert size(unheard=2) == pytest.approx(1.0)


def test_what_others_sent_last_is_known_whatever_max_norm_is(tmp_path):
    link = FiveSites(tmp_path, ALIKE)

    def tamper(order, data):
        answer = wire.unpack_reply(data)
        if not (any(is_training(order, client, 2) for client in "13") and isinstance(answer, Answer)):
            return data
        up = {name: value if name in RANGED else value * 1e-10 for name, value in answer.up.items()}
        return wire.pack_reply(replace(answer, up=Message(up)))

    link.tamper = tamper
    link.lose = lambda order: (
        "no answer came" if any(is_training(order, client, 2) for client in "24") else None
    )
    serve(link, tmp_path / "run", experiment("fedproto", ALIKE, 2, max_norm="none", quorum=0.6))
    assert read_json(tmp_path / "run" / "federation.json")["norms"]["2"]["0"] < 10.0


@pytest.mark.parametrize(
    ("before", "grown", "named"),
    [
        (1.0, 13.0, [(1, "1")]),
        (1.0, 1.5, [(2, "2")]),
        (0.01, 0.2, [(2, "2")]),
    ],  # the last: changes of weights
)
def test_who_stands_out_after_all_went_on_from_a_lie_is_not_named(before, grown, named):
    """Client 2 is honest where the messages of all have grown since client 1 lied; else nobody made it large."""
    usual = dict.fromkeys(IDS, before)
    norms = {1: usual | {"1": 60.0}, 2: dict.fromkeys(IDS, grown) | {"2": 1e8}, 3: dict.fromkeys(IDS, 1e7)}
    register = SimpleNamespace(values=SimpleNamespace(norms=norms, went_back=()))
    found = Evidence(register, lambda: IDS).stood_out(3)
    assert [(one.round, one.without) for one in found] == named
