"""An operator who changes the experiment between two starts of the server, or names a client that there is not."""

from pathlib import Path

import pytest
import sites
from links import FEDMRL, EndsAfter, Killed, Link, Told, serve
from test_resume_served import command, link, started  # noqa: F401  (a fixture)

from potluck.deploy.flower import serve as served
from potluck.deploy.flower.connections import Security
from potluck.errors import ConfigError, RunError
from potluck.files import read_json, write_json

ENGINE = {"device": "cpu", "workers": 1, "deadline": 60, "patience": 5}
TRAINING = {"rounds": 3, "batch_size": 64, "optimizer": {"lr": 0.05}}


def experiment(**changes):
    return sites.federated(FEDMRL, rounds=3, **{"engine": ENGINE, "training": TRAINING} | changes)


def begun(tmp_path):
    home = Link(tmp_path)
    with pytest.raises(Killed):
        serve(home, tmp_path / "run", experiment(), EndsAfter(1))
    return home


@pytest.mark.parametrize(("key", "value"), [("deadline", 900), ("patience", 70)])
def test_how_long_a_server_waits_may_change_while_a_run_goes_on(tmp_path, key, value):
    home = begun(tmp_path)
    for time in range(2):  # the second start has it from the first
        with pytest.raises(Killed):
            serve(home, tmp_path / "run", experiment(engine=ENGINE | {key: value}), EndsAfter(1))
        (change,) = read_json(tmp_path / "run" / "environment.json")["changes"]
        assert change == {"round": 1, "key": f"engine.{key}", "before": float(ENGINE[key]), "after": value}, (
            time
        )
    serve(home, tmp_path / "run", experiment())
    changes = read_json(tmp_path / "run" / "environment.json")["changes"]
    assert [one["after"] for one in changes] == [value, ENGINE[key]]
    assert sites.log(tmp_path / "run") == sites.serial(FEDMRL, tmp_path / "serial", training=TRAINING)


@pytest.mark.parametrize(
    "change",
    [
        {"engine": ENGINE | {"threads": 2}},
        {"training": TRAINING | {"quorum": 0.3}},
        {"training": TRAINING | {"optimizer": {"lr": 0.01}}},
        {"seed": 3},
    ],
)
def test_whatever_may_change_a_number_may_not(tmp_path, change):
    home = begun(tmp_path)
    before = (tmp_path / "run" / "environment.json").read_bytes()
    with pytest.raises(RunError, match=r"was begun with other settings \("):
        serve(home, tmp_path / "run", experiment(**change))
    assert (tmp_path / "run" / "environment.json").read_bytes() == before


def test_a_resumed_federation_may_wait_longer_and_does_nothing_else_otherwise(tmp_path, link):  # noqa: F811
    started(tmp_path, link)
    code, said = command("resume", "runs/three", "training.quorum=0.2")
    assert (code, "only engine.deadline and engine.patience may change" in said) == (2, True)
    code, said = command("resume", "runs/three", "engine.deadline=0")
    assert code == 2, said
    code, said = command("resume", "runs/three", "engine.deadline=900")
    assert code == 0, said
    changes = read_json(tmp_path / "runs" / "three" / "environment.json")["changes"]
    assert [(one["key"], one["after"]) for one in changes] == [("engine.deadline", 900)]


def test_what_cannot_be_played_is_refused_before_flower_is_started(tmp_path, link):  # noqa: F811
    def start(**options):
        where = Path("runs/three"), "127.0.0.1:8123", Security()
        return served.serve(options.pop("experiment", experiment()), *where, Told(), **options)

    with pytest.raises(ConfigError, match="'west' is none of the experiment's clients"):
        start(exclude=["west"])
    assert not link.calls
    start()
    link.calls.clear()
    with pytest.raises(RunError, match="is finished"):
        start()
    with pytest.raises(RunError, match="other settings"):
        start(experiment=experiment(seed=3))
    Path("runs/three/report.html").unlink()
    assert start().summary["rounds"] == 3  # only its report was left to write
    assert not link.calls


UNKNOWN = ("engine.compile", "training.start_quorum", "method.weight_widths", "keep")


def forget(folder):
    """Make a folder one of an earlier version, which did not know these keys."""
    about = read_json(folder / "environment.json")
    for key in UNKNOWN:
        *blocks, leaf = key.split(".")
        block = about["settings"]
        for name in blocks:
            block = block[name]
        del block[leaf]
    write_json(folder / "environment.json", about)


def test_a_key_that_an_earlier_version_did_not_know_has_its_default_there(tmp_path):
    home = begun(tmp_path)
    forget(tmp_path / "run")
    with pytest.raises(RunError, match=r"other settings \(training.start_quorum: 1.0 there, 0.5 here\)"):
        serve(home, tmp_path / "run", experiment(training=TRAINING | {"start_quorum": 0.5}))
    serve(home, tmp_path / "run", experiment())
    assert sites.log(tmp_path / "run") == sites.serial(FEDMRL, tmp_path / "serial", training=TRAINING)
