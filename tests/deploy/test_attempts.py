"""Attempts at a round: the same question gets the same bytes, another one is counted, and nothing is told twice."""

import itertools
import json
import shutil
from unittest.mock import Mock

import lone_site
import pytest
import sites
import torch
from lone_site import ask, head, joined, make_site, offer, request, same, small

from potluck.core.client import Client
from potluck.core.message import Message
from potluck.deploy import resident
from potluck.deploy.agreement import ATTEMPTS, Agreement
from potluck.deploy.rehearsal import propose
from potluck.deploy.run import open_folder, play, prepared
from potluck.engine.protocol import Answer, Examination, Failure, Stamp
from potluck.runs.api import run as simulate


def contract(home, method="fedmrl", **changes):
    """The agreement that `join --check` proposes for client 0."""
    federation = make_site(home / "rehearsal").federation(offer(method)["experiment"], "rehearsal")
    return propose(federation, "0")[0].model_copy(update=changes)


# --- what a site agrees to ------------------------------------------------------------------------------


def test_servers_that_die_after_the_sites_answered_cost_nothing(tmp_path):
    """Six starts of the server, each of which asks the same: as a default contract allows."""
    site = joined(tmp_path, agreement=contract(tmp_path))
    down = small(site)
    first = ask(site, request(down))
    for start in range(1, 7):
        assert same(first, ask(site, request(down, incarnation=start)))
    assert same(first, ask(site, request(down, attempt=2, incarnation=6)))


def test_attempts_with_other_bytes_have_a_number_of_their_own(tmp_path):
    site = joined(tmp_path, agreement=contract(tmp_path, attempts_per_round=3))
    replies = [ask(site, request(small(site, 1 + 0.1 * start), incarnation=start)) for start in range(4)]
    assert all(isinstance(one, Answer) for one in replies[:3])
    assert replies[3].reason == (
        "client 0: round 1 was asked for 3 times, each time with another question, and this site agreed to 3 "
        "attempts at a round; raise attempts_per_round in its contract if that is meant"
    )
    assert same(replies[1], ask(site, request(small(site, 1.1), incarnation=4)))
    assert isinstance(
        ask(site, request(small(site), round_=2, incarnation=4)), Answer
    )  # a new round counts anew


def test_a_contract_without_the_number_of_attempts_has_the_usual_one(tmp_path):
    path = tmp_path / "contract.json"
    values = contract(tmp_path).model_dump(mode="json")
    del values["attempts_per_round"]
    path.write_text(json.dumps(values))
    assert Agreement.load(path).attempts_per_round == ATTEMPTS == 8


def test_without_a_contract_attempts_are_limited_too(tmp_path):
    site = joined(tmp_path, "fedre", simulated=False)
    replies = [ask(site, request(head(site, 1 + start), incarnation=start)) for start in range(ATTEMPTS + 1)]
    assert [isinstance(one, Failure) for one in replies] == [False] * ATTEMPTS + [True]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_step_that_is_asked_for_again_in_an_attempt_counts_as_another_one(tmp_path, pinned):
    agreed = contract(tmp_path, "fedre", bytes_per_round=10**9) if pinned else None
    site = joined(tmp_path, "fedre", simulated=False, agreement=agreed)
    replies = [ask(site, request(head(site, 1 + place), exchange=place + 1)) for place in range(ATTEMPTS + 1)]
    assert [isinstance(one, Failure) for one in replies] == [False] * ATTEMPTS + [True]
    assert "was asked for 8 times, each time with another question" in replies[-1].reason


def test_exchanges_that_a_method_declares_are_one_attempt(tmp_path):
    options = {"name": "fccl", "exchange": "batch", "batch": 5, "samples": 60, "pretrain_epochs": 1}
    site = make_site(tmp_path, simulated=False)
    lone_site.greet(site, lone_site.welcome(sites.federated(options), lone_site.RUN))
    ask(site, request(Message(), steps=("score",)))
    down = Message({"scores": torch.zeros(5, 10), "share": torch.tensor(0.5)})
    replies = [ask(site, request(down, exchange=2 + place, steps=("learn",))) for place in range(12)]
    assert all(isinstance(one, Answer) for one in replies), replies[-1]
    assert site.resident.record.history.tried == {1: 1}


@pytest.mark.parametrize("known", [True, False])
def test_attempts_beyond_the_agreed_bytes_are_counted_and_cost_no_work_where_sizes_are_known(
    tmp_path, monkeypatch, known
):
    if not known:
        monkeypatch.setattr(resident, "certain_message", lambda *given: Message())
    agreed, done = contract(tmp_path, attempts_per_round=3), []
    site = joined(tmp_path, agreement=agreed)
    site.resident.performer.agreement = agreed.model_copy(update={"bytes_per_round": 10})
    train = site.resident.performer.method.train
    monkeypatch.setattr(
        site.resident.performer.method, "train", lambda client: done.append(1) or train(client)
    )
    replies = [ask(site, request(small(site, 1 + start), exchange=1 + start)) for start in range(2)]
    site = joined(tmp_path, agreement=agreed)  # a restart gives nothing back
    replies += [ask(site, request(small(site, 3 + start), incarnation=1 + start)) for start in range(2)]
    told = [getattr(one, "reason", "") for one in replies]
    assert ["bytes, this site agreed to 10" in one for one in told] == [True, True, False, False]
    assert (told[2], "round 1 was asked for 3 times" in told[3]) == ("", True)
    assert len(done) == (0 if known else 2)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (None, "what would leave is not finite; lower training.optimizer.lr"),
        (ValueError("x > 1"), "ValueError at the site; the log of its worker says more"),
        (SystemExit(1), "SystemExit at the site; the log of its worker says more"),
    ],
)
def test_attempts_of_which_nothing_leaves_are_counted_and_tell_nothing(tmp_path, raised, said):
    site = joined(tmp_path, agreement=contract(tmp_path, attempts_per_round=3))
    if raised is not None:
        site.resident.live["model"].module.fc.register_forward_pre_hook(Mock(side_effect=raised))
    told = [
        ask(site, request(small(site, 1e30 + start * 1e29), incarnation=start)).reason for start in range(4)
    ]
    assert told[:3] == [f"client 0: {said}"] * 3
    assert "round 1 was asked for 3 times" in told[3]


def test_the_same_question_that_fails_counts_once_and_an_accident_may_pass(tmp_path):
    agreed = contract(tmp_path, attempts_per_round=2)
    site, attempt = joined(tmp_path, agreement=agreed), itertools.count(1)
    told = {ask(site, request(small(site, 1e30), attempt=next(attempt))).reason for _ in range(3)}
    site = joined(tmp_path, agreement=agreed)
    told |= {ask(site, request(small(site, 1e30), attempt=next(attempt))).reason for _ in range(2)}
    assert told == {"client 0: what would leave is not finite; lower training.optimizer.lr"}
    full = site.resident.live["model"].module.fc.register_forward_pre_hook(Mock(side_effect=MemoryError))
    for _ in range(3):
        assert "MemoryError at the site" in ask(site, request(small(site), attempt=next(attempt))).reason
    full.remove()
    assert isinstance(ask(site, request(small(site), attempt=next(attempt))), Answer)
    assert site.resident.record.history.tried == {1: 2}
    third = ask(site, request(small(site, 2.0), attempt=next(attempt)))
    assert "round 1 was asked for 2 times" in third.reason


def test_the_proposal_counts_one_attempt(tmp_path):
    agreed = contract(tmp_path)
    largest = {name: spec.largest() for name, spec in agreed.steps["train"].up.items()}
    assert agreed.bytes_per_round == Message(largest).nbytes


# --- private noise --------------------------------------------------------------------------------------


def labels(*replies):
    return [one.up["label"] for one in replies]


def test_the_same_question_never_gets_a_second_noisy_answer(tmp_path):
    site = joined(tmp_path, "fedre", simulated=False)
    first = ask(site, request(head(site)))
    site = joined(tmp_path, "fedre", simulated=False)
    for attempt, start in [(1, 0), (2, 0), (1, 1), (5, 3)]:
        assert same(first, ask(site, request(head(site), attempt=attempt, incarnation=start)))


def test_another_question_gets_other_noise_and_the_old_one_still_the_old_bytes(tmp_path):
    site = joined(tmp_path, "fedre", simulated=False)
    replies = [ask(site, request(head(site, 1 + start), incarnation=start)) for start in range(3)]
    a, b, c = labels(*replies)
    assert not any(torch.equal(*pair) for pair in [(a, b), (b, c), (a, c)])
    assert same(replies[0], ask(site, request(head(site), incarnation=3)))
    assert site.resident.record.history.tried == {1: 3}


def test_noise_is_not_used_again_when_a_server_goes_back_over_a_round(tmp_path):
    site = joined(tmp_path, "fedre", simulated=False)
    first = ask(site, request(head(site)))
    ask(site, request(head(site), round_=2, accepted=1))
    again = ask(site, request(head(site), incarnation=1))
    assert same(first, again)
    other = ask(site, request(head(site, 2.0), incarnation=2))
    assert not torch.equal(*labels(first, other))
    assert site.resident.record.history.tried[1] == 2


@pytest.mark.parametrize("answered", [0, 1])
def test_a_home_restored_from_an_older_copy_draws_no_noise_twice(tmp_path, monkeypatch, answered):
    """Of a round that no server has accepted yet: the copy does not know what has left since."""
    drawn, private = [], Client._private
    monkeypatch.setattr(Client, "_private", lambda *given: drawn.append(private(*given)) or drawn[-1])
    site, home, copy = joined(tmp_path, "fedre", simulated=False), tmp_path / "0", tmp_path / "copy"
    for round_ in range(1, answered + 1):
        ask(site, request(head(site), round_=round_, accepted=round_ - 1))
    shutil.copytree(home, copy)
    open_ = {"round_": answered + 1, "accepted": answered}
    drawn.clear()
    ask(site, request(head(site, 3.0), **open_))
    there = [one.integer for one in drawn]
    shutil.rmtree(home)
    copy.rename(home)
    site = joined(tmp_path, "fedre", simulated=False)
    drawn.clear()
    other = ask(site, request(head(site, 2.0), attempt=2, **open_))
    assert isinstance(other, Answer)
    assert there
    assert not {one.integer for one in drawn} & {*there}


# --- several exchanges ----------------------------------------------------------------------------------


class Script:
    """FedMD asks twice in a round; here with a downlink that a test chooses."""

    def __init__(self, home):
        self.home, self.site = home, joined(home, "fedmd")

    def restart(self):
        self.site = make_site(self.home)

    def ask(self, number, value=0.0, **stamp):
        if number == 1:
            return ask(self.site, request(Message(), exchange=1, steps=("score",), **stamp))
        agreed = Message({"logits": torch.full((30, 10), 1.0 + value)})
        return ask(self.site, request(agreed, exchange=number, steps=("learn",), **stamp))


@pytest.mark.parametrize("killed", [False, True])
def test_a_server_that_starts_again_in_mid_round_is_answered_from_the_record(tmp_path, killed):
    script = Script(tmp_path)
    first, second = script.ask(1), script.ask(2)
    assert isinstance(second, Answer), second
    if killed:
        script.restart()
    assert same(first, script.ask(1, incarnation=1))
    if killed:
        script.restart()  # the site still knows that exchange 2 follows exchange 1
    assert same(second, script.ask(2, incarnation=1))
    assert script.site.at("a1").record.history.tried == {1: 1}


def test_another_second_exchange_begins_after_the_first_one(tmp_path):
    """A server starts again after exchange 2 and, as others answered otherwise, sends another exchange 2."""
    script, straight = Script(tmp_path / "a"), Script(tmp_path / "b")
    script.ask(1), script.ask(2)
    script.ask(1, incarnation=1)
    other = script.ask(2, value=0.5, incarnation=1)
    straight.ask(1)
    straight.ask(2, value=0.5)
    history, expected = script.site.resident.record, straight.site.resident.record
    assert isinstance(other, Answer)
    state, wanted = (record.current(Stamp("a1", 1, 1, 0, 1, 1)) for record in (history, expected))
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert history.history.tried == {1: 2}


def test_the_bytes_of_an_attempt_are_counted_over_its_exchanges(tmp_path):
    script = Script(tmp_path)
    first = script.ask(1)
    size, record = first.up.nbytes, script.site.resident.record
    script.ask(2)
    assert record.history.now.sent == size
    script.ask(1, incarnation=1)
    assert record.history.now.sent == size


def test_a_late_repeat_is_answered_and_moves_nothing(tmp_path):
    script = Script(tmp_path)
    first, second = script.ask(1), script.ask(2)
    assert same(first, script.ask(1))
    assert same(second, script.ask(2))
    script.ask(1, incarnation=1, attempt=2)
    late = script.ask(2, value=3.0, incarnation=1, attempt=1)
    assert "attempt 1 at round 1 came after exchange 1, with another content" in late.reason
    assert same(second, script.ask(2, incarnation=1, attempt=2))


def test_one_exchange_has_one_content(tmp_path):
    script = Script(tmp_path)
    script.ask(1), script.ask(2)
    assert "exchange 2 of round 1 came again, with another content" in script.ask(2, value=1.0).reason


# --- a server that goes back ----------------------------------------------------------------------------


def played(site, rounds, **stamp):
    return [ask(site, request(small(site), round_=round_, accepted=round_ - 1, **stamp)) for round_ in rounds]


def test_a_server_that_goes_back_is_followed_for_three_rounds_and_no_further(tmp_path):
    site = joined(tmp_path, rounds=100)
    replies = played(site, range(1, 7))  # rounds 1 to 5 are accepted
    for start, back in enumerate((5, 4, 3), start=1):
        again = joined(tmp_path, rounds=100)
        assert same(
            replies[back], ask(again, request(small(site), round_=back + 1, accepted=back, incarnation=start))
        )
    reason = ask(
        joined(tmp_path, rounds=100), request(small(site), round_=3, accepted=2, incarnation=9)
    ).reason
    assert reason.startswith("client 0: the server goes on from round 2 of this client, which is past round")
    assert all(same(*pair) for pair in zip(replies[4:], played(again, (5, 6), incarnation=3), strict=True))


def test_a_server_that_goes_back_may_take_another_way(tmp_path):
    site, straight = joined(tmp_path / "a", rounds=100), joined(tmp_path / "b", rounds=100)
    played(site, (1, 2, 3))
    other = ask(site, request(small(site, 0.5), round_=2, accepted=1, incarnation=1))
    after = ask(site, request(small(site), round_=3, accepted=2, incarnation=1))
    played(straight, (1,))
    assert same(other, ask(straight, request(small(site, 0.5), round_=2, accepted=1)))
    assert same(after, ask(straight, request(small(site), round_=3, accepted=2)))
    assert site.resident.record.history.tried == {1: 1, 2: 2, 3: 2}


def test_only_a_server_that_was_started_again_may_go_back(tmp_path):
    site = joined(tmp_path, rounds=100)
    played(site, (1, 2, 3))
    reason = ask(site, request(small(site), round_=2, accepted=1)).reason
    assert (
        "goes on from round 1 of this client, which is past round 2, without having been started again"
        in reason
    )


def test_an_earlier_state_is_examined_when_a_server_goes_back(tmp_path):
    site = joined(tmp_path, rounds=100)

    def measured(accepted, incarnation):
        at = Stamp("a1", accepted + 1, 1, 0, accepted, incarnation, settled=True)
        return ask(site, Examination("0", small(site), at, ("mix-large",))).report.metrics

    played(site, (1,))
    before = measured(1, 0)
    played(site, (2, 3))
    assert measured(1, 1) == before != measured(2, 1)
    assert isinstance(played(site, (2,), incarnation=1)[0], Answer)  # looking has changed nothing


def test_rounds_that_nobody_accepts_are_counted_and_in_the_end_forgotten(tmp_path):
    site = joined(tmp_path, rounds=100)
    record = site.resident.record
    record.history.tried = dict.fromkeys(range(1, 65), 1)
    ask(site, request(small(site), round_=65))
    assert record.history.forgotten == 1
    assert "round 1 came after round 65" in ask(site, request(small(site), incarnation=1)).reason


def test_what_is_kept_does_not_grow(tmp_path):
    site = joined(tmp_path, rounds=100)
    sizes = []
    for round_ in range(1, 12):
        for attempt in (1, 2):
            ask(site, request(small(site, attempt), round_=round_, accepted=round_ - 1, attempt=attempt))
        record = site.resident.record
        sizes.append((len([*record.folder.iterdir()]), len(record.history.tried)))
    assert sizes[4:] == [sizes[4]] * 7
    assert sizes[4] == (1 + 2 * (3 + 2), 3)  # three accepted rounds, and two attempts at the last one


# --- in a federation ------------------------------------------------------------------------------------


class Killed(BaseException):
    """The server dies here."""


class Courier:
    """Carries bytes to sites of this process, and dies after some exchanges."""

    def __init__(self, home):
        self.sites = {number: lone_site.make_site(home, client) for number, client in enumerate(sites.IDS)}
        self.dies = set()
        self.exchanges = 0

    def nodes(self):
        return list(self.sites)

    def keys(self):
        return {}

    def took(self):
        return []

    def exchange(self, letters, timeout, most):
        answers = [self.sites[node].answer(data) for node, data in letters]
        self.exchanges += 1
        if self.exchanges in self.dies:
            raise Killed
        return answers


@pytest.mark.parametrize("method", [{"name": "fedmd", "samples": 30}, {"name": "fedre"}])
def test_a_server_that_dies_again_and_again_ends_with_the_bytes_of_an_undisturbed_run(tmp_path, method):
    courier, experiment = Courier(tmp_path), prepared(sites.federated(method))
    courier.dies = {2, 4, 6, 8, 11, 14, 17}
    for _ in range(20):
        try:
            play(experiment, courier, open_folder(tmp_path / "run"))
            break
        except Killed:
            continue
    simulate(sites.simulated(method), out=tmp_path / "serial")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert sites.log(tmp_path / "run", name) == sites.log(tmp_path / "serial", name)
    tried = [site.resident.record.history.tried for site in courier.sites.values()]
    assert all(set(one.values()) == {1} for one in tried)
