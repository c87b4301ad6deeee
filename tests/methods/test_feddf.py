"""FedDF: the divergence by hand, teachers, averages and distillation against a plain loop."""

import math

import numpy as np
import pytest
import torch

from potluck.core.settings import OptimizerSettings
from potluck.core.streams import Stream, shuffled_batches
from potluck.errors import ConfigError, RoundFailed
from potluck.kit.distillation import divergence, held_back
from potluck.kit.early_stopping import fit_patiently

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 16)}
SIZES = {"a": 7, "b": 5, "c": 4}
TRAINING = {"epochs": 1, "batch_size": 3, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((10, 3)).astype(np.float32)
CHOSEN = {"name": "feddf", "steps": 5, "every": 2, "batch": 4, "lr": 0.05, "validation": 0.0}


def federation(kit, public=PUBLIC, lacking=None, **options):
    models = [kit.Shallow, kit.Shallow, kit.Deep]  # a and b are one architecture
    chosen = {**CHOSEN, **options}
    return kit.Federation(chosen, models, ROWS, training=TRAINING, public=public, lacking=lacking)


def test_the_divergence_by_hand():
    """Half and half against 3/4 and 1/4: KL(teacher ‖ student), mean over samples, no factor T²."""
    teacher = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    expected = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
    assert float(divergence(torch.zeros(2, 2), teacher, 1.0)) == pytest.approx(expected, abs=1e-5)
    assert float(divergence(torch.zeros(2, 2), 2 * teacher, 2.0)) == pytest.approx(expected, abs=1e-5)


def averaged(game, models, clients):
    student, total = game.federation.population.build_model(clients[0]), sum(SIZES[one] for one in clients)
    with torch.no_grad():
        for name, value in student.named_parameters():
            value.copy_(
                sum(SIZES[one] / total * dict(models[one].named_parameters())[name] for one in clients)
            )
    return student


def distilled(game, student, name, teachers, lr, there, steps=5, every=2):
    """Adam, its rate on a cosine in stairs."""
    optimizer = torch.optim.Adam(student.parameters(), lr=lr)
    rng = game.federation.server_rng(1).child("distil", name)
    for step, rows in enumerate(shuffled_batches(there, 4, 9, "keep", rng)[:steps]):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * (step - step % every) / steps)) / 2
        optimizer.zero_grad()
        divergence(student(torch.tensor(PUBLIC[rows])), teachers[rows], 1.0).backward()
        optimizer.step()
    return student


@pytest.mark.parametrize("lacking", [(), (1, 4, 7)])
def test_a_round_is_a_plain_loop(kit, lacking):
    """Averages weigh samples within an architecture; teachers are all clients, each counted once.

    Samples that the server lacks are not learned from.
    """
    game, there = federation(kit, lacking={None: lacking}), np.setdiff1d(np.arange(10), lacking)
    models = game.trained(lr=0.2)
    game.round("a", "b", "c")
    with torch.no_grad():
        teachers = sum(model(torch.tensor(PUBLIC)) for model in models.values()) / 3
    for name, clients in (("model0", ["a", "b"]), ("model1", ["c"])):
        student = distilled(game, averaged(game, models, clients), name, teachers, 0.05, there)
        sent = game.method.downlink(game.server, clients[0])["model"]
        for key, value in student.named_parameters():
            torch.testing.assert_close(sent[key], value.detach(), msg=f"{name} {key}")


def test_without_distillation_to_speak_of_it_is_fedavg(kit):
    game = federation(kit, lr=1e-12, steps=1)
    plain = kit.Federation("fedavg", [kit.Shallow, kit.Shallow, kit.Deep], ROWS, training=TRAINING)
    for one in (game, plain):
        one.round("a", "b", "c")
        one.round("a", "c")
    for client in ROWS:
        ours, theirs = (one.method.downlink(one.server, client)["model"] for one in (game, plain))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=name)


def test_an_architecture_without_a_client_stays_as_it_is(kit):
    game = federation(kit)
    game.round("a", "b", "c")
    before = game.method.downlink(game.server, "c")["model"]
    game.round("a", "b")
    after = game.method.downlink(game.server, "c")["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_crosses(kit):
    game = federation(kit)
    game.round("a", "b", "c")
    lines = game.round("a", "b", "c").ledger.lines
    small, large = (3 * 6 + 6 + 6 * 4 + 4, 3 * 6 + 6 + 6 * 6 + 6 + 6 * 4 + 4)
    sizes = {"a": small, "b": small, "c": large}
    assert {(line["client"], line["direction"]): line["scalars"] for line in lines} == {
        (client, way): sizes[client] for client in ROWS for way in ("up", "down")
    }


def watched_training(game, values, patience, steps=12):
    """Train model0 with made-up values in the place of a validation loss; the states after every piece."""
    server, states, told = game.server, [], iter(values)
    server.enter(1, game.federation.server_rng(1), {}, "round")
    weight = server["model0"].content.head.weight

    def watch():
        states.append(weight.detach().clone())
        return next(told)

    stream = Stream(server.public.source, [np.arange(4)] * steps)
    loss = lambda server, batch: server["model0"](batch.x).square().mean()  # noqa: E731
    adam = OptimizerSettings(name="adam", lr=0.1)
    done = fit_patiently(
        server, loss, "model0", stream, optimizer=adam, every=2, scalars={}, watch=watch, patience=patience
    )
    return done, states, weight.detach()


def test_the_best_is_kept_and_patience_ends(kit):
    done, states, kept = watched_training(federation(kit), [3.0, 1.0, 2.0, 1.5, 0.5], patience=4)
    assert done == 8  # the best came after 4 steps, 4 more were in vain
    assert torch.equal(kept, states[1])
    done, states, kept = watched_training(federation(kit), [3.0, 1.0, 2.0, 0.9, 0.8, 0.7], patience=4)
    assert done == 12
    assert torch.equal(kept, states[-1])


def test_a_share_of_the_public_data_is_held_back_and_watched(kit, monkeypatch):
    game = federation(kit, validation=0.3)
    held = set(game.federation.population.public().order(0, 3)[0].tolist())
    seen = []

    def spy(holder, loss, part, stream, *, watch, **others):
        before = watch()
        done = fit_patiently(holder, loss, part, stream, watch=watch, **others)
        seen.append((set(np.concatenate(stream.order).tolist()), before, watch()))
        return done

    monkeypatch.setattr("potluck.methods.feddf.fit_patiently", spy)
    game.round("a", "b", "c")
    assert [rows & held for rows, _, _ in seen] == [set(), set()]
    watched, rows = held_back(game.server.public, game.method.config.validation)
    assert set(watched.tolist()) == held
    assert set(rows.tolist()) == set(range(10)) - held
    assert all(after != before for _, before, after in seen)


def test_samples_that_are_missing_are_neither_watched_nor_learned_from(kit):
    game = federation(kit, validation=0.3, lacking={None: (1, 4, 7)})
    watched, rows = held_back(game.server.public, game.method.config.validation)
    assert len(watched) == 2
    assert {*watched, *rows} == set(range(10)) - {1, 4, 7}


def test_what_diverges_is_told_with_both_rates(kit):
    game = federation(kit, lr=1e38)
    game.round("a", "b", "c")
    with pytest.raises(RoundFailed, match=r"lower training.optimizer.lr or method.lr, or set training.clip"):
        game.round("a", "b", "c")


def test_the_released_codes_values_are_the_defaults(kit):
    config = federation(kit, public=np.zeros((300, 3), np.float32), batch=None).method
    assert config.batch == 128
    plain = config.Config()
    assert (plain.steps, plain.every, plain.patience, plain.temperature) == (10_000, 100, 1000, 1.0)
    assert plain.lr == 1e-3


def test_what_cannot_work_is_said_in_a_sentence(kit):
    with pytest.raises(ConfigError, match=r"method.batch of 11 samples is larger than the public data"):
        federation(kit, batch=11)
    with pytest.raises(ConfigError, match=r"feddf needs public data"):
        federation(kit, public=None)
