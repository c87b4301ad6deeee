"""FedDF and Fed-ET: a client whose model gives no finite logits on public data teaches nobody and is left out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from potluck.core.message import Message
from potluck.engine.serial import SerialEngine
from potluck.errors import RoundFailed

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 16)}
TRAINING = {"epochs": 1, "batch_size": 3, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((10, 3)).astype(np.float32)
METHODS = [
    {"name": "feddf", "steps": 5, "every": 2, "batch": 4, "lr": 0.05, "validation": 0.0},
    {"name": "fed-et", "steps": 5, "batch": 4, "lr": 0.05},
]


class Lying(SerialEngine):
    """The serial engine, where some clients send other weights than those they trained."""

    lies: dict = {}

    def run(self, requests):
        return [self._changed(answer) for answer in super().run(requests)]

    def _changed(self, answer):
        lie = self.lies.get(answer.client)
        if lie is None:
            return answer
        return replace(answer, up=Message({name: lie(name, value) for name, value in answer.up.items()}))


def overflows(name, value):
    """Finite weights whose products are not."""
    return torch.full_like(value, 3e38)


def adds_up(name, value):
    """Logits of 2e38 whatever the sample: finite, and their sum over two clients is not."""
    return torch.full_like(value, 2e38) if name.endswith("head.bias") else torch.zeros_like(value)


def begun(kit, method):
    """A federation after an honest round; a and b are one architecture."""
    models = [kit.Shallow, kit.Shallow, kit.Deep]
    game = kit.Federation(method, models, ROWS, training=TRAINING, public=PUBLIC)
    game.round("a", "b", "c")
    return game


def lying(game, **lies):
    engine = Lying(game.federation.clients, game.engine.store)
    engine.lies = lies
    return engine


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one["name"])
@pytest.mark.parametrize("client", ["b", "c"])
def test_a_client_whose_logits_are_not_finite_is_left_out_of_the_round(kit, client, method):
    """Of its weights too: alone with its architecture, a student would begin with them."""
    played, plain = begun(kit, method), begun(kit, method)
    cohort = played.round("a", "b", "c", engine=lying(played, **{client: overflows}))
    plain.round(*(one for one in ROWS if one != client))
    assert list(cohort.failures) == [client]
    assert f"client {client}: what its model says of public data is not finite" in cohort.failures[client]
    assert played.accepted[client] == 1
    for one in ROWS:
        ours, theirs = (game.method.downlink(game.server, one)["model"] for game in (played, plain))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_logits_that_cannot_be_added_up_are_left_out(kit):
    game = begun(kit, METHODS[0])
    cohort = game.round("a", "b", "c", engine=lying(game, a=adds_up, b=adds_up))
    assert sorted(cohort.failures) == ["a", "b"]
    assert all(bool(value.isfinite().all()) for value in game.server.tensors().values())


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one["name"])
def test_without_a_teacher_the_round_fails(kit, method):
    game = begun(kit, method)
    with pytest.raises(
        RoundFailed, match=r"0 of 3 clients are left, 1 are needed: clients a, b, c: what its model says"
    ):
        game.round("a", "b", "c", engine=lying(game, a=overflows, b=overflows, c=overflows))
