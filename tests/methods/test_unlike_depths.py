"""FedProx, SCAFFOLD, FedNova and MOON on models of two depths: by layers and groups, SGD, momentum and Adam.

Each is played again by plain PyTorch loops. A client's global model is its own part of the server's tensors, and
weights, control variates, p and τ_eff are those of the clients that have a layer.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 14)}
KINDS = {"a": "Shallow", "b": "Deep", "c": "Deep"}
SCHEDULE = [("a", "b", "c"), ("b", "c"), ("a", "c")]
OPTIMIZERS = {
    "sgd": {"lr": 0.2},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "adam": {"name": "adam", "lr": 0.02},
}
MU, TAU = 0.6, 0.5


class Bundle(nn.Module):
    """A client's model and projector."""

    def __init__(self, client):
        super().__init__()
        self.model = copy.deepcopy(client["model"].content)
        self.projector = (
            copy.deepcopy(client["projector"].content) if "projector" in client else nn.Identity()
        )

    def u(self, x):
        return self.projector(self.model.features(x))

    def loss(self, x, y):
        return F.cross_entropy(self.model.head(self.u(x)), y)


class ByHand:
    """The server's tensors under keys, what clients remember, and plain loops."""

    def __init__(self, game, method, share, optimizer):
        self.game, self.method, self.share, self.settings = game, method, share, optimizer
        self.bundles = {client: Bundle(game.federation.clients.build_client(client)) for client in ROWS}
        self.x, self.previous = {}, copy.deepcopy(self.bundles)
        for client in ("b", "a", "c"):  # the one with most tensors brings them
            for name, value in self.bundles[client].named_parameters():
                self.x.setdefault(self.key(client, name), value.detach().clone())
        self.c = {key: torch.zeros_like(value) for key, value in self.x.items()}
        self.own = {
            client: {name: torch.zeros_like(value) for name, value in bundle.named_parameters()}
            for client, bundle in self.bundles.items()
        }

    def key(self, client, name):
        return name if self.share == "layers" else f"{KINDS[client]} {name}"

    def owners(self, key, clients=tuple(ROWS)):
        """Client → its name of a tensor."""
        return {
            client: name for client in clients for name in self.own[client] if self.key(client, name) == key
        }

    def play(self, number, cohort):
        trained = {client: self.train(client, number) for client in cohort}
        shares = {client: 1 if self.method == "scaffold" else len(ROWS[client]) for client in cohort}
        before, change = self.x, {}
        self.x = dict(before)
        for key in before:
            held = self.owners(key, cohort)
            if not held:
                continue
            total = sum(shares[client] for client in held)
            moves = {client: trained[client][0][name] - before[key] for client, name in held.items()}
            steps = dict.fromkeys(held, 1.0)
            if self.method == "fednova":
                steps = {client: self.accumulated(trained[client][2]) for client in held}
            effective = sum(shares[client] / total * steps[client] for client in held)
            self.x[key] = before[key] + effective * sum(
                shares[client] / total * moves[client] / steps[client] for client in held
            )
            change[key] = sum(
                trained[client][1][name] - self.own[client][name] for client, name in held.items()
            )
        for key, value in change.items():
            self.c[key] = self.c[key] + value / len(self.owners(key))
        for client in cohort:
            self.own[client] = trained[client][1]

    def accumulated(self, steps):
        rho = self.settings.get("momentum", 0.0)
        return sum((1 - rho**step) / (1 - rho) for step in range(1, steps + 1))

    def train(self, client, number):
        """The weights after local training, the mean of the raw gradients, and how many steps there were."""
        bundle = self.bundles[client]
        named = dict(bundle.named_parameters())
        with torch.no_grad():
            for name, value in named.items():
                value.copy_(self.x[self.key(client, name)])
        received, rows = copy.deepcopy(bundle), self.game.steps(client, number)
        kind = torch.optim.Adam if self.settings.get("name") == "adam" else torch.optim.SGD
        optimizer = kind(named.values(), **{k: v for k, v in self.settings.items() if k != "name"})
        raw = {name: torch.zeros_like(value) for name, value in named.items()}
        for batch in rows:
            optimizer.zero_grad()
            self.loss(client, bundle, received, batch).backward()
            for name, value in named.items():
                raw[name] += value.grad / len(rows)
                if self.method == "scaffold":
                    value.grad += self.c[self.key(client, name)] - self.own[client][name]
            optimizer.step()
        self.previous[client] = copy.deepcopy(bundle)
        return {name: value.detach().clone() for name, value in named.items()}, raw, len(rows)

    def loss(self, client, bundle, received, batch):
        x, y = torch.tensor(self.game.x[batch]).double(), torch.tensor(self.game.y[batch])
        loss = bundle.loss(x, y)
        if self.method == "fedprox":
            pairs = zip(bundle.parameters(), received.parameters(), strict=True)
            loss = loss + MU / 2 * sum((own - other.detach()).square().sum() for own, other in pairs)
        if self.method == "moon":
            u, others = bundle.u(x), [one.u(x).detach() for one in (received, self.previous[client])]
            logits = torch.stack([F.cosine_similarity(u, other) for other in others], 1) / TAU
            loss = loss + MU * F.cross_entropy(logits, torch.zeros(len(y), dtype=torch.long))
        return loss


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("share", ["groups", "layers"])
@pytest.mark.parametrize("method", ["fedprox", "scaffold", "fednova", "moon"])
def test_three_rounds_match_plain_loops(kit, method, share, optimizer):
    options = {"name": method, "share": share} | ({"mu": MU} if method in ("fedprox", "moon") else {})
    training = {"epochs": 2, "batch_size": 3, "optimizer": OPTIMIZERS[optimizer]}
    models = [getattr(kit, kind) for kind in KINDS.values()]
    game = kit.Federation(options, models, ROWS, training=training)
    expected = ByHand(game, method, share, OPTIMIZERS[optimizer])
    for number, cohort in enumerate(SCHEDULE, start=1):
        game.round(*cohort)
        expected.play(number, cohort)
    for client in ROWS:
        down = game.method.downlink(game.server, client)
        for name in expected.own[client]:
            part, _, key = name.partition(".")
            value = expected.x[expected.key(client, name)]
            torch.testing.assert_close(down[part][key], value, rtol=1e-7, atol=1e-9, msg=f"{client} {name}")
            if method == "scaffold":
                control = expected.c[expected.key(client, name)]
                torch.testing.assert_close(down["control"][key], control, rtol=1e-7, atol=1e-9)
