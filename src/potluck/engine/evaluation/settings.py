"""When clients are measured, on what, and in which ways of predicting."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from potluck.core.settings import Settings

Moment = Literal["before", "after_training", "after_aggregation"]
SPLITS = ("test", "validation")  # what is measured on, in the order of the log


class EvaluateSettings(Settings):
    """When clients are measured, and on what.

    `before`: with the newest downlink, before training. `after_training`: the clients that trained, as they are
    then, before the server combines. `after_aggregation`: with the new downlink. `who` chooses between all
    clients and the round's cohort for the first and the last.
    """

    every: int = Field(default=1, ge=1)
    who: Literal["all", "sampled"] = "all"
    when: tuple[Moment, ...] = ("after_training", "after_aggregation")
    on: Literal["own", "global"] = "own"
    modes: Literal["first", "all"] | tuple[str, ...] = "first"  # ways to predict; "first": the reported one
    judge: str | None = None  # the metric that clients are compared by; none: the first one of their task
    predictions: Literal["none", "last", "all"] = "none"  # of which evaluated rounds they are kept

    @field_validator("when", "modes", mode="before")
    @classmethod
    def _some(cls, value: Any, info: ValidationInfo) -> Any:
        """The name of a moment or mode stands for a list of one."""
        if value in ([], ()):
            known = get_args(Moment) if info.field_name == "when" else ("first", "all", "the method's modes")
            raise ValueError(f"nothing would be measured; give one or more of: {', '.join(known)}")
        return [value] if isinstance(value, str) and value not in ("first", "all") else value

    @field_validator("predictions", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        """`true`: those of the last evaluated round."""
        return {True: "last", False: "none"}.get(value, value) if isinstance(value, bool) else value


def chosen_modes(settings: EvaluateSettings, known: tuple[str, ...]) -> tuple[str, ...]:
    """The inference modes to evaluate, the reported one first."""
    named = {"first": known[:1], "all": known}
    return named[settings.modes] if isinstance(settings.modes, str) else settings.modes
