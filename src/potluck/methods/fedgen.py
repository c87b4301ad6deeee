"""FedGen (Zhu, Hong & Zhou, ICML 2021): the server learns to generate representations of each class.

    Up:     the head φ_k and how many samples of each class the client has: |φ| + C scalars.
    Down:   the averaged head φ; from the second round on the generator G and the classes it knows.
    Client: CE + (B_g/B)·a_t·CE(φ_k(G(ŷ, ε)), ŷ) + b_t·KL(σ(φ_k(G(y, ε))) ‖ σ(o)), the target detached and ŷ
            drawn uniformly from the classes G knows; a_t = max(1e-4, a·0.98^(t−1)) in round t, b_t alike. Both
            terms only in the first 20 local epochs of a round. G is frozen and in evaluation mode.
    Server: G on Σ_k w_k[y]·CE(φ_k(z), y), z = G(y, ε) and w_k[y] the share of client k in the samples of class
            y, plus η·exp(−mean_ij mean (ε_i − ε_j)²·mean |z_i − z_j|), by Adam. Then φ ← Σ_k n_k·φ_k / Σ_k n_k.

G takes one-hot(y) and noise ε, uniform in [0, 1), through linear → batch norm → ReLU → linear. It learns the
classes of which some client of the round has more than one sample (`floor`).

Deviations: the official code shares the whole model unless it is called `partial`; here the head alone, so that
the rest may differ. Its weights w_k[y] meet the losses of other samples (a column times a row); here each loss
has the weight of its own sample. It lets ŷ be any class, and lowers the learning rate of G by 2 % a round; here
that stays. A client that first comes late is taught at once. HtFLlib's form is `teacher: mean_logits`,
`diversity: 0`, `answer: 1`, `distil: 0`, `decay: 1`, `steps: 100`, `hidden: 512`, `lr: 0.005`, `weight_decay: 0`;
it draws ŷ by class frequency and keeps no moments of Adam between rounds.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Shapes, counts, numbers, state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Method, MethodConfig, client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import OptimizerSettings
from potluck.core.state import Moments
from potluck.core.streams import Stream
from potluck.core.task import Batch, Task
from potluck.kit.averaging import average
from potluck.kit.class_means import class_counts
from potluck.kit.distillation import divergence, divergence_of_each
from potluck.kit.requirements import require_one_width
from potluck.kit.shared_head import fresh_head, require_one_head
from potluck.kit.stacked_modules import Stacked
from potluck.training.fit import fit

LARGEST = 1e6  # a number of a head as the generator sees it, so that no upload spoils it for good


class FedGen(Method):
    """A generator of representations, trained on the server against all heads, teaches every client."""

    name = "fedgen"
    citation = "Zhu, Hong & Zhou, ICML 2021"
    models = "any, with heads of one form (models.rep_dim and models.adapter give one width)"
    server_needs = "head"
    card_fields = ("width",)
    stays = ("data", "model/features")
    remedy = "lower training.optimizer.lr or method.lr, or set training.clip"
    down = {
        "head": state_of("model/head", "the averaged head"),
        "generator": state_of("generator", "the generator, once it is trained", optional=True),
        "classes": numbers("known<=C", "the classes it knows", below="C", optional=True, distinct=True),
    }

    class Config(MethodConfig):
        """Options of FedGen; the defaults are those of the official code for MNIST."""

        buffers: Literal["average"] = option(
            default="average",
            description="the generator's batch-norm statistics always cross; so do those of a head",
            source="ours",
        )
        answer: float = option(
            default=10.0,
            ge=0,
            description="a, the weight of generated samples",
            source="official code; 1: HtFLlib",
        )
        distil: float = option(
            default=10.0,
            ge=0,
            description="b, the weight of distillation; 1 for EMNIST",
            source="official code; 0: HtFLlib",
        )
        decay: float = option(
            default=0.98,
            gt=0,
            le=1,
            description="a and b are multiplied by it after every round",
            source="official code; 1: HtFLlib",
        )
        guided_epochs: int = option(
            default=20, ge=1, description="local epochs of a round with both terms", source="official code"
        )
        generated: int = option(
            default=32, ge=1, description="B_g, generated samples in a client's step", source="official code"
        )
        teacher: Literal["weighted_losses", "mean_logits"] = option(
            default="weighted_losses",
            description="G learns from the loss of every head by class shares, or of the heads' n_k-weighted mean",
            source="official code; mean_logits: HtFLlib",
        )
        diversity: float = option(
            default=1.0, ge=0, description="η, the weight of diversity", source="official code; 0: HtFLlib"
        )
        student: float = option(
            default=0.0,
            ge=0,
            description="β: G also seeks where φ as it was sent differs from the heads, −β·KL",
            source="official code, 0 in all its configurations",
        )
        steps: int = option(
            default=50,
            ge=1,
            description="the server's steps of a round",
            source="official code; 100: HtFLlib",
        )
        batch: int = option(
            default=32, ge=2, description="samples in a step of the server", source="official code"
        )
        lr: float = option(
            default=3e-4,
            gt=0,
            description="the server's learning rate, Adam; 1e-4 for EMNIST",
            source="official code; 0.005 or 0.1: HtFLlib",
        )
        weight_decay: float = option(
            default=1e-2, ge=0, description="weight decay of the generator", source="official code"
        )
        noise: int = option(default=32, ge=1, description="width of ε", source="official code")
        hidden: int = option(
            default=256, ge=1, description="width of the hidden layer", source="official code; 512: HtFLlib"
        )
        floor: int = option(
            default=1,
            ge=0,
            description="a class is learned if some client of the round has more samples of it than this",
            source="official code",
        )

        @model_validator(mode="after")
        def _has_no_idle_option(self) -> FedGen.Config:
            if not self.answer and not self.distil:
                raise ValueError(
                    "answer and distil are both 0: clients learn nothing from the generator; use lg-fedavg"
                )
            if not self.answer:
                self.refuse_set("generated", reason="at answer: 0")
            return self

    def setup(self, population: Population) -> None:
        """The form of the heads and the width of what is generated."""
        self.head = population.head(population.ids[0])
        self.rep_dim = population.width(population.ids[0])

    def check(self, population: Population) -> None:
        """All heads have one form, on representations of one width."""
        otherwise = ", or use fd, which takes any models"
        require_one_head(population, otherwise)
        require_one_width(population, "a generated representation", otherwise)

    def expected(self, card: Card, part: str) -> Shapes | None:
        """All clients have heads of one form."""
        return self.head if part == "model/head" else super().expected(card, part)

    def generator(self, task: Task, width: int) -> Generator:
        """A fresh generator."""
        return Generator(task.classes, self.config.noise, self.config.hidden, width)

    def server_state(self, task: Task) -> dict[str, Any]:
        """φ, G, its optimiser's moments, and the classes it knows, none before it is trained."""
        generator = self.generator(task, self.rep_dim)
        return {"head": fresh_head(self, task), "generator": generator, "moments": Moments(), "known": {}}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, G frozen, the classes it knows as a distribution, and the steps of this round so far."""
        generator = self.generator(task, model.rep_dim).requires_grad_(False)
        known = torch.zeros(task.classes)
        return {"model": model, "generator": generator, "known": known, "done": torch.zeros(())}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """φ, and G once it is trained."""
        content: dict[str, Any] = {"head": server["head"].state()}
        if known := server["known"].tensors():
            content |= {"generator": server["generator"].state(), **known}
        return content

    def receive(self, client: Client, down: Message) -> None:
        """Install φ and G."""
        client["model/head"].load(down.group("head"))
        if "classes" in down:
            client["generator"].load(down.group("generator"))
            client["known"].value.zero_().index_fill_(0, down["classes"], 1.0)

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, then G against the heads, then average these."""
        replies = clients.ask(self.train)
        self.train_generator(server, replies)
        server["head"].load(average(replies, "head"))

    @client_step(
        up={
            "head": state_of("model/head", "the head after local training"),
            "counts": counts("C", "training samples of each class", "n"),
        }
    )
    def train(self, client: Client) -> Content:
        """Local epochs with generated samples beside the own ones."""
        config, private = self.config, client.batches()
        fade, share = config.decay ** (client.round - 1), config.generated / client.training.batch_size
        guided = len(private) * config.guided_epochs / client.training.epochs
        values = {
            "answer": share * max(1e-4, config.answer * fade) if config.answer else 0.0,
            "distil": max(1e-4, config.distil * fade) if config.distil else 0.0,
            "guided": guided,
        }
        client["done"].value.zero_()
        scalars = {name: torch.full((), value, device=client.device) for name, value in values.items()}
        fit(client, self.guided_loss, streams={"private": private}, scalars=scalars)
        return {"head": client["model/head"].state(), "counts": class_counts(client)}

    def guided_loss(
        self, client: Client, batch: Batch, answer: Tensor, distil: Tensor, guided: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of own samples and of generated ones, and distillation from those of the same class."""
        head, known, done = client["model"].head, client["known"].value, client["done"].value
        scores = client["model"](batch.x)
        terms = {"ce": client.task.loss(scores, batch.y, batch.weight)}
        taught = known.any() & (done < guided)
        done.add_(1)
        if self.config.answer:
            y = drawn_classes(known, self.config.generated)
            found = F.cross_entropy(head(self.generate(client, y)).float(), y)
            terms["generated"] = taught * answer * found
        if self.config.distil:
            target = head(self.generate(client, batch.y))
            terms["distillation"] = taught * distil * batch.mean(divergence_of_each(scores, target))
        return terms

    def generate(self, client: Client, y: Tensor) -> Tensor:
        """Representations of given classes, from fresh noise; G learns nothing from them."""
        noise = torch.rand(len(y), self.config.noise, device=y.device)
        generated: Tensor = client["generator"](y, noise).detach()
        return generated

    def train_generator(self, server: Server, replies: Replies) -> None:
        """Steps of Adam on fresh noise and classes; nothing where no class has enough samples."""
        config, amounts = self.config, torch.stack([message["counts"] for message in replies.values()])
        classes = (amounts.amax(0) > config.floor).nonzero().squeeze(1)
        if not len(classes):
            return
        draw, wanted = server.draw("generator"), config.steps * config.batch
        noise = torch.rand(wanted, config.noise, generator=draw, device=server.device)
        y = classes[torch.randint(len(classes), (wanted,), generator=draw, device=server.device)]
        samples = [float(replies.cards[client].samples) for client in replies]
        sent = [message.group("head") for message in replies.values()]
        heads = Stacked(server["head"].module, sent, LARGEST)
        shares = amounts if config.teacher == "weighted_losses" else amounts.new_tensor(samples).unsqueeze(1)
        shares = (shares / shares.sum(0).clamp_min(1)).expand(len(replies), server.task.classes)
        fit(
            server,
            lambda server, batch: self.consensus(server, batch, heads, shares),
            train=["generator"],
            streams={"generated": Stream.of(noise, y, config.batch)},
            optimizer=OptimizerSettings(name="adam", lr=config.lr, weight_decay=config.weight_decay),
            moments=server["moments"].content,
        )
        server["known"].load({"classes": classes})

    def consensus(self, server: Server, batch: Batch, heads: Stacked, shares: Tensor) -> dict[str, Tensor]:
        """What all heads say of generated representations, and how much these differ; `shares` are w_k[y]."""
        z = server["generator"](batch.y, batch.x)
        logits, weights = heads(z), shares[:, batch.y]
        mean = (weights.unsqueeze(2) * logits).sum(0)
        terms = {"diversity": self.config.diversity * sameness(batch.x, z)} if self.config.diversity else {}
        if self.config.student:
            terms["student"] = -self.config.student * divergence(server["head"](z), mean, 1.0)
        if self.config.teacher == "mean_logits":
            return {"teacher": F.cross_entropy(mean, batch.y), **terms}
        each = F.cross_entropy(logits.flatten(0, 1), batch.y.repeat(len(logits)), reduction="none")
        return {"teacher": (weights * each.view_as(weights)).sum(0).mean(), **terms}


class Generator(nn.Module):
    """One-hot(y) and noise → linear → batch norm → ReLU → linear."""

    def __init__(self, classes: int, noise: int, hidden: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        self.first = nn.Linear(classes + noise, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, width)

    def forward(self, y: Tensor, noise: Tensor) -> Tensor:
        """A representation for each class in y."""
        one_hot = noise.new_zeros(len(y), self.classes).scatter_(1, y.unsqueeze(1), 1.0)
        given = torch.cat([noise, one_hot], dim=1)
        z: Tensor = self.last(F.relu(self.norm(self.first(given))))
        return z


def drawn_classes(known: Tensor, size: int) -> Tensor:
    """Classes drawn uniformly from those with a 1 in `known`; the first class where there is none."""
    steps = (known.cumsum(0) / known.sum().clamp_min(1)).contiguous()
    drawn = torch.searchsorted(steps, torch.rand(size, device=known.device), right=True)
    return drawn.clamp_max(len(known) - 1) * known.any()


def sameness(noise: Tensor, z: Tensor) -> Tensor:
    """exp(−mean_ij mean (ε_i − ε_j)²·mean |z_i − z_j|): 1 where unlike noise gives the same representation."""
    apart = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)
    unlike = (z.unsqueeze(0) - z.unsqueeze(1)).abs().mean(2)
    return torch.exp(-(apart * unlike).mean())
