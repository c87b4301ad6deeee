"""FedProx (Li et al., MLSys 2020): FedAvg with a pull towards the weights a client received."""

from __future__ import annotations

from potluck.core.client import Client
from potluck.core.options import option
from potluck.methods.fedavg import FedAvg
from potluck.training.fit import Fit, fit


class FedProx(FedAvg):
    """FedAvg whose clients minimise L(w) + (μ/2)·‖w − w⁰‖², with w⁰ the weights at the start of the round.

    Up: the weights. Down: the averaged weights. The squared norm is summed over all trained tensors.
    """

    name = "fedprox"
    citation = "Li et al., MLSys 2020"

    class Config(FedAvg.Config):
        """Options of FedProx."""

        mu: float = option(
            default=0.01,
            ge=0,
            description="μ of the proximal term; the usual grid is 0.001, 0.01, 0.1, 1",
            source="paper, its grid; the default is ours",
        )

    def fit(self, client: Client) -> Fit:
        """Local training with the proximal term."""
        return fit(client, self.loss, prox={"model": self.config.mu})
