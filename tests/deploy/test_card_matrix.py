"""Every method meets cards that no honest client has: whoever lies is turned away or left out, the others play."""

import pytest
import sites
import torch
from hostile import note_of, noted
from links import Link, Told, serve

from potluck.core.formulas import formula_value
from potluck.core.message import Message
from potluck.core.state import Report
from potluck.deploy import served_run, wire
from potluck.deploy.site import Site
from potluck.engine.protocol import Answer, Request
from potluck.experiment.schema import Experiment
from potluck.methods.registry import find_method, method_names

RESNETS = [{"name": name, "width": 2, "stem": "cifar"} for name in ("resnet10", "resnet10", "resnet18")]
SCALED = [{"name": "conv-large", "scale": scale} for scale in (0.2, 0.1, 0.2)]
MODELS = {
    **dict.fromkeys(("inclusivefl", "inco"), RESNETS),
    **dict.fromkeys(("heterofl", "fedrolex", "fjord"), SCALED),
    "scalefl": [{"name": f"scalefl{level}", "depth": 10, "width": 8, "stem": "cifar"} for level in (1, 4, 4)],
}
OPTIONS = {
    **{key: {"peers": 1, "batch": 20} for key in ("fedmuscle", "gramian", "pairwise")},
    **{key: {"pretrain_epochs": 1, "batch": 20} for key in ("fccl", "rhfl")},
    "cofed": {"margin": 0.0},
    "creamfl": {"server_model": "mlp-small", "batch": 20},
    "fed-et": {"steps": 2, "batch": 20},
    "feddf": {"steps": 2, "every": 2},
    "fedgen": {"steps": 2},
    "fedhenn": {"samples": 20},
    "fedmrl": {"d1": 8},
    "fedtgp": {"server_epochs": 2},
}
QUICK = ("fedgh", "fednova", "inclusivefl")  # the others are tried where faults are
HONEST = ("a", "b", "c")


def told(field, change):
    """A card that tells something else in a field that the method asks for."""
    return lambda note: note["extra"].update({field: change(note["extra"][field])})


def said(part, **values):
    """A card with other numbers of samples, or another task."""
    return lambda note: note[part].update(values)


LIES = {
    "names, none": told("names", lambda names: {}),
    "names, one": told("names", lambda names: dict([*names.items()][-1:])),
    "names, deep": told("names", lambda names: names | {f"layer4.{10**12}.conv2.weight": [16, 16, 3, 3]}),
    "names, more axes": told("names", lambda names: {name: [*shape, 1] for name, shape in names.items()}),
    "names, no axes": told("names", lambda names: {name: [] for name in names}),
    "parameter_names, none": told("parameter_names", lambda names: []),
    "width, huge": told("width", lambda width: 1 << 20),
    "width, odd": told("width", lambda width: width + 1),
    "stem, odd": told("stem", lambda shape: [3, 5]),
    "classes_held, none": told("classes_held", lambda held: []),
    "many samples": said("samples", train=10**8, test=10**8),
    "no samples": said("samples", train=0, test=0, validation=0),
    "many classes": said("task", classes=100_000),
    "large samples": said("task", input=[1, 2048, 2048]),
    "regression": said("task", kind="regression", classes=1),
    "texts": said("task", kind="text-classification", input=[5], vocabulary=9),
}


def liars_for(method):
    """The lies that can be told to a method, each by a client of that name."""
    fields = find_method(method).card_fields
    return [lie for lie in LIES if "," not in lie or lie.partition(",")[0] in fields]


class Liars(Link):
    """Three honest sites between liars; these answer with zeros, as many as their cards allow."""

    def __init__(self, home, method, models):
        super().__init__(home)
        liars = liars_for(method)
        self.ids = (*liars[::2], *HONEST, *liars[1::2])
        self.entries = {client: models[place % 3] for place, client in enumerate(self.ids)}
        self.entries |= dict(zip(HONEST, models, strict=True))
        self.sites = {place: self.site(home, place, client) for place, client in enumerate(self.ids)}
        self.cards, self.method, self.tamper = {}, None, self.lie

    def site(self, home, place, client):
        data = sites.loader(sites.IDS[place % 3])
        return Site(client, self.entries[client], data, home / str(place), simulated=True)

    def lie(self, order, data):
        note = note_of(data)
        if note["client"] not in LIES:
            return data
        if isinstance(order, wire.Hello):
            LIES[note["client"]](note)
            self.cards[note["client"]] = noted(data, note)
            return self.cards[note["client"]]
        if not isinstance(order, Request):
            return data
        up = self.zeros(order.steps, wire.unpack_reply(self.cards[order.client]).card)
        return wire.pack_reply(Answer(order.client, Message(up), Report(1, {}, {})))

    def zeros(self, steps, card):
        """What the contract of these steps asks for; a tensor that would be huge is a single number."""
        known, found = dict(self.method.symbols(card)), {}
        for name, field in self.method.sent_by(steps).items():
            if field.like is not None:
                shapes = self.method.expected(card, field.like) or {}
                found |= {f"{name}/{key}": torch.zeros(shape) for key, shape in shapes.items()}
                continue
            axes = [axis.partition("<=")[0] for axis in field.shape.split(",") if axis.strip()]
            size = [formula_value(axis, known) if axis.strip() in known else 1 for axis in axes]
            size = size if sum(size) < 10**6 else []
            found[name] = torch.arange(*size) if field.distinct else torch.zeros(size, dtype=field.dtype)
        return found


def experiment(method, link):
    settings = sites.settings({"name": method, **OPTIONS.get(method, {})}, 1)
    settings["models"] = {"pool": link.entries, "rep_dim": None if method == "scalefl" else 16}
    settings["training"] |= {"batch_size": 256, "start_quorum": 0.15, "quorum": 0.1}
    settings["public"] = {"data": "digits", "samples": 40}
    return Experiment.make(partition={"sites": link.ids, "classes": 10}, **settings)


@pytest.mark.parametrize(
    "method",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.faults) for name in method_names()],
)
def test_no_card_ends_the_server(tmp_path, method, monkeypatch):
    link, notes = Liars(tmp_path, method, MODELS.get(method, ["mlp-small"] * 3)), Told()
    build = served_run.enrolled_federation

    def noticed(*given):
        federation = build(*given)
        link.method = federation.method
        return federation

    monkeypatch.setattr(served_run, "enrolled_federation", noticed)
    serve(link, tmp_path / "run", experiment(method, link), notes)
    assert {*HONEST} <= {*link.asked(1)}, notes.notices
