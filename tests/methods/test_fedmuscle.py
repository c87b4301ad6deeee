"""FedMuscle: the loss through the method, who steps on what, what crosses, by hand."""

import itertools
import json
import math
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from potluck.core.model import Model
from potluck.core.rng import Rng
from potluck.data import ClientSplit, Split, from_arrays, load
from potluck.errors import ConfigError, RoundFailed
from potluck.experiment.schema import Experiment
from potluck.federation.explain import explain
from potluck.kit.contrastive import gramian, muscle, pairwise
from potluck.kit.representation_model import representation_model
from potluck.report.scores import messages_block
from potluck.report.sheets import headline
from potluck.runs.api import run
from potluck.testing.bench import Played
from potluck.testing.contract import require_same_from_tape
from potluck.testing.double_precision import double_precision
from potluck.testing.faulty_engines import Losing, Taped, Wrapped

E = [[1.0, 0.0], [0.0, 1.0]]
SWAPPED = [[0.0, 1.0], [1.0, 0.0]]
TURNED = [[0.6, 0.8], [0.8, -0.6]]
EQUAL = [[0.6, 0.8], [0.6, 0.8]]


class Table(Model):
    """The representation of public sample i, a unit vector, is row i of a table."""

    rep_dim = 2

    def __init__(self, task, rows=E):
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))
        self.head = nn.Linear(2, task.classes)

    def features(self, x):
        return x @ self.rows


class Net(Model):
    """One hidden layer; or two, or with batch norm."""

    rep_dim = 4

    def __init__(self, task, deep=False, norm=False):
        super().__init__()
        self.fc1 = nn.Linear(task.input[0], 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.fc2 = nn.Sequential(*([nn.Linear(5, 5), nn.Tanh()] if deep else []), nn.Linear(5, self.rep_dim))
        self.head = nn.Linear(self.rep_dim, task.classes)

    def features(self, x):
        return self.fc2(torch.tanh(self.norm(self.fc1(x))))


class Dropped(Net):
    """Batch norm, and dropout that leaves little."""

    def __init__(self, task):
        super().__init__(task, norm=True)
        self.fc2.append(nn.Dropout(0.8))


class Wide(Net):
    rep_dim = 6


class Inside(Model):
    """A head that is also a layer of an inner network, and a parameter of its own."""

    rep_dim = 3

    def __init__(self, task):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.net = nn.ModuleDict({"fc": nn.Linear(task.input[0], 3), "last": nn.Linear(3, task.classes)})
        self.head = self.net["last"]

    def features(self, x):
        return self.net["fc"](x) * self.scale


class Listening(Wrapped):
    """Keeps every exchange: what went down, and the answers."""

    def __init__(self, inner):
        super().__init__(inner)
        self.heard = []

    def run(self, requests):
        outcomes = self.inner.run(requests)
        self.heard.append(
            {one.client: (one.down, reply) for one, reply in zip(requests, outcomes, strict=True)}
        )
        return outcomes


STILL = {"optimizer": {"lr": 1e-12}, "training": {"optimizer": {"lr": 0.3}}}  # no alignment to speak of


def vectors(rows, inputs, seed):
    draw = Rng(seed).numpy()
    return from_arrays(
        draw.standard_normal((rows, inputs)).astype(np.float32), np.arange(rows) % 3, classes=3
    )


def asked(models, *, inputs=3, public=None, training=None, seed=0, **options):
    nothing = np.zeros(0, dtype=np.int64)
    parts = [ClientSplit(str(n), np.arange(4 * n, 4 * n + 4), nothing, nothing) for n in range(len(models))]
    return Experiment.make(
        data=vectors(4 * len(models), inputs, 5),
        partition=Split.of(parts),
        models={str(number): model for number, model in enumerate(models)},
        public={"data": public if public is not None else vectors(11, inputs, 6)},
        method={"name": "fedmuscle"} | options,
        training={"batch_size": 4, "optimizer": {"lr": 0.1}} | (training or {}),
        engine={"device": "cpu", "workers": 1},
        seed=seed,
    )


def played(experiment, rounds=1, wrap=Listening):
    spies = []
    game = Played(experiment.build(), lambda engine: spies.append(wrap(engine)) or spies[0])
    for _ in range(rounds):
        assert not game.round(game.federation.population.ids).failures
    return game, spies[0]


def aligned(tables, **options):
    """What clients with these tables report of their first step, before anything has moved."""
    pair = from_arrays(np.eye(2, dtype=np.float32), np.zeros(2, dtype=np.int64), classes=2)
    models = [partial(Table, rows=rows) for rows in tables]
    options = {"batch": 2, "peers": len(tables) - 1, "first": "alignment"} | options
    _, spy = played(asked(models, inputs=2, public=pair, **options))
    return {
        client: answer.report.losses | answer.report.metrics for client, (_, answer) in spy.heard[1].items()
    }


class TestLoss:
    """The specification's tiny checks, through a whole round."""

    @pytest.mark.parametrize(
        ("tables", "muscles", "pairs"),
        [
            ([E, E], 0.00671535, 0.00671535),
            ([E, E, E], 0.06896003, 0.01343070),
            ([E, E, E, E], 0.45135903, 0.02014605),
            ([E, E, SWAPPED], 3.40229337, None),
            ([E, TURNED, SWAPPED], (6.46082370 + 12.01863849) / 2, None),
            ([EQUAL, EQUAL, EQUAL], 2 * math.log(2), 2 * math.log(2)),
        ],
    )
    def test_values(self, tables, muscles, pairs):
        found = aligned(tables)["0"]
        assert float(found["muscle"]) == pytest.approx(muscles, abs=1e-4)
        assert float(found["theorem1_value"]) == pytest.approx(
            (len(tables) - 1) * math.log(2) - muscles, abs=1e-4
        )
        if pairs is not None:
            assert float(aligned(tables, loss="pairwise")["0"]["pairwise"]) == pytest.approx(pairs, abs=1e-4)
        if pairs is not None and len(tables) > 2:
            assert float(aligned(tables, tau_prev=0.2)["0"]["muscle"]) == pytest.approx(pairs, abs=1e-4)

    def test_the_positive_tuple_without_its_weight(self):
        """M = 2, all alike: (0,0) has e¹⁰, (0,1) and (1,0) e⁵, (1,1) e^−γ; γ = 5/3; α of (0,0) is 1, not e^−γ."""
        found = aligned([E, E, E], positive="plain")["0"]["muscle"]
        below = math.exp(10) + 2 * math.exp(5) + math.exp(-5 / 3)
        assert float(found) == pytest.approx(math.log(below) - 10, abs=1e-5)
        weighted = math.exp(10 - 5 / 3) + 2 * math.exp(5) + math.exp(-5 / 3)
        expected = math.log(weighted) - (10 - 5 / 3)
        assert float(aligned([E, E, E])["0"]["muscle"]) == pytest.approx(expected, abs=1e-5)

    def test_one_peer_has_no_second_temperature(self):
        """So that τ may be below the default of the other one, which does nothing."""
        expected = pairwise(torch.tensor(E), [torch.tensor(TURNED)], 0.1)
        found = aligned([E, TURNED], tau=0.1)["0"]["muscle"]
        assert float(found) == pytest.approx(float(expected), abs=1e-4)

    def test_one_peer_is_info_nce_at_any_temperature(self):
        expected = pairwise(torch.tensor(E), [torch.tensor(TURNED)], 0.5)
        assert float(aligned([E, TURNED], tau=0.5)["0"]["muscle"]) == pytest.approx(float(expected), abs=1e-4)

    def test_the_bounds_are_those_of_the_peers(self):
        found = aligned([E, E, SWAPPED])["0"]
        bounds = [math.log(2) - math.log1p(math.exp(-5)), math.log(2) - math.log1p(math.exp(5))]
        assert [float(found["bound 0 0"]), float(found["bound 0 1"])] == pytest.approx(bounds, abs=1e-4)

    @pytest.mark.parametrize("negatives", ["tuples", "anchor"])
    def test_the_gramian_is_there_too(self, negatives):
        found = aligned([E, E, E], loss="gramian", negatives=negatives)["0"]
        # Two equal vectors span nothing with any third: all candidates are alike, up to what keeps a root finite.
        assert 0 < float(found["gramian"]) < 2 * math.log(2) + 0.1

    @pytest.mark.parametrize("negatives", ["tuples", "anchor"])
    def test_the_gramian_has_the_negatives_it_is_told(self, negatives):
        found = aligned([E, TURNED, SWAPPED], loss="gramian", negatives=negatives)["0"]["gramian"]
        anchor, *others = (torch.tensor(rows) for rows in (E, TURNED, SWAPPED))
        each = {kind: float(gramian(anchor, others, negatives=kind)) for kind in ("tuples", "anchor")}
        assert abs(each["tuples"] - each["anchor"]) > 0.1
        assert float(found) == pytest.approx(each[negatives], abs=1e-6)


def by_hand(experiment, rounds, bundle=1, first="task", decay=1.0, clip=math.inf):
    """The whole protocol in a plain loop: all others are peers, everyone's Z is of before the step."""
    federation, config = experiment.build(), experiment.method
    models = {client: federation.population.build_model(client) for client in federation.population.ids}
    for number in range(1, rounds + 1):
        for client, model in models.items() if first == "task" else ():
            privately(federation, client, model, 0.1 * decay ** (number - 1), clip)
        optimizers = {
            client: torch.optim.AdamW(
                [value for name, value in model.named_parameters() if not name.startswith("head.")],
                lr=config.optimizer.lr * decay ** (number - 1),
                weight_decay=config.optimizer.weight_decay,
            )
            for client, model in models.items()
        }
        order = federation.population.public().order(number, config.batch, config.passes)
        x = {client: federation.population.public(client).source.x for client in models}
        for model in models.values():
            model.eval()
        for start in range(0, len(order), bundle):
            few = order[start : start + bundle]
            with torch.no_grad():
                sent = {
                    client: [model.features(x[client][rows]) for rows in few]
                    for client, model in models.items()
                }
            for client, model in models.items():
                for place, rows in enumerate(few):
                    others = [sent[other][place] for other in models if other != client]
                    optimizers[client].zero_grad()
                    muscle(model.features(x[client][rows]), others).backward()
                    trained = [
                        value for group in optimizers[client].param_groups for value in group["params"]
                    ]
                    nn.utils.clip_grad_norm_(trained, clip)
                    optimizers[client].step()
        for client, model in models.items() if first == "alignment" else ():
            privately(federation, client, model, 0.1 * decay ** (number - 1), clip)
    return models


def privately(federation, client, model, lr, clip):
    """A step on the private batch: the clients here have no more."""
    rows, data = federation.split[client].train, federation.clients.groups[0].data
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer.zero_grad()
    F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


NETS = [Net, partial(Net, deep=True), partial(Net, norm=True)]


def same_models(game, models):
    for client, model in models.items():
        for name, value in model.state_dict().items():
            found = game.client(client)[f"model/{name}"]
            torch.testing.assert_close(found, value, atol=2e-5, rtol=1e-4, msg=f"{client} {name}")


class TestProtocol:
    @pytest.mark.parametrize("first", ["task", "alignment"])
    @pytest.mark.parametrize("bundle", [1, 2])
    def test_two_rounds_by_hand(self, first, bundle):
        """Three batches: with two in a bundle the last one is short. The optimiser is new in the second round."""
        public = vectors(15, 3, 6)
        experiment = asked(
            NETS, public=public, batch=5, peers=2, bundle=bundle, first=first, optimizer={"lr": 0.01}
        )
        game, _ = played(experiment, rounds=2)
        same_models(game, by_hand(experiment, 2, bundle, first))

    def test_clipping_and_the_schedule_of_the_rate_are_for_both_phases(self):
        """SGD, as AdamW takes no notice of a gradient's length."""
        optimizer = {"name": "sgd", "lr": 0.5, "weight_decay": 0.0}
        experiment = asked(
            NETS, batch=5, peers=2, optimizer=optimizer, training={"lr_decay": 0.5, "clip": 0.02}
        )
        game, _ = played(experiment, rounds=2)
        with mock.patch("torch.optim.AdamW", torch.optim.SGD):
            same_models(game, by_hand(experiment, 2, decay=0.5, clip=0.02))

    def test_a_bundle_is_no_larger_than_a_round(self):
        make = partial(asked, NETS, public=vectors(15, 3, 6), batch=5, peers=2)
        all_at_once, more = (played(make(bundle=bundle))[0] for bundle in (3, 100))
        assert more.client("0")["peers/z"].shape == (15, 2, 4)
        assert explain(more.federation)["steps"] == explain(all_at_once.federation)["steps"]
        for name, value in all_at_once.client("0").items():
            assert torch.equal(more.client("0")[name], value)

    def test_a_bundle_is_not_the_same_as_single_batches(self):
        make = partial(asked, NETS, batch=5, peers=2, optimizer={"lr": 0.01})
        one, two = (played(make(bundle=bundle))[0].client("0")["model/fc1.weight"] for bundle in (1, 2))
        assert not torch.allclose(one, two, atol=1e-6)

    @pytest.mark.parametrize("statistics", ["private", "public"])
    def test_alignment_touches_neither_heads_nor_statistics(self, statistics):
        experiment = asked(NETS, batch=5, peers=2, statistics=statistics)
        game, _ = played(experiment)
        alone, _ = played(experiment.variant(method="local"))
        for client in game.federation.population.ids:
            ours, theirs = game.client(client), alone.client(client)
            for name, value in theirs.items():
                left = name.startswith("model/head.") or "running" in name or "tracked" in name
                assert torch.equal(ours[name], value) == left, name

    def test_without_gamma_it_is_pairwise(self):
        make = partial(asked, NETS, batch=5, peers=2)
        flat, sums, other = (
            played(make(**options), 2)[0]
            for options in ({"tau_prev": 0.2}, {"loss": "pairwise"}, {"tau_prev": 0.15})
        )
        name = "model/fc1.weight"
        for client in flat.federation.population.ids:
            torch.testing.assert_close(
                flat.client(client)[name], sums.client(client)[name], atol=1e-5, rtol=1e-4
            )
        assert not torch.allclose(flat.client("0")[name], other.client("0")[name], atol=1e-5)

    def test_the_rows_sent_are_those_of_before_the_step(self):
        """Everyone's second upload is of its state after the first step; what came down is what the others sent."""
        _, spy = played(asked(NETS, batch=5, peers=2))
        for number in (1, 2):
            for client, (down, _) in spy.heard[number].items():
                others = [one for one in spy.heard[number] if one != client]
                sent = [spy.heard[number - 1][one][1].up["representations"] for one in others]
                assert torch.equal(down["peers"], torch.stack(sent, 1))
                assert torch.allclose(down["peers"].norm(dim=2), torch.ones(()))
        assert not spy.heard[2]["0"][1].up

    def test_anchors_are_the_rows_that_were_sent_unless_batch_norm_sees_the_public_batch(self):
        for statistics, equal in (("private", True), ("public", False)):
            _, spy = played(asked([partial(Net, norm=True)] * 2, batch=5, peers=1, statistics=statistics))
            own, other = (spy.heard[0][client][1].up["representations"] for client in ("0", "1"))
            found = float(spy.heard[1]["0"][1].report.losses["muscle"])
            assert (abs(found - float(pairwise(own, [other]))) < 1e-5) == equal

    def test_dropout_rests_whatever_batch_norm_uses(self):
        experiment = asked([Dropped] * 2, batch=5, peers=1, statistics="public", first="alignment")
        game, spy = played(experiment)
        model, public = game.federation.population.build_model("0"), game.federation.population.public("0")
        model.eval()
        model.norm.train()
        own = model.features(public.source.x[public.order(1, 5)[0]])
        other = spy.heard[0]["1"][1].up["representations"]
        found = float(spy.heard[1]["0"][1].report.losses["muscle"])
        assert found == pytest.approx(float(pairwise(own.detach(), [other])), abs=1e-5)

    def test_what_diverges_while_aligning_is_told_with_both_rates(self):
        game = Played(asked(NETS, batch=5, peers=2, optimizer={"lr": 3e38}).build())
        with pytest.raises(RoundFailed, match=r"lower training.optimizer.lr or method.optimizer.lr, or set"):
            game.round(game.federation.population.ids)

    def test_learned_temperatures_are_trained_and_keep_their_order(self):
        game, _ = played(asked(NETS, batch=5, peers=2, learned=True, optimizer={"lr": 0.05}), 2)
        state = game.client("0")
        tau, gamma = state["temperatures/log_tau"].exp(), state["temperatures/log_gamma"].exp()
        assert abs(float(tau) - 0.2) > 0.005
        assert float(gamma) > 0
        assert abs(float(gamma) - 5 / 3) > 0.005
        plain, _ = played(asked(NETS, batch=5, peers=2))
        assert not [name for name in plain.client("0") if "temperatures" in name]

    def test_a_round_is_observed_by_its_means_and_then_the_largest_bound(self):
        game, spy = played(asked(NETS, batch=5, peers=2))
        noted = game.rounds.server.report.metrics
        for client in game.federation.population.ids:
            reports = [exchange[client][1].report for exchange in spy.heard[1:]]
            losses = [report.losses | report.metrics for report in reports]
            means = {name: np.mean([float(one[name]) for one in losses]) for name in losses[0]}
            assert float(noted[f"{client}/theorem1_value"]) == pytest.approx(
                means["theorem1_value"], abs=1e-5
            )
            assert float(noted[f"{client}/muscle"]) == pytest.approx(means["muscle"], abs=1e-5)
            bound = max(means["bound 0 0"], means["bound 0 1"])
            assert float(noted[f"{client}/information_bound"]) == pytest.approx(bound, abs=1e-5)

    @pytest.mark.parametrize("bundle", [1, 2])
    def test_the_bound_is_the_largest_of_those_of_the_peers_not_of_their_places(self, bundle):
        """Alignment moves nothing, so that what was sent is what is compared."""
        experiment = asked([Net] * 5, batch=3, peers=2, bundle=bundle, **STILL)
        game, spy = played(experiment)
        for client in game.federation.population.ids:
            by_peer = {}
            for before, now in itertools.pairwise(spy.heard):
                sent = {one: answer.up["representations"].split(3) for one, (_, answer) in before.items()}
                for place, dealt in enumerate(now[client][0]["peers"].split(3)):
                    for rows in dealt.unbind(1):
                        [peer] = [one for one in sent if torch.equal(sent[one][place], rows)]
                        bound = math.log(3) - float(pairwise(sent[client][place], [rows]))
                        by_peer.setdefault(peer, []).append(bound)
            assert len(by_peer) > 2
            found = float(game.rounds.server.report.metrics[f"{client}/information_bound"])
            assert found == pytest.approx(max(map(np.mean, by_peer.values())), abs=1e-5)

    def test_what_is_observed_does_not_depend_on_bundles_where_nothing_moves(self):
        """Three batches: with two in a bundle the last one is on its own, and counts as one."""
        make = partial(asked, [Net] * 4, public=vectors(15, 3, 6), batch=5, peers=2, **STILL)
        one, *others = (played(make(bundle=bundle))[0].rounds.server.report.metrics for bundle in (1, 2, 3))
        assert len(one) == 4 * 3
        for other in others:
            assert other.keys() == one.keys()
            for name, value in one.items():
                assert float(other[name]) == pytest.approx(float(value), abs=1e-4), name

    def test_rows_may_keep_their_length(self):
        _, spy = played(asked(NETS, batch=5, peers=2, normalize=False))
        lengths = spy.heard[0]["0"][1].up["representations"].norm(dim=1)
        assert (lengths - 1).abs().max() > 0.05


class TestPeers:
    def drawn(self, **options):
        """Whose matrices each client got, exchange by exchange."""
        _, spy = played(asked([Net] * 5, training={"optimizer": {"lr": 0.3}}, batch=3, peers=2, **options))
        found = []
        for before, now in zip(spy.heard, spy.heard[1:], strict=False):
            sent = {client: answer.up["representations"] for client, (_, answer) in before.items()}
            chosen = {}
            for client, (down, _) in now.items():
                columns = down["peers"].unbind(1)
                chosen[client] = [one for column in columns for one in sent if torch.equal(sent[one], column)]
            found.append(chosen)
        return found

    def test_two_others_each_anew_for_every_batch(self):
        drawn = self.drawn()
        assert len(drawn) == 3
        for exchange in drawn:
            for client, others in exchange.items():
                assert len(set(others)) == len(others) == 2
                assert client not in others
        assert len({tuple(exchange["0"]) for exchange in drawn}) > 1
        assert len({tuple(others) for others in drawn[0].values()}) > 1
        assert drawn == self.drawn()
        assert drawn != self.drawn(seed=1)

    def test_or_once_a_round(self):
        drawn = self.drawn(redraw="round")
        assert drawn[0] == drawn[1] == drawn[2]

    def test_in_a_bundle_each_batch_has_its_own(self):
        _, spy = played(asked([Net] * 5, batch=3, peers=2, bundle=3, training={"optimizer": {"lr": 0.3}}))
        sent = {client: answer.up["representations"] for client, (_, answer) in spy.heard[0].items()}
        chosen = []
        for batch in range(3):
            rows = slice(3 * batch, 3 * batch + 3)
            columns = spy.heard[1]["0"][0]["peers"][rows].unbind(1)
            chosen.append([one for column in columns for one in sent if torch.equal(sent[one][rows], column)])
        assert [len(set(others)) for others in chosen] == [2, 2, 2]
        assert len({tuple(others) for others in chosen}) > 1

    def test_who_is_left_goes_on_with_those_there_are(self):
        """One of three is lost in the second exchange: a client then has one peer, and its loss is InfoNCE."""
        spies = []

        def wrap(engine):
            spies.append(Listening(Losing(engine, "1", 2)))
            return spies[0]

        game = Played(asked(NETS, batch=5, peers=2).build(), wrap)
        game.round(game.federation.population.ids)
        down, answer = spies[0].heard[2]["0"]
        assert tuple(down["peers"].shape) == (5, 1, 4)
        sent = spies[0].heard[1]["0"][1].up["representations"]
        expected = pairwise(sent, [down["peers"][:, 0]])
        assert float(answer.report.losses["muscle"]) == pytest.approx(float(expected), abs=1e-5)
        assert set(answer.report.metrics) == {"bound 0 0"}
        assert float(game.rounds.server.report.metrics["0/information_bound"]) <= math.log(5)

    def test_a_client_alone_is_not_aligned(self):
        experiment = asked(NETS, batch=5, peers=2)
        game, alone = Played(experiment.build()), Played(experiment.variant(method="local").build())
        for one in (game, alone):
            assert not one.round(("0",)).failures
        assert torch.equal(game.client("0")["model/fc1.weight"], alone.client("0")["model/fc1.weight"])


class TestWire:
    @pytest.mark.parametrize("bundle", [1, 2])
    def test_sizes_to_the_scalar(self, bundle, tmp_path):
        """Three public batches of B=5, d=4, M=2: 15·4 up, 2·15·4 down; the paper counts B^M·(d + 1) a batch."""
        make = partial(asked, NETS, public=vectors(15, 3, 6), batch=5, peers=2, bundle=bundle)
        game, _ = played(make(accounting="paper"))
        lines = [line for line in game.cohorts[0].ledger.lines if line["client"] == "0"]
        totals = {
            way: sum(line["scalars"] for line in lines if line["direction"] == way) for way in ("up", "down")
        }
        assert totals == {"up": 15 * 4, "down": 2 * 15 * 4}
        counted = {
            way: [line["as_published"] for line in lines if line["direction"] == way] for way in totals
        }
        assert counted["up"] == [line["scalars"] for line in lines if line["direction"] == "up"]
        assert counted["down"] == ([125] * 3 if bundle == 1 else [250, 125])
        assert game.cohorts[0].exchange == (4 if bundle == 1 else 3)
        (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        messages = messages_block(tmp_path / "ledger.jsonl")
        assert messages["as_published"] == {"up": 60, "down": 375}
        assert "as the paper counts: 60 scalars up, 375 down" in headline({"messages": messages})
        exact, _ = played(make())
        assert not any("as_published" in line for line in exact.cohorts[0].ledger.lines)

    def test_explain_says_how_often(self):
        explained = explain(asked(NETS, public=vectors(15, 3, 6), batch=5, peers=2).build())
        assert (explained["up_scalars"], explained["down_scalars"]) == (60, 120)
        align = next(step for step in explained["steps"] if step["name"] == "align")
        assert align["times"] == {"up": 2, "down": 3}

    def test_the_head_is_found_wherever_it_is(self):
        task = vectors(3, 3, 0).task
        assert representation_model(Net(task)) == ["model/fc1", "model/fc2"]
        assert representation_model(Inside(task)) == ["model/scale", "model/net.fc"]


WORDS = {"zero": 2, "one": 3, "two": 4, "the": 5, "digit": 6}


def mixed(only=None, **changes):
    """Attributes, segments, text and pairs; every fourth public sample has no caption, or `only` one has."""

    def few(name):
        data = load(name)
        return replace(data, x=data.x[:40], y=data.y[:40], strata=data.strata[:40], train_rows=40)

    y = np.arange(40) % 3
    texts = replace(from_arrays(np.stack([y + 2, y + 5], 1), y, vocabulary=8, name="texts"), words=WORDS)
    pairs = load("digits-captions")
    told = tuple(
        text if (row % 4 if only is None else row == only) else "" for row, text in enumerate(pairs.texts)
    )
    sets = [(few("digits-attributes"), "conv-large"), (few("digits-segments"), "conv-dense")]
    sets += [(texts, "text-mean"), (few("digits-captions"), "dual-small")]
    partition = {"kind": "iid", "clients": 1, "test": 0.3}
    values = {
        "federation": [{"data": data, "partition": partition, "models": model} for data, model in sets],
        "models": {"rep_dim": 16},
        "method": {"name": "fedmuscle", "batch": 8, "peers": 3},
        "public": {"data": replace(pairs, texts=told), "samples": 24},
        "training": {"rounds": 2, "batch_size": 16, "optimizer": {"lr": 0.05}},
        "engine": {"device": "cpu", "workers": 1},
    }
    return Experiment.make(**values | changes)


class TestModalities:
    def test_samples_a_client_lacks_are_no_positive_and_no_negative(self):
        game, spy = played(mixed())
        public = game.federation.population.public("2")
        rows = public.order(1, 8)
        assert not public.mask.all()
        lacking = ~public.mask[torch.from_numpy(rows[0])]
        sent = {client: answer.up["representations"] for client, (_, answer) in spy.heard[0].items()}
        for client, told in (("0", False), ("1", False), ("2", True), ("3", True)):
            assert torch.equal(sent[client].eq(0).all(1), lacking & told)
        masks = [None if one in "01" else ~lacking for one in "0123"]
        for client in "0123":
            others = [number for number in range(4) if str(number) != client]
            own = None if masks[int(client)] is None else masks[int(client)].float()
            expected = muscle(
                sent[client], [sent[str(other)] for other in others], weight=own,
                present=[masks[other] for other in others],
            )  # fmt: skip
            found = spy.heard[1][client][1].report.losses["muscle"]
            assert float(found) == pytest.approx(float(expected), abs=1e-4), client

    @pytest.mark.parametrize("bundle", [1, 2])
    def test_a_batch_a_client_has_nothing_of_makes_no_step(self, bundle):
        """One caption in all: clients 2, with texts, and 3, with pairs, step once; decay alone would move w."""
        federation = mixed().build()
        row = int(federation.population.public().ids[federation.population.public().order(1, 8)[1][0]])
        experiment = mixed(
            row, method={"name": "fedmuscle", "batch": 8, "peers": 3, "bundle": bundle, "first": "alignment"}
        )
        for wrap in (Listening, lambda engine: Listening(Taped(engine))):
            game, spy = played(experiment, wrap=wrap)
            for client, steps in (("0", 3), ("1", 3), ("2", 1), ("3", 1)):
                counts = {int(v) for name, v in game.client(client).items() if name.endswith(":step")}
                assert counts == {steps}, client
            bounds = {name for one in spy.heard for name in one["2"][1].report.metrics}
            assert bounds == {f"bound {1 % bundle} {m}" for m in range(3)}
            [told] = [one["2"][1].report.losses for one in spy.heard if "muscle" in one["2"][1].report.losses]
            noted = game.rounds.server.report.metrics
            assert float(noted["2/muscle"]) == pytest.approx(float(told["muscle"]), abs=1e-6)

    def test_runs_do_not_depend_on_the_engine(self, tmp_path):
        one = run(mixed(), out=tmp_path / "one")
        two = run(mixed(engine={"device": "cpu", "workers": 2}), out=tmp_path / "two")
        for log in ("metrics.jsonl", "ledger.jsonl", "observations.jsonl"):
            assert (one.folder / log).read_bytes() == (two.folder / log).read_bytes()
        seen = [json.loads(line) for line in (one.folder / "observations.jsonl").read_text().splitlines()]
        assert [(line["round"], line["client"]) for line in seen] == [(r, c) for r in (1, 2) for c in "0123"]
        assert all(line.keys() >= {"muscle", "theorem1_value", "information_bound"} for line in seen)
        with double_precision():
            plain, taped = Played(mixed().build()), Played(mixed().build(), Taped)
            for played in (plain, taped):
                for _ in range(3):
                    assert not played.round(played.federation.population.ids).failures
        require_same_from_tape(plain, taped)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"models": [Net, Wide, Net]},
            "fedmuscle: a representation space for all needs one representation width",
        ),
        ({"peers": 3}, "fedmuscle: method.peers is 3, but a client has 2 others; lower it"),
        ({"batch": 12}, "method.batch of 12 samples is larger than the public data, which has 11"),
        ({"tau_prev": 0.3}, "method: tau_prev is 0.3, which must not be above tau, 0.2"),
        (
            {"tau_prev": 0.2, "learned": True},
            "method: tau_prev is 0.2, which must be below tau where both are",
        ),
        (
            {"negatives": "anchor"},
            "method: negatives does nothing with loss: muscle; it is for gramian",
        ),
        (
            {"negatives": "anchor", "loss": "pairwise"},
            "method: negatives does nothing with loss: pairwise",
        ),
        (
            {"tau_prev": 0.1, "loss": "pairwise"},
            "method: tau_prev does nothing with loss: pairwise; it is for muscle",
        ),
        (
            {"tau_prev": 0.1, "loss": "gramian"},
            "method: tau_prev does nothing with loss: gramian; it is for muscle",
        ),
        ({"memory": 9, "loss": "pairwise"}, "method: memory does nothing with loss: pairwise"),
        (
            {"memory": 9, "loss": "gramian", "negatives": "anchor"},
            "method: memory does nothing with negatives: anchor",
        ),
        (
            {"models": [Net] * 5, "training": {"participation": 0.4}},
            "fedmuscle: method.peers is 2, but with training.participation 0.4 a round has 2 of 5 clients",
        ),
        ({"learned": True, "loss": "gramian"}, "method: learned temperatures are for muscle and pairwise"),
        ({"batch": 1}, "method.batch"),
        ({"loss": "cosine"}, "method.loss"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(changes, sentence):
    values = {"models": NETS, "peers": 2, "batch": 5} | changes
    with pytest.raises(ConfigError) as error:
        asked(**values).build()
    assert sentence in str(error.value)


@pytest.mark.parametrize("loss", ["muscle", "pairwise", "gramian"])
def test_what_a_run_writes_down_can_be_read_again(loss):
    config = asked(NETS, peers=2, batch=5, loss=loss).method
    assert type(config)(**config.model_dump()) == config


def test_a_round_with_just_enough_clients_is_taken():
    assert (
        asked([Net] * 5, peers=2, batch=5, training={"participation": 0.6}).build().population.cohort_size
        == 3
    )


def test_what_pairwise_has_no_use_for_limits_nothing():
    """tau below the default of tau_prev, also where it is learned."""
    game, _ = played(asked(NETS, peers=2, batch=5, loss="pairwise", tau=0.1, learned=True))
    assert float(game.client("0")["temperatures/log_tau"].exp()) == pytest.approx(0.1, abs=0.01)


def test_without_public_data_or_anything_to_read_there_is_no_run():
    with pytest.raises(ConfigError, match="fedmuscle needs public data; name some"):
        mixed(public=None).build()
    with pytest.raises(ConfigError, match="fedmuscle: client 2 can read nothing of the public data 'digits'"):
        mixed(public={"data": "digits"}).build()
