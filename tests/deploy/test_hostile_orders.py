"""Orders of a hostile server: each is refused in one sentence, quickly, and the site goes on."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import sites
import torch
from lone_site import RUN, ask, greet, joined, make_site, offer, request, small
from test_attempts import contract

from potluck.core import modest
from potluck.core.message import Message
from potluck.core.modest import Modest, ModestResults
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.deploy import bounds, kept_welcome, wire
from potluck.deploy.site import Site
from potluck.deploy.welcome import welcome
from potluck.engine.protocol import Answer, Examination, Failure, Stamp
from potluck.errors import ConfigError
from potluck.models import check

DEEP = "[" * 50_000 + "]" * 50_000


def changed(*path, value):
    """A welcome with one other value."""
    told = offer(run="b2")
    place = told
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return told


def without(*path):
    told = offer(run="b2")
    place = told
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return told


WELCOMES = {
    "threads": (changed("experiment", "engine", "threads", value=10**6), "engine.threads: 1,000,000"),
    "classes": (changed("experiment", "partition", "classes", value=10**7), "partition.classes: 10,000,000"),
    "width": (changed("experiment", "models", "rep_dim", value=10**8), "models.rep_dim: 100,000,000"),
    "rounds": (changed("experiment", "training", "rounds", value=10**6), "training.rounds: 1,000,000"),
    "long name": (
        changed("experiment", "name", value="x" * 10**6),
        "the server's experiment.name has 1,000,000 letters",
    ),
    "many names": (
        changed("experiment", "training", "per_client", value={f"n{one}": {} for one in range(10_001)}),
        "10,001 entries in experiment.training.per_client",
    ),
    "epochs": (changed("experiment", "training", "epochs", value=10**9), "training.epochs: 1,000,000,000"),
    "seen": (changed("experiment", "training", "epochs", value=9_999), None),
    "batch": (changed("experiment", "training", "batch_size", value=2**40), "training.batch_size"),
    "own epochs": (
        changed("experiment", "training", "per_client", value={"0": {"epochs": 10**12}}),
        "training.per_client.0.epochs",
    ),
    "option": (changed("experiment", "method", "d1", value=10**9), "method.d1: 1,000,000,000"),
    "passes": (changed("experiment", "method", "passes", value=10**6), "method.passes: 1,000,000"),
    "passes by another name": (
        changed("experiment", "method", "public_epochs", value=10**6), "method.public_epochs: 1,000,000"
    ),
    "nested option": (
        changed("experiment", "method", "small", value={"name": "mlp-small", "rep_dim": 10**9}),
        "method.small.rep_dim",
    ),
    "pool": (
        changed("experiment", "models", "pool", value={"name": "mlp-small", "rep_dim": 10**9}),
        "models.pool.rep_dim",
    ),
    "padding": (
        changed("experiment", "data", "augment", value=[{"crop": {"pad": 10**6}}]),
        "data.augment.crop.pad",
    ),
    "roster": (changed("experiment", "partition", "sites", value=list(map(str, range(20_000)))), "20,000 "),
    "metrics": (changed("experiment", "metrics", value=["f1_macro"] * 500), "500 metrics"),
    "not a number": (changed("experiment", "training", "epochs", value=float("nan")), "training.epochs"),
    "negative": (changed("experiment", "training", "batch_size", value=-1), "training.batch_size"),
    "another type": (changed("experiment", "engine", "threads", value={"a": 1}), "engine.threads"),
    "no block": (changed("experiment", value=[1, 2]), "experiment must be a block"),
    "no method": (without("experiment", "method"), "method must be a block"),
    "no seed": (without("experiment", "seed"), "seed is missing"),
    "unknown method": (changed("experiment", "method", value={"name": "spy"}), "spy"),
    "code": (changed("experiment", "method", "small", value="os:system"), "a site runs no code but its own"),
    "own split": (
        changed("experiment", "partition", value={"kind": "iid", "clients": 3}), "a site brings its own data"
    ),
    "no version": (without("potluck"), "the server runs potluck None"),
    "a path": (changed("run", value="../../etc"), "is no name of a run"),
    "a long name": (changed("run", value="a" * 100_000), "is no name of a run"),
    "a number": (changed("run", value={}), "is no name of a run"),
    "a hub repository": (
        changed("experiment", "models", "pool", value={"name": "hf-vit", "weights": "evil/repo"}),
        "models.pool.weights: a site reads no file and fetches nothing that a server names",
    ),
    "a file of weights": (
        changed("experiment", "models", "pool", value={"0": {"name": "efficientnet-lite0", "weights": "w"}}),
        "models.pool.0.weights",
    ),
    "weights of an option": (
        changed("experiment", "method", "small", value=[{"name": "mlp-small", "weights": "/etc/hostname"}]),
        "method.small.weights",
    ),
    "a repository": (changed("experiment", "method", "small", value="evil/repo"), "method.small"),
    "a kernel": (
        changed("experiment", "models", "pool", value={"name": "hf-vit", "config": {"attn": "evil/repo"}}),
        "models.pool.config.attn",
    ),
    "a folder": (changed("experiment", "data", "dir", value="/etc"), "names data.dir"),
    "a device": (changed("experiment", "engine", "device", value="meta"), "names engine.device"),
    "public files": (
        changed("experiment", "public", value={"data": {"name": "x", "path": "/etc"}}),
        "names public.data.path",
    ),
    "a path of a metric": (
        changed("experiment", "metrics", value=["sklearn:/../../../etc/planted.py:f"]), "ConfigError at the site"
    ),
    "many models": (
        changed("experiment", "models", "pool",
                value=[{"name": "resnet18", "width": width} for width in range(200, 400)]),
        "200 different models",
    ),
    "a further key": (changed("junk", value=[0]), "the server's welcome names junk, which a site takes from no"),
    "a further block": (changed("experiment", "junk", value={}), "names experiment.junk"),
    "a long key": (changed("x" * 10**6, value=0), "which a site takes from no server"),
    "a deep option": (
        changed("experiment", "method", "junk", value=json.loads("[" * 200 + "]" * 200)), "nested too deeply"
    ),
    "rounds in words": (changed("experiment", "training", "rounds", value="2"), "must be a whole number"),
    "not invited": (changed("experiment", "partition", "sites", value=["1", "2"]), "is for the clients 1, 2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return joined(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("kind", [kind for kind, (_, sentence) in WELCOMES.items() if sentence])
def test_a_welcome_beyond_all_bounds_is_refused_before_anything_is_loaded_or_built(tmp_path, kind):
    told, sentence = WELCOMES[kind]

    def load():
        raise AssertionError("data were loaded")

    lone, threads = Site("0", sites.builder("0"), load, tmp_path), torch.get_num_threads()
    reply = greet(lone, told)
    assert isinstance(reply, Failure)
    assert sentence in reply.reason
    assert len(reply.reason) < 1000
    assert torch.get_num_threads() == threads
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]  # no secret, no folder of a run


def test_a_refusal_is_short_however_long_the_words_of_the_server_are(tmp_path):
    told = changed("experiment", "method", "name", value=["a" * 1000] * 1000)
    reply = make_site(tmp_path).answer(wire.pack_order(wire.Hello(told)))
    assert "there is no method" in wire.unpack_reply(reply).reason
    assert len(reply) < 2000


def test_a_welcome_takes_no_more_room_on_the_disk_than_on_the_wire(tmp_path):
    site = make_site(tmp_path)
    roster = [f"n{number}{'x' * 200}" for number in range(9_000)]
    told = changed("experiment", "partition", "sites", value=["0", *roster])
    assert isinstance(greet(site, told), wire.Enrolment)
    file = tmp_path / "0" / "runs" / "b2.json"
    assert file.stat().st_size < len(wire.pack_order(wire.Hello(told)))
    ask(make_site(tmp_path), request(small(site)))  # the site can read it


def test_welcomes_together_take_a_bounded_room(tmp_path, monkeypatch):
    site = make_site(tmp_path)
    size = len(json.dumps(offer()))
    monkeypatch.setattr(kept_welcome, "MOST_KEPT", 2 * size)
    for run in ("a1", "a2", "a3"):
        reply = greet(site, offer(run=run))
    assert isinstance(reply, Failure)
    assert [path.name for path in sorted((tmp_path / "0" / "runs").iterdir())] == ["a1.json", "a2.json"]
    monkeypatch.setattr(kept_welcome, "LARGEST_INTRODUCTION", size // 2)
    reply = greet(make_site(tmp_path / "other"), offer())
    assert f"this site keeps {size // 2:,}: ask for less" in reply.reason


def test_epochs_are_bounded_together_with_the_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "MOST_SEEN", 10**5)
    reply = greet(make_site(tmp_path), WELCOMES["seen"][0])
    assert "training.epochs: 9,999 times this client's samples are more than 100,000" in reply.reason


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedmuscle", "peers": 1, "batch": 2, "passes": 4},
        {"name": "rhfl", "samples": 60, "batch": 2, "public_epochs": 4, "exchange": "batch"},
    ],
)
def test_more_exchanges_than_a_record_takes_are_refused_while_a_site_joins(tmp_path, method):
    reply = greet(make_site(tmp_path), welcome(sites.federated(method), RUN))
    assert "120 times in a round; this site goes up to 100" in reply.reason


class Enlarging(torch.nn.Module):
    """Makes a large result of a small sample, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        if self.way == "interpolate":
            return torch.nn.functional.interpolate(x, (20_000, 20_000), mode="bilinear")
        if self.way == "attention":
            tokens = x.flatten()[:1].repeat(1 << 15, 1)
            return tokens @ tokens.T
        if self.way == "padding":
            return torch.nn.functional.pad(x, (10_000,) * 4)
        return x.repeat(10_000, 1, 100, 100)


@pytest.mark.parametrize("way", ["interpolate", "attention", "padding", "repeat"])
def test_a_pass_that_makes_more_than_there_is_room_for_is_refused_before_it_is_made(way):
    x = torch.zeros(1, 1, 8, 8)
    with pytest.raises(ConfigError, match="a tensor of"), ModestResults(Modest(2**28)):
        Enlarging(way)(x)
    assert x.sum() == 0  # nothing is watched any more


def test_a_watched_pass_gives_the_same_numbers_and_draws_the_same():
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5))
    x = torch.linspace(0, 1, 128).view(2, 1, 8, 8)
    with Rng(1).as_default():
        wanted = net(x), torch.rand(3)
    bounds = Modest(tensors=10)
    with Rng(1).as_default(), ModestResults(bounds), bounds:
        found = net(x), torch.rand(3)
    assert [torch.equal(*pair) for pair in zip(wanted, found, strict=True)] == [True, True]


@pytest.mark.parametrize("place", ["small", "pool"])
def test_a_named_model_that_enlarges_images_is_refused_before_a_pass(tmp_path, place, monkeypatch):
    big = {"name": "efficientnet-lite0", "side": 20_000}
    told = offer()
    if place == "small":
        told["experiment"]["method"]["small"] = big
    else:
        told["experiment"]["models"]["pool"] = big
    monkeypatch.setattr(torch.nn.functional, "interpolate", None)
    assert isinstance(greet(make_site(tmp_path), told), Failure)


def test_a_contract_is_compared_before_a_model_of_the_server_is_run(tmp_path, monkeypatch):
    agreed, told, tried = contract(tmp_path, "fedmrl"), offer(), []
    told["experiment"]["models"]["pool"] = {"name": "efficientnet-lite0", "side": 64}
    attempt = check.attempt
    monkeypatch.setattr(check, "attempt", lambda *given: tried.append(given) or attempt(*given))
    reply = greet(make_site(tmp_path, agreement=agreed), told)
    assert "which this site has not agreed to" in reply.reason
    assert not tried
    assert isinstance(greet(make_site(tmp_path, agreement=agreed), offer()), wire.Enrolment)
    assert tried  # what is agreed to is tried as before


def test_a_model_larger_than_the_machine_is_refused_before_it_is_made():
    with pytest.raises(ConfigError, match="a tensor of 4,294,967,296 numbers"), Modest(2**30):
        torch.nn.Linear(2**16, 2**16)
    with Modest(2**30):
        assert torch.nn.Linear(4, 4)(torch.zeros(2, 4)).shape == (2, 4)


def test_an_honest_server_tells_of_models_without_their_weights():
    small = {"name": "mlp-small", "weights": "/srv/small"}
    pool = {"0": {"name": "hf-vit", "weights": "some/repo"}, "1": "conv-small", "2": "mlp-small"}
    method = {"name": "fedmrl", "d1": 8, "small": small}
    told = welcome(sites.federated(method, models={"pool": pool}), "b2")
    bounds.check_welcome(told)
    assert told["experiment"]["models"]["pool"] == pool | {"0": {"name": "hf-vit"}}
    assert told["experiment"]["method"]["small"] == {"name": "mlp-small"}
    weights = welcome(sites.federated({"name": "fedavg"}), "b2")["experiment"]["method"]["weights"]
    assert weights == sites.federated({"name": "fedavg"}).method.weights


COPIED = torch.nn.BatchNorm1d(100)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(100),
        lambda: copy.deepcopy(COPIED),
        lambda: copy.deepcopy(COPIED.running_mean),
        lambda: torch.zeros_like(COPIED.bias),
    ],
)
def test_many_tensors_that_fill_the_machine_together_are_refused(monkeypatch, make):
    monkeypatch.setattr("potluck.core.modest.STRIDE", 4_000)
    monkeypatch.setattr("potluck.core.modest.free_bytes", lambda: 7_000)
    with pytest.raises(ConfigError, match="more than there is room for here"), Modest():
        [make() for _ in range(10)]


def test_a_quarter_of_the_memory_stays_free(monkeypatch):
    free = [100_000]
    monkeypatch.setattr("potluck.core.modest.STRIDE", 4_000)
    monkeypatch.setattr("potluck.core.modest.free_bytes", lambda: free[0])
    with Modest():
        free[0] = 30_000
        torch.empty(1_000)
        with pytest.raises(ConfigError, match="more than there is room for here"):
            torch.empty(2_000)


@pytest.mark.parametrize(
    ("method", "step", "down", "sentence"),
    [
        (
            "cofed",
            "learn",
            {"rows": torch.arange(10), "counts": torch.tensor([2**62] * 3 + [2**62 + 10] + [0] * 6)},
            "'counts' has other numbers than whole numbers from 0 to 60",
        ),
        (
            "cofed",
            "learn",
            {"rows": torch.tensor([60]), "counts": torch.tensor([1] + [0] * 9)},
            "'rows' has other numbers than whole numbers from 0 to 59",
        ),
        (
            "fedproto",
            "train",
            {"classes": torch.tensor([3, 10**6]), "prototypes": torch.zeros(2, 16)},
            "'classes' has other numbers than whole numbers from 0 to 9",
        ),
    ],
)
def test_numbers_outside_of_their_declared_range_are_refused_before_any_work(
    tmp_path, method, step, down, sentence
):
    """Sizes and places that come down are used as they are: wrong ones would reach beyond a tensor's memory."""
    site = joined(tmp_path, method)
    held = len(site.resident.live.classes_held)
    down = {name: value[:held] if name == "counts" else value for name, value in down.items()}
    reply = ask(site, request(Message(down), steps=(step,)))
    assert f"step {step}, down: tensor {sentence}" in reply.reason
    assert site.resident.record.history.tried == {}


def test_what_a_method_keeps_is_bounded_while_a_site_joins(tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.deploy.site.MOST_TENSORS", 300)
    told, site = offer("moon"), make_site(tmp_path)
    told["experiment"]["method"]["previous"] = 10**6
    assert "more than 300 tensors" in greet(site, told).reason
    told["experiment"]["method"]["previous"] = 2
    assert not isinstance(greet(site, told), Failure)


@pytest.mark.parametrize(("most", "free"), [("5000", [2500]), ("max", [])])
def test_the_bound_of_a_unit_or_container_counts(tmp_path, most, free):
    group = tmp_path / "system.slice" / "worker.service"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("1:memory:/\n0::/system.slice/worker.service\n")
    for name, text in (("max", most), ("current", "3000\n"), ("stat", "anon 2500\ninactive_file 500\n")):
        (group / f"memory.{name}").write_text(text)
    assert modest._free_in_groups(tmp_path, tmp_path / "own") == free
    assert modest._free_in_groups(tmp_path, tmp_path / "nothing") == []


def test_a_model_of_more_tensors_than_any_has_is_refused_while_it_is_made():
    with pytest.raises(ConfigError, match="more than 10 tensors"), torch.device("meta"), Modest(tensors=10):
        torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(10)))


@pytest.mark.parametrize("told", ["there is no file /srv/cases/x.csv", "there is no file x.csv"])
def test_what_the_data_of_a_site_say_is_told_by_its_kind_alone(tmp_path, told):
    def load():
        raise ConfigError(told)

    reply = greet(Site("0", sites.builder("0"), load, tmp_path), offer())
    assert reply.reason == "client 0: DataError at the site; the log of its worker says more"


def own_data(**changes):
    """The samples of a site as vectors, under a name that is nobody else's business."""
    data = sites.dealt()[0]
    x = data.x[:60].flatten(1).float()
    values = {"task": Task("classification", 10, (64,)), "x": x, "y": data.y[:60], "train_rows": 40}
    return replace(data, name="ward 7", mean=(), std=(), **values | changes)


def texts(**changes):
    task = Task("text-classification", 10, (8,), 50)
    return own_data(task=task, x=torch.ones(60, 8, dtype=torch.long), texts=("a",) * 60, **changes)


@pytest.mark.parametrize(
    "given",
    [
        {"data": own_data(standardize=(0,)), "public": own_data(train_rows=60)},
        {"data": own_data(), "public": own_data(x=torch.zeros(7, 64), y=torch.zeros(7), train_rows=7)},
        {"data": texts(words=None), "public": texts(train_rows=60)},
        {"data": own_data(), "public": texts(train_rows=60)},
        {"data": sites.dealt()[0], "public": np.zeros((7, 1, 8, 8), "float32")},
    ],
    ids=["standardized", "few", "no words", "another modality", "few without a name"],
)
def test_public_data_that_do_not_fit_tell_nothing_of_themselves_or_of_the_sites_own(tmp_path, given, capsys):
    reply = greet(Site("0", "mlp-small", lambda: given, tmp_path), offer("fedmd"))
    assert reply.reason == "client 0: PublicDataError at the site; the log of its worker says more"


def test_no_sentence_with_a_path_leaves_a_site(site):
    for sentence in ("no file /srv/x.csv", "'~/x' is missing", "a:/../x"):
        assert wire.unpack_reply(site.refuse(ConfigError(sentence))).reason == (
            "client 0: ConfigError at the site; the log of its worker says more"
        )
    plain = "tensor 'small/fc.weight' is half (1/2)"
    assert wire.unpack_reply(site.refuse(ConfigError(plain))).reason == f"client 0: {plain}"


def note(**changes):
    values = {"client": "0", "order": "steps", "steps": ["train"], "purpose": "train"}
    values["stamp"] = {"experiment": RUN, "round": 1, "attempt": 1, "exchange": 1, "accepted": 0,
                       "incarnation": 0, "settled": False}  # fmt: skip
    values["stamp"] |= changes.pop("stamp", {})
    return Message().encode({wire.KEY: json.dumps(values | changes)})


BYTES = {
    "nothing": b"",
    "no message": b"hello",
    "a head too long": (2**62).to_bytes(8, "little") + b"{}",
    "no envelope": Message().encode(),
    "nested": Message().encode({wire.KEY: '{"order": "hello", "welcome": ' + DEEP + "}"}),
    "no order": Message().encode({wire.KEY: '{"order": "dance"}'}),
    "no mapping": Message().encode({wire.KEY: "[1]"}),
    "many digits": Message().encode({wire.KEY: '{"order": "hello", "welcome": {"run": ' + "9" * 5000 + "}}"}),
    "no stamp": note(stamp={"round": "soon"}),
    "infinite round": note(stamp={"round": float("inf")}),
    "nan round": note(stamp={"round": float("nan")}),
    "negative round": note(stamp={"round": -3}),
    "round zero": note(stamp={"round": 0}),
    "a huge round": note(stamp={"round": 10**400}),
    "accepted ahead": note(stamp={"accepted": 7}),
    "accepted negative": note(stamp={"accepted": -1}),
    "many steps": note(steps=["train"] * 10_000),
    "no steps": note(steps=[]),
    "steps of another kind": note(steps=[{"a": 1}]),
    "steps a number": note(steps=3),
    "a private name": note(steps=["__init__"]),
    "a purpose of another kind": note(purpose={"a": [1]}),
    "another client": note(client="1"),
    "an unknown run": note(stamp={"experiment": "c3"}),
    "a run outside": note(stamp={"experiment": "../0"}),
    "no downlink": note(),
    "modes": note(order="examine", modes=["own"] * 1000, on="own", bare=True, metrics=[], predictions=False),
    "unknown mode": note(order="examine", modes=["spy"], on="own", bare=True, metrics=[], predictions=False),
    "unknown part": note(order="examine", modes=["mix-large"], on="moon", bare=True, metrics=[], predictions=False),
    "unknown metric": note(order="examine", modes=["mix-large"], on="own", bare=True, metrics=["spy"],
                           predictions=False),
    "predictions": note(order="examine", modes=["mix-large"], on="own", bare=True, metrics=[], predictions=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", BYTES)
def test_an_order_that_makes_no_sense_is_refused_in_one_sentence(site, kind):
    reply = wire.unpack_reply(site.answer(BYTES[kind]))
    assert isinstance(reply, Failure)
    assert reply.reason.startswith("client 0")
    assert site.resident.record.begun is False


DOWNLINKS = {
    "none": lambda tensors: {},
    "extra": lambda tensors: tensors | {"spy": torch.zeros(1)},
    "missing": lambda tensors: dict([*tensors.items()][1:]),
    "flat": lambda tensors: {name: value.reshape(-1) for name, value in tensors.items()},
    "nan": lambda tensors: {name: value * torch.nan for name, value in tensors.items()},
    "whole numbers": lambda tensors: {name: value.long() for name, value in tensors.items()},
    "bool": lambda tensors: {name: value.bool() for name, value in tensors.items()},
    "complex": lambda tensors: {name: value.to(torch.complex64) for name, value in tensors.items()},
    "float8": lambda tensors: {name: value.to(torch.float8_e4m3fn) for name, value in tensors.items()},
    "other float8": lambda tensors: {name: value.to(torch.float8_e5m2) for name, value in tensors.items()},
    "half": lambda tensors: {name: value.half() for name, value in tensors.items()},
    "double": lambda tensors: {name: value.double() for name, value in tensors.items()},
    "one float8": lambda tensors: tensors | {"spy": torch.zeros(1).to(torch.float8_e4m3fn)},
    "empty": lambda tensors: {name: value[:0] for name, value in tensors.items()},
    "renamed": lambda tensors: {f"{name}x": value for name, value in tensors.items()},
}


@pytest.mark.parametrize("kind", DOWNLINKS)
def test_a_downlink_that_breaks_the_contract_is_refused_and_touches_nothing(site, kind):
    reply = ask(site, request(Message(DOWNLINKS[kind](dict(small(site))))))
    assert isinstance(reply, Failure)
    assert reply.reason.startswith("client 0")
    assert "at the site" not in reply.reason  # refused in a sentence of its own, not caught after an error
    assert site.resident.record.begun is False
    measured = Examination(
        "0", Message(DOWNLINKS[kind](dict(small(site)))), Stamp(RUN, 1, 1, 0, 0), ("mix-large",)
    )
    examined = ask(site, measured)
    assert isinstance(examined, Failure)
    assert "at the site" not in examined.reason


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RecursionError("deep"),
        SystemExit(3),
        RuntimeError("[enforce fail] alloc"),
        OSError(28, "x"),
    ],
)
def test_whatever_happens_in_a_step_the_site_lives_on(tmp_path, error, capsys):
    site = joined(tmp_path)

    def fail(*ignored):
        raise error

    method = site.resident.performer.method
    method.train = fail
    reply = ask(site, request(small(site)))
    assert reply.reason == f"client 0: {type(error).__name__} at the site; the log of its worker says more"
    del method.train
    assert isinstance(ask(site, request(small(site))), Answer)


def test_a_site_is_as_it_was_after_all_of_it(site):
    at = Stamp(RUN, 1, 1, 0, 0)
    assert isinstance(ask(site, Examination("0", small(site), at, ("mix-large",))), Answer)
    for told, sentence in WELCOMES.values():
        if sentence:
            greet(site, told)
    assert isinstance(ask(site, request(small(site))), Answer)
    assert [path.name for path in (site.home / "runs").glob("*.json")] == [f"{RUN}.json"]


def test_a_site_keeps_records_of_so_many_runs_only(tmp_path, monkeypatch, capsys):
    site = joined(tmp_path)
    monkeypatch.setattr("potluck.deploy.site.MOST_RUNS", 1)
    assert "RunError at the site" in greet(site, offer(run="b2")).reason
    assert "remove old ones with potluck prune" in capsys.readouterr().err
    assert isinstance(ask(site, request(small(site))), Answer)
