"""Finished comparisons and sweeps as objects: frames, LaTeX tables, figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from potluck.errors import ConfigError, RunError, nearest, some
from potluck.files import read_json, write_json
from potluck.front_door import front_door
from potluck.models import Entries
from potluck.report import latex
from potluck.report.comparison import disagreement_with
from potluck.report.comparison_page import sweep_heat_map, write_sweep
from potluck.report.log import read_config
from potluck.report.reading import reading, shown_from
from potluck.report.render import Sheet, notebook, plain
from potluck.report.sheets import comparison_sheet, measure_in, rounds_sheet, sweep_sheet, targets_sheet
from potluck.runs.comparisons.own_models import check_models, models_of
from potluck.runs.folder import FORMAT, LOCK
from potluck.runs.kept_models.given import Plugins, listed_plugins
from potluck.runs.results.open_run import open_run
from potluck.runs.results.run_result import RunResult
from potluck.runs.stored import read_summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COMPARISON, SWEEP = "comparison.json", "sweep.json"
MARK = "experiment.yaml"  # beside a lock it marks the folder of a comparison; no other is written into
Kind = Literal["curves", "differences", "cost", "gains", "grid"]  # as in `potluck.plot`
AGAIN = "run potluck compare again"
ROWS = 40  # of a table in a notebook or at a prompt


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods or variants side by side, each paired with Local under the same settings.

    `comparison` is the content of `comparison.json`.
    """

    folder: Path
    comparison: dict[str, Any]
    # The runs by label and seed, with the models of the process that played them.
    _results: Mapping[tuple[str, int], RunResult] = field(default_factory=dict, compare=False)
    # What `potluck.open` was given for all runs: the user's own classes, and whether plug-ins may be loaded.
    _models: Entries | None = field(default=None, compare=False)
    _plugins: Plugins = field(default=False, compare=False)

    @front_door()
    def run(
        self,
        method: str,
        seed: int | None = None,
        *,
        models: Entries | None = None,
        plugins: Plugins | None = None,
    ) -> RunResult:
        """One of its runs, with clients and models; by default that of the first seed.

        Where clients had models of your own and another process ran the comparison, `models` brings the classes and
        `plugins=True` loads the plug-ins, as in `potluck.open`. By default both are what `open` was given.
        """
        runs = {entry["method"]: entry["runs"] for entry in self.comparison["methods"]}
        if method not in runs:
            raise ConfigError(f"there is no {method!r} here; {nearest(method, runs)}")
        seed = int(next(iter(runs[method]))) if seed is None else seed
        if str(seed) not in runs[method]:
            raise ConfigError(f"{method} was not run with seed {seed}; its seeds: {', '.join(runs[method])}")
        if models is None and (method, seed) in self._results:
            return self._results[method, seed]
        folder = self.folder / runs[method][str(seed)]
        given = models_of(folder, self._models) if models is None else models
        asked = self._plugins if plugins is None else listed_plugins(plugins)
        return open_run(folder, given, asked, onward="potluck compare again")

    @shown_from(COMPARISON)
    def frame(self) -> pd.DataFrame:
        """A row per method, seed, client, moment and mode, in the round that the comparison looks at."""
        from potluck.report.comparison_frames import comparison_frame

        return comparison_frame(self.folder, self.comparison)

    @shown_from(COMPARISON)
    def summary(self) -> pd.DataFrame:
        """A row per method, moment and mode: means, spreads, and the paired difference with its interval."""
        from potluck.report.comparison_frames import summary_frame

        return summary_frame(self.comparison)

    @shown_from(COMPARISON)
    def targets(self) -> pd.DataFrame:
        """A row per method and target: the round that reached it, and what was sent until then.

        The targets are those that `potluck.compare(targets=…)` was asked for.
        """
        from potluck.report.comparison_frames import targets_frame

        return targets_frame(self._asked("targets"))

    @shown_from(COMPARISON)
    def rounds(self) -> pd.DataFrame:
        """A row per method, moment, mode and round, for the rounds of `potluck.compare(rounds=…)`."""
        from potluck.report.comparison_frames import rounds_frame

        return rounds_frame(self._asked("rounds"))

    @shown_from(COMPARISON)
    def gains(self) -> pd.DataFrame:
        """A row per method: how many clients are better, equal and worse than under the reference."""
        from potluck.report.comparison_frames import gains_frame

        return gains_frame(self.comparison)

    def _asked(self, what: str) -> dict[str, Any]:
        if not self.comparison.get(what):
            raise RunError(f"{self.folder} was compared without {what}; run potluck.compare(…, {what}=[…])")
        return self.comparison

    @shown_from(COMPARISON)
    def latex(self) -> str:
        """A table for a paper (booktabs): mean ± deviation, differences with intervals, the best in bold."""
        return latex.comparison_table(self.comparison, self.folder.resolve().name)

    @front_door()
    @shown_from(COMPARISON)
    def plot(self, kind: Kind = "curves") -> Figure:
        """A matplotlib figure: `curves` over rounds, `differences` with intervals, what scores `cost` in rounds and
        bytes, the `gains` of all clients, or a heat map of variants that are a `grid`; `potluck.plot` has more.
        """
        from potluck.runs.comparisons.pictures import PICTURES

        if kind not in PICTURES:
            raise ConfigError(f"there is no picture {kind!r}; {nearest(kind, PICTURES)}")
        figure = PICTURES[kind](self.comparison)
        if figure is None:
            there = [name for name, draw in PICTURES.items() if draw(self.comparison) is not None]
            raise RunError(f"{self.folder} has nothing to show as {kind!r}; it has {', '.join(there)}")
        return figure

    @property
    @shown_from(COMPARISON)
    def sheet(self) -> Sheet:
        """The main table."""
        return comparison_sheet(self.comparison)

    @shown_from(COMPARISON)
    def __repr__(self) -> str:
        asked = [make(self.comparison) for make in (rounds_sheet, targets_sheet)]
        sheets = [self.sheet, *(sheet for sheet in asked if sheet)]
        shown = [plain(sheet.first(ROWS, "comparison.html")) for sheet in sheets]
        return "\n".join([*shown, f"report: {self.folder / 'comparison.html'}"])

    def _repr_html_(self) -> str:
        return _in_notebook(self.sheet, self.folder / "comparison.html")


@dataclass(frozen=True, repr=False)
class Sweep:
    """A comparison for each of several settings, by label; `settings` says what each of them changes."""

    folder: Path
    name: str
    settings: dict[str, dict[str, Any]]
    comparisons: dict[str, Comparison]

    def __getitem__(self, setting: str) -> Comparison:
        if setting not in self.comparisons:
            raise ConfigError(f"there is no setting {setting!r}; {self._meant(setting)}")
        return self.comparisons[setting]

    def _meant(self, setting: str) -> str:
        """A hint for an unknown setting: those of a grid that have all its values, or the nearest one."""
        asked = {*str(setting).split(",")}
        found = [name for name in self.comparisons if asked <= {*name.split(",")}]
        if not found:
            return nearest(str(setting), self.comparisons)
        return f"did you mean {' or '.join(map(repr, found[:5]))}?"

    def frame(self) -> pd.DataFrame:
        """The frames of all comparisons, with the setting and a column for each key in front."""
        return self._together({name: one.frame() for name, one in self.comparisons.items()})

    def summary(self) -> pd.DataFrame:
        """The summaries of all comparisons, with the setting and a column for each key in front."""
        return self._together({name: one.summary() for name, one in self.comparisons.items()})

    def targets(self) -> pd.DataFrame:
        """The targets of all comparisons, with the setting and a column for each key in front."""
        return self._together({name: one.targets() for name, one in self.comparisons.items()})

    def rounds(self) -> pd.DataFrame:
        """The chosen rounds of all comparisons, with the setting and a column for each key in front."""
        return self._together({name: one.rounds() for name, one in self.comparisons.items()})

    def gains(self) -> pd.DataFrame:
        """The gains of clients in all comparisons, with the setting and a column for each key in front."""
        return self._together({name: one.gains() for name, one in self.comparisons.items()})

    @shown_from(SWEEP)
    def _together(self, frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
        import pandas as pd

        keys = list(dict.fromkeys(key for changes in self.settings.values() for key in changes))
        parts = []
        for setting, frame in frames.items():
            own = {"setting": setting} | {key: self.settings[setting].get(key) for key in keys}
            front = pd.DataFrame({key: [value] * len(frame) for key, value in own.items()}, index=frame.index)
            parts.append(pd.concat([front, frame.drop(columns=[*own], errors="ignore")], axis=1))
        return pd.concat(parts, ignore_index=True)

    @shown_from(SWEEP)
    def latex(self) -> str:
        """A table for a paper (booktabs): a row per method, a column per setting, the best in bold."""
        return latex.sweep_table(self._contents, self.folder.resolve().name)

    @front_door()
    @shown_from(SWEEP)
    def plot(self, kind: str = "grid") -> Figure:
        """A heat map of the scores over the settings, as a matplotlib figure; `potluck.plot` has other kinds."""
        if kind != "grid":
            raise ConfigError(f"plot() of a sweep draws its heat map; call potluck.plot({kind!r}, sweep)")
        return sweep_heat_map({"settings": self.settings}, self._contents)

    @property
    def _contents(self) -> dict[str, dict[str, Any]]:
        return {name: one.comparison for name, one in self.comparisons.items()}

    @property
    @shown_from(SWEEP)
    def sheet(self) -> Sheet:
        """A table with a row per setting, method and mode."""
        return sweep_sheet(self.settings, self._contents)

    def write(self) -> None:
        """Write `sweep.json` and the overview `sweep.html`."""
        about = {"format": FORMAT, "name": self.name, "settings": self.settings}
        write_json(self.folder / SWEEP, about)
        write_sweep(self.folder / "sweep.html", about, self._contents)

    def __repr__(self) -> str:
        return f"{plain(self.sheet.first(ROWS, 'sweep.html'))}\noverview: {self.folder / 'sweep.html'}"

    def _repr_html_(self) -> str:
        return _in_notebook(self.sheet, self.folder / "sweep.html")


def with_code(found: Comparison | Sweep, models: Entries | None, plugins: Plugins) -> Comparison | Sweep:
    """The same comparisons, whose runs are opened with these classes and plug-ins; a wrong name is refused."""
    parts = found.comparisons.values() if isinstance(found, Sweep) else [found]
    check_models([folder for one in parts for folder in _run_folders(one)], models)
    if isinstance(found, Comparison):
        return replace(found, _models=models, _plugins=plugins)
    given = {name: replace(one, _models=models, _plugins=plugins) for name, one in found.comparisons.items()}
    return replace(found, comparisons=given)


def _run_folders(one: Comparison) -> list[Path]:
    return [one.folder / name for entry in one.comparison["methods"] for name in entry["runs"].values()]


def is_comparison(folder: Path) -> bool:
    """Whether this is the folder of a comparison or a sweep, finished or not."""
    return any((folder / name).exists() for name in (COMPARISON, SWEEP, MARK))


def begun_runs(folder: Path) -> list[Path]:
    """The folders of all runs in that of a comparison that have begun, finished or not."""
    return [config.parent for config in sorted(folder.glob("*-seed*/config.yaml"))]


def is_sweep(folder: Path, settings: Iterable[str]) -> bool:
    """Whether this is the folder of a sweep, or of one of these settings that was stopped, and no user's own."""
    with contextlib.suppress(RunError):
        if "format" in _mapping(folder / SWEEP, "settings"):
            return True
    names, known = {one.name for one in folder.iterdir()}, {*settings}
    if names & {"config.yaml", MARK, COMPARISON}:
        return False
    return names <= known | {LOCK} or any((folder / name / MARK).is_file() for name in known)


def open_comparison(folder: Path | str) -> Comparison | Sweep:
    """A finished comparison or sweep from its folder; nothing runs, and no code that it names is loaded."""
    folder = Path(folder)
    if (folder / SWEEP).exists():
        about = _mapping(folder / SWEEP, "settings")
        with reading(folder / SWEEP, AGAIN):
            settings = {name: dict(changes) for name, changes in about["settings"].items()}
            parts = {name: _open(_inside(folder, name, SWEEP)) for name in settings}
        return Sweep(folder, str(about.get("name", folder.name)), settings, parts)
    return _open(folder)


def _open(folder: Path) -> Comparison:
    if not (folder / COMPARISON).exists():
        finished = [str(run) for run in begun_runs(folder) if (run / "summary.json").exists()]
        or_one = f", or open one of its finished runs: {some(finished)}" if finished else ""
        raise RunError(f"{folder} has no {COMPARISON}: it is not a finished comparison; {AGAIN}{or_one}")
    comparison = _mapping(folder / COMPARISON, "methods")
    with reading(folder / COMPARISON, AGAIN):
        comparison_sheet(comparison).rows  # noqa: B018 - what cannot be shown is refused here
        measure_in(comparison)
        runs = {
            entry["method"]: [_inside(folder, name, COMPARISON) for name in entry["runs"].values()]
            for entry in comparison["methods"]
        }
        if all(run.is_dir() for each in runs.values() for run in each):
            _check_runs(folder, comparison, runs)
    return Comparison(folder, comparison)


def _inside(folder: Path, name: str, said_by: str) -> Path:
    """A part of a comparison's folder; a name that leads anywhere else is refused."""
    if Path(name).name != name or name in ("", ".."):
        raise RunError(f"{folder / said_by} names {name!r}, which is not a folder beside it; {AGAIN}")
    return folder / name


def _check_runs(folder: Path, comparison: Mapping[str, Any], runs: Mapping[str, Sequence[Path]]) -> None:
    """Refuse damaged logs, and a comparison that says something else than they do."""
    for run in (run for each in runs.values() for run in each):
        RunResult(run, read_summary(run, "potluck compare again")).check_log()
    _refuse_longer(folder, comparison, runs)
    try:
        other = disagreement_with(comparison, runs)
    except ConfigError as error:
        raise RunError(f"{folder / COMPARISON} does not fit its runs: {error}; {AGAIN}") from error
    if other is not None:
        raise RunError(
            f"{folder / COMPARISON} does not agree with the logs of its runs: {other} is another there; {AGAIN}"
        )


def _refuse_longer(folder: Path, comparison: Mapping[str, Any], runs: Mapping[str, Sequence[Path]]) -> None:
    """Refuse a comparison one of whose runs has been extended since, and say how to extend the others."""
    said = {entry["method"]: entry.get("rounds_trained") for entry in comparison["methods"]}
    for label, run in ((label, run) for label, each in runs.items() for run in each):
        now = (read_config(run).get("training") or {}).get("rounds")
        if isinstance(now, int) and isinstance(said[label], int) and now > said[label]:
            raise RunError(
                f"{run} now has {now} rounds, and {folder / COMPARISON} was made when it had {said[label]}; "
                f"compare again into {folder} with training.rounds={now}"
            )


def _mapping(path: Path, needed: str) -> dict[str, Any]:
    value = read_json(path, AGAIN)
    if not isinstance(value, dict) or not value.get(needed):
        raise RunError(f"{path} has no {needed}: it is not a file of a comparison; {AGAIN}")
    return value


def _in_notebook(sheet: Sheet, page: Path) -> str:
    """The first rows, and below them where the whole page is."""
    short = sheet.first(ROWS, page.name)
    return notebook(replace(short, notes=(*short.notes, str(page))))
