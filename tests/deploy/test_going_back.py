"""A finite but absurd update that nobody can go on from: the server takes the round back."""

import itertools
import shutil
from types import SimpleNamespace

import pytest
import sites
from links import EndsAfter, Killed, Link, Time, Told, blown_up, is_training, serve

from potluck.deploy import wire
from potluck.deploy.suspects import Suspect, find_suspect
from potluck.engine.protocol import Answer, Examination, Request
from potluck.engine.store.checkpoints import Checkpoints
from potluck.errors import RoundFailed
from potluck.files import read_json

ALIKE = {"models": {"pool": "mlp-small", "rep_dim": 16, "init": "per_client"}}


class PatientLink(Link):
    """Sites that follow a server back: each is put back from the copy of its folder after the round it names."""

    def __init__(self, home, **options):
        super().__init__(home, model="mlp-small", **options)
        self.after = dict.fromkeys(sites.IDS, 0)

    def _answer(self, node, data):
        order = wire.unpack_order(data)
        if isinstance(order, Request | Examination):
            client, accepted = order.client, order.stamp.accepted
            here, kept = self.home / client, self.home / "copies" / client
            if accepted > self.after[client]:
                shutil.copytree(here, kept / str(accepted), dirs_exist_ok=True)
            elif accepted < self.after[client]:
                shutil.rmtree(here)
                shutil.copytree(kept / str(accepted), here)
                self.sites[node] = self.make(client)
            elif accepted == 0 and not kept.exists():
                shutil.copytree(here, kept / "0")
            self.after[client] = accepted
        return super()._answer(node, data)


def experiment(rounds=4, ids=sites.IDS, **training):
    settings = {"rounds": rounds, "batch_size": 16, "optimizer": {"lr": 0.05}, "quorum": 1.0}
    settings |= {"max_norm": "none"} | training  # else such a message is refused before it does harm
    return sites.federated("fedavg", ids=ids, training=settings, **ALIKE)


@pytest.mark.parametrize("round_", [1, 2])
def test_a_round_that_nobody_can_go_on_from_is_played_again_without_whose_message_stood_out(tmp_path, round_):
    link, told = PatientLink(tmp_path), Told()
    link.tamper = blown_up(lambda order: is_training(order, "1", round_))
    result = serve(link, tmp_path / "run", experiment(3), told)
    (back,) = [one for one in told.notices if "going back" in one]
    assert not [one for one in told.notices if "same numbers" in one]
    assert back.startswith(f"round {round_ + 1}: most clients fail over values that are not finite")
    assert back.endswith(f"going back, round {round_} is played again without client 1")
    (went,) = result.summary["went_back"]
    assert (went["round"], went["without"]) == (round_, "1")
    assert went["times"] > 1e25
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"Round {round_} was taken back and repeated without client 1" in page
    expected = sites.serial("fedavg", tmp_path / "serial", away={("1", round_)}, **settings(3))
    assert sites.log(tmp_path / "run") == expected
    assert len({order.stamp.incarnation for order in link.orders if isinstance(order, Request)}) == 2


def settings(rounds):
    return {"training": {"rounds": rounds, "batch_size": 16, "optimizer": {"lr": 0.05}}, **ALIKE}


def test_a_client_that_is_silent_after_it_does_not_use_up_the_attempts_of_the_others(tmp_path):
    link, time = Link(tmp_path, simulated=False, model="mlp-small"), Time()
    link.tamper = blown_up(lambda order: is_training(order, "1", 1))
    link.lose = lambda order: "no answer came" if is_training(order, "1", 2) else None
    result = serve(link, tmp_path / "run", experiment(2, quorum=0.5), time=time)
    assert [(one["round"], one["without"]) for one in result.summary["went_back"]] == [(1, "1")]
    assert time.waits == []  # whoever else is away: nobody can go on from there


def test_a_client_that_does_it_in_every_round_is_left_out_of_each(tmp_path):
    link = PatientLink(tmp_path)
    link.tamper = blown_up(lambda order: any(is_training(order, "1", round_) for round_ in (1, 2)))
    result = serve(link, tmp_path / "run", experiment(3))
    assert [(one["round"], one["without"]) for one in result.summary["went_back"]] == [(1, "1"), (2, "1")]


def test_a_server_that_was_started_again_in_between_still_knows_whose_message_stood_out(tmp_path):
    class Killed(BaseException):
        pass

    def die(order):
        if is_training(order, "0", 3):
            raise Killed

    link, told = PatientLink(tmp_path), Told()
    link.tamper, link.lose = blown_up(lambda order: is_training(order, "1", 2)), die
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", experiment(3))
    link.lose = lambda order: None
    result = serve(link, tmp_path / "run", experiment(3), told)
    assert [(one["round"], one["without"]) for one in result.summary["went_back"]] == [(2, "1")]


def test_a_server_restored_from_a_backup_is_followed_however_often_it_was_started_since(tmp_path):
    link, folder = Link(tmp_path / "sites", model="mlp-small"), tmp_path / "run"
    with pytest.raises(Killed):
        serve(link, folder, experiment(4), EndsAfter(1))
    shutil.copytree(folder, tmp_path / "backup")
    for last in (1, 1, 2):
        with pytest.raises(Killed):
            serve(link, folder, experiment(4), EndsAfter(last))
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    with pytest.MonkeyPatch.context() as clock:
        clock.setattr("potluck.deploy.register.time.time", lambda: 2e9)  # later than all of them
        assert serve(link, folder, experiment(4)).summary["failures"] == {}


def test_a_server_restored_within_the_second_of_its_last_start_is_followed(tmp_path, monkeypatch):
    ticks = itertools.count()
    clock = SimpleNamespace(time=lambda: 2e9 + next(ticks) / 100)
    monkeypatch.setattr(
        "potluck.deploy.register.time", clock
    )  # for the starts alone: others look at theirs, too
    link, folder = Link(tmp_path / "sites", model="mlp-small"), tmp_path / "run"
    with pytest.raises(Killed):
        serve(link, folder, experiment(4), EndsAfter(1))
    shutil.copytree(folder, tmp_path / "backup")
    with pytest.raises(Killed):
        serve(link, folder, experiment(4), EndsAfter(2))
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    assert serve(link, folder, experiment(4)).summary["failures"] == {}
    assert next(ticks) < 100


def test_a_round_is_taken_back_once_and_then_the_next_that_stands_out_is_named(tmp_path):
    """Two lie: with one of them left out, the other's message still spoils the round."""
    link = PatientLink(tmp_path)
    link.tamper = blown_up(lambda order: is_training(order, "1", 2))
    second = blown_up(lambda order: is_training(order, "2", 2), 1e25)
    first = link.tamper
    link.tamper = lambda order, data: second(order, first(order, data))
    told = Told()
    with pytest.raises(RoundFailed) as error:
        serve(link, tmp_path / "run", experiment(3), told)
    sentence = str(error.value)
    assert (
        "also after round 2 was played again without client 1; in round 2 the message of client 2 was"
        in sentence
    )
    assert "--exclude 2, or" in sentence  # of two nobody can say which is wrong
    assert sentence.endswith("--exclude 0")
    assert "lr" not in sentence
    result = serve(link, tmp_path / "run", experiment(3), told, exclude=["2"])
    assert [(one["round"], one["without"]) for one in result.summary["went_back"]] == [(2, "1"), (2, "2")]
    assert [one for one in told.notices if "going back" in one][-1].endswith(
        "client 2 was in round 2 and is out by now: going back, round 2 is played again without client 2"
    )
    assert "without client 2, which was left out since" in (tmp_path / "run" / "report.html").read_text()


def test_where_half_stand_against_the_other_the_command_of_the_sentence_goes_on(tmp_path):
    link = Link(tmp_path, model="mlp-small", away={"2"})
    link.tamper = blown_up(lambda order: is_training(order, "1", 1))
    asked = experiment(2, ids=("0", "1"))
    with pytest.raises(RoundFailed, match="--exclude 1, or"):
        serve(link, tmp_path / "run", asked)
    result = serve(link, tmp_path / "run", asked, exclude=["1"])
    assert [(one["round"], one["without"]) for one in result.summary["went_back"]] == [(1, "1")]


def test_where_all_messages_were_alike_nobody_is_blamed_and_the_rate_is(tmp_path):
    link, told = PatientLink(tmp_path), Told()
    link.tamper = blown_up(
        lambda order: isinstance(order, Request) and order.stamp.round == 1 and order.purpose == "train"
    )
    with pytest.raises(RoundFailed, match=r"lower training\.optimizer\.lr") as error:
        serve(link, tmp_path / "run", experiment(), told)
    assert "median" not in str(error.value)
    assert not [one for one in told.notices if "going back" in one]


def test_one_that_stands_out_and_alone_can_go_on_does_not_take_over_the_run(tmp_path):
    """With a low quorum its own message would be enough for the next round."""
    link, told = PatientLink(tmp_path), Told()
    stored = []

    def tamper(order, data):
        answer = wire.unpack_reply(data)
        if is_training(order, "1", 2):
            stored.append(data)
        if is_training(order, "1", 3) and not isinstance(answer, Answer):
            return stored[0]  # it did not train at all
        return blown_up(lambda order: is_training(order, "1", 2))(order, data)

    link.tamper = tamper
    result = serve(link, tmp_path / "run", experiment(4, quorum=0.2), told)
    assert [(one["round"], one["without"]) for one in result.summary["went_back"]] == [(2, "1")]
    assert result.summary["failures"] == {}


def test_the_last_three_checkpoints_are_kept_and_no_file_more(tmp_path):
    serve(PatientLink(tmp_path), tmp_path / "run", experiment(5))
    files = Checkpoints(tmp_path / "run" / "checkpoints")
    assert files.rounds() == (3, 4, 5)
    states = [f"server-{round_:06d}.safetensors" for round_ in (3, 4, 5)]
    assert sorted(path.name for path in files.folder.glob("*.safetensors")) == states
    assert read_json(tmp_path / "run" / "federation.json")["norms"].keys() == {"2", "3", "4", "5"}


@pytest.mark.parametrize(
    ("norms", "suspect"),
    [
        ({}, None),
        ({"a": 1e30}, None),
        ({"a": 1.0, "b": 8.0, "c": 2.0}, None),
        ({"a": 1.0, "b": 1e30}, None),
        ({"a": 2.0, "b": 3.0, "c": 1e9, "d": 2.0}, Suspect("c", 5e8)),
        ({"a": 0.0, "b": 0.0, "c": 1.0}, None),
    ],
)
def test_only_a_message_far_from_the_others_stands_out(norms, suspect):
    assert find_suspect(norms) == suspect
