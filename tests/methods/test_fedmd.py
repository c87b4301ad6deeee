"""FedMD against a plain loop: initial training, mean logits, digest by absolute error, revisit."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.streams import shuffled_batches
from potluck.errors import ConfigError

ROWS = {"a": range(0, 7), "b": range(7, 12)}
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((10, 3)).astype(np.float32)
CHOSEN = {"name": "fedmd", "samples": 6, "digest_batch": 4}


def federation(kit, models=None, public=PUBLIC, lacking=None, **options):
    return kit.Federation(
        {**CHOSEN, **options},
        models or [kit.Shallow, kit.Deep],
        ROWS,
        training=TRAINING,
        public=public,
        lacking=lacking,
    )


def train(kit, game, client, model, number, again):
    rows = game.steps(client, number, again)
    kit.plain_training(
        model, [(torch.tensor(game.x[one]), torch.tensor(game.y[one])) for one in rows], lr=0.2
    )


@pytest.mark.parametrize("lacking", [{}, {"a": (0, 2, 3, 5, 8)}])
def test_two_rounds_are_a_plain_loop(kit, lacking):
    """A sample that a client lacks is not digested, and does not count."""
    game = federation(kit, lacking=lacking)
    models = {client: game.federation.population.build_model(client) for client in ROWS}
    for number in (1, 2):
        game.round("a", "b")
        if number == 1:
            for client, model in models.items():
                train(kit, game, client, model, 1, 0)
        drawn = game.federation.population.public().order(number, 6)[0]
        x = torch.tensor(PUBLIC)
        with torch.no_grad():
            mean = sum(model(x[drawn]) for model in models.values()) / 2
        consensus = dict(zip(drawn.tolist(), mean, strict=True))
        for client, model in models.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            for rows in shuffled_batches(drawn, 4, 1, "keep", game.rng(client, number).child("digest")):
                optimizer.zero_grad()
                rows = [row for row in rows.tolist() if row not in lacking.get(client, ())]
                if rows:
                    F.l1_loss(model(x[rows]), torch.stack([consensus[row] for row in rows])).backward()
                optimizer.step()
            train(kit, game, client, model, number, 1 if number == 1 else 0)
    for client, model in models.items():
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                game.part(client, "model")[name], value.detach(), msg=f"{client} {name}"
            )


def test_what_crosses(kit):
    lines = federation(kit).round("a", "b").ledger.lines
    sizes = {(line["client"], line["direction"]): line["names"] for line in lines}
    assert len(lines) == 4
    assert set(sizes) == {(client, way) for client in ROWS for way in ("up", "down")}
    assert all(names == {"logits": 6 * kit.classes} for names in sizes.values())


def test_the_released_codes_sizes_are_the_defaults(kit):
    method = federation(kit, public=np.zeros((5003, 3), np.float32), samples=None, digest_batch=None).method
    assert (method.samples, method.batch) == (5000, 256)
    method = federation(kit, samples=None, digest_batch=None).method
    assert (method.samples, method.batch) == (10, 10)


def test_only_newcomers_begin(kit):
    """A client whose first round was lost begins anew; one that was accepted does not."""
    game = federation(kit)
    asked = []
    original = game.method.begin

    def begin(client):
        asked.append((client.round, client.id))
        return original(client)

    begin.__name__ = "begin"
    game.method.begin = begin
    game.round("a")
    game.round("a", "b")
    game.round("a", "b")
    assert asked == [(1, "a"), (2, "b")]
    assert sorted(game.server["met"].tensors()) == ["a", "b"]


def test_without_initial_training_the_first_consensus_is_of_untrained_models(kit):
    game = federation(kit, initial=0, models=kit.Shallow)
    with torch.no_grad():
        first = game.federation.population.build_model("a")(torch.tensor(PUBLIC))
    heard = []
    original = game.method.learn
    learn = lambda client, down: (heard.append(down["logits"]), original(client, down))[1]  # noqa: E731
    learn.__name__ = "learn"
    game.method.learn = learn
    game.round("a", "b")
    rows = game.federation.population.public().order(1, 6)[0]
    torch.testing.assert_close(heard[0], first[rows])


@pytest.mark.parametrize("option", ["samples", "digest_batch"])
def test_more_than_the_public_data_is_refused(kit, option):
    with pytest.raises(ConfigError, match=f"method.{option} of 11 samples is larger than the public data"):
        federation(kit, **{option: 11})


def test_no_public_data_is_refused(kit):
    with pytest.raises(ConfigError, match="fedmd needs public data"):
        federation(kit, public=None)
