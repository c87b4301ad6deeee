"""Public data: the same samples for everyone, each in the form it can read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from potluck.core.card import Card
from potluck.core.contract import tensor
from potluck.core.dataset import Dataset
from potluck.core.method import Method, client_step
from potluck.core.method import _registry as registry
from potluck.core.public import Public, check_same_samples
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.data import from_arrays, from_datasets, load
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.runs.api import resume, run
from potluck.testing.bench import Played
from potluck.testing.contract import check_method, require_same_from_tape
from potluck.testing.double_precision import double_precision
from potluck.testing.faulty_engines import Taped
from potluck.training.collect import collect
from potluck.training.fit import fit

PARTITION = {"kind": "iid", "clients": 1, "test": 0.3}
TASK = Task("classification", 10, (1, 8, 8))
WORDS = {"zero": 2, "one": 3, "two": 4, "the": 5, "digit": 6}


class Meeting(Method):
    """Clients meet in the mean of their representations of public samples; whoever lacks a sample is left out."""

    tasks = "any"
    needs_public_data = True
    card_fields = ("width",)
    stays = ("data", "labels", "model")

    def client_state(self, task, model):
        return {"model": model, "target": torch.zeros(8, model.rep_dim)}

    def round(self, server, clients):
        order = server.public.order(server.round, 8)
        replies = clients.ask(self.represent)
        means = torch.stack([replies[client]["z"] for client in replies]).nan_to_num().mean(0)
        assert all((replies[client]["rows"] == torch.from_numpy(order[0])).all() for client in replies)
        clients.ask(self.meet, down={"mean": means})

    @client_step(up={"z": tensor("8, d", "representations"), "rows": tensor("8", "rows", dtype=torch.long)})
    def represent(self, client):
        fit(client, self.loss)
        rows = client.public.order(client.round, 8)[0]
        [z] = collect(client, partial(self.read, client), rows=rows, source=client.public.source)
        return {"z": z, "rows": client.numbers(rows)}

    def read(self, client, batch):
        return client["model"].features(batch.x) * client.public.mask[batch.id].unsqueeze(1)

    @client_step(down={"mean": tensor("8, d", "the mean")})
    def meet(self, client, down):
        client["target"].value.copy_(down["mean"])
        stream = client.public.stream(client.round, 8)
        fit(client, self.align, streams={"public": replace(stream, order=stream.order[:1])}, train=["model"])

    def align(self, client, batch):
        there = client.public.mask[batch.id].float()
        gap = (client["model"].features(batch.x) - client["target"].value).square().mean(1)
        return (gap * there).sum() / there.sum().clamp_min(1)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The method is registered in these tests alone."""
    monkeypatch.setattr(Meeting, "name", "meeting-on-public-data")
    monkeypatch.setitem(registry, "meeting-on-public-data", Meeting)


def few(name: str, rows: int = 40) -> Dataset:
    data = load(name)
    strata = data.strata[:rows] if data.strata is not None else None
    return replace(data, x=data.x[:rows], y=data.y[:rows], strata=strata, train_rows=rows)


def texts(words: Any = WORDS) -> Dataset:
    y = np.arange(40) % 3
    return replace(from_arrays(np.stack([y + 2, y + 5], 1), y, vocabulary=8, name="texts"), words=words)


def paired(**changes: Any) -> Dataset:
    """Captioned digits of which every fourth has lost its caption."""
    data = load("digits-captions")
    kept = tuple("" if row % 4 == 0 else text for row, text in enumerate(data.texts or ()))
    return replace(data, texts=kept, **changes)


def mixed(**changes: Any) -> Experiment:
    sets = [(few("digits-attributes"), "conv-small"), (few("digits-segments"), "conv-dense")]
    sets += [(texts(), "text-mean"), (few("digits-captions"), "dual-small")]
    values: dict[str, Any] = {
        "federation": [{"data": data, "partition": PARTITION, "models": model} for data, model in sets],
        "models": {"rep_dim": 16},
        "method": "meeting-on-public-data",
        "public": {"data": paired(), "samples": 20},
        "training": {"rounds": 2, "batch_size": 16},
        "engine": {"device": "cpu", "workers": 1},
    }
    return Experiment.make(**values | changes)


def test_everyone_means_the_same_samples():
    federation = mixed().build()
    views = [federation.population.public(client) for client in federation.population.ids]
    rows = views[0].ids
    assert len(rows) == 20
    assert all(np.array_equal(view.ids, rows) for view in views)
    assert (np.diff(rows) > 0).all()
    digits = load("digits")
    image, segment, text, pair = (
        federation.clients.build_client(client).public for client in federation.population.ids
    )
    assert torch.equal(image.source.x, digits.x[rows])
    prepared = image.source.take(torch.arange(20)).x
    assert torch.allclose(prepared, (digits.x[rows] - 0.3053) / 0.3761, atol=1e-6)
    assert segment.source.x.shape == (20, 1, 16, 16)
    named = {"zero": 2, "one": 3, "two": 4}
    for place, row in enumerate(rows):
        told = set(paired().texts[row].split()) & set(named)
        assert {int(token) for token in text.source.x[place]} & {2, 3, 4} <= {named[word] for word in told}
    assert text.mask.tolist() == pair.mask.tolist() == (rows % 4 != 0).tolist()
    assert image.mask.all()
    assert torch.allclose(pair.source.x[:, :64], prepared.flatten(1), atol=1e-6)
    assert torch.equal(pair.source.x[pair.mask][:, 64:], load("digits-captions").x[rows[rows % 4 != 0], 64:])


def test_the_order_is_shared_and_drawn_anew_every_round():
    federation = mixed().build()
    server, clients = (
        federation.server(),
        [federation.clients.build_client(client) for client in federation.population.ids],
    )
    first, second = (server.public.order(round_, 8, passes=2) for round_ in (1, 2))
    assert [len(batch) for batch in first] == [8] * 4  # the short last batch of a pass is left out
    assert not np.array_equal(np.stack(first), np.stack(second))
    for client in clients:
        assert np.array_equal(np.stack(client.public.order(1, 8, 2)), np.stack(first))
    other = mixed(seed=1).build().server()
    assert not np.array_equal(other.public.ids, server.public.ids)


def test_runs_resume_and_steps_can_be_captured(tmp_path):
    whole = run(mixed(), out=tmp_path / "one")
    two = run(mixed(engine={"device": "cpu", "workers": 2}), out=tmp_path / "two")
    assert (whole.folder / "metrics.jsonl").read_bytes() == (two.folder / "metrics.jsonl").read_bytes()
    with double_precision():
        plain, taped = Played(mixed().build()), Played(mixed().build(), Taped)
        for played in (plain, taped):
            for _ in range(3):
                assert not played.round(played.federation.population.ids).failures
    require_same_from_tape(plain, taped)


def test_a_method_on_public_data_keeps_the_contract():
    check_method("meeting-on-public-data")


def test_a_file_names_it_and_a_method_that_needs_none_ignores_it(tmp_path):
    values = {"data": "digits", "partition": PARTITION, "models": {"pool": "mlp-small", "rep_dim": 16}}
    asked = Experiment.make(
        **values,
        method="meeting-on-public-data",
        public={"data": "digits", "samples": 30},
        training={"rounds": 1},
    )
    result = run(asked, out=tmp_path / "a")
    again = Experiment.load(result.folder / "config.yaml")
    assert again.to_yaml() == (result.folder / "config.yaml").read_text()
    assert again.public is not None
    assert resume(result.folder).accuracy == result.accuracy
    local = asked.variant(method="local").build()
    assert local.population.public() is None
    assert "public" not in local.population.card("0").extra


def test_images_are_brought_to_a_clients_size_and_colours():
    colours = load("digits").x.repeat(1, 3, 2, 2)
    colours[:, 0] = 0
    public = replace(load("digits"), x=colours, task=Task("classification", 10, (3, 16, 16)))
    federation = mixed(federation=[{"data": few("digits"), "partition": PARTITION, "models": "mlp-small"}],
                  public={"data": public, "samples": 9}).build()  # fmt: skip
    seen = federation.population.public("0").source.x
    assert seen.shape == (9, 1, 8, 8)
    assert float(seen.mean()) == pytest.approx(
        float(colours[federation.population.public("0").ids].mean()), abs=0.02
    )


class Notes(list[dict[str, Any]]):
    """Rows of texts, as `from_datasets` takes them."""

    column_names = ["text", "label"]


def notes(*lines: str, **options: Any) -> Dataset:
    return from_datasets(Notes({"text": line, "label": row % 2} for row, line in enumerate(lines)), **options)


def test_texts_of_their_own_are_read_in_every_clients_numbers(tmp_path):
    first, second = notes(*["good film"] * 9, "bad"), notes(*["bad good"] * 9, "bad", length=3)
    public = notes("Bad, good film!", "", "a film", "good")
    groups = [{"data": data, "partition": PARTITION, "models": "text-mean"} for data in (first, second)]
    method = {"name": "fedmuscle", "peers": 1, "batch": 2}
    experiment = mixed(federation=groups, public={"data": public}, method=method)
    federation = experiment.build()
    views = [federation.population.public(client) for client in federation.population.ids]
    for view, words in zip(views, ({"film": 2, "good": 3, "bad": 4}, {"bad": 2, "good": 3}), strict=True):
        read = [[token for token in row.tolist() if token] for row in view.source.x]
        assert read == [[words.get(word, 1) for word in text] for text in
                        (["bad", "good", "film"], [], ["a", "film"], ["good"])]  # fmt: skip
        assert view.mask.tolist() == [True, False, True, True]
    result = run(experiment, out=tmp_path / "run")
    assert result.summary["failures"] == {}


NO_WORDS = [{"data": texts(words=None), "partition": PARTITION, "models": "text-mean"}]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"public": None}, "meeting-on-public-data needs public data; name some"),
        (
            {"public": {"data": "digits"}},
            "meeting-on-public-data: client 2 can read nothing of the public data",
        ),
        (
            {"public": {"data": "digits", "samples": 2000}},
            "public.samples: 2000 are asked for, data set 'digits' has",
        ),
        ({"public": {"data": "digits", "sample": 3}}, "unknown key 'public.sample'; did you mean 'samples'"),
        ({"public": {"samples": 3}}, "the key 'public.data' is missing"),
        (
            {"public": {"data": {"name": "digits", "normalize": False}}},
            "public.data: leave out normalize, as clients prepare public samples like their own",
        ),
        (
            {"public": {"data": {"name": "digits", "augment": ["flip"]}}},
            "public.data: leave out augment, as clients prepare public samples like their own",
        ),
        (
            {"public": {"data": {"name": "digits-captions", "tokenizer": "bert"}}},
            "public.data: leave out tokenizer, as clients prepare public samples like their own",
        ),
        ({"federation": NO_WORDS}, "data set 'texts' does not say which word has which number"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(changes, sentence):
    with pytest.raises(ConfigError) as error:
        mixed(**changes).build()
    assert str(error.value).startswith(sentence)


def test_a_batch_larger_than_the_public_data_is_refused():
    view = mixed().build().population.public()
    assert view is not None
    with pytest.raises(
        ConfigError, match=r"method.batch of 21 samples is larger than the public data, which has 20"
    ):
        view.check_batch(21, "method.batch")
    with pytest.raises(ConfigError, match="a public batch of 32 samples is larger"):
        view.stream(1, 32)


def viewed(public: Dataset | str, ids: Any = None) -> Public:
    """The public data as a server sees them; `ids` instead of those drawn."""
    group = {"data": few("digits"), "partition": PARTITION, "models": "mlp-small"}
    view = mixed(federation=[group], public={"data": public, "samples": 20}).build().population.public()
    assert view is not None
    return view if ids is None else replace(view, ids=ids)


def refused(own: Public, *others: Public) -> str:
    """Why a server refuses clients with such copies; empty where it does not."""
    cards = {
        str(place): Card(str(place), 9, TASK, {"public": one.fingerprint}) for place, one in enumerate(others)
    }
    try:
        check_same_samples(own, cards)
    except ConfigError as error:
        return str(error)
    return ""


def without_texts(data: Dataset) -> Dataset:
    return from_arrays(data.images, np.zeros(len(data), dtype=int), classes=2, name=data.name)


def without_images(data: Dataset) -> Dataset:
    return replace(data, images=None, x=torch.zeros(len(data), 1, dtype=torch.long))


def test_other_ids_on_one_side_are_refused():
    own = viewed("digits")
    assert not refused(own, viewed("digits"), viewed(load("digits")))
    assert refused(own, viewed("digits"), viewed("digits", own.ids + 1)).startswith(
        "client 1 has public samples with other ids than the server"
    )
    federation = mixed().build()
    assert len({str(card.extra["public"]) for card in federation.population.cards.values()}) == 1
    check_same_samples(federation.population.public(), federation.population.cards)


def test_other_content_under_the_same_ids_is_refused():
    digits = load("digits")
    nothing = from_arrays(torch.zeros(1797, 1, 8, 8), digits.y, name="digits")
    turned = replace(digits, x=digits.x.flip(0))
    one, chosen = digits.x.clone(), viewed("digits").ids
    one[chosen[7], 0, 3, 3] += 1 / 16
    for other in (nothing, turned, replace(digits, x=one)):
        assert refused(viewed(digits), viewed(other)).startswith(
            "client 0 has public samples with other images than the server"
        )
    elsewhere = torch.zeros_like(digits.x)
    elsewhere[chosen] = digits.x[chosen]
    assert not refused(viewed(digits), viewed(replace(digits, x=elsewhere)))
    vectors = [
        from_arrays(torch.full((40, 3), float(value)), np.zeros(40, int), name="v") for value in (0, 1)
    ]
    assert "other vectors" in refused(viewed_vectors(vectors[0]), viewed_vectors(vectors[1]))


def viewed_vectors(public: Dataset) -> Public:
    group = {"data": public, "partition": PARTITION, "models": "mlp-small"}
    view = mixed(federation=[group], public={"data": public, "samples": 20}).build().population.public()
    assert view is not None
    return view


def test_sides_are_compared_in_what_both_have():
    pairs, swapped = load("digits-captions"), load("digits-captions", shuffled=True)
    images, texts_ = viewed(without_texts(pairs)), fingerprinted(without_images(pairs))
    assert not refused(viewed(pairs), images, texts_)
    assert not refused(images, texts_, texts_)  # the same name has to do
    assert "client 0 has public samples with other texts than the server" in refused(
        viewed(pairs), fingerprinted(without_images(swapped))
    )
    assert "client 1 has public samples with other texts than client 0" in refused(
        images, texts_, fingerprinted(without_images(swapped))
    )
    other = replace(without_images(pairs), name="other-captions")
    assert "client 0 has public samples of another name than the server" in refused(
        images, fingerprinted(other)
    )
    assert not refused(viewed(replace(pairs, name="my copy")), viewed(pairs))


def fingerprinted(data: Dataset) -> Public:
    return replace(viewed("digits"), data=data)


def test_a_copy_that_lacks_some_captions_is_compared_in_the_others():
    pairs, gaps = load("digits-captions"), paired()
    assert not refused(viewed(pairs), viewed(gaps))
    assert not refused(viewed(gaps), viewed(gaps), viewed(without_texts(pairs)))
    assert "other texts than the server" in refused(viewed(gaps), viewed(pairs))  # it cannot know them
    wrong = replace(gaps, texts=tuple(text.upper() for text in gaps.texts or ()))
    assert "other texts than the server" in refused(viewed(pairs), viewed(wrong))


def test_colours_as_whole_numbers_or_as_fractions_are_the_same():
    colours = torch.randint(256, (1797, 3, 8, 8), generator=Rng(3).generator(), dtype=torch.uint8)
    y = np.zeros(1797, dtype=int)
    assert not refused(viewed(from_arrays(colours, y)), viewed(from_arrays(colours.numpy() / 255, y)))


def test_a_holder_without_public_data_says_so():
    federation = mixed(method="local").build()
    with pytest.raises(ConfigError, match="there is no public data here"):
        _ = federation.clients.build_client("0").public
