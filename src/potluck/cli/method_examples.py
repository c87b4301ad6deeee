"""The demo played by any method: the example whose sizes `potluck methods`, `explain` and the pages show."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.cli.demo import DEMO
from potluck.errors import PotluckError

if TYPE_CHECKING:
    from potluck.experiment import Experiment

DEPTHS = "models=[{name: resnet10, width: 8}, {name: resnet14, width: 8}]"  # of one family
WIDTHS = "models=[conv-large, {name: conv-large, scale: 0.5}]"  # of one architecture
FOR_DEMO = {  # options a method needs to fit the demo's models, or models that suit it
    "fedin": ("method.project=fixed",),
    **dict.fromkeys(("fedrolex", "fjord", "heterofl"), (WIDTHS,)),
    **dict.fromkeys(("inclusivefl", "inco"), (DEPTHS,)),
    "scalefl": ("models={name: scalefl, depth: 10, width: 8}",),
}


def with_method(method: str, overrides: Sequence[str] = (), path: Path | str = DEMO) -> Experiment:
    """An experiment with another method; `method.…` among the overrides is an option of that."""
    from potluck.runs.comparisons.plan import experiments_by_method

    own = [
        f"{method}.{one.removeprefix('method.')}" if one.startswith("method.") else one for one in overrides
    ]
    return experiments_by_method(path, [method], own)[method]


def explained_in_demo(method: str) -> dict[str, Any] | None:
    """What crosses between the demo's clients and the server; None where the method does not fit them."""
    from potluck.federation.explain import explain

    try:
        experiment = with_method(method, FOR_DEMO.get(method, ()))
        return explain(experiment.variant(engine={"device": "cpu"}).build(_demo_data()))
    except PotluckError:  # one of the user's own, for other models or data
        return None


@functools.cache
def _demo_data() -> Any:
    from potluck.experiment import Experiment

    return Experiment.load(DEMO).load_data(labels_only=True)
