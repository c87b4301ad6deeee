"""A tiny federation played round by round, and softmax regression in plain NumPy to compare it with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from potluck.core.message import Message
from potluck.core.model import Model
from potluck.core.rng import Rng, Seeds
from potluck.core.settings import ClientTraining
from potluck.core.streams import shuffled_batches
from potluck.data import ClientSplit, Split, from_arrays
from potluck.engine.protocol import Examination
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.federation.federation import simulated
from potluck.federation.groups import GroupData
from potluck.methods.registry import find_method
from potluck.models import ModelPool
from potluck.testing.double_precision import double_precision

INPUTS, CLASSES = 3, 4


class Federation:
    """A method, a client per model and list of rows, and a server; played with explicit cohorts."""

    def __init__(
        self,
        method,
        models,
        rows,
        *,
        x=None,
        y=None,
        training=None,
        per_client=False,
        test=(),
        public=None,
        lacking=None,
    ):
        draw = Rng(5).numpy()
        total = 1 + max(int(max(part)) for part in rows.values() if len(part))
        self.x = draw.standard_normal((total, INPUTS)).astype(np.float32) if x is None else x
        self.y = np.arange(total) % CLASSES if y is None else y
        data = from_arrays(self.x, self.y, classes=None if y is not None else CLASSES)
        options = (
            {"name": method} if isinstance(method, str) else {} if isinstance(method, type) else dict(method)
        )
        kind = method if isinstance(method, type) else find_method(options["name"])
        pool = ModelPool(dict(zip(rows, models, strict=True)) if isinstance(models, list) else models)
        self.method = kind(kind.Config(**options), pool)
        self.rows = {client: np.asarray(part, dtype=np.int64) for client, part in rows.items()}
        nothing, measured = np.zeros(0, dtype=np.int64), np.asarray(test, dtype=np.int64)
        self.federation = simulated(
            self.method,
            [GroupData(data, len(self.rows))],
            Split.of(ClientSplit(client, part, nothing, measured) for client, part in self.rows.items()),
            pool,
            seeds=Seeds(1, 2, 3, 4),
            training=ClientTraining(**(training or {})),
            independent_init=per_client,
            public=None if public is None else (unlabelled(public), np.arange(len(public))),
        )
        if lacking is not None:
            blind(self.federation, lacking)
            self.federation.prepared()
        self.engine = SerialEngine(self.federation.clients)
        self.rounds = Rounds(self.federation, self.engine, name="tiny")
        self.server = self.rounds.server
        self.number = 0

    @property
    def accepted(self):
        """Client → the last round whose work was accepted."""
        return self.rounds.accepted

    def round(self, *ids, engine=None, quorum=1):
        """One whole round with this cohort; gives the cohort, with its ledger and failures."""
        self.number += 1
        self.rounds.engine = engine or self.engine
        return self.rounds.play(self.number, ids, quorum=quorum)

    def stamp(self, client, exchange):
        return self.rounds.stamp(client, self.number, attempt=1, exchange=exchange)

    def state(self, client):
        """Everything a client has at rest."""
        record = self.engine.store.peek(client)
        if record is None or record.base is None:
            return self.federation.clients.build_client(client).snapshot()
        return record.base

    def part(self, client, part):
        """One part of a client's state at rest."""
        return {
            name.removeprefix(f"{part}/"): value
            for name, value in self.state(client).items()
            if name.startswith(f"{part}/")
        }

    def initial(self, client):
        """The weights a client's model starts with."""
        return {
            name: value.detach().clone()
            for name, value in self.federation.population.build_model(client).named_parameters()
        }

    def rng(self, client, number):
        """A client's randomness in a round."""
        return self.federation.seeds.tree("training").child("round", number, "client", client)

    def steps(self, client, number, again=0):
        """The rows of each training step of a client in a round, the first time it trains or again."""
        training = self.federation.clients.client_training(client)
        rng = self.rng(client, number).child("batches", "train", again)
        return shuffled_batches(
            self.rows[client], training.batch_size, training.epochs, training.last_batch, rng
        )

    def trained(self, lr):
        """Every client's model after local training in round 1, from common weights."""
        found = {}
        for client in self.rows:
            found[client] = model = self.federation.population.build_model(client)
            batches = [
                (torch.tensor(self.x[one]), torch.tensor(self.y[one])) for one in self.steps(client, 1)
            ]
            Toolbox.plain_training(model, batches, lr=lr)
        return found

    def measure(self, client, mode, down=True):
        """Correct answers and summed loss on the client's test rows."""
        message = Message(self.method.downlink(self.server, client)) if down else None
        [answer] = self.engine.examine([Examination(client, message, self.stamp(client, 0), (mode,))])
        return {name.rsplit("/", 1)[1]: value.item() for name, value in answer.report.metrics.items()}


def unlabelled(x):
    """Public samples."""
    return from_arrays(x, np.zeros(len(x), dtype=np.int64), classes=2, name="public")


def blind(federation, lacking):
    """Let clients (None: the server) lack some public rows, as texts do that have no captions of them."""
    whole, views = federation.population.public(), {}
    for side, rows in lacking.items():
        mask = whole.mask.clone()
        mask[list(rows)] = False
        views[side] = replace(whole, mask=mask)
    federation.population.public = lambda client=None: views.get(client, whole)
    federation.clients.public = federation.population.public


class Linear(Model):
    """Softmax regression: the features are the sample."""

    def __init__(self, task):
        super().__init__()
        self.rep_dim = task.input[0]
        self.head = nn.Linear(task.input[0], task.classes)

    def features(self, x):
        return x


class Shallow(Model):
    """One hidden layer."""

    width = 6

    def __init__(self, task):
        super().__init__()
        self.rep_dim = self.width
        self.fc1 = nn.Linear(task.input[0], self.width)
        self.head = nn.Linear(self.width, task.classes)

    def features(self, x):
        return F.relu(self.fc1(x))


class Deep(Shallow):
    """The same and a layer more."""

    def __init__(self, task):
        super().__init__(task)
        self.fc2 = nn.Linear(self.width, self.width)

    def features(self, x):
        return F.relu(self.fc2(super().features(x)))


class Side(Shallow):
    """The first and a layer of its own."""

    def __init__(self, task):
        super().__init__(task)
        self.fc3 = nn.Linear(self.width, self.width)

    def features(self, x):
        return F.relu(self.fc3(super().features(x)))


class Narrow(Shallow):
    """A narrower representation."""

    width = 4


class Normed(Shallow):
    """With batch norm."""

    def __init__(self, task):
        super().__init__(task)
        self.norm = nn.BatchNorm1d(self.width)

    def features(self, x):
        return F.relu(self.norm(self.fc1(x)))


class Regression:
    """Softmax regression in float64: the gradient of the mean cross-entropy, by hand."""

    @staticmethod
    def gradient(weight, bias, x, y):
        x = x.astype(np.float64)
        logits = x @ weight.T + bias
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        error = shifted / shifted.sum(1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        return error.T @ x / len(y), error.mean(0)


class Toolbox:
    """What a parity test needs."""

    Federation, Regression = Federation, Regression
    Linear, Shallow, Deep, Side, Narrow, Normed = Linear, Shallow, Deep, Side, Narrow, Normed
    inputs, classes = INPUTS, CLASSES

    @staticmethod
    def plain_training(model, batches, lr, anchor=None, mu=0.0):
        """Gradient descent in a plain PyTorch loop."""
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            if anchor is not None:
                named = dict(model.named_parameters())
                loss = loss + mu / 2 * sum((named[name] - anchor[name]).square().sum() for name in named)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@pytest.fixture
def in_double_precision():
    """Play in float64: rounding grows over the steps of several rounds, and differs between processors."""
    with double_precision():
        yield


@pytest.fixture(scope="session")
def kit():
    """The tools of the parity tests."""
    return Toolbox
