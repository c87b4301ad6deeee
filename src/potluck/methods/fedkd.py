"""FedKD (Wu et al., Nature Communications 2022): adaptive mutual distillation, and messages of low rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.streams import Stream
from potluck.core.task import Batch, Task
from potluck.kit.low_rank import LowRank
from potluck.kit.mutual import MutualSmall, learn_from
from potluck.training.fit import Fit

LEAST = 1e-6  # of s, which is 0 in float32 where both models are sure of every label


class FedKD(MutualSmall):
    """A private mentor and a shared mentee teach each other, the more the better both are; the mentee travels.

    Up: the change of the mentee's parameters θ_k − θ, each matrix of low rank. Down: the mean change, of low rank
    again, or θ whole for a client that missed the last round. Stays: data, labels, the mentor, the map W_h.

    Client: with representations z_p and z_g, scores o_p and o_g, and s = CE(o_p, y) + CE(o_g, y),

        L_p = CE(o_p, y) + KL(σ(o_g) ‖ σ(o_p))/s + MSE(z_p, W_h z_g)/s
        L_g = CE(o_g, y) + KL(σ(o_p) ‖ σ(o_g))/s + MSE(z_p, W_h z_g)/s

    and mentor, mentee and the linear map W_h learn from L_p + L_g, so from the last term twice. s and the first
    distribution of a KL have no gradient; KL is summed over classes and averaged over samples.
    Messages: a tensor is cut to the least rank r whose singular values have Σ_{i≤r} σ_i² ≥ e·Σ σ_i², and is sent
    whole where that is no smaller; a convolution is a matrix of output channels by all the rest, and what has one
    dimension is sent whole. e rises from 0.95 to 0.98 over the first `compress.rounds` rounds.
    Server: θ ← θ + the mean change, all clients alike, cut to low rank as it is sent.

    `compress: null` sends θ_k and θ as they are; with `compress: {start: 1, end: 1}` the result is the same up to
    rounding. `compress: {of: weights}` cuts the weights themselves, as HtFLlib does.

    Deviations: the code at hand detaches neither s nor the targets; here both are constants, as an adaptive weight
    and a target are (INFERRED). s is at least 1e-6 (ours). The published e rises until the last round of the run;
    here no round depends on how many there will be. Not taken over from reference code: ranks of 0, which send
    nothing of a tensor; decomposing each 3×3 kernel by itself; KL averaged over classes. With compression the
    upload waits for the device, as the ranks decide its shapes.
    """

    name = "fedkd"
    citation = "Wu et al., Nature Communications 2022"
    stays = (*MutualSmall.stays, "map")
    trained = (*MutualSmall.trained, "map")

    class Config(MutualSmall.Config):
        """Options of FedKD; `small_lr` is the mentee's learning rate."""

        compress: LowRank | None = option(
            default=LowRank(),
            description="how the mentee is sent, {start, end, rounds, of}; none: as it is",
            source="paper, 0.95 to 0.98; of: updates in the released code, weights in HtFLlib; rounds: ours",
        )
        clip: float | None = option(
            default=10.0,
            gt=0,
            description="largest gradient norm of each part; training.clip holds, too",
            source="HtFLlib (10)",
        )

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The mentor, the mentee, and W_h from the mentee's representation to the mentor's."""
        state = super().client_state(task, model)
        return state | {"map": nn.Linear(state["small"].rep_dim, model.rep_dim, bias=False)}

    def fit(
        self, client: Client, streams: Mapping[str, Stream] | None = None, clip: float | None = None
    ) -> Fit:
        """Train all three parts, each with its own clipping."""
        limits = filter(None, (clip, self.config.clip, client.training.clip))
        return super().fit(client, streams, min(limits, default=None))

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """L_p + L_g, by their terms."""
        mentor, mentee = client["model"], client["small"]
        z_p, z_g = mentor.features(batch.x), mentee.features(batch.x)
        o_p, o_g = mentor.head(z_p), mentee.head(z_g)
        error_p, error_g = (client.task.loss(scores, batch.y, batch.weight) for scores in (o_p, o_g))
        s = (error_p + error_g).detach().clamp_min(LEAST)
        hidden = batch.mean((z_p - client["map"](z_g)).square().flatten(1).mean(1))
        return {
            "mentor": error_p,
            "mentor_from_mentee": learn_from(o_p, o_g, batch) / s,
            "mentee": error_g,
            "mentee_from_mentor": learn_from(o_g, o_p, batch) / s,
            "hidden": 2 * hidden / s,
        }
