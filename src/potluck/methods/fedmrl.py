"""FedMRL (Yi et al., NeurIPS 2024): Matryoshka fusion of a shared small model and a private one."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.contract import Contract, state_of
from potluck.core.message import Content
from potluck.core.method import client_step
from potluck.core.model import Model
from potluck.core.open_options import Ascending
from potluck.core.population import Population
from potluck.core.task import Batch, Task
from potluck.kit.loss_weights import Weight, rules, try_rules, weigh
from potluck.kit.projector import Projection, make_projector
from potluck.kit.requirements import require_apart, require_linear_heads, require_one_width, require_width
from potluck.kit.shared_small import SharedSmall
from potluck.training.fit import fit
from potluck.training.optimizers import Group


class FedMRL(SharedSmall):
    """A small shared model works beside each private one; their representations are fused and learned nested.

    Up and down: the small model's parameters θ. Stays home: data, private model ω, projector φ.
    With r_g = G_ex(x) of width d1 and r_f = F_ex(x) of width d2, fused R = P([r_g, r_f]) has width d2 and
    loss = m_g·CE(G_hd(R[:, :d1]), y) + m_f·CE(F_hd(R), y), one backward through everything.
    Server: θ ← Σ_k (n_k / Σ_j n_j) θ_k over the cohort, each entry over those whose d1 reaches it.

    `mrl`: the texts at hand do not define "without MRL". `full` gives both headers all of R, so that nothing is
    lost at d1 = d2, as the paper remarks; `local_only` has the second loss alone, and no G_hd. Both INFERRED.
    `global_header: false` is MRL-E, future work in the paper: the first d1 columns of F_hd stand in for G_hd, and
    only G_ex crosses. `tie_headers` does the same but sends these columns, as the released homogeneous script
    does (which steps them with two optimisers, here it is one); what comes down only serves `single-small`.
    Beyond the paper: d1 per client or `auto`; `widths`, further losses on R[:, :w], through the first columns of
    G_hd up to d1, of F_hd beyond; weights that follow the client's report; projectors other than `linear`.

    As read (it was not run here), the released code averages copies that share memory, so that the mean is the last
    client's θ, and carries momentum from client to client. Here the mean is the paper's, and every client starts a
    round with a fresh optimiser. Which d1 the headline tables use is not stated; 100 is the smallest tried there.
    """

    name = "fedmrl"
    citation = "Yi et al., NeurIPS 2024"
    models = "any"
    server_needs = "nothing"
    stays: tuple[str, ...] = ("data", "labels", "model", "projector", "representations")
    modes: tuple[str, ...] = ("mix-large", "mix-small", "single-large", "single-small")

    class Config(SharedSmall.Config):
        """Options of FedMRL; n_k as in the paper is `weights: samples`."""

        mrl: Literal["nested", "full", "local_only"] = "nested"
        global_header: bool = True  # false: MRL-E
        tie_headers: bool = False
        widths: Ascending = ()  # further nested widths, below every d2
        projector: Projection = "linear"  # deep: a hidden layer of d2, ReLU; none: r_g added to r_f[:, :d1]
        weight_small: Weight = 1.0  # m_g: a number, a function of the last report, or module:function
        weight_large: Weight = 1.0  # m_f, likewise
        weight_widths: float = Field(default=1.0, ge=0)  # of each further width
        lr: dict[Literal["model", "small", "projector"], PositiveFloat] = {}  # default: the optimiser's
        clip: float | None = Field(default=50.0, gt=0)  # norm per part, official; training.clip holds, too

        @model_validator(mode="after")
        def _fits_together(self) -> Self:
            if self.mrl != "nested" and (self.widths or self.tie_headers or not self.global_header):
                raise ValueError(
                    f"mrl: {self.mrl} goes with none of widths, tie_headers and a missing global_header"
                )
            if self.tie_headers and not self.global_header:
                raise ValueError("tie_headers sends a header, global_header: false has none; choose one")
            self.refuse_idle("weight_small", needs="mrl", among=("nested", "full"))
            if self.projector == "none" and "projector" in self.lr:
                raise ValueError("projector: none has nothing that lr.projector could train")
            return self

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        mrl, shared = self.config.mrl, self.config.global_header
        undefined = {"mix-small": mrl == "local_only", "single-small": mrl != "nested" or not shared}
        self.modes = tuple(mode for mode in type(self).modes if not undefined.get(mode))
        if self.config.tie_headers:  # the private header does leave, as far as it is tied
            self.stays = ("data", "labels", "private extractor", "projector", "representations")
        self.weights = {"small": self.config.weight_small} if mrl != "local_only" else {}
        self.weights["large"] = self.config.weight_large
        self.rules = rules(self.weights)
        if self.rules:
            self.remedy += ", or look at what the functions of method.weight_* give"

    def check(self, population: Population) -> None:
        """The options must suit the clients' widths and headers."""
        super().check(population)
        for client in population.ids if self.config.widths else ():
            require_width(population, client, "widths", self.config.widths[-1], spare=1)
        require_apart("fedmrl: widths", self.config.widths, self.d1_values())
        if self.config.mrl == "full":
            require_one_width(population, "mrl: full")
        if self.config.tie_headers:
            require_linear_heads(population, "tie_headers", self.build_small(population.task))
        others = {"widths": self.config.weight_widths} if self.config.widths else {}
        try_rules({**self.weights, **others}, self.no_report(), "method.weight")

    def build_small(self, task: Task, d1: int | None = None) -> Model:
        """G of width d1; its header takes all of R under `full`, and is absent where nothing would train it."""
        small = super().build_small(task, d1)
        if self.config.mrl == "full":
            small.head = super().build_small(task, self.d2).head
        elif self.config.mrl == "local_only" or not self.config.global_header:
            small.head = nn.Identity()
        return small

    def client_state(self, task: Task, model: Model, d1: int | None = None) -> dict[str, Any]:
        """The private model, a working copy of the small one, the private projector."""
        small = self.build_small(task, d1)
        projector = make_projector(self.config.projector, small.rep_dim, model.rep_dim)
        state = {"model": model, "small": small, "projector": projector}
        return {**state, "report": self.no_report()} if self.rules else state

    def no_report(self) -> dict[str, Tensor]:
        """What functions for m_g and m_f see before a client's first round."""
        return {"small": torch.zeros(()), "large": torch.zeros(())}

    def sent(self) -> Contract:
        """θ_k, and what it tells of the private model."""
        tied = "; its header: the first d1 columns of the private one" if self.config.tie_headers else ""
        return {"small": state_of("small", f"the small model's parameters after local training{tied}")}

    @client_step(up=sent)
    def train(self, client: Client) -> Content:
        """Local epochs on the fused loss, then θ_k."""
        parts = [part for part in ("model", "small", "projector") if client[part].trainable()]
        clip = min(filter(None, (self.config.clip, client.training.clip)), default=None)
        groups = {part: Group(lr=self.config.lr.get(part), clip=clip) for part in parts}
        scalars = weigh(self.rules, client["report"].tensors() if self.rules else {}, client.device)
        losses = fit(client, self.loss, groups=groups, scalars=scalars).losses
        if self.rules:
            client["report"].load({term: losses[term] for term in self.no_report() if term in losses})
        if self.config.tie_headers:
            self.tie(client)
        return {"small": client["small"].state()}

    def tie(self, client: Client) -> None:
        """G_hd as it is sent: the first d1 columns of F_hd."""
        header, d1 = client["model"].head, client["small"].rep_dim
        client["small"].load({"head.weight": header.weight[:, :d1], "head.bias": header.bias})

    def loss(self, client: Client, batch: Batch, **chosen: Tensor) -> dict[str, Tensor]:
        """The nested losses, by name; `chosen` are the weights that functions gave."""
        config, fused = self.config, self.fuse(client, batch.x)
        weights = {**self.weights, **chosen}
        scores = {} if config.mrl == "local_only" else {"small": self.small_scores(client, fused)}
        scores |= {"large": client["model"].head(fused)}
        scores |= {f"width-{width}": self.nested_scores(client, fused, width) for width in config.widths}
        return {
            term: weights.get(term, config.weight_widths) * client.task.loss(value, batch.y, batch.weight)
            for term, value in scores.items()
        }

    def fuse(self, client: Client, x: Tensor) -> Tensor:
        """R = P([r_g, r_f]), the small representation first."""
        both = torch.cat([client["small"].features(x), client["model"].features(x)], dim=1)
        fused: Tensor = client["projector"](both)
        return fused

    def small_scores(self, client: Client, fused: Tensor) -> Tensor:
        """G_hd(R[:, :d1]), or G_hd(R) under `full`."""
        if self.config.mrl != "full":
            return self.nested_scores(client, fused, client["small"].rep_dim)
        scores: Tensor = client["small"].head(fused)
        return scores

    def nested_scores(self, client: Client, fused: Tensor, width: int) -> Tensor:
        """A header on R[:, :width]: with zeros for the rest, only the first columns of a linear one count."""
        own_header = self.config.global_header and not self.config.tie_headers
        part = client["small" if own_header and width <= client["small"].rep_dim else "model"]
        first, missing = fused[:, :width], part.rep_dim - width
        scores: Tensor = part.head(F.pad(first, (0, missing)) if missing else first)
        return scores

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """`mix-*` use the fused representation, `single-*` one model alone on its own features.

        The headers never see unprojected features in training, so `single-*` may be low.
        """
        if mode == "mix-small":
            return self.small_scores(client, self.fuse(client, batch.x))
        if mode == "mix-large":
            scores: Tensor = client["model"].head(self.fuse(client, batch.x))
        else:
            scores = client["small" if mode == "single-small" else "model"](batch.x)
        return scores
