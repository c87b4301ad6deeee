"""Pairwise alignment: its loss and a round by a few lines of their own, and FedMuscle where it is the same."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.errors import ConfigError

ROWS = {"a": range(0, 6), "b": range(6, 10), "c": range(10, 16)}
TRAINING = {"epochs": 1, "batch_size": 8, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((11, 3)).astype(np.float32)
CHOSEN = {
    "name": "pairwise",
    "batch": 5,
    "peers": 2,
    "optimizer": {"name": "sgd", "lr": 0.3, "weight_decay": 0},
}


def federation(kit, models=None, public=PUBLIC, **options):
    models = models or [kit.Shallow, kit.Deep, kit.Normed]
    return kit.Federation({**CHOSEN, **options}, models, ROWS, training=TRAINING, public=public)


def info_nce(z, others, tau):
    """Σ_m −(1/B) Σ_i log softmax of the cosines of z_i with the rows of peer m."""
    own = torch.arange(len(z))
    cosines = [F.cosine_similarity(z[:, None], other[None], dim=2) for other in others]
    return sum(F.cross_entropy(one / tau, own) for one in cosines)


def test_two_rounds_are_a_plain_loop(kit):
    """Anchors carry the gradient, the rows of peers are of before the step, heads and statistics stay."""
    game = federation(kit, tau=0.3)
    models = {client: game.federation.population.build_model(client) for client in ROWS}
    for number in (1, 2):
        game.round(*ROWS)
        for client, model in models.items():
            steps = game.steps(client, number)
            batches = [(torch.tensor(game.x[one]), torch.tensor(game.y[one])) for one in steps]
            kit.plain_training(model, batches, lr=0.2)
            model.eval()
        for rows in game.federation.population.public().order(number, 5):
            x = torch.tensor(PUBLIC[rows])
            with torch.no_grad():
                sent = {client: model.features(x) for client, model in models.items()}
            for client, model in models.items():
                trained = [one for name, one in model.named_parameters() if not name.startswith("head.")]
                optimizer = torch.optim.SGD(trained, lr=0.3)
                optimizer.zero_grad()
                info_nce(model.features(x), [sent[one] for one in ROWS if one != client], 0.3).backward()
                optimizer.step()
    for client, model in models.items():
        for name, value in model.state_dict().items():
            found = game.part(client, "model")[name]
            torch.testing.assert_close(found, value, msg=f"{client} {name}", atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"loss": "pairwise"}, {"tau_prev": 0.2}])
def test_it_is_fedmuscle_where_alpha_is_one(kit, options):
    ours, theirs = federation(kit), federation(kit, name="fedmuscle", **options)
    for _ in range(2):
        ours.round(*ROWS)
        theirs.round(*ROWS)
    for client in ROWS:
        for name, value in theirs.part(client, "model").items():
            torch.testing.assert_close(ours.part(client, "model")[name], value, atol=1e-6, rtol=1e-5)


def test_what_crosses(kit):
    """Two batches of five: B·d up for each, M·B·d down for each."""
    lines = federation(kit).round(*ROWS).ledger.lines
    sums = {way: sum(line["scalars"] for line in lines if line["direction"] == way) for way in ("up", "down")}
    assert sums == {"up": 3 * 2 * 5 * 6, "down": 3 * 2 * 2 * 5 * 6}


def test_what_cannot_work_is_said_in_a_sentence(kit):
    with pytest.raises(ConfigError, match=r"pairwise: .* needs one representation width, but client b"):
        federation(kit, models=[kit.Shallow, kit.Narrow, kit.Shallow])
    with pytest.raises(ConfigError, match=r"pairwise: method.peers is 3, but a client has 2 others"):
        federation(kit, peers=3)
    with pytest.raises(ConfigError, match="pairwise needs public data"):
        federation(kit, public=None)


def test_the_defaults(kit):
    config = federation(kit).method.Config()
    assert (config.tau, config.batch, config.peers) == (0.2, 32, 3)
