"""ScaleFL: losses of exits by hand, rounds of three levels in a plain loop, what the released code got wrong."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from potluck import Experiment
from potluck.core.client import Client
from potluck.core.contract import shapes_of
from potluck.core.message import Message
from potluck.core.replies import Replies
from potluck.core.rng import Rng
from potluck.core.state import Part
from potluck.core.streams import Source
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError
from potluck.kit.width_slices import WidthSlices
from potluck.methods.scalefl import ScaleFL
from potluck.models import build
from potluck.runs.advice import advice
from staged_nets import OneExit, ThreeExits, TwoExits

MODELS = [OneExit, TwoExits, ThreeExits, ThreeExits]
ROWS = {"a": range(0, 5), "b": range(5, 7), "c": range(7, 12), "d": range(12, 15)}
LR = 0.1
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": LR}}
SCORES = ([[2.0, 0.0, -1.0]], [[0.5, 1.0, 0.0]], [[1.0, 3.0, 0.0]])  # of three exits, one sample of class 1


def scalefl(**options):
    return ScaleFL(ScaleFL.Config(name="scalefl", **options))


class Fixed(nn.Module):
    """Exits whose scores are parameters."""

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.ParameterList(torch.tensor(one) for one in scores)

    def exit_scores(self, x):
        return list(self.scores)


def terms(method, scores=SCORES, strength=None):
    task, y = Task("classification", 3, (1,)), torch.tensor([1])
    client = Client(task, Source(torch.zeros(1, 1), y))
    client.declare({"model": Fixed(scores)})
    return client, method.loss(client, Batch(torch.zeros(1, 1), y), strength)


def softmax(scores, temperature=1.0):
    powers = np.exp(np.float64(scores) / temperature)
    return powers / powers.sum()


def test_exits_weigh_one_two_three_sixths():
    _, found = terms(scalefl(gamma=0.0))
    wanted = (
        sum(share * -np.log(softmax(one[0])[1]) for share, one in zip((1, 2, 3), SCORES, strict=True)) / 6
    )
    assert found.keys() == {"exits"}
    np.testing.assert_allclose(found["exits"].item(), wanted, rtol=1e-6)


def divergences(temperature):
    """KL(σ(o_3/T) ‖ σ(o_j/T)) of the two early exits."""
    teacher = softmax(SCORES[2][0], temperature)
    return [(teacher * np.log(teacher / softmax(one[0], temperature))).sum() for one in SCORES[:2]]


@pytest.mark.parametrize(("compat", "classes"), [(False, 1), (True, 3)])
def test_early_exits_learn_from_the_last(compat, classes):
    """The released code takes the mean over classes, too."""
    _, found = terms(scalefl(compat=compat), strength=torch.tensor(0.45))
    first, second = divergences(3.0)
    np.testing.assert_allclose(found["distil"].item(), 0.45 * (first + 2 * second) / 6 / classes, rtol=1e-5)


def test_the_teacher_learns_nothing_from_its_pupils():
    """It is not detached in the released code."""
    for compat in (False, True):
        client, found = terms(scalefl(compat=compat), strength=torch.tensor(1.0))
        scores = list(client["model"].module.scores)
        first, second, last = torch.autograd.grad(found["distil"], scores, allow_unused=True)
        assert first.abs().sum() > 0
        assert second.abs().sum() > 0
        assert (last is not None and bool(last.abs().sum() > 0)) == compat


def test_one_exit_has_no_teacher():
    _, found = terms(scalefl(), SCORES[:1], torch.tensor(1.0))
    assert found.keys() == {"exits"}
    np.testing.assert_allclose(found["exits"].item(), -np.log(softmax(SCORES[0][0])[1]), rtol=1e-6)


def images():
    return Rng(3).numpy().standard_normal((15, 1, 8, 8)).astype(np.float32)


def played(kit, method, models=None, **options):
    return kit.Federation(
        {"name": method, **options},
        MODELS if models is None else models,
        ROWS,
        x=images(),
        y=np.arange(15) % 4,
        training=TRAINING,
    )


def trained(game, client, number, start, gamma):
    """A client's round in plain PyTorch."""
    model = game.federation.population.build_model(client)
    own = {name: start[name][tuple(map(slice, value.shape))] for name, value in Part(model).wire().items()}
    Part(model).load(own)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.train()
    for rows in game.steps(client, number):
        x, y = torch.tensor(game.x[rows]), torch.tensor(game.y[rows])
        outs = model.exit_scores(x)
        loss = 0.0
        for j, out in enumerate(outs, start=1):
            part = F.cross_entropy(out, y)
            if j < len(outs):
                teacher = F.softmax(outs[-1].detach() / 3, 1)
                part = part + gamma * 9 * F.kl_div(F.log_softmax(out / 3, 1), teacher, reduction="batchmean")
            loss = loss + j * part
        optimizer.zero_grad()
        (loss / (len(outs) * (len(outs) + 1) / 2)).backward()
        optimizer.step()
    return {name: value.double().numpy() for name, value in Part(model).state().items()}


def mean_of_entries(whole, uploads):
    """Entry by entry, over the uploads that hold it."""
    result = {name: value.double().numpy().copy() for name, value in whole.items()}
    for name, value in result.items():
        for place in np.ndindex(*value.shape):
            held = [
                upload[name][place]
                for upload in uploads
                if name in upload
                and all(at < size for at, size in zip(place, upload[name].shape, strict=True))
            ]
            if held:
                value[place] = sum(held) / len(held)
    return result


def test_two_rounds_of_three_levels(kit, in_double_precision):
    """Self-distillation begins in the second round, in which nobody holds the third block and the last channel."""
    game = played(kit, "scalefl", gamma=0.5, warmup=1)
    for number, cohort in ((1, ("a", "b", "c")), (2, ("a", "b"))):
        start = game.server["parent"].state()
        game.round(*cohort)
        uploads = [trained(game, client, number, start, 0.5 * (number > 1)) for client in cohort]
        wanted = mean_of_entries(start, uploads)
        for name, value in game.server["parent"].state().items():
            np.testing.assert_allclose(value, wanted[name], atol=1e-6, err_msg=f"{number} {name}")
    end = game.server["parent"].state()
    assert torch.equal(end["layer1.2.conv1.weight"], start["layer1.2.conv1.weight"])
    assert torch.equal(end["conv1.weight"][3:], start["conv1.weight"][3:])
    assert not torch.equal(end["conv1.weight"][2:3], start["conv1.weight"][2:3])


def test_the_mean_of_known_numbers(kit):
    """Channels 0–1 are held by 1, 2 and 6, channel 2 by 2 and 6, channel 3 by 6 alone."""
    game = played(kit, "scalefl")
    values = {"a": 1.0, "b": 2.0, "c": 6.0}
    messages = {
        client: Message({"model": {"conv1.bias": torch.full((size,), values[client])}})
        for client, size in (("a", 2), ("b", 3), ("c", 4))
    }
    found = game.method.mean(game.server, Replies(messages, game.server.cards))
    torch.testing.assert_close(found["conv1.bias"], torch.tensor([3.0, 3.0, 4.0, 6.0]))


def test_a_client_gets_the_first_channels_up_to_its_exit(kit):
    game = played(kit, "scalefl")
    whole = game.server["parent"].state()
    down = game.method.downlink(game.server, "b")["model"]
    assert {name.split(".")[1] for name in down if name.startswith("exits.")} == {"0", "1"}
    torch.testing.assert_close(down["layer1.1.conv2.weight"], whole["layer1.1.conv2.weight"][:3, :3])
    torch.testing.assert_close(down["exits.1.weight"], whole["exits.1.weight"][:, :3])


def test_distillation_waits_for_its_round(kit):
    """Before, a run goes as one without it."""
    with_it, without = played(kit, "scalefl", gamma=0.5, warmup=1), played(kit, "scalefl", gamma=0.0)
    for number in (1, 2):
        for game in (with_it, without):
            game.round(*ROWS)
        one, other = (game.server["parent"].state() for game in (with_it, without))
        same = all(torch.allclose(one[name], other[name], atol=1e-7) for name in one)
        assert same == (number == 1)


def test_with_one_exit_and_one_width_it_is_fedavg(kit):
    ours = played(kit, "scalefl", OneExit)
    fedavg = played(kit, "fedavg", OneExit, share="all", weights="uniform")
    ours.server["parent"].load(Part(fedavg.federation.population.build_model("a")).state())
    for cohort in (("a", "b", "c", "d"), ("a", "c")):
        for game in (ours, fedavg):
            game.round(*cohort)
    one, other = (game.method.downlink(game.server, "b")["model"] for game in (ours, fedavg))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_the_ensemble_is_the_mean_probability(kit):
    game = played(kit, "scalefl")
    client = game.federation.clients.build_client("c")
    batch = Batch(torch.tensor(images()), torch.arange(15) % 4)
    client["model"].module.eval()
    last, ensemble = (game.method.predict(client, batch, mode) for mode in ("last", "ensemble"))
    scores = client["model"].exit_scores(batch.x)
    torch.testing.assert_close(last, scores[2])
    torch.testing.assert_close(ensemble.exp(), sum(one.softmax(1) for one in scores) / 3)


def asked(models, **options):
    values = {"data": "digits", "partition": {"kind": "iid", "clients": 4}, "engine": {"device": "cpu"}}
    return Experiment.make(**values, models=models, method={"name": "scalefl", **options}).build()


def test_the_levels_of_the_deepest_resnet_are_parts_of_it():
    with torch.device("meta"):
        entries = [{"name": f"scalefl{level}", "width": 4, "depth": 152} for level in (1, 2, 3, 4)]
        models = [build(entry, Task("classification", 4, (3, 32, 32)), check=False) for entry in entries]
    names = [shapes_of(Part(model).wire()) for model in models]
    slices = WidthSlices(names[3])
    for smaller, larger in pairwise(names):
        assert smaller.keys() < larger.keys()
        assert slices.misfit(names[3] | smaller) == ""
    assert names[0]["layer1.1.conv3.weight"] == (8, 2, 1, 1)
    assert names[2]["layer1.1.conv3.weight"] == (12, 3, 1, 1)


def test_models_that_are_no_parts_are_refused():
    with pytest.raises(
        ConfigError, match=r"client 0 \(mlp-small\) has no function exit_scores; use a method"
    ):
        asked("mlp-small")
    models = [{"name": "scalefl4", "depth": 10, "width": 2}, {"name": "scalefl1", "depth": 10, "width": 8}]
    with pytest.raises(
        ConfigError, match=r"client 1 \(scalefl1\) has 'conv1.weight' of shape \(5, 1, 7, 7\), and "
    ):
        asked(models)


class Shuffled(ThreeExits):
    """Channels that do not lie where those of the whole network do."""

    width = 2

    def exit_scores(self, x):
        return [one.flip(1) for one in super().exit_scores(x)]


def test_exits_that_compute_something_else_are_refused():
    with pytest.raises(ConfigError, match="computes something else than the parent"):
        asked([Shuffled, ThreeExits])


def test_a_whole_network_everywhere_is_spoken_of():
    whole = {"name": "scalefl4", "depth": 10, "width": 2}
    assert "every client holds the whole parent" in " ".join(advice(asked([whole])))
    assert "whole parent" not in " ".join(advice(asked([whole, whole | {"ratio": 0.5}])))


@pytest.mark.parametrize("option", [{"temperature": 2.0}, {"warmup": 3}, {"compat": True}])
def test_options_of_a_distillation_that_is_off_are_refused(option):
    with pytest.raises(ConfigError, match="does nothing with gamma: 0"):
        asked("scalefl", gamma=0.0, **option)
