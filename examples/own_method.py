"""A method of one's own, checked and compared with Local over two seeds: python examples/own_method.py."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from potluck import (
    Batch,
    Client,
    ClientId,
    Clients,
    Content,
    Experiment,
    Message,
    Method,
    MethodConfig,
    Model,
    Server,
    Task,
    check_method,
    client_step,
    collect,
    compare,
    fit,
    option,
    tensor,
)

ROUNDS = 10


class SharedCentre(Method):
    """Clients agree on the mean of their representations and are pulled towards it, with growing strength.

    Up: the mean representation. Down: the mean of these over clients. Loss: CE + w·r·‖mean f(x) − c‖²/d in round r.
    """

    name = "shared-centre"
    models = "any, with the same representation width"
    card_fields = ("width",)
    down = {"centre": tensor("d", "the mean of the clients' means", optional=True)}

    class Config(MethodConfig):
        """Options."""

        weight: float = option(default=0.01, ge=0, description="w, on the pull", source="ours")

    def server_state(self, task: Task) -> dict[str, Any]:
        """Nothing until the first round is over: the server does not know the width."""
        return {"centre": {}}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, the centre as received, and whether there is one."""
        return {"model": model, "centre": torch.zeros(model.rep_dim), "known": torch.zeros(())}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The centre, once there is one."""
        return dict(server["centre"].tensors())

    def receive(self, client: Client, down: Message) -> None:
        """Put it in its place."""
        if "centre" in down:
            client["centre"].load(down["centre"])
            client["known"].value.fill_(1.0)

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average the means."""
        replies = clients.ask(self.train)
        server["centre"].load(
            {"centre": torch.stack([reply["centre"] for reply in replies.values()]).mean(0)}
        )

    @client_step(up={"centre": tensor("d", "the mean representation of the training samples")})
    def train(self, client: Client) -> Content:
        """Local epochs, then the mean representation."""
        weight = torch.tensor(self.config.weight * client.round, device=client.device)
        fit(client, self.loss, scalars={"weight": weight})
        features = torch.cat(collect(client, lambda batch: client["model"].features(batch.x)))
        return {"centre": features.mean(0)}

    def loss(self, client: Client, batch: Batch, weight: Tensor) -> dict[str, Tensor]:
        """Cross-entropy and the pull."""
        z = client["model"].features(batch.x)
        gap = (z.mean(0) - client["centre"].value).square().mean()
        return {
            "ce": client.task.loss(client["model"].head(z), batch.y, batch.weight),
            "pull": weight * client["known"].value * gap,
        }


def main() -> None:
    check_method("shared-centre")
    ours = Experiment.make(
        data="digits",
        partition={"kind": "dirichlet", "alpha": 0.3, "clients": 4},
        models=["mlp-small", "conv-small"],
        method={"name": "shared-centre", "weight": 0.1},
        training={"rounds": ROUNDS, "batch_size": 16, "optimizer": {"lr": 0.05}},
    )
    with TemporaryDirectory() as folder:
        print(compare(ours, seeds=[0, 1], out=Path(folder) / "comparison"))


if __name__ == "__main__":
    main()
