"""`potluck methods`, `explain` and `split`: look before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli import completion
from potluck.cli.demo import DEMO
from potluck.cli.method_examples import FOR_DEMO, explained_in_demo, with_method
from potluck.cli.options import RUNS, AsJson, Debug, ExperimentFile, Overrides, PluginFiles, check_experiment
from potluck.cli.screen import Screen
from potluck.errors import ConfigError, RunError

if TYPE_CHECKING:
    from potluck.experiment import Experiment

PLUGIN = "--plugin FILE.py"


def methods(
    formulas: Annotated[
        bool, typer.Option("--formulas", help="Show what crosses as formulas instead, with their symbols.")
    ] = False,
    plugin: PluginFiles = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the methods."""
    from potluck.cli.views.methods import formulas_sheet, method_entry, methods_sheet
    from potluck.methods.registry import find_method, method_names

    _load(plugin)
    screen = Screen(json)
    entries = [method_entry(find_method(name), explained_in_demo(name)) for name in method_names()]
    if json:
        screen.data(entries)
    else:
        screen.sheet((formulas_sheet if formulas else methods_sheet)(entries))


def explain(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="A method, or an experiment file for its own method.",
            autocompletion=completion.methods,
        ),
    ],
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="[EXPERIMENT.yaml]", help="The experiment to explain it in. Default: the demo."
        ),
    ] = None,
    overrides: Overrides = None,
    options: Annotated[
        bool, typer.Option("--options", help="Show the method's options instead: meaning, default, source.")
    ] = False,
    plugin: PluginFiles = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a client sends, what it receives and what never leaves it, with real sizes."""
    from potluck.cli.views.contract import explain_entry, explain_view

    _load(plugin)
    screen = Screen(json)
    if options:
        return _show_options(screen, method, experiment, overrides or ())
    added = FOR_DEMO.get(method, ()) if experiment is None and not overrides else ()
    chosen = _explained(method, experiment, overrides or added)
    data = chosen.load_data(labels_only=True)
    entry = explain_entry(chosen.variant(engine={"device": "cpu"}).build(data))
    if json:
        screen.data(entry)
    else:
        in_demo = not _is_file(method) and (experiment is None or _is_override(experiment))
        screen.show(explain_view(entry, ", ".join(["the demo" if in_demo else chosen.name, *added])))


def _load(plugins: Sequence[str] | None) -> None:
    from potluck.plugins import load_plugin

    for plugin in plugins or ():
        load_plugin(plugin, Path())


def _show_options(screen: Screen, method: str, experiment: str | None, overrides: Sequence[str]) -> None:
    """The options of a method; an experiment file is read for its method, or for the plugins it loads."""
    from potluck.cli.views.options import options_sheet
    from potluck.core.options import options_of
    from potluck.experiment import Experiment
    from potluck.methods.registry import find_method

    if _is_file(method):
        method = Experiment.load(method, overrides).method.name
    elif experiment is not None and not _is_override(experiment):
        Experiment.load(experiment)
    found = options_of(find_method(method, PLUGIN).Config)
    if screen.json:
        screen.data({"method": method, "options": [one.as_json() for one in found]})
    else:
        screen.sheet(options_sheet(method, found))


def _explained(method: str, experiment: str | None, overrides: Sequence[str]) -> Experiment:
    """The experiment with its method replaced; if `method` is an experiment file, that experiment as it is."""
    from potluck.experiment import Experiment
    from potluck.experiment.schema import load_plugins
    from potluck.methods.registry import find_method

    if experiment is not None and (_is_file(method) or _is_override(experiment)):
        # The file was left out: its place has an override.
        overrides, experiment = [experiment, *overrides], None
    if _is_file(method):
        return Experiment.load(method, overrides)
    if experiment is not None:
        load_plugins(experiment, overrides)  # the method may be one of theirs
    find_method(method, PLUGIN)
    return with_method(method, overrides, experiment or DEMO)


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def _is_override(word: str) -> bool:
    return "=" in word and not Path(word).exists()


def split(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write the picture. Default: runs/<name>-split.png."),
    ] = None,
    plugin: PluginFiles = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show which client has which classes, as a table and a picture."""
    check_experiment(experiment)
    from potluck.cli.views.split import split_entry, split_view
    from potluck.experiment import Experiment
    from potluck.experiment.build import group_data
    from potluck.experiment.schema import with_plugins

    if png is not None and png.suffix.lower() != ".png":
        raise ConfigError(f"--png {png}: a PNG is written; give a name that ends in .png")
    screen = Screen(json)
    chosen = Experiment.load(experiment, with_plugins(experiment, overrides or (), plugin or ()))
    data = chosen.load_data(labels_only=True)
    whole = chosen.make_split(data)
    groups = whole.by_group((ground.data, ground.clients) for ground in group_data(chosen, data, whole))
    path, entries = png or RUNS / f"{chosen.name}-split.png", []
    for number, (part, own) in enumerate(groups):
        entry, place = split_entry(part, own), path.with_stem(f"{path.stem}-{number}") if number else path
        entries.append(entry | {"picture": str(_write_picture(entry, place))})
        if not json:
            title = [f"{part.name}: {part.task}"] if len(groups) > 1 else []
            screen.show(*title, split_view(entry), f"picture: {place}")
    if json:
        screen.data(entries[0] if len(entries) == 1 else {"hash": whole.hash, "groups": entries})


def _write_picture(entry: dict[str, Any], path: Path) -> Path:
    from potluck.files import make_folders, write_anew
    from potluck.report.pictures.files import to_png
    from potluck.report.pictures.split import split_picture

    clients = entry["clients"]
    counts, ids = [client["counts"] for client in clients], [client["id"] for client in clients]
    try:
        make_folders(path.parent, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make the folder {path.parent}: {error.strerror or error}; choose another place"
        ) from error
    write_anew(path, to_png(split_picture(counts, ids, entry["classes"])))
    return path
