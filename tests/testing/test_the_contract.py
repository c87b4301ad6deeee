"""The contract itself: each kind of broken method is found, by the check that is meant to find it."""

from __future__ import annotations

import contextlib
import random  # noqa: TID251
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import numbers, state_of, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Method, _registry, client_step
from potluck.core.model import Model
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.streams import Stream
from potluck.core.task import Batch, Task
from potluck.kit.class_means import ClassStats
from potluck.methods.registry import find_method
from potluck.testing import contract as testing
from potluck.testing.double_precision import double_precision
from potluck.training.collect import collect
from potluck.training.fit import fit


class Plain(Method):
    """Keeps the contract: a mean of one number, and a weight that changes from round to round."""

    down = {"level": tensor("", "the mean of all levels")}

    def server_state(self, task: Task) -> dict[str, Any]:
        return {"level": torch.zeros(())}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        return {"model": model, "level": torch.zeros(())}

    def downlink(self, server: Server, client: str) -> Content:
        return {"level": server["level"].value.clone()}

    def receive(self, client: Client, down: Any) -> None:
        client["level"].load(down["level"])

    def round(self, server: Server, clients: Clients) -> None:
        replies = clients.ask(self.train)
        server["level"].load(torch.stack([message["level"] for message in replies.values()]).mean())

    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        weight = torch.tensor(0.5**client.round, device=client.device)
        fit(client, self.loss, scalars={"weight": weight})
        return {"level": client["level"].value + 1}

    def loss(self, client: Client, batch: Batch, weight: Tensor | float) -> Tensor:
        scores = client["model"](batch.x)
        return client.task.loss(scores, batch.y) + weight * scores.square().mean()


class FrozenNumber(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        fit(client, lambda client, batch: self.loss(client, batch, 0.5**client.round))
        return {"level": client["level"].value + 1}


class LooseStatistics(Plain):
    """Gathers into tensors made anew in every round: a captured collection goes on writing to the old ones."""

    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        sums = torch.zeros(())
        collect(client, lambda batch: sums.add_(client["model"](batch.x).sum().detach()))
        return {"level": sums}


class Replaces(Plain):
    """Assigns to a parameter instead of writing to it: what is saved is the old one."""

    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        answer = super().train(client)
        client["model"].head.weight.data = client["model"].head.weight.data.clone()
        return answer


class ReadsBack(Plain):
    def loss(self, client: Client, batch: Batch, weight: Tensor | float) -> Tensor:
        value = super().loss(client, batch, weight)
        return value * 2 if value.item() > 1 else value


class HiddenState(Plain):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory: dict[str, Tensor] = {}

    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        self.memory[client.id] = self.memory.get(client.id, torch.zeros(())) + 1
        return {"level": self.memory[client.id]}


class CountsCalls(Plain):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls = 0

    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        self.calls += 1
        super().train(client)
        return {"level": torch.tensor(float(self.calls) * (1 + int(client.id)))}


class GlobalRandomness(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        return {"level": torch.tensor(float(np.random.rand()))}  # noqa: NPY002


class SeedsOnTheServer(Plain):
    def round(self, server: Server, clients: Clients) -> None:
        super().round(server, clients)
        torch.manual_seed(0)  # noqa: TID251
        server["level"].load(server["level"].value + torch.randn(()))


class SeedsInAStep(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        torch.default_generator.manual_seed(3)
        return {"level": torch.randn(())}


class SeedsToPredict(Plain):
    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        torch.manual_seed(0)  # noqa: TID251
        return super().predict(client, batch, mode)


class PythonsRandom(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        random.seed(0)
        return {"level": torch.tensor(random.random())}


class DrawsFromTheDefault(Plain):
    """Allowed: torch's default generator is seeded for every step."""

    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        return {"level": torch.randn(())}


class LooseClassMeans(Plain):
    """Sums into a `ClassStats` of its own, which a captured collection knows nothing of: a level too short."""

    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        stats = ClassStats(3, 64)
        collect(client, lambda batch: stats.add(client["model"].features(batch.x), batch.y))
        return {"level": stats.counts[stats.counts > 0].mean(0) if stats.counts.sum() else stats.counts[:0]}


class OneHotInCollect(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        rows = collect(client, lambda batch: F.one_hot(batch.y))
        return {"level": torch.cat(rows).float().mean()}


class Undeclared(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        return {**super().train(client), "samples": torch.tensor(1.0)}


class Leaks(Plain):
    @client_step(up={"level": tensor("", "the client's level"), "model": state_of("model", "said to stay")})
    def train(self, client: Client) -> Content:
        return {**super().train(client), "model": client["model"].state()}


class PreparesLate(Plain):
    """Prepares in `check` what `setup` is for."""

    def check(self, population: Population) -> None:
        self.widths = [population.width(client) for client in population.ids]


class NoSuchPart(Plain):
    stays = ("data", "labels", "projector")


class OwnBatches(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        client.count("batches:train")
        return super().train(client)


class NotFinite(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        return {"level": torch.tensor(float("nan") if client.samples == 1 else 1.0)}


class ClaimsNumbers(Plain):
    """Says that it takes any task, and learns classes."""

    tasks = "any"

    def loss(self, client: Client, batch: Batch, weight: Tensor | float) -> Tensor:
        return weight * F.cross_entropy(client["model"](batch.x), batch.y)


class TrainsOnItsTestSplit(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        weight = torch.ones(())
        fit(client, self.loss, streams={"seen": client.batches("test")}, scalars={"weight": weight})
        return {"level": client["level"].value + 1}


class TrainsOnEverything(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        everything = Stream(client.source, [np.arange(len(client.source.x))])
        fit(client, self.loss, streams={"all": everything}, scalars={"weight": torch.ones(())})
        return {"level": client["level"].value + 1}


class MeanOfEverything(Plain):
    """Looks at the rows of others in code of its own, and sends what it saw."""

    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        return {"level": client.source.x.mean()}


class CollectsTestLabels(Plain):
    """Keeps what it saw in its state and sends nothing of it."""

    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        seen = collect(client, lambda batch: batch.y.float().mean(), "test")
        client["level"].load(seen[0])
        return {"level": torch.zeros(())}


class FixedTorchSeed(Plain):
    def round(self, server: Server, clients: Clients) -> None:
        super().round(server, clients)
        draw = torch.Generator().manual_seed(0)
        server["level"].load(server["level"].value + torch.randn((), generator=draw))


class FixedNumpySeed(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        return {"level": torch.tensor(np.random.default_rng(int(client.id)).random())}


class UnseededGenerator(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        return {"level": torch.tensor(np.random.default_rng().random())}


MEMORY: dict[str, int] = {}


class ModuleMemory(Plain):
    @client_step(up={"level": tensor("", "the client's level")})
    def train(self, client: Client) -> Content:
        super().train(client)
        MEMORY[client.id] = MEMORY.get(client.id, 1000) + 1
        return {"level": torch.tensor(1.0 / MEMORY[client.id])}


class NeedsEveryone(Plain):
    def round(self, server: Server, clients: Clients) -> None:
        replies = clients.ask(self.train)
        assert len(replies) == 4
        server["level"].load(torch.stack([message["level"] for message in replies.values()]).mean())


class TellsItsClasses(Plain):
    @client_step(
        up={"level": tensor("", "the client's level"), "held": numbers("C_k", "which classes", below="C")}
    )
    def train(self, client: Client) -> Content:
        return {**super().train(client), "held": client.numbers(client.classes_held)}


BROKEN = [
    (
        TrainsOnItsTestSplit,
        testing.clients_of_every_kind_work,
        r"step train trains on rows .* the stream 'seen', of the split test, has \d+ of them",
    ),
    (
        TrainsOnEverything,
        testing.clients_of_every_kind_work,
        r"step train trains on rows .* the stream 'all' has \d+ of them",
    ),
    (
        MeanOfEverything,
        testing.only_training_rows_matter,
        r"step train of client 0 depends on samples that are not in client.rows\['train'\]",
    ),
    (
        CollectsTestLabels,
        testing.only_training_rows_matter,
        r"step train of client 0 depends on samples that are not in client.rows\['train'\]",
    ),
    (
        FixedTorchSeed,
        testing.no_global_randomness,
        r"round \(test_the_contract.py, line \d+\) seeds .* with 0",
    ),
    (
        FixedNumpySeed,
        testing.no_global_randomness,
        r"train \(test_the_contract.py, line \d+\) seeds .* with \d",
    ),
    (
        UnseededGenerator,
        testing.no_global_randomness,
        "the step train of client 0 depends on randomness that no seed .* or on something remembered outside",
    ),
    (
        TellsItsClasses,
        testing.only_declared_crosses,
        "'?held'? of the step train tells which classes are held",
    ),
    (
        ClaimsNumbers,
        testing.tasks_it_claims_work,
        "claims to take regression and fails there .* client.task.loss",
    ),
    (FrozenNumber, testing.a_captured_step_is_right, "a captured step gives other values"),
    (LooseStatistics, testing.a_captured_step_is_right, "declared tensors"),
    (Replaces, testing.a_captured_step_is_right, "was replaced by another tensor"),
    (ReadsBack, testing.a_captured_step_is_right, "cannot be captured"),
    (HiddenState, testing.state_survives, "saved and resumed"),
    (CountsCalls, testing.order_does_not_matter, "order of clients matters"),
    (CountsCalls, testing.faults_leave_no_trace, "left a trace|differs from an absent client"),
    (GlobalRandomness, testing.no_global_randomness, "the step train uses the global generator of NumPy"),
    (SeedsOnTheServer, testing.no_global_randomness, "round seeds torch's default generator"),
    (SeedsInAStep, testing.no_global_randomness, "the step train seeds torch's default generator"),
    (SeedsToPredict, testing.no_global_randomness, "predict seeds torch's default generator"),
    (
        PythonsRandom,
        testing.no_global_randomness,
        "the step train uses the global generator of Python's random",
    ),
    (
        LooseClassMeans,
        testing.a_captured_step_is_right,
        "when fit and collect are captured: .*ClassStats.into",
    ),
    (OneHotInCollect, testing.a_captured_step_is_right, r"given to collect .*test_the_contract.py, line \d+"),
    (Undeclared, testing.only_declared_crosses, "refused|not declared"),
    (Leaks, testing.only_declared_crosses, "said to stay at home"),
    (NoSuchPart, testing.only_declared_crosses, "'projector' is said to stay .* no such part"),
    (PreparesLate, testing.check_only_refuses, "check changes widths: prepare that in setup"),
    (OwnBatches, testing.comparisons_are_paired, "order of batches"),
    (NotFinite, testing.clients_of_every_kind_work, "clients failed"),
]


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Any:
    """A method under a name, for one test only."""

    def register(cls: type[Method]) -> dict[str, str]:
        monkey.setattr(cls, "name", cls.__name__.lower(), raising=False)
        monkey.setitem(_registry, cls.name, cls)
        return {"name": cls.name}

    with pytest.MonkeyPatch.context() as monkey:
        yield register


def test_a_method_that_keeps_the_contract_passes(registered: Any) -> None:
    testing.check_method(registered(Plain))


class TakesNumbers(Plain):
    tasks = "any"


def test_a_method_of_any_task_is_tried_with_modules_of_fixed_outputs_too(registered: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Linear(8, 3))
    testing.tasks_it_claims_work(testing.Bench(registered(TakesNumbers), models=[module]))


@pytest.mark.parametrize(
    ("cls", "check", "sentence"), BROKEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_broken_method_is_found(registered: Any, cls: Any, check: Any, sentence: str) -> None:
    from potluck.errors import RoundFailed

    with pytest.raises((AssertionError, RoundFailed), match=sentence):
        check(testing.Bench(registered(cls)))


SECRETS: dict[str, Callable[[Client], Tensor]] = {
    "data": lambda client: client.source.x[int(client.rows["train"][-1])],
    "labels": lambda client: client.source.y[client.rows["train"]],
    "model": lambda client: client["model"].head.weight,
    "model/features": lambda client: [*client["model"].parameters()][1],  # the bias of the first layer
    "projector": lambda client: client["projector"].bias,
    "representations": lambda client: collect(client, lambda batch: client["model"].features(batch.x))[0][0],
}
LEAKS = [
    *(
        (options, secret)
        for options in ("fedavg", "fedprox", "scaffold", "fedin")
        for secret in ("data", "labels")
    ),
    *(({"name": "feddf", "steps": 2, "every": 2, "batch": 20}, secret) for secret in ("data", "labels")),
    *(({"name": "fedmrl", "d1": 16}, secret) for secret in find_method("fedmrl").stays),
    *(
        ({"name": "fedmrl", "d1": 16, "tie_headers": True}, secret)
        for secret in ("model/features", "projector")
    ),
]


def leaking(base: type[Method], secret: Callable[[Client], Tensor]) -> type[Method]:
    """A method that writes something private into the largest tensor it may send."""
    step = base.steps()["train"]

    class Leaking(base):  # type: ignore[misc, valid-type]
        @client_step(up=step.up, down=step.down)
        def train(self, client: Client, *down: Message) -> Content:
            message = Message(super().train(client, *down))
            private = secret(client).detach().flatten().float()
            name = max(message, key=lambda name: message[name].numel())
            changed = message[name].clone()
            changed.view(-1)[5 : 5 + len(private)] = private
            return {**message, name: changed}

    return Leaking


@pytest.mark.parametrize(
    ("options", "secret"), LEAKS, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_a_planted_leak_is_found(registered: Any, options: Any, secret: str) -> None:
    options = {"name": options} if isinstance(options, str) else options
    base = find_method(options["name"])
    assert secret in base(base.Config(**options)).stays
    models = ("conv-small", "conv-large") if base.name == "fedin" else testing.DEFAULT_MODELS
    leaky = registered(leaking(base, SECRETS[secret]))
    with pytest.raises(AssertionError, match=r"in a message holds .* said to stay at home"):
        testing.only_declared_crosses(testing.Bench({**options, **leaky}, models))


def test_a_subclass_without_a_name_of_its_own_does_not_take_the_place_of_its_base() -> None:
    base = find_method("fedavg")
    leaking(base, SECRETS["data"])
    assert find_method("fedavg") is base


def test_double_precision_reaches_every_state_and_ends() -> None:
    for inside, expected in ((double_precision, torch.float64), (contextlib.nullcontext, torch.float32)):
        with inside():
            played = testing.Bench("fedproto").play([testing.ALL])
        found = [value for state in played.states().values() for value in (state or {}).values()]
        assert {value.dtype for value in found if value.is_floating_point()} == {expected}


def test_torchs_default_generator_may_be_drawn_from(registered: Any) -> None:
    testing.no_global_randomness(testing.Bench(registered(DrawsFromTheDefault)))


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (HiddenState, "hiddenstate: state_survives: .* changed after setup: memory: declare"),
        (Undeclared, "undeclared: clients_of_every_kind_work: .*'samples' is not declared"),
        (
            ModuleMemory,
            "modulememory: .* outside the declared state.*variables of its module .*: MEMORY: declare",
        ),
        (
            NeedsEveryone,
            r"state_survives: round raised AssertionError .*at test_the_contract.py, line \d+: assert len.*, "
            "in round 1 with the clients 0, 1, 3 of 0, 1, 2, 3",
        ),
    ],
)
def test_check_method_names_the_check_and_what_a_method_remembers(
    registered: Any, cls: Any, sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        testing.check_method(registered(cls))


def test_check_method_says_which_part_is_broken(registered: Any) -> None:
    with pytest.raises(AssertionError, match=r"frozennumber: a_captured_step_is_right: .*scalars"):
        testing.check_method(registered(FrozenNumber))


def test_check_method_shows_its_progress_when_asked(
    registered: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        testing.check_method(registered(Undeclared), verbose=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("undeclared: check_only_refuses … 0.")
    assert lines[1] == "undeclared: clients_of_every_kind_work … failed"


def test_help_says_what_the_source_of_a_client_is() -> None:
    assert "rows of all clients and all splits" in " ".join((Client.__doc__ or "").split())
