"""`potluck.open`: a finished run from its folder, in any process, without its data."""

from __future__ import annotations

from pathlib import Path

from potluck.errors import RunError, some
from potluck.files import refuse_links
from potluck.front_door import front_door
from potluck.models import Entries
from potluck.report.log import ENVIRONMENT
from potluck.report.reading import reading
from potluck.runs.comparisons.comparison import (
    COMPARISON,
    SWEEP,
    Comparison,
    Sweep,
    begun_runs,
    is_comparison,
    open_comparison,
    with_code,
)
from potluck.runs.folder import RunFolder
from potluck.runs.kept_models.given import Plugins, listed_plugins
from potluck.runs.results.open_run import open_run
from potluck.runs.results.run_result import RunResult

WRITTEN = "; give one that potluck run or potluck compare has written"


@front_door()
def open(
    folder: Path | str, *, models: Entries | None = None, plugins: Plugins = False
) -> RunResult | Comparison | Sweep:
    """The result of a finished run, as `potluck.run` gave it; of a comparison's folder, as `potluck.compare` did.

    No data are loaded, and no code that the folder names is run, unless `plugins=True` asks for the run's plug-ins
    (or a list names some), which must not have changed since. A folder cannot hold classes. Where clients had
    models of your own, `models` brings the class, or a function that builds the model: by name
    (`models={"Net": Net}`), by client (`{"0": Net}`), or as the list that the experiment had. Of a comparison or
    a sweep both are kept for its runs, and used when `run()` opens one.
    """
    plugins = listed_plugins(plugins)
    found = looked_at(Path(folder))
    return open_run(found, models, plugins) if isinstance(found, Path) else with_code(found, models, plugins)


def looked_at(home: Path) -> Path | Comparison | Sweep:
    """The folder of a run, finished or not, or the comparison in it; anything else is refused.

    Whatever reads a folder that anybody may have written begins here: nothing in it leads out of it.
    """
    _refuse_other_folders(home)
    return open_comparison(home) if is_comparison(home) else home


def runs_so_far(home: Path) -> list[Path]:
    """The runs that have begun in the folder of a comparison that is not finished; none in any other folder."""
    _refuse_other_folders(home)
    finished = any((home / name).exists() for name in (COMPARISON, SWEEP))
    return begun_runs(home) if is_comparison(home) and not finished else []


def _refuse_other_folders(home: Path) -> None:
    if not home.is_dir():
        raise RunError(f"there is no run folder {home}; check the path")
    with reading(home):
        refuse_links(home)
    if not is_comparison(home) and not (home / ENVIRONMENT).exists():
        raise RunError(
            f"{home} is not the folder of a run or of a comparison{_lacking(home) or _inside(home) or WRITTEN}"
        )


def _lacking(home: Path) -> str:
    """That a folder with the settings of a run lacks something, for a sentence."""
    begun = (home / "config.yaml").is_file()
    return f", as it has no {ENVIRONMENT}; {RunFolder(home).remedy}" if begun else ""


def _inside(home: Path) -> str:
    """Which folders inside can be opened, for a sentence; nothing where there are none."""
    found = [one for one in sorted(home.iterdir()) if is_comparison(one) or (one / ENVIRONMENT).exists()]
    return f"; open one that is in it: {some(map(str, found))}" if found else ""
