"""Options a method leaves open, to be chosen by pilot runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from potluck.core.population import Population
from potluck.core.settings import Settings
from potluck.errors import ConfigError


def _read_width(value: Any) -> Any:
    """Name clients by text, and refuse anything else in one sentence."""
    if isinstance(value, Mapping):
        value = {str(client): width for client, width in value.items()}
    inside = list(value.values()) if isinstance(value, dict) else value
    widths = inside if isinstance(inside, list | tuple) else [inside]
    whole = all(isinstance(width, int) and not isinstance(width, bool) and width >= 1 for width in widths)
    if value != "auto" and (not widths or not whole):
        raise ValueError("give a whole number from 1, a list of them, a mapping from client to one, or auto")
    return value


# One width for all, one to be chosen, a list dealt out in turn, or one per client.
Width = Annotated[int | Literal["auto"] | tuple[int, ...] | dict[str, int], BeforeValidator(_read_width)]


def _ascending(value: tuple[int, ...]) -> tuple[int, ...]:
    if list(value) != sorted(set(value)):
        raise ValueError("the widths must grow from each to the next")
    return value


Ascending = Annotated[tuple[PositiveInt, ...], AfterValidator(_ascending)]


class TuneSettings(Settings):
    """How pilot runs choose an open option."""

    candidates: Ascending = Field(
        default=(), description="values to try; default: an eighth, a quarter, a half and all of the largest"
    )
    rounds: int = Field(default=5, ge=1, description="rounds of each pilot run")
    tolerance: float = Field(
        default=0.01, ge=0, lt=1, description="validation accuracy given up for a smaller value, as a share"
    )

    def values(self, largest: int) -> tuple[int, ...]:
        """The values to try: the candidates, or else shares of the largest possible one."""
        shares = (max(1, largest // part) for part in (8, 4, 2, 1))
        return self.candidates or tuple(dict.fromkeys(shares))


@dataclass(frozen=True)
class OpenOption:
    """An option of a method without a value: its name and the values to try, ascending."""

    name: str
    candidates: Sequence[int]
    how: TuneSettings


def require_validation(population: Population, key: str) -> None:
    """Refuse `auto` where no client has validation rows to choose by."""
    if not any(population.samples(client)["validation"] for client in population.trainers):
        raise ConfigError(
            f"{key}: auto chooses by validation accuracy, and no client has validation rows; set "
            "partition.validation to a share such as 0.1, or give a number"
        )
