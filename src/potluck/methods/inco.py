"""InCo Aggregation (Chan et al., ICLR 2024): deep layers follow the shallow layer of their stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from potluck.core.card import Card
from potluck.core.method import Clients
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.errors import ConfigError
from potluck.kit.requirements import named, one_per_architecture
from potluck.methods.fedavg import FedAvg

EPSILON = 1e-7  # beside norms, as in the released code
DEEPER_BLOCK = re.compile(r"(.+)\.[1-9]\d*\.conv\d+\.weight")  # a convolution after a stage's first block
FIRST_BLOCK = re.compile(r".+\.0\.conv2\.weight")
SECOND_NORM = re.compile(r"(.+\.\d+)\.norm2\.weight")  # of a transformer's block


class InCo(FedAvg):
    """Layer-wise averaging (`fedavg` with `share: layers`) with a cross-layer mix of the mean changes.

    Up: the weights. Down: the averaged weights of the tensors a client has; nothing beside. The server knows
    what it sent, so the mean change of a tensor is g = (mean of the weights over the cohort's holders) − (weights
    before), unweighted as published. In a stage of blocks every convolution ℓ after the first block has as
    partner s the second convolution of the first block, if it has the same shape; of each k × k kernel

        θ   = min(|⟨g_s, g_ℓ⟩| / (‖g_s‖² + 1e-7), 5)
        g_ℓ ← clip((g_ℓ/‖g_ℓ‖ + θ·g_s/‖g_s‖)·(‖g_ℓ‖ + ‖g_s‖)/2, ±0.1),

    where 1e-7 is added to the norms that divide, too. In a transformer the weight of a block's second layer norm
    has that of its first as partner, as one vector. Everything else moves by its mean change: batch norm,
    shortcuts, stem and head. In bottlenecks only the 3 × 3 convolutions have a partner of their shape.

    `sign: negative` takes θ from negative products alone (0 elsewhere), which is how we recall the paper's closed
    form; we could not verify it. The released code always takes the absolute value. Running variances are means
    of variances here, so they need no clamp at 0, and counters of batches do not cross. The released code divides
    a ViT's changes by the number of local epochs: set `server_lr` to its inverse.
    """

    name = "inco"
    citation = "Chan et al., ICLR 2024"
    models = "one family of stages or blocks, of any depth, whose layers have the same names (resnet, vit)"

    class Config(FedAvg.Config):
        """Options of InCo Aggregation."""

        share: Literal["all", "groups", "layers"] = option(
            default="layers",
            description="what is averaged with what: layer by layer as published, or as in fedavg",
            source="paper",
        )
        weights: Literal["samples", "uniform"] = option(
            default="uniform",
            description="weights of the mean over the cohort; the released code's is unweighted",
            source="released code",
        )
        theta_max: float = option(
            default=5.0,
            ge=0,
            description="largest θ, the share of the shallow layer's direction",
            source="released code",
        )
        update_max: float = option(
            default=0.1,
            gt=0,
            description="largest change of a weight that is mixed, in a round",
            source="released code",
        )
        sign: Literal["absolute", "negative"] = option(
            default="absolute",
            description="θ from the absolute value of the product, or from negative products alone",
            source="released code; negative: the paper's closed form as we recall it, not verified",
        )
        server_lr: float = option(
            default=1.0,
            gt=0,
            le=1,
            description="share of the mean change that the server takes; 1/epochs in the released ViT code",
            source="released code",
        )

    def check(self, population: Population) -> None:
        """Every model must have stages or blocks that the mix knows."""
        super().check(population)
        for client in one_per_architecture(population):
            names = population.names(client)
            if not any(FIRST_BLOCK.fullmatch(name) or SECOND_NORM.fullmatch(name) for name in names):
                raise ConfigError(
                    f"{self.name} needs stages of convolutions (as resnet18 has, named layer1.0.conv2) or "
                    f"transformer blocks (vit-b16); {named(population, client)} has neither; use fedavg with "
                    "share: layers"
                )

    def advice(self, population: Population) -> Iterator[str]:
        """Say where there is nothing to mix."""
        yield from super().advice(population)
        if not self.partners(map(population.card, one_per_architecture(population))):
            yield (
                f"{self.name}: no client has a layer behind the first block of its stage, so this is fedavg with "
                "share: layers; give some clients deeper models"
            )

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average layer by layer, mix, and move."""
        self.introduce(server, clients)
        replies = clients.ask(self.train)
        means = self.mean(replies, "model", self.config.weights)
        partners = self.partners(replies.cards[client] for client in replies)
        server["weights"].load(self.moved(server["weights"].tensors(), means, partners))

    def moved(
        self, before: Mapping[str, Tensor], means: Mapping[str, Tensor], partners: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """The server's next weights; what has no partner becomes its mean."""
        rate = self.config.server_lr
        after = dict(means) if rate == 1 else {key: before[key].lerp(means[key], rate) for key in means}
        for key, partner in partners.items():
            if key not in means or partner not in means:
                continue
            deep, shallow = ((means[one] - before[one]) * rate for one in (key, partner))
            after[key] = before[key] + self.mix(deep, shallow)
        return after

    def mix(self, deep: Tensor, shallow: Tensor) -> Tensor:
        """A deep layer's change bent towards a shallow one's: per kernel, or as one vector."""
        axes = (-2, -1) if deep.dim() == 4 else None
        product = (shallow * deep).sum(axes, keepdim=True)
        product = product.abs() if self.config.sign == "absolute" else (-product).clamp_min(0)
        square = shallow.square().sum(axes, keepdim=True)
        theta = (product / (square + EPSILON)).clamp_max(self.config.theta_max)
        own, other = (torch.linalg.vector_norm(one, dim=axes, keepdim=True) for one in (deep, shallow))
        direction = deep / (own + EPSILON) + theta * shallow / (other + EPSILON)
        mixed: Tensor = (direction * (own + other) / 2).nan_to_num(0.0)  # where norms overflow
        return mixed.clamp(-self.config.update_max, self.config.update_max)

    def partners(self, cards: Iterable[Card]) -> dict[str, str]:
        """The server's key of each deep layer's tensor, and that of the shallow one it is mixed with."""
        found: dict[str, str] = {}
        for card in cards:
            keys = self.keys(card)
            for name, shape in card.names.items():
                partner = _partner(name)
                if partner and card.names.get(partner) == shape:
                    found.setdefault(keys[name], keys[partner])
        return found


def _partner(name: str) -> str:
    """The name of the shallow tensor that a deep one is mixed with; empty where there is none.

    >>> _partner("layer3.2.conv1.weight"), _partner("layers.7.norm2.weight"), _partner("layer3.0.conv1.weight")
    ('layer3.0.conv2.weight', 'layers.7.norm1.weight', '')
    """
    if block := DEEPER_BLOCK.fullmatch(name):
        return f"{block[1]}.0.conv2.weight"
    norm = SECOND_NORM.fullmatch(name)
    return f"{norm[1]}.norm1.weight" if norm else ""
