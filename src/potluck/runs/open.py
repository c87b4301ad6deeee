"""`potluck.open`: a finished run from its folder, in any process, without its data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError, RunError
from potluck.files import refuse_links
from potluck.front_door import front_door
from potluck.models import Entries
from potluck.plugins import load_plugin
from potluck.report.again import to_go_on
from potluck.report.log import ENVIRONMENT, read_config
from potluck.runs.comparisons.comparison import Comparison, Sweep, is_comparison, open_comparison
from potluck.runs.folder import FORMAT, RunFolder
from potluck.runs.kept_models.given import Plugins
from potluck.runs.own_code import own_code, with_imported
from potluck.runs.results.run_result import RunResult
from potluck.runs.stored import read_summary
from potluck.version import __version__


@front_door()
def open(
    folder: Path | str, *, models: Entries | None = None, plugins: Plugins = False
) -> RunResult | Comparison | Sweep:
    """The result of a finished run, as `potluck.run` gave it; of a comparison's folder, as `potluck.compare` did.

    No data are loaded, and no code that the folder names is run, unless `plugins=True` asks for the run's plug-ins
    (or a list names some), which must not have changed since. A folder cannot hold classes. Where clients had
    models of your own, `models` brings the class, or a function that builds the model: by name
    (`models={"Net": Net}`), by client (`{"0": Net}`), or as the list that the experiment had.
    """
    plugins = _listed(plugins)
    home = Path(folder)
    if not home.is_dir():
        raise RunError(f"there is no run folder {home}")
    refuse_links(home)
    if is_comparison(home):
        if models is not None or plugins:
            raise ConfigError(
                f"{home} is a comparison, and models and plugins are for one of its runs{_inside(home)}"
            )
        return open_comparison(home)
    if not (home / ENVIRONMENT).exists():
        raise RunError(
            f"{home} is not the folder of a run or of a comparison{_lacking(home) or _inside(home)}"
        )
    about = _about(home)
    settings = read_config(home) if plugins is True else {"plugins": _whole_paths(plugins or ())}
    _check_code(home, settings, about.get("code", {}))
    for plugin in settings.get("plugins") or ():
        load_plugin(str(plugin), Path())
    onward = to_go_on(home, portable=bool(about.get("portable", True)))
    if not (home / "summary.json").exists():
        raise RunError(f"the run in {home} is not finished; go on with it: {onward}")
    summary = read_summary(home, onward)
    if about.get("potluck") != __version__:
        warnings.warn(
            f"{home} was made by potluck {about.get('potluck')}, this is {__version__}: what its models "
            "predict may differ",
            stacklevel=3,
        )
    if not plugins:
        _warn_of_edits(home, about.get("code", {}))
    result = RunResult(home, summary, models, _plugins=plugins)
    result.clients.models.check_files()
    result.check_log()
    result.clients.models.check_given()
    return result


def _warn_of_edits(home: Path, known: Mapping[str, str]) -> None:
    """Warn of plug-ins that were edited since: whoever has imported one predicts with what it says now."""
    for name, content in own_code({"plugins": read_config(home).get("plugins") or []}).items():
        if known.get(name, content) != content:
            warnings.warn(
                f"{with_imported(name)} is not the code that {home} was made with: if you use it, what its models "
                "predict may differ from what was measured",
                stacklevel=4,
            )


def _about(home: Path) -> Mapping[str, Any]:
    """What the folder says of its origin; a folder of another format is refused."""
    about = RunFolder(home).about()
    if not isinstance(about.get("code", {}), Mapping):
        raise RunError(f"{home / ENVIRONMENT} is not the environment of a run: code is no mapping")
    if about.get("format") != FORMAT:
        raise RunError(
            f"{home} was made by potluck {about.get('potluck')} in another format than {FORMAT}; open it with "
            "that version"
        )
    return about


def _lacking(home: Path) -> str:
    """That a folder with the settings of a run lacks something, for a sentence."""
    begun = (home / "config.yaml").is_file()
    return f", as it has no {ENVIRONMENT}; {RunFolder(home).remedy}" if begun else ""


def _inside(home: Path) -> str:
    """Which folders inside can be opened, for a sentence; nothing where there are none."""
    found = [one for one in sorted(home.iterdir()) if is_comparison(one) or (one / ENVIRONMENT).exists()]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"; open one that is in it: {', '.join(map(str, found[:5]))}{more}" if found else ""


def _listed(plugins: Any) -> Plugins:
    """True, False or a list of plug-ins; one may be given alone."""
    names = [plugins] if isinstance(plugins, str | Path) else plugins
    if isinstance(names, bool):
        return names
    if not isinstance(names, list | tuple) or not all(isinstance(one, str | Path) for one in names):
        raise ConfigError(f"plugins: give True or a list of files or modules, not {plugins!r}")
    return list(map(str, names))


def _whole_paths(plugins: Sequence[str]) -> list[str]:
    """Plug-ins as a run folder writes them."""
    return [str(Path(name).resolve()) if name.endswith(".py") else name for name in plugins]


def _check_code(home: Path, settings: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Refuse code that was changed after the run: what it predicts now is not what was measured."""
    for name, content in own_code(settings).items():
        if known.get(name, content) != content:
            raise RunError(
                f"{with_imported(name)} is not the code that {home} was made with, so its models may predict "
                "something else; restore that code, or import the new one yourself and open the run without plugins"
            )
