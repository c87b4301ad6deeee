"""Single numbers about the answers of an exchange, computed on the device and read back once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.contract import Contract
from potluck.core.message import Message
from potluck.engine.norms import Before, Form, Others, Ratios, SentPart, norm_ratios, parts_of
from potluck.engine.protocol import Answer


def variances(message: Message) -> list[tuple[str, Tensor]]:
    """The running variances in a message, by the name that PyTorch's batch norm gives them."""
    return [
        (name, value)
        for name, value in message.items()
        if name.endswith("running_var") and value.is_floating_point() and value.numel()
    ]


def _magnitudes(values: list[Tensor]) -> list[Tensor]:
    """The largest magnitude of each, NaN if one number is; on a CPU by what is twenty times as fast as its norm."""
    if not all(value.device.type == "cpu" for value in values):
        return [*torch._foreach_norm(values, torch.inf)]
    return [torch.maximum(-low, high) for low, high in map(torch.aminmax, values)]


class Reductions:
    """Gathers tensors of answers; `read` reduces each to a number and waits for the device, once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.unsound: set[ClientId] = set()
        self._largest: list[Tensor] = []
        self._singles: list[Tensor] = []
        self._owners: list[list[ClientId]] = [[], []]
        self._parts: list[tuple[ClientId, SentPart]] = []
        self._measured: list[Tensor] = []
        self._norms: list[float] = []

    def add_largest(self, answer: Answer) -> None:
        """The floating-point tensors of an answer; the largest magnitude of each is looked at."""
        floats = [value for value in answer.up.values() if value.is_floating_point() and value.numel()]
        self._largest += floats
        self._owners[0] += [answer.client] * len(floats)

    def add_singles(self, answer: Answer, beyond: Tensor | None) -> None:
        """The losses of an answer, and how far its numbers are outside their ranges."""
        single = [*answer.report.losses.values()]
        single += [] if beyond is None else [torch.where(beyond <= 0, 0.0, torch.inf)]
        self._singles += single
        self._owners[1] += [answer.client] * len(single)

    def add_variances(self, answer: Answer) -> None:
        """The variances of batch norm in an answer, which are not negative."""
        lowest = [value.min() for _, value in variances(answer.up)]
        self._singles += [torch.where(low >= 0, 0.0, torch.inf) for low in lowest]
        self._owners[1] += [answer.client] * len(lowest)

    def add_norms(self, answers: Sequence[Answer], contract: Contract) -> None:
        """The norms of what can be compared."""
        for answer in answers:
            for part in parts_of(answer.up, contract):
                self._parts.append((answer.client, part))
                self._measured += [answer.up[name] for name in part.tensors]

    def read(self) -> None:
        """Compute and read all numbers."""
        largest = _magnitudes(self._largest)
        norms = [*torch._foreach_norm(self._measured)] if self._measured else []
        everything = [value.float().to(self.device) for value in largest + self._singles + norms]
        read = torch.stack(everything).tolist() if everything else []
        owners = self._owners[0] + self._owners[1]
        self.unsound = {
            client for client, value in zip(owners, read, strict=False) if not math.isfinite(value)
        }
        self._norms = [
            value if math.isfinite(value) else float(tensor.double().norm())  # its squares were too large
            for value, tensor in zip(read[len(owners) :], self._measured, strict=True)
        ]

    def ratios(
        self, refused: Mapping[ClientId, str], before: Before, others: Others
    ) -> dict[tuple[ClientId, Form], Ratios]:
        """How far each part is from its like, among the clients not refused; the rest as in `norm_ratios`."""
        return norm_ratios(self.sent(refused), before, others)

    def of_tensors(self) -> dict[ClientId, dict[str, float]]:
        """The norm of each tensor."""
        found: dict[ClientId, dict[str, float]] = {}
        norms = iter(self._norms)
        for client, part in self._parts:
            found.setdefault(client, {}).update((name, next(norms)) for name in part.tensors)
        return found

    def senders(self, form: Form, refused: Mapping[ClientId, str]) -> list[ClientId]:
        """The clients not refused that sent such a part."""
        return [client for client, part in self._parts if part.form == form and client not in refused]

    def norms(self, refused: Mapping[ClientId, str]) -> dict[tuple[ClientId, Form], float]:
        """The root mean square of each part, of the clients not refused."""
        found = self.sent(refused)
        return {(client, part.form): value for client, parts in found.items() for part, value in parts}

    def sent(self, refused: Mapping[ClientId, str]) -> dict[ClientId, list[tuple[SentPart, float]]]:
        """The parts of the clients not refused, with their root mean squares."""
        sent: dict[ClientId, list[tuple[SentPart, float]]] = {}
        norms = iter(self._norms)
        for client, part in self._parts:
            mean_square = sum(next(norms) ** 2 for _ in part.tensors) / part.size
            if client not in refused:
                sent.setdefault(client, []).append((part, math.sqrt(mean_square)))
        return sent
