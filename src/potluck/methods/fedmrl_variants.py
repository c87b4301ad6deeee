"""FedMRL with its ablations and our extensions: what `method: fedmrl` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.model import Model
from potluck.core.open_options import Ascending
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.task import Task
from potluck.kit.loss_weights import Weight, rules, try_rules, weigh
from potluck.kit.requirements import require_apart, require_linear_heads, require_one_width, require_widths
from potluck.methods.fedmrl import FedMRL
from potluck.training.fit import Fit

Projection = Literal["linear", "deep", "none"]


class FedMRLVariants(FedMRL):
    """FedMRL as published by default; each option changes one thing.

    "Without MRL" (`mrl`) is not defined in the texts at hand. `full` gives both headers all of R, so that nothing
    is lost at d1 = d2, as the paper remarks; `local_only` has the second loss alone, and no G_hd. Both INFERRED.
    MRL-E (`global_header: false`), future work in the paper: the first d1 columns of F_hd stand in for G_hd, and
    only G_ex crosses. `tie_headers` does the same but sends these columns, as the released homogeneous script does
    (which steps them with two optimisers, here it is one); what comes down then serves `single-small` only.

    Ours: d1 per client or `auto`, with each entry of θ averaged over the clients whose d1 reaches it; `widths`,
    further losses on R[:, :w], through the first columns of G_hd up to d1 and of F_hd beyond; loss weights that
    follow the client's last report; projectors other than `linear`.
    """

    name = FedMRL.name

    class Config(FedMRL.Config):
        """Options of FedMRL with all its variants."""

        mrl: Literal["nested", "full", "local_only"] = option(
            default="nested",
            description="nested as published; full and local_only are readings of `without MRL`",
            source="paper's ablation, not defined there; full and local_only: inferred",
        )
        global_header: bool = option(
            default=True,
            description="whether the small model has a header of its own; false: MRL-E",
            source="paper, future work (MRL-E)",
        )
        tie_headers: bool = option(
            default=False,
            description="send the first d1 columns of the private header as the small one's",
            source="released homogeneous script",
        )
        widths: Ascending = option(
            default=(),
            description="further nested widths with a loss each, below every d2",
            source="ours",
        )
        projector: Projection = option(
            default="linear",
            description="linear as published; deep: a hidden layer of d2 with ReLU; none: r_g added to r_f[:, :d1]",
            source="paper for linear; deep and none: ours",
        )
        weight_small: Weight = option(
            default=1.0,
            description="m_g, 1 in the paper: a number, a function of the last report, or module:function",
            source="paper, Eq. 9; functions: ours",
        )
        weight_large: Weight = option(
            default=1.0,
            description="m_f, 1 in the paper: a number, a function of the last report, or module:function",
            source="paper, Eq. 9; functions: ours",
        )
        weight_widths: float = option(
            default=1.0, ge=0, description="weight of the loss of each further width", source="ours"
        )

        @model_validator(mode="after")
        def _fits_together(self) -> Self:
            if self.mrl != "nested" and (self.widths or self.tie_headers or not self.global_header):
                raise ValueError(
                    f"mrl: {self.mrl} goes with none of widths, tie_headers and a missing global_header"
                )
            if self.tie_headers and not self.global_header:
                raise ValueError("tie_headers sends a header, global_header: false has none; choose one")
            self.refuse_idle("weight_small", needs="mrl", among=("nested", "full"))
            self.refuse_idle("tune", needs="d1", among=("auto",))
            if not self.widths:
                self.refuse_set("weight_widths", reason="without widths; it is the weight of their losses")
            if self.projector == "none" and "projector" in self.lr:
                raise ValueError("projector: none has nothing that lr.projector could train")
            return self

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        config = self.config
        small = {} if config.mrl == "local_only" else {"small": config.weight_small}
        large = {"large": config.weight_large}
        widths = {f"width-{width}": config.weight_widths for width in config.widths}
        self.weights = {**small, **large, **widths}
        self.rules = rules({**small, **large})
        if self.rules:
            self.remedy += ", or look at what the functions of method.weight_* give"
        if config.tie_headers:
            self.stays = ("data", "labels", "model/features", "projector", "representations")
            self.sends += "; its header: the first d1 columns of the private one"
        undefined = {
            "mix-small": not small,
            "single-small": config.mrl != "nested" or not config.global_header,
        }
        self.modes = tuple(mode for mode in type(self).modes if not undefined.get(mode))

    def check(self, population: Population) -> None:
        """The options must suit the clients' widths and headers."""
        super().check(population)
        config = self.config
        if config.widths:
            require_widths(population, "widths", dict.fromkeys(population.ids, config.widths[-1]), spare=1)
        require_apart("fedmrl: widths", config.widths, self.d1_values())
        if config.mrl == "full":
            require_one_width(population, "mrl: full")
        if config.tie_headers:
            require_linear_heads(population, "tie_headers", self.build_small(population.task))
        named = {term: weight for term, weight in self.weights.items() if term in self.no_report()}
        others = {"widths": config.weight_widths} if config.widths else {}
        try_rules({**named, **others}, self.no_report(), "method.weight")

    def build_small(self, task: Task, width: int | None = None) -> Model:
        """G of width d1; its header takes all of R under `full`, and is absent where nothing would train it."""
        small = super().build_small(task, width)
        if self.config.mrl == "full" and small.rep_dim < self.d2:
            with torch.random.fork_rng(devices=[]):  # what is drawn next is that of the other variants
                small.head = super().build_small(task, self.d2).head
        elif self.config.mrl == "local_only" or not self.config.global_header:
            small.head = nn.Identity()
        return small

    def build_projector(self, small: Model, model: Model) -> nn.Module:
        """P, of the chosen kind."""
        return make_projector(self.config.projector, small.rep_dim, model.rep_dim)

    def client_state(self, task: Task, model: Model, d1: int | None = None) -> dict[str, Any]:
        """As published, and the last report where weights follow it."""
        state = super().client_state(task, model, d1)
        return {**state, "report": self.no_report()} if self.rules else state

    def no_report(self) -> dict[str, Tensor]:
        """What functions for m_g and m_f see before a client's first round."""
        return {"small": torch.zeros(()), "large": torch.zeros(())}

    def fit(self, client: Client, scalars: Mapping[str, Tensor] | None = None) -> Fit:
        """As published, with the weights that functions give; then the header that is sent, if it is tied."""
        report = client["report"].tensors() if self.rules else {}
        done = super().fit(client, weigh(self.rules, report, client.device))
        if self.rules:
            client["report"].load(
                {term: done.losses[term] for term in self.no_report() if term in done.losses}
            )
        if self.config.tie_headers:
            self.tie(client)
        return done

    def tie(self, client: Client) -> None:
        """Copy the first d1 columns of F_hd to G_hd, which is sent."""
        header, d1 = client["model"].head, client["small"].rep_dim
        client["small"].load({"head.weight": header.weight[:, :d1], "head.bias": header.bias})

    def scores(self, client: Client, fused: Tensor) -> dict[str, Tensor]:
        """The published two, less the small one under `local_only`, and one for each further width."""
        found = (
            super().scores(client, fused)
            if "small" in self.weights
            else {"large": client["model"].head(fused)}
        )
        widths = {f"width-{width}": self.nested_scores(client, fused, width) for width in self.config.widths}
        return {**found, **widths}

    def small_scores(self, client: Client, fused: Tensor) -> Tensor:
        """As published; under `full` G_hd(R); where F_hd stands in for G_hd, its first d1 columns."""
        if self.config.mrl == "full":
            scores: Tensor = client["small"].head(fused)
            return scores
        if self.has_own_header:
            return super().small_scores(client, fused)
        return self.nested_scores(client, fused, client["small"].rep_dim)

    def nested_scores(self, client: Client, fused: Tensor, width: int) -> Tensor:
        """A header on R[:, :width]: with zeros for the rest, only the first columns of a linear one count."""
        part = client["small" if self.has_own_header and width <= client["small"].rep_dim else "model"]
        scores: Tensor = part.head(F.pad(fused[:, :width], (0, part.rep_dim - width)))
        return scores

    @property
    def has_own_header(self) -> bool:
        """Whether G_hd is trained for itself."""
        return bool(self.config.global_header and not self.config.tie_headers)


class Overlay(nn.Module):
    """No projector: the small representation is added to the first columns of the large one.

    Both stay in the sum, the width is the large one's, and nothing is trained. What "no projector" means is our
    choice (INFERRED): a plain concatenation would be wider than the private header takes, and cutting it back would
    throw the last large features away.
    """

    def __init__(self, small: int, large: int) -> None:
        super().__init__()
        self.small, self.large = small, large

    def forward(self, both: Tensor) -> Tensor:
        """(batch, small + large) to (batch, large)."""
        first, rest = torch.split(both, [self.small, self.large], dim=1)
        return rest + F.pad(first, (0, self.large - self.small))

    def extra_repr(self) -> str:
        """The two widths, when the module is printed."""
        return f"{self.small}, {self.large}"


def make_projector(kind: Projection, small: int, large: int) -> nn.Module:
    """From `small + large` columns to `large`: one layer, two with a ReLU between, or none.

    >>> make_projector("linear", 2, 3)
    Linear(in_features=5, out_features=3, bias=True)
    """
    if kind == "none":
        return Overlay(small, large)
    if kind == "linear":
        return nn.Linear(small + large, large)
    return nn.Sequential(nn.Linear(small + large, large), nn.ReLU(), nn.Linear(large, large))
