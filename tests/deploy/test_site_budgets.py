"""How often a server may ask a site: runs under other names, and evaluations, are counted at the site."""

import json
from pathlib import Path

import pytest
import torch
from lone_site import RUN, ask, greet, head, joined, make_site, offer, request
from test_attempts import contract

from potluck.deploy.agreement import EVALUATIONS, RUNS, Agreement
from potluck.deploy.exchanges import AHEAD
from potluck.deploy.pruning import prune
from potluck.engine.protocol import Answer, Examination, Failure, Stamp


def hello(site, run):
    return greet(site, offer("fedre", run))


def test_old_contracts_have_the_usual_numbers(tmp_path):
    path, values = tmp_path / "contract.json", contract(tmp_path).model_dump(mode="json")
    del values["most_runs"], values["evaluations_per_round"], values["most_rounds"]
    path.write_text(json.dumps(values))
    agreed = Agreement.load(path)
    assert (agreed.most_runs, agreed.evaluations_per_round) == (RUNS, EVALUATIONS) == (10, 24)
    assert agreed.most_rounds == 1000


# --- runs -----------------------------------------------------------------------------------------------


def test_a_question_under_many_run_names_is_refused_in_the_end(tmp_path):
    agreed = contract(tmp_path, "fedre", most_runs=3)
    site = make_site(tmp_path, agreement=agreed)
    replies = [hello(site, f"r{number}") for number in range(4)]
    assert not any(isinstance(one, Failure) for one in replies[:3])
    assert "this site has joined 3 runs, and agreed to 3" in replies[3].reason
    assert replies[3].reason.endswith("raise most_runs in its contract to allow more")
    assert not isinstance(hello(site, "r1"), Failure)  # a known run costs nothing
    assert isinstance(hello(make_site(tmp_path, agreement=agreed), "r5"), Failure)  # nor does a restart help
    more = make_site(tmp_path, agreement=agreed.model_copy(update={"most_runs": 4}))
    assert not isinstance(hello(more, "r5"), Failure)


def test_pruning_gives_no_further_runs_back(tmp_path):
    agreed = contract(tmp_path, "fedre", most_runs=2)
    site = make_site(tmp_path, agreement=agreed)
    hello(site, "r0"), hello(site, "r1")
    assert len(prune(tmp_path / "0", unfinished=True)) == 2
    assert isinstance(hello(make_site(tmp_path, agreement=agreed), "r2"), Failure)


def test_a_run_whose_record_was_removed_is_not_joined_again(tmp_path):
    """It would draw the same private noise for other messages, and count attempts and runs from the start."""
    site = make_site(tmp_path, simulated=False)
    hello(site, "r0"), hello(site, "r1")
    (tmp_path / "0" / "joined.json").unlink()  # as in a home from before runs were counted
    prune(tmp_path / "0", unfinished=True)
    again = make_site(tmp_path, simulated=False)
    told = hello(again, "r0").reason
    assert "run r0 was joined before and its record is removed" in told
    assert told.endswith("start a new run")
    assert not isinstance(hello(again, "r2"), Failure)


@pytest.mark.parametrize("removed", [1, 2, 3])
def test_a_run_that_was_removed_half_is_not_joined_again_and_is_removed_whole(tmp_path, monkeypatch, removed):
    site = joined(tmp_path, "fedre", simulated=False)
    ask(site, request(head(site)))
    unlink, left = Path.unlink, [removed]

    def dying(path, missing_ok=False):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dying)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path / "0", unfinished=True)
    assert "its record is removed" in greet(make_site(tmp_path, simulated=False), offer("fedre")).reason
    assert [one.run for one in prune(tmp_path / "0")] == [RUN]
    assert not (tmp_path / "0" / "runs" / RUN).exists()


@pytest.mark.parametrize("written", ["runs", "joined.json"])
def test_a_site_that_was_killed_while_it_joined_can_join(tmp_path, monkeypatch, written):
    def dying(*given):
        raise KeyboardInterrupt

    place = "kept_welcome.write_whole" if written == "runs" else "joined_runs.write_checked"
    with monkeypatch.context() as patch:
        patch.setattr(f"potluck.deploy.{place}", dying)
        with pytest.raises(KeyboardInterrupt):
            hello(make_site(tmp_path), "r0")
    assert not isinstance(hello(make_site(tmp_path), "r0"), Failure)


def test_a_changed_list_of_runs_is_refused(tmp_path, capsys):
    hello(make_site(tmp_path), "r0")
    path = tmp_path / "0" / "joined.json"
    path.write_text(path.read_text().replace("r0", "r8"))
    assert isinstance(hello(make_site(tmp_path), "r1"), Failure)
    assert f"{path} is not as potluck wrote it" in capsys.readouterr().err


def test_runs_of_a_home_from_before_they_were_counted_are_counted(tmp_path):
    site = make_site(tmp_path)
    hello(site, "r0"), hello(site, "r1")
    (tmp_path / "0" / "joined.json").unlink(missing_ok=True)
    again = make_site(tmp_path, agreement=contract(tmp_path, "fedre", most_runs=2))
    assert isinstance(hello(again, "r2"), Failure)


def test_a_run_that_was_refused_is_not_counted(tmp_path):
    site = make_site(tmp_path, agreement=contract(tmp_path, "fedre", most_runs=1))
    assert isinstance(greet(site, offer("fedmrl", "other")), Failure)
    assert not isinstance(hello(site, "r0"), Failure)


# --- rounds ---------------------------------------------------------------------------------------------


def test_a_run_of_more_rounds_than_agreed_is_refused(tmp_path):
    site = make_site(tmp_path, agreement=contract(tmp_path, "fedre", most_rounds=1))
    told = hello(site, "r0").reason
    assert "the run has 2 rounds, this site agreed to 1; raise most_rounds in its contract" in told
    assert not list((tmp_path / "0" / "runs").glob("*.json"))


def test_a_run_is_trained_in_no_round_beyond_its_last(tmp_path):
    site = joined(tmp_path, "fedre")
    for round_ in (1, 2):
        assert isinstance(ask(site, request(head(site), round_, accepted=round_ - 1)), Answer)
    refused = [ask(site, request(head(site), round_, accepted=2)) for round_ in (3, 10**6)]
    assert [one.reason.partition(": ")[2] for one in refused] == [
        "round 3 is asked about, the run has 2; start a new run for more rounds",
        "round 1000000 is asked about, the run has 2; start a new run for more rounds",
    ]


# --- evaluations ----------------------------------------------------------------------------------------


def measure(site, factor, round_=1, accepted=0, **stamp):
    mode = site.at("a1").federation.method.modes[:1]
    return ask(site, Examination("0", head(site, factor), Stamp("a1", round_, 1, 0, accepted, **stamp), mode))


def answered(replies):
    return [isinstance(one, Answer) for one in replies]


def test_a_server_that_asks_for_earlier_and_earlier_rounds_fills_no_disk_and_gets_no_noise_twice(tmp_path):
    """It says that it was started again each time, and that it never accepted anything."""
    site, last = joined(tmp_path, "fedre", rounds=AHEAD + 2, simulated=False), AHEAD + 2
    first, *others = [
        ask(site, request(head(site), round_=round_, incarnation=last - round_))
        for round_ in range(last, 0, -1)
    ]
    assert not any(isinstance(one, Failure) for one in (first, *others))
    assert len([*site.resident.record.folder.glob("*.safetensors")]) == AHEAD
    again = ask(site, request(head(site), round_=last, incarnation=last))
    assert not torch.equal(first.up["label"], again.up["label"])
    assert site.resident.record.history.tried[last] == 2


def test_evaluations_of_other_weights_are_counted_in_a_round(tmp_path):
    site = joined(tmp_path, "fedre", agreement=contract(tmp_path, "fedre", evaluations_per_round=3))
    replies = [measure(site, 1 + number) for number in range(4)]
    assert answered(replies) == [True, True, True, False]
    assert replies[3].reason == (
        "client 0: round 1 was measured 3 times, each time with another question, and this site agreed to 3; raise "
        "evaluations_per_round in its contract if that is meant"
    )
    again = measure(site, 2)  # a question that was answered costs nothing, after a restart too
    assert again.report.metrics == replies[1].report.metrics
    site = joined(tmp_path, "fedre", agreement=contract(tmp_path / "x", "fedre", evaluations_per_round=3))
    assert answered([measure(site, 2, incarnation=1), measure(site, 7, incarnation=1)]) == [True, False]
    ask(site, request(head(site), incarnation=1))
    assert answered([measure(site, 7, 2, 1, incarnation=1)]) == [True]  # a new round counts anew


def test_the_same_weights_on_another_state_are_another_question(tmp_path):
    site = joined(tmp_path, "fedre", agreement=contract(tmp_path, "fedre", evaluations_per_round=1))
    assert answered([measure(site, 1)]) == [True]
    ask(site, request(head(site)))
    assert answered([measure(site, 1)]) == [False]


def test_a_server_cannot_make_up_rounds_to_measure_in(tmp_path):
    site = joined(tmp_path, "fedre", agreement=contract(tmp_path, "fedre"))
    assert "round 4 is asked about, the run has 2" in measure(site, 1, round_=4).reason


def test_without_a_contract_evaluations_are_limited_too(tmp_path):
    site = joined(tmp_path, "fedre", simulated=False)
    replies = [measure(site, 1 + number) for number in range(EVALUATIONS + 1)]
    assert answered(replies) == [True] * EVALUATIONS + [False]


def test_a_refused_evaluation_changes_nothing(tmp_path):
    agreed = contract(tmp_path, "fedre", evaluations_per_round=1)
    site, straight = joined(tmp_path / "a", "fedre", agreement=agreed), joined(tmp_path / "b", "fedre")
    measure(site, 1), measure(site, 2)
    one, other = (ask(each, request(head(each))) for each in (site, straight))
    assert all(torch.equal(one.up[name], other.up[name]) for name in other.up)
