"""Who is needed for a federation to start and to go on; clients that come late or leave for good."""

import errno
import itertools
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import sites
import torch
from links import FEDMRL, Link, Time, Told, blown_up, is_evaluation, is_training, serve

from kills import Kill
from potluck.core.message import Message
from potluck.core.server import Server
from potluck.core.state import Report
from potluck.core.task import Task
from potluck.deploy import repeats, served_run, wire
from potluck.deploy.engine import GRACE, HELLO
from potluck.deploy.enrolments import kept_enrolments
from potluck.deploy.federated_run import fits
from potluck.deploy.record_files import RecordFiles
from potluck.deploy.register import Register
from potluck.deploy.run import open_folder
from potluck.engine.protocol import Answer, Request, Stamp
from potluck.errors import ConfigError, RoundFailed, RunError
from potluck.files import read_json, write_checked


class Killed(BaseException):
    """The server dies here."""


def training(rounds=2, **others):
    return {"training": {"rounds": rounds, "batch_size": 16, "optimizer": {"lr": 0.05}} | others}


def test_a_round_that_needs_a_site_with_a_full_disk_waits_until_there_is_room(tmp_path, monkeypatch):
    experiment = sites.federated(
        FEDMRL, engine={"device": "cpu", "patience": 600}, **training(3, quorum=1.0, attempts=2)
    )
    serve(Link(tmp_path / "fine"), tmp_path / "fine/run", experiment)
    link, time, told, write = Link(tmp_path / "full"), Time(), Told(), RecordFiles.write_manifest
    room = [True, True, *[False] * 5]  # for the site of client 1, at each write

    def full(files, values):
        if (tmp_path / "full" / "1") in files.folder.parents and room and not room.pop(0):
            raise RunError("there is no room") from OSError(errno.ENOSPC, "No space left on device")
        write(files, values)

    monkeypatch.setattr(RecordFiles, "write_manifest", full)
    serve(link, tmp_path / "full/run", experiment, told, time)
    assert not room
    assert time.waits == [5, 10, 20, 40]
    assert sum("client 1: RunError at the site" in one for one in told.notices) == 4
    assert sites.log(tmp_path / "full/run") == sites.log(tmp_path / "fine/run")


def stop_in(link, round_):
    """Let the server die when a round begins."""

    def lose(order):
        if isinstance(order, Request) and order.stamp.round == round_:
            raise Killed

    link.lose = lose
    return link


def begun(tmp_path, experiment, rounds=1):
    """A run whose server was killed after some rounds, and its sites."""
    link = stop_in(Link(tmp_path), rounds + 1)
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", experiment)
    link.lose = lambda order: None
    link.orders.clear()
    return link


def test_a_start_waits_for_everyone_by_default_and_says_who_is_missing(tmp_path):
    with pytest.raises(RunError, match=r"after 5 s these clients have not joined: 1$"):
        serve(Link(tmp_path, away="1"), tmp_path / "run", sites.federated(FEDMRL))


def test_a_start_quorum_lets_a_run_begin_and_the_late_client_is_taken_in_between_rounds(tmp_path):
    link, told, time = Link(tmp_path, away="1"), Told(), Time()
    link.lose = lambda order: link.away.discard("1") if is_training(order, "0", 2) else None
    experiment = sites.federated(
        FEDMRL, engine={"device": "cpu", "patience": 100}, **training(4, start_quorum=0.6)
    )
    result = serve(link, tmp_path / "run", experiment, told, time)
    assert [link.asked(round_) for round_ in (1, 2, 3, 4)] == [["0", "2"], ["0", "2"], [*"012"], [*"012"]]
    assert "going on without 1: 2 of 3 are here" in told.notices
    assert "taken in after round 2: 1" in told.notices
    assert time.seconds == pytest.approx(GRACE, abs=5)
    assert result.summary["clients"] == 3
    assert result.summary["accuracy"]["missing"] == {"last": [], "rounds": {"1": ["1"], "2": ["1"]}}
    absent = {one["missing"] for one in sites.log(tmp_path / "run") if "missing" in one}
    assert absent == {"it has not joined yet"}


def test_a_node_that_comes_and_goes_does_not_keep_the_others_from_starting(tmp_path):
    link, time = Link(tmp_path, away="1"), Time()
    steady, looks = link.nodes, iter(range(10**6))
    link.nodes = lambda: [*steady(), *([99] if next(looks) % 2 else [])]
    answer = link._answer
    link._answer = lambda node, data: "it is silent" if node == 99 else answer(node, data)
    experiment = sites.federated(
        "local", engine={"device": "cpu", "patience": 100}, **training(1, start_quorum=0.6)
    )
    serve(link, tmp_path / "run", experiment, time=time)
    assert time.seconds < 60


@pytest.mark.parametrize("said", ["no answer came", b"nonsense"])
def test_a_node_that_starts_anew_and_does_not_enrol_is_waited_for_less_and_less(tmp_path, said):
    link, time, numbers = Link(tmp_path, model="mlp-small"), Time(), iter(range(99, 10**6))
    steady, exchange = link.nodes, link.exchange
    link.nodes = lambda: [*steady(), next(numbers)]

    def silent(letters, timeout, most):
        if any(node >= 99 for node, _ in letters):
            time.sleep(timeout)
        answers = {letter[0]: answer for letter in letters if letter[0] < 99
                   for answer in exchange([letter], timeout, most)}  # fmt: skip
        return [answers.get(node, said) for node, _ in letters]

    link.exchange = silent
    settings = {"device": "cpu", "deadline": 600, "patience": 5000}
    serve(link, tmp_path / "run", sites.federated("local", engine=settings, **training(3)), time=time)
    assert HELLO < time.seconds < 4 * HELLO  # of ten greetings


def test_a_site_that_needs_minutes_to_introduce_itself_is_greeted_long_enough(tmp_path):
    """An exchange through Flower alone takes several seconds: a shorter greeting would be answered by nobody."""
    link, time = Link(tmp_path, model="mlp-small"), Time()
    exchange = link.exchange

    def slow(letters, timeout, most):
        loads = time.seconds < 300 and any(node == 2 for node, _ in letters)
        time.sleep(timeout if loads else 6)
        answers = exchange(letters, timeout, most)
        late = {node for node, _ in letters if timeout < 6 or (node == 2 and loads)}
        return ["no answer came" if node in late else one
                for (node, _), one in zip(letters, answers, strict=True)]  # fmt: skip

    link.exchange = slow
    settings = {"device": "cpu", "deadline": 600, "patience": 1000}
    serve(link, tmp_path / "run", sites.federated("local", engine=settings, **training(1)), time=time)
    assert link.asked(1) == [*sites.IDS]


def test_too_few_for_the_start_quorum_do_not_start(tmp_path):
    experiment = sites.federated(FEDMRL, **training(start_quorum=0.6))
    with pytest.raises(RunError, match=r"have not joined: 1, 2 \(1 are here, 2 are needed\)"):
        serve(Link(tmp_path, away="12"), tmp_path / "run", experiment)


SEVEN = Task("classification", 7, (1, 8, 8))


def another_task(*clients, task=SEVEN):
    """Replies in which clients introduce themselves with a well-formed task that is not the others'."""

    def tamper(order, answer):
        reply = wire.unpack_reply(answer)
        if not isinstance(order, wire.Hello) or reply.card.client not in clients:
            return answer
        return wire.pack_reply(replace(reply, card=replace(reply.card, task=task)))

    return tamper


@pytest.mark.parametrize("odd", ["0", "2"])
def test_a_client_with_another_task_is_turned_away_and_the_others_start_if_they_are_enough(tmp_path, odd):
    link, told = Link(tmp_path), Told()
    link.tamper = another_task(odd)
    experiment = sites.federated(FEDMRL, **training(1, start_quorum=0.6, quorum=0.5))
    result = serve(link, tmp_path / "run", experiment, told)
    assert link.asked(1) == [client for client in sites.IDS if client != odd]
    (notice,) = [one for one in told.notices if "was not taken in" in one]
    assert f"client {odd} cannot take part: client " in notice
    assert "7" in notice
    assert result.summary["clients"] == 2
    missing = {line["client"]: line["missing"] for line in sites.log(tmp_path / "run") if "missing" in line}
    assert missing == {odd: "it was not taken in"}


def test_where_everyone_is_needed_the_error_says_who_does_not_fit_and_what_to_do(tmp_path):
    link = Link(tmp_path)
    link.tamper = another_task("0", "1", task=Task("classification", 10, (1, 9, 9)))
    with pytest.raises(ConfigError, match=r"client 2 .*another task.*; .* begin without: --exclude 2$"):
        serve(link, tmp_path / "run", sites.federated(FEDMRL, rounds=1))
    link.tamper = another_task("1")
    serve(link, tmp_path / "run", sites.federated(FEDMRL, rounds=1), exclude=["1"])
    assert link.asked(1) == ["0", "2"]


def test_a_restart_goes_on_with_the_quorum_and_knows_who_is_away(tmp_path):
    experiment = sites.federated(FEDMRL, **training(3, quorum=0.5))
    link = begun(tmp_path, experiment)
    link.away = {"1"}
    told = Told()
    serve(link, tmp_path / "run", experiment, told)
    assert any(one.startswith("round 2 goes on without client 1: it is not") for one in told.notices)
    away = {("1", 2), ("1", 3)}
    measured = [one for one in sites.log(tmp_path / "run") if "missing" not in one]
    expected = sites.serial(FEDMRL, tmp_path / "serial", away=away, **training(3, quorum=0.5))
    assert measured == [one for one in expected if (one["client"], one["round"]) not in away]


def test_enrolments_of_a_start_that_never_was_do_not_count(tmp_path, monkeypatch):
    """A server is killed before `config.yaml`; the next start begins without one of its clients, for good."""
    experiment, link = sites.federated(FEDMRL, **training(start_quorum=0.6, quorum=1.0)), Link(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(served_run, "write_start", lambda *given: stop())
        with pytest.raises(Killed):
            serve(link, tmp_path / "run", experiment)
    assert (tmp_path / "run" / "enrolments.json").exists()
    link.away = {"2"}
    with pytest.raises(Killed):
        serve(stop_in(link, 2), tmp_path / "run", experiment)
    link.lose = lambda order: None
    serve(link, tmp_path / "run", experiment)
    assert link.asked(2) == ["0", "1"]


def stop():
    raise Killed


def test_a_start_that_never_was_may_come_again_with_other_settings(tmp_path, monkeypatch):
    link, kept = Link(tmp_path), served_run.keep_enrolments
    monkeypatch.setattr(served_run, "keep_enrolments", Mock(side_effect=Killed))
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", sites.federated(FEDMRL, **training(1)))
    monkeypatch.setattr(served_run, "keep_enrolments", kept)
    serve(link, tmp_path / "run", sites.federated(FEDMRL, **training(2)))
    assert link.asked(2) == [*"012"]


def test_a_restart_without_the_quorum_waits_and_says_so(tmp_path):
    experiment = sites.federated(FEDMRL, **training(quorum=0.6))
    link = begun(tmp_path, experiment)
    link.away = {"1", "2"}
    with pytest.raises(RunError, match=r"have not joined: 1, 2 \(1 are here, 2 are needed\)"):
        serve(link, tmp_path / "run", experiment)


def test_a_site_that_comes_back_with_another_card_is_refused_after_a_restart_too(tmp_path):
    experiment = sites.federated("fedproto", **training(quorum=0.5))
    link = begun(tmp_path, experiment)
    load = link.sites[1].load
    link.sites[1] = link.make("1")
    link.sites[1].load = lambda: {name: part for name, part in load().items() if name != "validation"}
    told = Told()
    serve(link, tmp_path / "run", experiment, told)
    assert any("client 1: it came back with another card" in one for one in told.notices)


@pytest.mark.parametrize("method", ["fedproto", FEDMRL])
def test_a_site_that_comes_back_with_another_model_is_refused_though_its_card_is_the_same(
    tmp_path, capsys, method
):
    experiment = sites.federated(method, **training(quorum=0.5))
    link = begun(tmp_path, experiment)
    link.sites[1] = link.make("1")
    link.sites[1].model = sites.builder("0")
    told = Told()
    serve(link, tmp_path / "run", experiment, told)
    said = "client 1: ModelError at the site; the log of its worker says more"
    assert any(said in one and "was not taken in" in one for one in told.notices)
    why = r"client 1: its model is not the one that it began this run with: tensor 'model/\S+' is .+, and .+ in the"
    assert re.search(why, capsys.readouterr().err)


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: [],
        lambda kept: kept | {"1": 3},
        lambda kept: kept | {"1": kept["0"] | {"samples": {"train": -1, "validation": 0, "test": 0}}},
        lambda kept: kept | {"1": kept["1"] | {"extra": {"spy": 1}}},
        lambda kept: kept | {"1": kept["1"] | {"task": "dance"}},
    ],
)
def test_kept_enrolments_are_checked_like_strangers(tmp_path, change):
    folder, kept = open_folder(tmp_path / "run"), sample_enrolments()
    write_checked(folder / "enrolments.json", {"clients": change(kept)})
    with pytest.raises(RunError, match=r"enrolments\.json"):
        kept_enrolments(folder, [])
    write_checked(folder / "enrolments.json", {"clients": kept})
    assert sorted(kept_enrolments(folder, [])) == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "digit"), [("enrolments.json", '"train": 9'), ("federation.json", '"starts": 9')]
)
def test_a_changed_digit_is_found_and_the_file_named(tmp_path, name, digit):
    folder = open_folder(tmp_path / "run")
    write_checked(folder / "enrolments.json", {"clients": sample_enrolments()})
    Register(folder).note(starts=9, norms={10: {"0": 0.1}, 9: {"0": 1e300}})
    assert (Register(folder).values.starts, sorted(kept_enrolments(folder, []))) == (9, ["0", "1"])
    path = folder / name
    path.write_text(path.read_text().replace(digit, digit.replace("9", "8")))
    with pytest.raises(RunError, match=rf"{name} is not as potluck wrote it: .* put a whole copy of it back"):
        Register(folder), kept_enrolments(folder, [])


def sample_enrolments():
    task = {"kind": "classification", "classes": 10, "input": [1, 8, 8]}
    samples = {"train": 9, "validation": 0, "test": 4}
    return {one: {"client": one, "samples": samples, "task": task, "extra": {}} for one in ("0", "1")}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"run": "../x", "starts": 1},
        {"run": "a1", "starts": "many"},
        {"run": "a1", "starts": 1, "keys": [1]},
    ],
)
def test_a_register_that_makes_no_sense_is_named(tmp_path, values):
    folder = open_folder(tmp_path / "run")
    write_checked(folder / "federation.json", values)
    with pytest.raises(RunError, match=r"federation\.json was not written by potluck"):
        Register(folder)


def test_an_excluded_client_is_out_for_good_until_it_is_included_again(tmp_path):
    experiment = sites.federated(FEDMRL, **training(4, quorum=1.0))
    link = begun(tmp_path, experiment)
    stop_in(link, 3)
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", experiment, exclude=["1"])
    assert link.asked(2) == ["0", "2"]
    assert read_json(tmp_path / "run" / "federation.json")["excluded"] == ["1"]
    told = Told()
    stop_in(link, 4)
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", experiment, told)  # a plain restart leaves it out as well
    assert link.asked(3) == ["0", "2"]
    assert any("client 1 is excluded from this run; --include 1 takes it back" in one for one in told.notices)
    link.lose = lambda order: None
    link.orders.clear()
    result = serve(link, tmp_path / "run", experiment, include=["1"])
    assert link.asked(4) == [*"012"]
    assert result.summary["accuracy"]["missing"]["rounds"] == {"2": ["1"], "3": ["1"]}
    assert "excluded" not in result.summary


def test_who_answers_the_same_question_otherwise_is_named_and_can_be_excluded(tmp_path):
    """With other first weights at each try the others would be asked for something new every time."""
    settings = training(quorum=1.0) | {"models": {"pool": "mlp-small", "rep_dim": 16}}
    experiment, factors = sites.federated("fedavg", **settings), itertools.count(1)
    link = Link(tmp_path, simulated=False, model="mlp-small")

    def tamper(order, data):
        gives = is_training(order, "0", 1) and order.purpose == "setup"
        return blown_up(lambda order: gives, next(factors) if gives else 1.0)(order, data)

    link.tamper = tamper
    link.lose = lambda order: (
        "no answer came" if is_training(order, "0", 1) and order.purpose != "setup" else None
    )
    with pytest.raises(RoundFailed, match="client 0: it answered the same question otherwise when round 1"):
        serve(link, tmp_path / "run", experiment)
    trained = [one for one in link.orders if is_training(one, "1", 1) and one.purpose != "setup"]
    assert len(trained) == 1
    assert serve(link, tmp_path / "run", experiment, exclude=["0"]).summary["excluded"] == ["0"]


def test_one_downlink_for_all_is_looked_through_once(monkeypatch):
    digests = Mock(side_effect=lambda message: str(len(message)))
    monkeypatch.setattr(repeats, "digest_of", digests)
    down, up = Message({"w": torch.zeros(2)}), Message()
    requests = [Request(one, ("train",), down, Stamp("run", 1, 1, 1, 0)) for one in "abcd"]
    outcomes = [Answer(one, up, Report()) for one in "abcd"]
    assert repeats.Repeats().check(requests, outcomes) == outcomes
    assert [one.args[0] is down for one in digests.call_args_list].count(True) == 1


def test_the_summary_names_who_was_excluded(tmp_path):
    experiment = sites.federated("fedproto", **training(2))
    link = begun(tmp_path, experiment)
    result = serve(link, tmp_path / "run", experiment, exclude=["2"])
    assert result.summary["excluded"] == ["2"]
    assert result.summary["clients"] == 2
    assert result.summary["accuracy"]["missing"] == {"last": ["2"], "rounds": {"2": ["2"]}}
    assert "Excluded from the run: 2." in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("exclude", "include", "sentence"),
    [
        (["west"], [], "'west' is none of the experiment's clients"),
        (["0", "1", "2"], [], "all clients would be out"),
        (["0"], ["0"], "both name 0"),
    ],
)
def test_exclusions_that_make_no_sense_are_refused(tmp_path, exclude, include, sentence):
    with pytest.raises(ConfigError, match=sentence):
        serve(Link(tmp_path), tmp_path / "run", sites.federated(FEDMRL), exclude=exclude, include=include)


def test_an_exclusion_that_a_run_cannot_go_on_with_is_not_kept(tmp_path):
    experiment = sites.federated({"name": "pairwise", "peers": 2}, **training(2))
    link = begun(tmp_path, experiment)
    with pytest.raises(ConfigError, match=r"method\.peers is 2, but a client has 1"):
        serve(link, tmp_path / "run", experiment, exclude=["2"])
    assert serve(link, tmp_path / "run", experiment).summary["rounds"] == 2


def test_a_late_client_that_does_not_fit_is_refused_in_one_sentence_and_the_rest_go_on(tmp_path):
    """The late one brings pictures of another size."""
    link, told = Link(tmp_path, away="1", model="mlp-small"), Told()
    given = link.sites[1].load()
    narrow = {name: (given[name][0][..., :4], given[name][1]) for name in ("train", "test")}
    link.sites[1].load = lambda: narrow
    link.lose = lambda order: link.away.discard("1") if is_evaluation(order, "0", 1) else None
    experiment = sites.federated("fedavg", **training(3, start_quorum=0.6))
    serve(link, tmp_path / "run", experiment, told)
    (refusal, *more) = [one for one in told.notices if "cannot join" in one]
    assert refusal.startswith("node 1 was not taken in: client 1 cannot join after round 1: ")
    assert not more
    assert link.asked(3) == ["0", "2"]


def test_a_state_that_is_for_other_clients_is_refused_in_one_sentence(tmp_path):
    def server(width):
        made = Server(Task("classification", 2, (1,)), {})
        made.declare({"table": torch.zeros(width), "open": {"a": torch.zeros(width)}})
        return made

    assert fits(server(2), server(2).snapshot() | {"open/b": torch.zeros(7)})
    assert not fits(server(2), server(3).snapshot())
    assert not fits(server(2), {"open/a": torch.zeros(2)})
    assert not fits(server(2), server(2).snapshot() | {"other": torch.zeros(1)})


# --- a server that is killed ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    home = tmp_path_factory.mktemp("uninterrupted")
    serve(Link(home), home / "run", sites.federated("fedproto"))
    return home / "run"


@pytest.mark.parametrize(
    ("at", "away"),
    [
        ("checkpoint-000001.json", ()),
        ("/checkpoint.json", ()),
        ("summary.json", sites.IDS),  # nothing is left to play
        ("report.html", sites.IDS),
    ],
)
def test_a_server_that_was_killed_goes_on_by_the_same_command(tmp_path, uninterrupted, at, away):
    with Kill(at) as kill:
        serve(Link(tmp_path), tmp_path / "run", sites.federated("fedproto"))
    assert kill.dead
    ended = serve(Link(tmp_path, away=away), tmp_path / "run", sites.federated("fedproto"))
    assert ended.summary["rounds"] == 2
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (uninterrupted / name).read_bytes()
    assert (tmp_path / "run/report.html").exists()
    with pytest.raises(RunError, match="is finished; choose another --out"):
        serve(Link(tmp_path), tmp_path / "run", sites.federated("fedproto"))
