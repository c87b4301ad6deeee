"""A client that trains well and tells absurd losses of itself: it has no part in a mean, and is named once."""

import json
from dataclasses import replace
from math import inf, nan

import pytest
import sites
import torch
from hostile import changed, note_of
from links import Link, Told, is_training, serve

from potluck.core.metrics import MetricFacts
from potluck.deploy import wire
from potluck.engine.evaluation.unbounded import UnboundedNumbers
from potluck.engine.protocol import Answer, Examination


def telling(loss):
    """Client 1 answers evaluations with another sum of losses."""

    def tamper(order, data):
        answer = wire.unpack_reply(data)
        if not (isinstance(order, Examination) and order.client == "1" and isinstance(answer, Answer)):
            return data
        told = {
            name: torch.full_like(value, loss) if name.endswith("loss") else value
            for name, value in answer.report.metrics.items()
        }
        return wire.pack_reply(replace(answer, report=replace(answer.report, metrics=told)))

    return tamper


@pytest.mark.parametrize(
    ("loss", "words"), [(nan, "not finite"), (inf, "not finite"), (1e99, "e+96"), (1e20, "e+17")]
)
def test_an_absurd_loss_has_no_part_in_the_mean_and_is_said_once(tmp_path, loss, words):
    link, told = Link(tmp_path / "sites"), Told()
    link.tamper = telling(loss)
    serve(link, tmp_path / "run", sites.federated("local"), told)
    (notice,) = [one for one in told.notices if "no part in means" in one]
    assert notice.startswith("round 1: the loss of client 1 is ")
    assert words in notice
    honest, found = sites.serial("local", tmp_path / "simulation"), sites.log(tmp_path / "run")
    for line, expected in zip(found, honest, strict=True):
        if line["client"] == "1":
            assert line["test"]["loss"] is None
            assert line["test"]["accuracy"] == expected["test"]["accuracy"]
        else:
            assert line == expected
    others = [line["test"]["loss"] for line in honest if line["round"] == 2 and line["client"] != "1"]
    assert told.ends[-1].loss == pytest.approx(sum(others) / 2)


def line(client, loss, **others):
    return {"round": 1, "client": client, "mode": "model", "test": {**others, "loss": loss, "samples": 4}}


def judged(*lines, **facts):
    notices = []
    found = UnboundedNumbers(facts, notices.append).judge(1, lines)
    return [one["test"] for one in found], notices


def test_a_diverged_model_and_other_tasks_keep_their_losses():
    lines = [line("0", 2.0, accuracy=0.1), line("1", 1e8, accuracy=0.1), line("2", 2.5, accuracy=0.1)]
    regression = line("3", 1e20, score=-1e5, metric="r2", r2=-1e5)
    found, notices = judged(*lines, regression)
    assert [one["loss"] for one in found] == [2.0, 1e8, 2.5, 1e20]
    assert not notices


def test_who_is_judged_by_an_absurd_number_has_no_score():
    lines = [line(client, 1.0, score=0.5, metric="r2", r2=0.5) for client in "012"]
    found, notices = judged(*lines, line("3", 1.0, score=-1e30, metric="r2", r2=-1e30))
    assert [one["score"] for one in found] == [0.5, 0.5, 0.5, None]
    assert [one.partition(":")[2].strip().partition(" is ")[0] for one in notices] == ["the r2 of client 3"]


def test_an_undefined_value_of_r2_and_of_ones_own_metric_is_nothing_new():
    lines = [line(client, 1.0, r2=None, hours=None) for client in "012"]
    assert judged(*lines, hours=MetricFacts("hours", high=inf))[1] == []


@pytest.mark.parametrize(("lie", "words"), [(3.3e38, "not finite"), (1e30, "1e+30, far beyond all others")])
def test_an_absurd_number_beside_the_tensors_is_null_where_a_method_logs_it(tmp_path, lie, words):
    link, told = Link(tmp_path / "sites"), Told()

    def tamper(order, data):
        note = note_of(data)
        if note["client"] != "1" or note["reply"] != "answer" or isinstance(order, Examination):
            return data
        absurd = {name: [lie, "float32"] for name in note["losses"]}
        return changed(data, losses=absurd)

    link.tamper = tamper
    method = {"name": "fedmuscle", "peers": 1, "batch": 20}
    serve(link, tmp_path / "run", sites.federated(method), told)
    text = (tmp_path / "run" / "observations.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert len(lines) == 6
    for one in lines:
        assert (one["muscle"] is None) == (one["client"] == "1")
        assert one["information_bound"] is not None
    (notice,) = [one for one in told.notices if "the muscle of client 1" in one]
    assert (
        notice
        == f"round 1: the muscle of client 1 is {words}: it is null in the log and has no part in means"
    )


@pytest.mark.parametrize("loss", [inf, nan, 1e99])
def test_whose_loss_of_training_is_not_finite_hears_of_the_learning_rate(tmp_path, loss):
    """An honest site may have such a loss, where it trains on with what another has spoiled."""
    link, told = Link(tmp_path / "sites"), Told()

    def tamper(order, data):
        if not is_training(order, "1", 1):
            return data
        return changed(data, losses={name: [loss, "float64"] for name in note_of(data)["losses"]})

    link.tamper = tamper
    serve(link, tmp_path / "run", sites.federated("fedproto"), told)
    (out,) = [one for one in told.notices if "goes on without" in one]
    assert out.startswith(
        "round 1 goes on without client 1, step train: the loss is not finite; lower training."
    )
