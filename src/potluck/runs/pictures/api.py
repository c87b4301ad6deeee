"""`potluck.plot`: every picture that the library makes of runs, by its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from potluck.core.dataset import Dataset
from potluck.errors import ConfigError, nearest
from potluck.files import check_writable, write_anew
from potluck.front_door import front_door
from potluck.models import Entries
from potluck.report.pictures.files import format_of, to_bytes
from potluck.runs.kept_models.given import Plugins, listed_plugins
from potluck.runs.pictures import from_models, one_run, over_settings, side_by_side
from potluck.runs.pictures.asked import Code, Draw, Given, Options, asked_of

Kind = Literal[
    "split",
    "curves",
    "clients",
    "gains",
    "differences",
    "cost",
    "option",
    "grid",
    "cka",
    "tsne",
    "pca",
    "confusion",
    "timeline",
    "wire",
]
MODELS = ("clients", "samples", "stages", "moment", "data")
MAPS = (*MODELS, "classes")


@dataclass(frozen=True)
class Picture:
    """A kind of picture: what it shows in one line, who draws it, and the options that it takes."""

    line: str
    draw: Draw
    options: tuple[str, ...] = ()


KINDS: dict[Kind, Picture] = {
    "split": Picture("who has which class, as bubbles", one_run.split),
    "curves": Picture("scores over rounds, with their spread; of one run or several", side_by_side.curves),
    "clients": Picture("the score of every client, best first", one_run.clients),
    "gains": Picture("what every client gains over a reference, a bar each", side_by_side.gains),
    "differences": Picture("paired differences to a reference, with intervals", side_by_side.differences),
    "cost": Picture("scores against rounds, and against bytes sent", side_by_side.cost),
    "option": Picture(
        "scores over the values of a setting (--over d1), a line per method", over_settings.option, ("over",)
    ),
    "grid": Picture("scores over two settings (--over d1,lr), as heat maps", over_settings.grid, ("over",)),
    "cka": Picture(
        "how alike clients represent samples, stage by stage (linear CKA)", from_models.cka, MODELS
    ),
    "tsne": Picture("features in the plane by t-SNE, by class and by client", from_models.tsne, MAPS),
    "pca": Picture("features in the plane by PCA, by class and by client", from_models.pca, MAPS),
    "confusion": Picture(
        "confusion matrices, of all clients and of each",
        from_models.confusion,
        ("clients", "moment", "mode", "data"),
    ),
    "timeline": Picture(
        "what each round took; one round lane by lane where a trace was recorded", one_run.timeline
    ),
    "wire": Picture("server, clients and what crosses between them, with sizes", one_run.wire),
}


@front_door(apart=("kind", "runs", "over", "clients", "stages", "classes"))
def plot(
    kind: Kind,
    runs: Given | Sequence[Given],
    *,
    out: Path | str | None = None,
    over: str | Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
    samples: int | None = None,
    stages: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    moment: str | None = None,
    mode: str | None = None,
    data: Dataset | None = None,
    models: Entries | None = None,
    plugins: Plugins = False,
) -> Figure:
    """A picture of runs, as a matplotlib figure; `out` also writes it, as .png, .pdf or .svg.

    `runs` are folders of runs, comparisons and sweeps, or what `run`, `compare` and `open` return; one or a list.
    Which options a kind takes, `potluck plot` lists:

    - `over`: the settings of `option` and `grid`, by their keys or the ends of these: `"d1"`, `["d1", "lr"]`;
    - `clients`, `samples`, `stages`: whose models are looked into, on how many test samples, and where;
    - `classes`: of a map of features, the classes to show, by name or number;
    - `moment`, `mode`: which state of the models, and which of the method's ways to predict;
    - `data`: the data set of a run that was given data as a Python object;
    - `models`, `plugins`: classes and plug-ins of your own for a kind that looks into models, as in `potluck.open`.
      Kinds that are drawn from logs need neither.

    >>> import tempfile, potluck
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = potluck.run(
    ...         data="digits", partition={"kind": "iid", "clients": 2}, models=["mlp-small"], method="fedavg",
    ...         training={"rounds": 1}, engine={"device": "cpu"}, out=f"{folder}/run",
    ...     )
    ...     figure = potluck.plot("wire", result, out=f"{folder}/wire.pdf")
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no kind of picture {kind!r}; {nearest(str(kind), KINDS)}")
    place, form = (None, "") if out is None else (Path(out), format_of(Path(out)))
    if place is not None:
        check_writable(place)
    lists = {"over": over, "clients": clients, "stages": stages, "classes": classes}
    words = {name: _words(name, given) for name, given in lists.items()}
    options = Options(**words, samples=samples, moment=moment, mode=mode, data=data)
    _check_options(kind, options)
    code = Code(models, listed_plugins(plugins))
    figure: Figure = KINDS[kind].draw(asked_of(kind, runs, options, code))
    if place is not None:
        write_anew(place, to_bytes(figure, form))
    return figure


def _words(name: str, given: Any) -> tuple[str, ...] | None:
    """A list of words, which may be one text with commas."""
    if given is None:
        return None
    words = given.split(",") if isinstance(given, str) else given
    if not isinstance(words, list | tuple) or not all(isinstance(word, str | int) for word in words):
        raise ConfigError(f"{name}: give a text or a list of texts, not {given!r}")
    found = tuple(text for word in words if (text := str(word).strip()))
    if not found:
        raise ConfigError(f"{name}: it is empty; name something, or leave it out")
    return found


def _check_options(kind: Kind, options: Options) -> None:
    for one in fields(options):
        if getattr(options, one.name) is None or one.name in KINDS[kind].options:
            continue
        takers = [name for name, picture in KINDS.items() if one.name in picture.options]
        raise ConfigError(f"the picture {kind!r} has no option {one.name!r}; it is for {', '.join(takers)}")
    if options.samples is not None and options.samples < 2:
        raise ConfigError(f"samples: give at least 2, not {options.samples}")
