"""FedL2G (Zhang et al., arXiv 2410.06490): vectors that learn how to guide the clients' training.

    Down:   a guiding vector V[c] for every class, in the space of logits (C·C scalars) or features (C·d).
    Client: holds out some of its samples, the quiz, and trains on the others: CE(o, y) + mean((o − V[y])²), with z
            in place of o in the space of features. Then, on a study batch, θ' = θ − lr·∇_θ of the same loss, one
            step that is differentiated through; the gradient of CE(θ') on the quiz with respect to V goes up.
    Up:     this gradient for each class held, the classes, and how many study samples each had: C_k·(C + 2).
            A class without one has no gradient and does not count.
    Server: the mean per class over its senders, clipped to length 100, then a step of SGD on V.

In the first 50 rounds (`warm_up`) only V learns. V starts from normal noise.

Deviations: the quiz is at most half of a client's samples and drawn once, where HtFLlib takes the first ones; a
client with one sample sends no gradient. θ' is computed with batch norm on the batch's statistics, which are not
remembered, and without dropout (INFERRED); the models must be twice differentiable. Where `training.clip` is set,
it takes the place of the clients' clip of 100.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, counts, numbers, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Method, PrivateModelConfig, client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.streams import Stream, several_each, shuffled_batches
from potluck.core.task import Batch, Task
from potluck.kit.class_means import merge_classes
from potluck.kit.requirements import require_one_width
from potluck.training.fit import Gradients, fit
from potluck.training.modes import batch_statistics, twice_differentiable


def _down(method: FedL2G) -> Contract:
    return {"vectors": tensor(f"C, {method.width}", "the guiding vector of every class")}


class FedL2G(Method):
    """Guiding vectors, one per class, learned from how much they help on samples held out."""

    name = "fedl2g"
    citation = "Zhang et al., arXiv 2410.06490"
    models = "any; with space: feature of the same representation width"
    card_fields = ("width", "classes_held")
    stays = ("data", "model")
    down = _down

    class Config(PrivateModelConfig):
        """Options of FedL2G; the defaults are HtFLlib's."""

        space: Literal["logit", "feature"] = option(
            default="logit",
            description="what is guided: logits or representations",
            source="HtFLlib has both",
        )
        warm_up: int = option(
            default=50, ge=0, description="first rounds in which only the vectors learn", source="HtFLlib"
        )
        study: int = option(default=1, ge=1, description="batches in the study step", source="HtFLlib")
        quiz: int = option(default=1, ge=1, description="batches held out as the quiz", source="HtFLlib")
        server_lr: float = option(
            default=0.01, gt=0, description="the server's learning rate, plain SGD", source="HtFLlib"
        )
        clip: float = option(
            default=100.0,
            gt=0,
            description="largest norm of a gradient, of a client's model and of the vectors",
            source="HtFLlib",
        )

    @property
    def width(self) -> str:
        """Of a vector, as a symbol of shape formulas."""
        return "C" if self.config.space == "logit" else "d"

    def setup(self, population: Population) -> None:
        """The width of a representation."""
        self.rep_dim = population.width(population.ids[0])

    def check(self, population: Population) -> None:
        """Representations that are guided have one width."""
        if self.config.space == "feature":
            require_one_width(population, "a guiding vector", ", or take method.space: logit")

    def advice(self, population: Population) -> Iterator[str]:
        """Say when models begin to learn."""
        yield from super().advice(population)
        if self.config.warm_up:
            yield (
                f"{self.name}: in the first {self.config.warm_up} rounds only the guiding vectors learn and no "
                "model is trained (method.warm_up); play more rounds, or set it lower"
            )

    def server_state(self, task: Task) -> dict[str, Any]:
        """V."""
        return {"vectors": torch.randn(self._shape(task, self.rep_dim))}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, V as received, its gradient, and how many study samples each class had."""
        shape = self._shape(task, model.rep_dim)
        guide, gradients = Guide(*shape), torch.zeros(shape)
        return {"model": model, "guide": guide, "gradients": gradients, "counts": torch.zeros(task.classes)}

    def _shape(self, task: Task, rep_dim: int) -> tuple[int, int]:
        return task.classes, task.classes if self.config.space == "logit" else rep_dim

    def downlink(self, server: Server, client: ClientId) -> Content:
        """V."""
        return {"vectors": server["vectors"].value.clone()}

    def receive(self, client: Client, down: Message) -> None:
        """Install V."""
        client["guide"].load({"vectors": down["vectors"]})

    def round(self, server: Server, clients: Clients) -> None:
        """Train with guidance, then improve the guidance."""
        self.improve(server, clients.ask(self.train))

    def improve(self, server: Server, replies: Replies) -> None:
        """A clipped step along the mean gradients; what is not finite does not count."""
        means, _ = merge_classes(replies, "gradients", server.task.classes)
        means = means.masked_fill(~means.isfinite(), 0.0).double()
        factor = (self.config.clip / (means.norm() + 1e-6)).clamp_max(1.0)
        server["vectors"].value.sub_((self.config.server_lr * factor * means).float())

    @client_step(
        up=lambda method: {
            "gradients": tensor(f"C_k<=C, {method.width}", "gradient of the quiz loss, for each class held"),
            "classes": numbers("C_k", "which classes these are", below="C", distinct=True),
            "counts": counts("C_k", "study samples of each; 0: no gradient", "n"),
        }
    )
    def train(self, client: Client) -> Content:
        """Local epochs after the warm-up, then the gradient of the quiz loss after one step on a study batch."""
        rows, quiz = self.held_out(client)
        if client.round > self.config.warm_up:
            self.learn(client, rows)
        client["gradients"].value.zero_()
        client["counts"].value.zero_()
        if len(quiz):
            self.study(client, rows, quiz)
        held = client.numbers(client.classes_held)
        return {
            "gradients": client["gradients"].value[held],
            "classes": held,
            "counts": client["counts"].value[held],
        }

    def learn(self, client: Client, rows: np.ndarray) -> None:
        """Local epochs on all samples but the quiz."""
        training, draw = client.training, client.rng.child("study")
        order = shuffled_batches(rows, training.batch_size, training.epochs, training.last_batch, draw)
        private = Stream(client.source, several_each(order), augment=True)
        clip = training.clip or self.config.clip
        fit(client, self.loss, train=["model"], streams={"private": private}, clip=clip)

    def study(self, client: Client, rows: np.ndarray, quiz: np.ndarray) -> None:
        """The gradient of the quiz loss, on a fresh study batch."""
        training, drawn = client.training, client.rng.child("study batch").numpy().permutation(rows)
        rate = training.optimizer.lr * training.lr_decay ** (client.round - 1)
        fit(
            client,
            self.quiz_loss,
            train=["guide"],
            streams={
                "study": Stream(client.source, [drawn[: self.config.study * training.batch_size]]),
                "quiz": Stream(client.source, [quiz]),
            },
            combine=lambda terms: self.keep(client, terms),
            scalars={"rate": torch.full((), rate, device=client.device)},
        )

    def held_out(self, client: Client) -> tuple[np.ndarray, np.ndarray]:
        """The rows to train on and those of the quiz, the same in every round; at most half are held out."""
        rows = client.secret.child("quiz").numpy().permutation(client.rows["train"])
        count = min(self.config.quiz * client.training.batch_size, len(rows) // 2)
        return rows[count:], rows[:count]

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy, and the mean squared distance to the guiding vector of the sample's class."""
        z = client["model"].features(batch.x)
        scores = client["model"].head(z)
        guided = scores if self.config.space == "logit" else z
        gaps = (guided.float() - client["guide"].vectors[batch.y]).square().mean(1)
        return {"ce": client.task.loss(scores, batch.y, batch.weight), "guidance": batch.mean(gaps)}

    def quiz_loss(self, client: Client, batch: Batch, quiz: Batch, rate: Tensor) -> dict[str, Tensor]:
        """The loss of the quiz after one step on the study batch, as a function of V."""
        model, weights = client["model"].content, client["model"].trainable()
        with twice_differentiable(model), batch_statistics(model, min(len(batch), len(quiz))):
            studied = sum(self.loss(client, batch).values(), torch.zeros((), device=rate.device))
            steps = torch.autograd.grad(studied, [*weights.values()], create_graph=True, allow_unused=True)
            moved = {
                name: value if step is None else value - rate * step
                for (name, value), step in zip(weights.items(), steps, strict=True)
            }
            scores = functional_call(model, moved, (quiz.x,))
        client["counts"].value.index_add_(0, batch.y, torch.ones_like(batch.y, dtype=torch.float32))
        return {"quiz": client.task.loss(scores, quiz.y, quiz.weight)}

    def keep(self, client: Client, terms: Mapping[str, Gradients]) -> Gradients:
        """Keep the gradient, which the server uses; the client's own V does not move."""
        client["gradients"].value.copy_(terms["quiz"]["guide/vectors"])
        return {}


class Guide(nn.Module):
    """Guiding vectors, a row per class."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(classes, width))
