"""At a site only what it agreed to is measured, by the libraries it knows and by its own functions."""

import sys
from dataclasses import replace
from math import nan

import pytest
import sites

from potluck.deploy import wire
from potluck.deploy.agreement import Agreement
from potluck.deploy.rehearsal import propose
from potluck.deploy.run import open_folder, play, prepared
from potluck.deploy.site import REHEARSAL, Site, metric_functions
from potluck.deploy.welcome import welcome
from potluck.engine.protocol import Answer, Examination, Failure, Stamp
from potluck.errors import ConfigError
from potluck.federation.explain import explain
from potluck.runs.api import run

RUN = "b2"


def share(scores, labels):
    """A metric that a site brings."""
    return float((scores.argmax(1) == labels).mean())


def make_site(client, home, **options):
    return Site(client, sites.builder(client), sites.loader(client), home / client, simulated=True, **options)


def ask(site, order):
    return wire.unpack_reply(site.answer(wire.pack_order(order)))


def enrol(site, *metrics):
    told = welcome(sites.federated("local"), RUN)
    told["experiment"]["metrics"] = list(metrics)
    return ask(site, wire.Hello(told))


def examine(site, *metrics, predictions=False):
    stamp = Stamp(RUN, 1, 1, 0, 0)
    return ask(site, Examination("0", None, stamp, ("model",), "own", metrics, predictions))


class Courier:
    """Carries bytes to sites of this process."""

    def __init__(self, home, **options):
        self.sites = {number: make_site(client, home, **options) for number, client in enumerate(sites.IDS)}

    def nodes(self):
        return list(self.sites)

    def keys(self):
        return {}

    def took(self):
        return []

    def exchange(self, letters, timeout, most):
        return [self.sites[node].answer(data) for node, data in letters]


def test_a_federation_measures_what_a_simulation_measures(tmp_path):
    (tmp_path / "server.py").write_text(
        "def share(scores, labels): return (scores.argmax(1) == labels).mean()"
    )
    asked = {"metrics": ["macro_f1", "auroc", f"{tmp_path}/server.py:share"]}
    courier = Courier(tmp_path, metrics={"share": share})
    play(prepared(sites.federated("local", **asked)), courier, open_folder(tmp_path / "run"))
    run(sites.simulated("local", **asked), out=tmp_path / "serial")
    found = sites.log(tmp_path / "run")
    assert found == sites.log(tmp_path / "serial")
    assert all(line["test"]["share"] == pytest.approx(line["test"]["accuracy"], abs=1e-6) for line in found)


def test_a_site_does_not_join_for_a_metric_outside_its_agreement(tmp_path):
    site = make_site("0", tmp_path)
    federation = site.federation(welcome(sites.federated("local"), RUN)["experiment"], REHEARSAL)
    agreement, _ = propose(federation, "0")
    assert agreement.metrics == ()
    site = make_site("0", tmp_path, agreement=agreement)
    refusal = enrol(site, "macro_f1")
    assert isinstance(refusal, Failure)
    assert refusal.reason == (
        "client 0: the metric 'macro_f1' would be measured, this site agreed to: those of its task; "
        "change its contract if that is meant"
    )


def test_a_rehearsal_proposes_the_metrics_it_was_asked_for(tmp_path):
    told = welcome(sites.federated("local", metrics=["macro_f1", "sklearn:hamming_loss"]), RUN)
    federation = make_site("0", tmp_path).federation(told["experiment"], REHEARSAL)
    agreement, _ = propose(federation, "0")
    assert agreement.metrics == ("macro_f1", "hamming_loss")
    [said] = [one["meaning"] for one in explain(federation, "0")["report"] if one["name"] == "metrics"]
    assert said.endswith("also macro_f1, hamming_loss")


def test_a_metric_that_was_not_in_the_welcome_is_not_measured_later(tmp_path):
    agreement = Agreement(method="local", steps={"train": {}, "evaluate": {}}, bytes_per_round=0,
                          card=("samples", "task"), metrics=("macro_f1",))  # fmt: skip
    site = make_site("0", tmp_path, agreement=agreement)
    enrol(site, "macro_f1")
    assert "model/test/macro_f1" in examine(site, "macro_f1").report.metrics
    assert "this site agreed to: macro_f1" in examine(site, "auroc").reason
    site.agreement = site.resident.performer.agreement = None
    assert "it is asked for the metric 'auroc', which it does not have" in examine(site, "auroc").reason


def test_a_metric_that_fails_at_a_site_costs_its_own_value_alone(tmp_path, capsys):
    def fussy(scores, labels):
        return {40: 0.5}.get(len(labels)) or {}["a\x1b row"]

    site = make_site("0", tmp_path, metrics={"fussy": fussy})
    enrol(site, "fussy")
    report = examine(site, "fussy").report
    assert report.metrics["model/test/fussy"].isnan()
    assert report.metrics["model/test/correct"] >= 0
    assert report.errors == {"fussy": "KeyError at the site"}
    told = capsys.readouterr()
    assert "the metric fussy failed: KeyError: 'a" in told.out + told.err


@pytest.mark.parametrize("error", [KeyError, ConfigError])
def test_a_metric_that_fails_when_a_site_joins_tells_its_kind_alone(tmp_path, error):
    def audit(scores, labels):
        raise error("Anna, row 7")

    refusal = enrol(make_site("0", tmp_path, metrics={"audit": audit}), "audit")
    assert refusal.reason == "client 0: TrialFailed at the site; the log of its worker says more"


def test_a_function_that_a_site_brings_comes_before_one_of_a_library(tmp_path):
    site = make_site("0", tmp_path, metrics={"hamming_loss": lambda scores, labels: 0.25})
    enrol(site, "sklearn:hamming_loss")
    assert examine(site, "hamming_loss").report.metrics["model/test/hamming_loss"] == 0.25


def test_an_evaluation_without_a_mode_is_refused(tmp_path, capsys):
    site = make_site("0", tmp_path)
    enrol(site)
    reply = ask(site, Examination("0", None, Stamp(RUN, 1, 1, 0, 0), ()))
    assert reply.reason == "client 0: an evaluation came that names no mode; name one in evaluate.modes"
    assert "Traceback" not in capsys.readouterr().err


def test_predictions_stay_at_a_site(tmp_path):
    site = make_site("0", tmp_path)
    enrol(site)
    assert "predictions are asked for, which stay at a site; leave" in examine(site, predictions=True).reason
    with pytest.raises(ConfigError, match="stay with its clients"):
        prepared(sites.federated("local", evaluate={"predictions": True}))


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("form", ["sklearn:/../../../../../../../../../..{}:f", "{}:f", "sklearn:{}:f"])
def test_a_server_cannot_have_a_file_at_a_site_run(tmp_path, form, pinned):
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(a, b): return 0.5\n")
    agreed = Agreement(method="local", steps={"train": {}, "evaluate": {}}, bytes_per_round=0, metrics=("f",))
    site = make_site("0", tmp_path, agreement=agreed if pinned else None)
    reasons = [
        enrol(site, form.format(file)).reason for file in (tmp_path / "planted.py", tmp_path / "no.py")
    ]
    assert reasons == ["client 0: ConfigError at the site; the log of its worker says more"] * 2
    assert not (tmp_path / "ran").exists()
    assert site.resident is None


def test_metrics_are_compared_with_the_contract_before_anything_is_loaded(tmp_path):
    agreed = Agreement(method="local", steps={"train": {}, "evaluate": {}}, bytes_per_round=0)
    site = make_site("0", tmp_path, agreement=agreed)
    site.load = None
    assert "the metric 'hamming_loss' would be measured" in enrol(site, "sklearn:hamming_loss").reason


@pytest.mark.parametrize("name", ["evil_module:run", "sklearn:run:me", "mine", "sklearn.metrics:f1_score"])
def test_a_site_imports_nothing_that_a_server_names(tmp_path, name):
    site = make_site("0", tmp_path)
    refusal = enrol(site, name)
    assert f"the server asks for the metric {name!r}, which this site does not bring" in refusal.reason
    assert "evil_module" not in sys.modules
    assert site.resident is None


def test_sites_hear_the_name_of_a_metric_and_nothing_of_its_home(tmp_path):
    (tmp_path / "server.py").write_text("def share(scores, labels): return 0.5")
    own = {"name": f"{tmp_path}/server.py:share", "called": "ours"}
    told = welcome(sites.federated("local", metrics=["macro_f1", own]), RUN)
    assert told["experiment"]["metrics"] == ["macro_f1", "ours"]
    with pytest.raises(ConfigError, match="sites know sklearn:fbeta_score by its name alone"):
        welcome(
            sites.federated("local", metrics=[{"name": "sklearn:fbeta_score", "options": {"beta": 2}}]), RUN
        )


def test_a_reply_without_the_metrics_asked_for_is_not_taken(tmp_path):
    courier = Courier(tmp_path)
    honest = courier.sites[1].answer

    def silent(data):
        order = wire.unpack_order(data)
        if isinstance(order, Examination):
            data = wire.pack_order(replace(order, metrics=()))
        return honest(data)

    courier.sites[1].answer = silent
    asked = sites.federated("local", rounds=1, metrics=["macro_f1"])
    play(prepared(asked), courier, open_folder(tmp_path / "run"))
    lines = sites.log(tmp_path / "run")
    assert {line["client"] for line in lines if "test" in line} == {"0", "2"}
    assert [line["client"] for line in lines if "missing" in line] == ["1"]


def test_a_metric_that_fails_at_every_site_ends_no_run(tmp_path):
    """In a run of one's own it would, in the first evaluation; but what strangers answer must not."""
    courier = Courier(tmp_path)
    honest = courier.exchange

    def failing(answer):
        reply = wire.unpack_reply(answer)
        if not isinstance(reply, Answer):
            return answer
        found = {name: value * (nan if "f1" in name else 1) for name, value in reply.report.metrics.items()}
        report = replace(reply.report, metrics=found, errors={"macro_f1": "ValueError: nothing to see"})
        return wire.pack_reply(replace(reply, report=report))

    courier.exchange = lambda *order: [failing(answer) for answer in honest(*order)]
    asked = sites.federated("local", rounds=1, metrics=["macro_f1"])
    play(prepared(asked), courier, open_folder(tmp_path / "run"))
    assert {line["test"]["macro_f1"] for line in sites.log(tmp_path / "run")} == {None}


@pytest.mark.parametrize("name", ["os:system", "builtins:len", "string:Template"])
def test_what_takes_no_scores_and_labels_is_no_metric_of_a_site(name):
    with pytest.raises(
        ConfigError, match=rf"--metric {name}: .* takes other arguments than scores and labels"
    ):
        metric_functions([name])


def test_functions_of_two_arguments_and_those_that_hide_theirs_are_taken():
    taken = ("operator:eq", "builtins:max", f"{__name__}:share")
    assert list(metric_functions(taken)) == ["eq", "max", "share"]
