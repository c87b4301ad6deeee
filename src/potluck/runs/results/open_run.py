"""A finished run from its folder, with everything in it checked; no data are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from potluck.errors import RunError
from potluck.models import Entries
from potluck.plugins import load_plugin
from potluck.report.again import to_go_on
from potluck.report.log import read_config
from potluck.report.reading import reading
from potluck.runs.folder import FORMAT, RunFolder
from potluck.runs.kept_models.given import Plugins
from potluck.runs.own_code import own_code, with_imported
from potluck.runs.results.run_result import RunResult
from potluck.runs.stored import read_summary
from potluck.version import __version__


def open_run(
    home: Path, models: Entries | None = None, plugins: Plugins = False, onward: str | None = None
) -> RunResult:
    """The result of the run in a folder, `models` and `plugins` as in `potluck.open`.

    `onward` is how to go on with the run, where `potluck resume` is not the way.
    """
    about = _about(home)
    settings = _config(home) if plugins is True else {"plugins": list(plugins or ())}
    _check_code(home, settings, about.get("code", {}))
    for plugin in settings.get("plugins") or ():
        load_plugin(str(plugin), Path())
    onward = onward or to_go_on(home, portable=bool(about.get("portable", True)))
    if not (home / "summary.json").exists():
        raise RunError(f"the run in {home} is not finished; go on with it: {onward}")
    summary = read_summary(home, onward)
    if about.get("potluck") != __version__:
        warnings.warn(
            f"{home} was made by potluck {about.get('potluck')}, this is {__version__}: what its models "
            "predict may differ",
            stacklevel=4,
        )
    if not plugins:
        _warn_of_edits(home, about.get("code", {}))
    result = RunResult(home, summary, models, _plugins=plugins)
    result.clients.models.check_files()
    result.check_log()
    result.clients.models.check_given()
    return result


def check_run(home: Path) -> None:
    """Refuse the folder of a run of another format; and a finished run whose logs and summary do not agree."""
    about = _about(home)
    if (home / "summary.json").exists():
        onward = to_go_on(home, portable=bool(about.get("portable", True)))
        RunResult(home, read_summary(home, onward)).check_log()


def _config(home: Path) -> dict[str, Any]:
    """What `config.yaml` says; its plugins are a list."""
    with reading(home / "config.yaml"):
        settings = read_config(home)
        return {**settings, "plugins": [str(name) for name in settings.get("plugins") or ()]}


def _warn_of_edits(home: Path, known: Mapping[str, str]) -> None:
    """Warn of plug-ins that were edited since: whoever has imported one predicts with what it says now."""
    for name, content in own_code({"plugins": _config(home)["plugins"]}, known).items():
        if known.get(name, content) != content:
            warnings.warn(
                f"{with_imported(name)} is not the code that {home} was made with: if you use it, what its models "
                "predict may differ from what was measured",
                stacklevel=5,
            )


def _about(home: Path) -> Mapping[str, Any]:
    """What the folder says of its origin; a folder of another format is refused."""
    about = RunFolder(home).about()
    if about.get("format") != FORMAT:
        raise RunError(
            f"{home} was made by potluck {about.get('potluck')} in another format than {FORMAT}; open it with "
            "that version"
        )
    return about


def _check_code(home: Path, settings: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Refuse code that was changed after the run: what it predicts now is not what was measured."""
    for name, content in own_code(settings, known).items():
        if known.get(name, content) != content:
            raise RunError(
                f"{with_imported(name)} is not the code that {home} was made with, so its models may predict "
                "something else; restore that code, or import the new one yourself and open the run without plugins"
            )
