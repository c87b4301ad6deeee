"""`potluck.open`: a finished run from its folder, in any process, without its data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.errors import RunError
from potluck.files import read_json
from potluck.models import Entries
from potluck.plugins import load_plugin
from potluck.report.log import read_config
from potluck.runs.comparisons.comparison import Comparison, Sweep, is_comparison, open_comparison
from potluck.runs.folder import FORMAT
from potluck.runs.results.run_result import RunResult
from potluck.version import __version__


def open(
    folder: Path | str, *, models: Entries | None = None, plugins: bool | Sequence[str] = False
) -> RunResult | Comparison | Sweep:
    """The result of a finished run, as `potluck.run` gave it; of a comparison's folder, as `potluck.compare` did.

    No data are loaded, and no code that the folder names is run, unless `plugins=True` asks for the run's plug-ins
    (or a list names some). A folder cannot hold classes. Where clients had models of your own, `models` brings the
    class, or a function that builds the model: by name (`models={"Net": Net}`), by client (`{"0": Net}`), or as the
    list that the experiment had.
    """
    if not isinstance(folder, Path | str):
        raise RunError(f"open() takes the folder of a run, not a {type(folder).__name__}")
    home = Path(folder)
    if not home.is_dir():
        raise RunError(f"there is no run folder {home}")
    if is_comparison(home):
        return open_comparison(home)
    about, named = _about(home), read_config(home).get("plugins") or ()
    for plugin in named if plugins is True else plugins or ():
        load_plugin(str(plugin), Path())
    if not (home / "summary.json").exists():
        raise RunError(f"the run in {home} is not finished; go on with it: potluck resume {home}")
    summary = read_json(home / "summary.json")
    if not isinstance(summary, Mapping) or "accuracy" not in summary:
        raise RunError(f"{home / 'summary.json'} is not the summary of a run")
    if about.get("potluck") != __version__:
        warnings.warn(
            f"{home} was made by potluck {about.get('potluck')}, this is {__version__}: what its models "
            "predict may differ",
            stacklevel=2,
        )
    return RunResult(home, dict(summary), models)


def _about(home: Path) -> Mapping[str, Any]:
    """What the folder says of its origin; a folder of another format is refused."""
    about = read_json(home / "environment.json")
    if not isinstance(about, Mapping) or about.get("format") != FORMAT:
        other = about.get("potluck") if isinstance(about, Mapping) else None
        raise RunError(
            f"{home} was made by potluck {other} in another format than {FORMAT}; open it with that version"
        )
    return about
