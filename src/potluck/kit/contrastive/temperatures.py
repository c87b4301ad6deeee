"""Temperatures of the Muscle loss: fixed or learned, one for all pairs of clients or one per pair."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from potluck.errors import ConfigError

Temperature = float | Tensor

TAU, TAU_PREV = 0.2, 0.15  # FedMuscle's τ^(N) and τ^(N−1), for all pairs


class Temperatures(nn.Module):
    """Learned temperatures for `muscle(anchor, peers, *temperatures())`: the same for all pairs, or one per pair.

    The parameters are log τ and log γ, and τ^(N−1) = 1 / (1/τ^(N) + γ), so γ stays positive whatever a step does.
    The paper has fixed temperatures; learning them is ours.
    """

    def __init__(
        self,
        peers: int | None = None,
        tau: float = TAU,
        tau_prev: float = TAU_PREV,
        *,
        per_pair: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < tau_prev < tau:
            raise ConfigError(f"learned temperatures need 0 < tau_prev < tau, not {tau_prev} and {tau}")
        if per_pair and not peers:
            raise ConfigError("temperatures per pair need the number of peers")
        sides = (peers, peers + 1) if per_pair and peers else ()
        self.log_tau = nn.Parameter(torch.full(sides[1:] * 2, math.log(tau)))
        self.log_gamma = nn.Parameter(torch.full(sides[:1] * 2, math.log(1 / tau_prev - 1 / tau)))

    def forward(self) -> tuple[Tensor, Tensor]:
        """τ^(N), scalar or (M+1)×(M+1) with the anchor first, and τ^(N−1), scalar or M×M among the peers."""
        tau, gamma = _symmetric(self.log_tau).exp(), _symmetric(self.log_gamma).exp()
        among_peers = tau[1:, 1:] if tau.ndim else tau
        return tau, 1 / (1 / among_peers + gamma)


class LearnedTemperature(nn.Module):
    """One learned temperature. The parameter is log τ, so that τ stays positive whatever a step does."""

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)))

    def forward(self) -> Tensor:
        """τ."""
        return self.log_tau.exp()


def gamma_of(tau: Temperature, tau_prev: Temperature) -> Temperature:
    """γ = 1/τ^(N−1) − 1/τ^(N) among the peers. Only plain numbers can be checked without reading back."""
    expect_positive("tau_prev", tau_prev)
    if isinstance(tau, Tensor):
        tau = tau[1:, 1:] if tau.ndim else tau
    elif not isinstance(tau_prev, Tensor) and tau_prev > tau:
        raise ConfigError(
            f"tau_prev is {tau_prev} and tau {tau}: γ = 1/tau_prev − 1/tau must not be negative"
        )
    return 1 / tau_prev - 1 / tau


def per_pair(name: str, value: Temperature, sides: int, like: Tensor) -> Tensor:
    """The value, a scalar or `sides`×`sides`, on a tensor's device; filled in, as a copy could not be captured."""
    table = value.to(like) if isinstance(value, Tensor) else like.new_full((), value)
    if table.ndim and tuple(table.shape) != (sides, sides):
        raise ConfigError(f"{name} has shape {tuple(table.shape)}, expected a scalar or {(sides, sides)}")
    return table


def expect_positive(name: str, value: Temperature) -> None:
    """Refuse a temperature that is not positive, where it is a plain number."""
    if not isinstance(value, Tensor) and not value > 0:
        raise ConfigError(f"{name} is {value}, expected a positive temperature")


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2 if matrix.ndim else matrix
