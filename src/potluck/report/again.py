"""How to do a run again, go on with it or look at it: lines that work as they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS = "experiment.yaml"  # marks the folder of a comparison
Lines = list[tuple[str, str]]  # what to type, and what it does
AFRESH = "run the same experiment again, with the same seed"
ONWARD = "continue after an interruption, with the same numbers"
LONGER = "more rounds, with the numbers of a run that had them from the start"


def again(folder: Path, config: Mapping[str, Any], environment: Mapping[str, Any]) -> Lines:
    """Lines to type where the run was started: commands if a file says it all, else Python."""
    partition, training = config.get("partition"), config.get("training")
    if isinstance(partition, Mapping) and "sites" in partition:
        return _of_sites(folder)
    rounds = training.get("rounds") if isinstance(training, Mapping) else None
    more = 2 * rounds if isinstance(rounds, int) else 20
    registered = environment.get("registered")
    if not environment.get("portable", True):
        lines = _with_objects(folder, more)
    elif registered:
        lines = _in_program(folder, registered, more)
    else:
        lines = _commands(folder, more)
    together = (f"# more rounds: compare again with training.rounds={more}, which extends all runs", "")
    compared = comparison_of(folder) is not None
    return [together if compared and line[1] == LONGER else line for line in lines]


def comparison_of(folder: Path) -> Path | None:
    """The folder of the comparison that a run belongs to, the one above it; None where it is a run of its own."""
    own = folder.resolve()
    is_part = re.search(r"-seed\d+$", own.name) and (own.parent / SETTINGS).is_file()
    return folder.parent if is_part else None


def typed(path: Path) -> str:
    """A path as one types it in a shell: quoted where it must be, and never like an option.

    >>> typed(Path("my runs/a")), typed(Path("-rf"))
    ("'my runs/a'", './-rf')
    """
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def to_go_on(folder: Path, portable: bool) -> str:
    """What to type to go on with a run, whose experiment a file can say (`portable`) or only Python."""
    if portable:
        return f"potluck resume {typed(folder)}"
    return f"potluck.resume({str(folder)!r}, experiment=experiment)"


def _commands(folder: Path, more: int) -> Lines:
    home, config = typed(folder), typed(folder / "config.yaml")
    return [
        (f"potluck run {config}", AFRESH),
        (to_go_on(folder, portable=True), ONWARD),
        (f"potluck resume {home} --rounds {more}", LONGER),
        (f"potluck explain {config}", "what crosses the wire, before anything runs"),
    ]


def _of_sites(folder: Path) -> Lines:
    return [(to_go_on(folder, portable=True), f"{ONWARD}; at the address and with the keys given then")]


def _with_objects(folder: Path, more: int) -> Lines:
    """The run was made of models, data or functions that are Python objects: they must be given again."""
    home = str(folder)
    return [
        ("import potluck", "and make the same models and data: experiment = potluck.Experiment.make(…)"),
        (f"potluck.run(experiment, out={home + '-again'!r})", AFRESH),
        (to_go_on(folder, portable=False), ONWARD),
        (f"potluck.resume({home!r}, experiment=experiment, rounds={more})", LONGER),
    ]


def _in_program(folder: Path, registered: list[str], more: int) -> Lines:
    """The experiment is plain, but it has names that only the program knows which registered them."""
    home, config = str(folder), str(folder / "config.yaml")
    return [
        ("import potluck", f"and the code that registers: {', '.join(registered)}"),
        (f"potluck.run(potluck.Experiment.load({config!r}), out={home + '-again'!r})", AFRESH),
        (f"potluck.resume({home!r})", ONWARD),
        (f"potluck.resume({home!r}, rounds={more})", LONGER),
    ]
