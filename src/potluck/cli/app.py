"""The command line. Results go to standard output, progress and errors to standard error.

Exit codes: 0 done; 1 a fault of potluck itself; 2 bad input; 130 stopped with Ctrl-C, 143 ended by a signal.
Heavy imports are inside the commands, so that `potluck --help` is quick.
"""

from __future__ import annotations

import errno
import functools
import math
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from potluck.errors import ConfigError, PotluckError, RunError

if TYPE_CHECKING:
    from potluck.experiment.schema import Experiment
    from potluck.report.render import Sheet
    from potluck.runs.compare import ComparisonResult
    from potluck.runs.result import RunResult

DEMO = Path(__file__).parents[1] / "demo.yaml"
DEMO_METHODS = ("local", "fedavg", "fedproto", "fedmrl")
FOR_DEMO = {"fedin": ["method.project=fixed"]}  # what a method needs to be explained with the demo's models
RUNS = Path("runs")
WIDTH = 110  # of what is written where there is no terminal

app = typer.Typer(
    name="potluck",
    help="Federated learning where everyone brings their own model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# --- what goes wrong ------------------------------------------------------------------------------------


class Ended(KeyboardInterrupt):
    """A polite signal to end; a run takes it like Ctrl-C and leaves a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Stopped(KeyboardInterrupt):
    """Stopped after a checkpoint; `command` goes on from there."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__("stopped")
        self.command = shlex.join(command)


P = ParamSpec("P")


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Register a command; whatever goes wrong in it becomes one sentence and an exit code."""

    @functools.wraps(function)
    def guarded(*args: P.args, **options: P.kwargs) -> None:
        try:
            function(*args, **options)
        except BaseException as error:
            fail(error, debug=bool(options.get("debug")))

    return app.command(function.__name__)(guarded)


def fail(error: BaseException, debug: bool) -> NoReturn:
    """Say in one sentence what went wrong, and leave with its exit code."""
    usage = hasattr(error, "exit_code") or isinstance(error, SystemExit)
    if usage or (isinstance(error, OSError) and error.errno == errno.EPIPE):
        raise error
    if debug:
        traceback.print_exception(error)
    sentence, code = _sentence(error)
    typer.echo(" ".join(sentence.splitlines()), err=True)
    raise typer.Exit(code)


def _sentence(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        onwards = f"; go on with: {error.command}" if isinstance(error, Stopped) else ""
        return f"stopped{onwards}", 128 + _signal(error)
    if isinstance(error, PotluckError):
        return f"error: {error}", 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"error: {where}{error.strerror or error}", 2
    kind = type(error).__name__
    return f"internal error: {kind}: {error}; run again with --debug to see where", 1


def _signal(error: BaseException | None) -> int:
    """The signal at the root of an interrupt: SIGINT unless another was taken for it."""
    while error is not None:
        if isinstance(error, Ended):
            return error.number
        error = error.__cause__ or error.__context__
    return signal.SIGINT


# --- what is shown --------------------------------------------------------------------------------------


class Screen:
    """The two streams of a command; with `json` nothing but JSON goes to standard output."""

    def __init__(self, json: bool) -> None:
        self.json = json
        self.out = _console(stderr=False)
        self.err = _console(stderr=True)

    def data(self, value: Any) -> None:
        """Plain data, for machines."""
        import json

        typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))

    def show(self, *parts: RenderableType) -> None:
        """Text and tables, for people."""
        for part in parts:
            self.out.print(Text(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))

    def sheet(self, sheet: Sheet) -> None:
        """A table; aligned text where there is no terminal to fit it to."""
        from potluck.report.render import plain, rich_table

        self.show(rich_table(sheet) if self.out.is_terminal else plain(sheet).rstrip())


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="The experiment file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="Values to change, such as training.rounds=5 or seed=1."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="JSON alone on standard output; progress on standard error.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


@command
def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where to write; a demo stopped there goes on. Default: runs/demo."
        ),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train clients with unlike models on the embedded data, in half a minute."""
    from potluck.runs.compare import experiments_by_method

    screen = Screen(json)
    experiments = experiments_by_method(DEMO, DEMO_METHODS)
    folder = out or _free(RUNS / "demo")
    screen.err.print(
        "Clients with four different models learn to read digits, each from a few samples of its own: alone,\n"
        "and with each other. `potluck explain fedmrl` says what crosses between them.",
        style="dim",
    )
    result = _compared(
        screen, experiments, [experiments["local"].seed], folder, ["demo", "--out", str(folder)]
    )
    if json:
        screen.data(result.comparison | {"folder": str(result.folder)})


# --- run and resume -------------------------------------------------------------------------------------


@command
def run(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The run folder, which must not exist. Default: runs/<name>, runs/<name>-2, …",
        ),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run an experiment."""
    from potluck.experiment.schema import Experiment
    from potluck.runs.api import run as play

    chosen = Experiment.load(experiment, overrides or ())
    _watched(Screen(json), chosen.method.name, lambda watcher: play(chosen, out=out, watcher=watcher))


@command
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was stopped.")],
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Go on with a run, to the same end as if it had never stopped."""
    from potluck.runs.api import resume as go_on

    _watched(Screen(json), run.name, lambda watcher: go_on(run, watcher=watcher))


def _watched(
    screen: Screen, label: str, play: Callable[[Any], RunResult], every_notice: bool = False
) -> None:
    """Play a run under a progress display, then show how it went."""
    from potluck.cli.live import showing
    from potluck.runs.loop import Interrupted

    try:
        with showing(screen.err) as display:
            display.notices = math.inf if every_notice else display.notices
            result = play(display.watch(label))
    except Interrupted as error:
        raise Stopped(["potluck", "resume", str(error.folder)]) from error
    if screen.json:
        screen.data(result.summary | {"folder": str(result.folder)})
    else:
        screen.sheet(_run_sheet(result))
        screen.show(f"\nreport: {result.folder / 'report.html'}")


def _run_sheet(result: RunResult) -> Sheet:
    """The clients of a run; with many of them only how it went as a whole."""
    from potluck.files import read_json
    from potluck.report.page import client_rows
    from potluck.report.sheets import run_sheet

    split = read_json(result.folder / "split.json")
    models = read_json(result.folder / "environment.json").get("models", {})
    rows = client_rows(split, result.summary["accuracy"], models)
    return run_sheet(result.summary, rows if len(rows) <= 20 else [])


# --- comparisons ----------------------------------------------------------------------------------------


@command
def compare(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="a,b,c",
            help="The methods; Local is always among them. The one the experiment names keeps its options, the "
            "others have their defaults; fedmrl.d1=50 sets an option of one method.",
        ),
    ] = "",
    seeds: Annotated[str, typer.Option(metavar="0,1,2", help="Default: the experiment's own seed.")] = "",
    target: Annotated[
        str,
        typer.Option(
            metavar="0.5,0.9",
            help="Scores above 0 and up to 1: show the first evaluated round whose mean reached each, and what "
            "was sent until then.",
        ),
    ] = "",
    rounds: Annotated[
        str,
        typer.Option(
            metavar="10,50,100",
            help="Rounds that are evaluated: show the scores at each, for all moments and modes measured.",
        ),
    ] = "",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="The method or variant to take differences to, then client by client too. Default: local.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to write. Default: runs/<name>-compare."),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run methods side by side: same split, same private initial models, same cohorts, same batch order.

    A file may name variants to compare instead, and a sweep over settings. The same command again skips the runs
    that are finished and goes on with those that were stopped.
    """
    from potluck.report.chosen_rounds import check_rounds
    from potluck.runs.compare import check_reference, with_baseline
    from potluck.runs.sweep import check_sweep, read_sweep

    listed, targets, at = _words(methods), _targets(target), _numbers("--rounds", rounds, "10,50,100")
    settings = read_sweep(experiment, with_baseline(listed) if listed else (), overrides or ())
    for setting, experiments in settings.items():
        check_reference(against, experiments)
        for label, one in experiments.items():
            who = f"{setting}, {label}" if setting else label
            check_rounds(at, one.training.rounds, one.evaluate.every, who)
    first = next(one for experiments in settings.values() for one in experiments.values())
    folder, screen = out or RUNS / f"{first.name}-compare", Screen(json)
    if len(settings) > 1:
        check_sweep(settings)
    results = {
        setting: _compared(
            screen,
            experiments,
            _seeds(seeds) or [first.seed],
            folder / setting,
            sys.argv[1:],
            targets,
            at,
            against,
        )
        for setting, experiments in settings.items()
    }
    if json:
        shown = {name: result.comparison | {"folder": str(result.folder)} for name, result in results.items()}
        screen.data(shown.get("", shown))


def _seeds(text: str) -> list[int]:
    return _numbers("--seeds", text, "0,1,2")


def _numbers(option: str, text: str, such: str) -> list[int]:
    """Whole numbers between commas, each once."""
    words = _words(text)
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise ConfigError(f"{option}: {wrong!r} is no whole number from 0; give some such as {such}")
    return list(dict.fromkeys(map(int, words)))


def _targets(text: str) -> list[float]:
    from potluck.report.targets import check_targets

    targets: list[float] = []
    for word in _words(text):
        try:
            targets.append(float(word))
        except ValueError:
            raise ConfigError(f"--target: {word!r} is no number; give scores such as 0.5,0.9") from None
    check_targets(targets)
    return list(dict.fromkeys(targets))


def _free(folder: Path) -> Path:
    """The folder, or the first of `-2`, `-3`, … that does not exist."""
    number, path = 1, folder
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}-{number}")
    return path


def _compared(
    screen: Screen,
    experiments: dict[str, Experiment],
    seeds: Sequence[int],
    folder: Path,
    again: Sequence[str],
    targets: Sequence[float] = (),
    rounds: Sequence[int] = (),
    against: str | None = None,
) -> ComparisonResult:
    """Compare under a progress display, then show the tables. `again` are the words that go on with it."""
    from potluck.cli.live import showing
    from potluck.runs.compare import compare as compare_methods

    try:
        with showing(screen.err, len(seeds) * len(experiments)) as display:
            result = compare_methods(
                experiments,
                seeds,
                folder,
                display.watch,
                display.skip,
                targets=targets,
                rounds=rounds,
                against=against,
            )
    except KeyboardInterrupt as error:
        raise Stopped(["potluck", *again]) from error
    if not screen.json:
        _show_comparison(screen, result)
    return result


def _show_comparison(screen: Screen, result: ComparisonResult) -> None:
    from potluck.cli.views import MOST_ROWS
    from potluck.report.sheets import (
        clients_sheet,
        comparison_sheet,
        further_sheet,
        gains_sheet,
        rounds_sheet,
        targets_sheet,
    )

    screen.sheet(comparison_sheet(result.comparison))
    for make in (clients_sheet, further_sheet, rounds_sheet, targets_sheet, gains_sheet):
        sheet = make(result.comparison)
        if sheet is not None:
            screen.show("")
            screen.sheet(sheet.first(MOST_ROWS, "comparison.html"))
    screen.show(
        f"\nreport: {result.folder / 'comparison.html'}",
        f"of each run: {result.folder}/<method>-seed<seed>/report.html",
    )


# --- a real federation ----------------------------------------------------------------------------------

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Plain text; on this machine (127.0.0.1) that is the default.")
]
Ca = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TLS: the certificate of the authority both sides trust.")
]


@command
def serve(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients join; a SuperLink there is used.")
    ] = "127.0.0.1:8000",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The run folder; a run there goes on. Default: runs/<name>."),
    ] = None,
    insecure: Insecure = False,
    ca: Ca = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TLS: the server's certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="TLS: the server's private key.")] = None,
    node_keys: Annotated[
        bool | None,
        typer.Option(
            "--node-keys/--no-node-keys",
            help="Take in only nodes whose key was registered with Flower; a client id belongs to its first key. "
            "Default: with TLS.",
        ),
    ] = None,
    client_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With <id>.pub of every client: registered, and the only key it can come with.",
        ),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run an experiment with clients that join over the network, on Flower.

    Started again after a crash, the same command goes on with the same run.
    """
    from potluck.deploy.flower.processes import Security
    from potluck.deploy.flower.serve import serve as play
    from potluck.experiment.schema import Experiment

    chosen = Experiment.load(experiment, overrides or ())
    tied = ca is not None if node_keys is None else node_keys
    security = Security(insecure, ca, certificate, key, node_keys=tied, client_keys=client_keys)
    folder = out or RUNS / chosen.name
    try:
        _watched(
            Screen(json),
            chosen.method.name,
            lambda watcher: play(chosen, folder, address, security, watcher),
            every_notice=True,  # who was refused, and why, is in the log for good
        )
    except KeyboardInterrupt as error:
        raise Stopped(["potluck", *sys.argv[1:]]) from error


@command
def join(
    client: Annotated[str, typer.Option(metavar="ID", help="This client's id in the experiment.")],
    model: Annotated[
        str, typer.Option(metavar="FILE.py:FUNCTION", help="Gives the model: a torch.nn.Module, or a name.")
    ] = "",
    data: Annotated[
        str,
        typer.Option(metavar="FILE.py:FUNCTION", help="Gives the data: {'train': (x, y), 'test': (x, y)}."),
    ] = "",
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.")] = "",
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="EXPERIMENT.yaml", help="Join nobody: show what would leave in a round of this."
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --check: write the agreement that allows just that."),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where this client keeps its state. Default: sites/<id>."),
    ] = None,
    accept: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Do and send only what this agreement allows.")
    ] = None,
    only: Annotated[
        str,
        typer.Option(metavar="worker|node", help="Start this half alone; the other runs as another user."),
    ] = "",
    socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --only: where worker and node meet.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda:0.")] = "cpu",
    insecure: Insecure = False,
    ca: Ca = None,
    node_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This node's private key, registered with the server.")
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated", help="Noise from the experiment's seed, which the server knows: for tests."
        ),
    ] = False,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Take part in a federation with a model and data of one's own; the server sees neither."""
    if check is not None:
        return _check_site(Screen(json), client, model, data, check, write)
    if write is not None:
        raise ConfigError("--write goes with --check")
    if not server and only != "worker":
        raise ConfigError("--server is missing: where is the server?")
    from potluck.deploy.flower.join import Joining, default_home
    from potluck.deploy.flower.join import join as take_part
    from potluck.deploy.flower.processes import Security

    screen = Screen(json=False)
    security = Security(insecure, ca, node_key=node_key)
    place = (home or default_home(client)).resolve()
    joining = Joining(server, client, model, data, place, security, accept, device, simulated, only, socket)
    take_part(joining, lambda sentence: screen.err.print(sentence, soft_wrap=True))


def _check_site(
    screen: Screen, client: str, model: str, data: str, experiment: Path, write: Path | None
) -> None:
    """Play a round at home and show what would leave; nothing leaves and nothing is kept but the agreement."""
    from potluck.cli.views import rehearsal_entry, rehearsal_sheet
    from potluck.deploy.rehearsal import propose
    from potluck.deploy.resident import enrolment
    from potluck.deploy.site import rehearsal_federation
    from potluck.deploy.wire import told_at_enrolment
    from potluck.experiment.schema import Experiment

    chosen = Experiment.load(experiment)
    federation = rehearsal_federation(chosen, client, model, data)
    agreement, exchanges = propose(federation, client, chosen.training.attempts)
    entry = rehearsal_entry(agreement, exchanges, told_at_enrolment(enrolment(federation, client)))
    if write is not None:
        agreement.write(write)
    if screen.json:
        screen.data(entry)
    else:
        screen.sheet(rehearsal_sheet(entry, f"client {client}"))
        screen.show(*([f"\nagreement: {write}"] if write is not None else []))


# --- looking without running ----------------------------------------------------------------------------


@command
def methods(json: AsJson = False, debug: Debug = False) -> None:
    """List the methods."""
    from potluck.cli.views import method_entry, methods_sheet
    from potluck.methods.registry import find_method, method_names

    screen = Screen(json)
    entries = [method_entry(find_method(name)) for name in method_names()]
    if json:
        screen.data(entries)
    else:
        screen.sheet(methods_sheet(entries))


@command
def explain(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="A method, or an experiment file for its own.")
    ],
    experiment: Annotated[
        str | None,
        typer.Argument(metavar="[EXPERIMENT.yaml]", help="Where it would run. Default: the demo."),
    ] = None,
    overrides: Overrides = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what leaves a client, what comes to it and what never leaves it, with real sizes."""
    from potluck.cli.views import explain_entry, explain_view

    screen = Screen(json)
    added = FOR_DEMO.get(method, []) if experiment is None and not overrides else []
    chosen = _explained(method, experiment, overrides or added)
    data = chosen.load_data(labels_only=True)
    entry = explain_entry(chosen.variant(engine={"device": "cpu"}).build(data))
    if json:
        screen.data(entry)
    else:
        screen.show(explain_view(entry, ", ".join([chosen.name, *added])))


def _explained(method: str, experiment: str | None, overrides: Sequence[str]) -> Experiment:
    """The experiment with its method replaced; an experiment file in the method's place explains its own."""
    from potluck.experiment.schema import Experiment
    from potluck.methods.registry import find_method
    from potluck.runs.compare import experiments_by_method

    if experiment is not None and (_is_file(method) or ("=" in experiment and not Path(experiment).exists())):
        overrides = [experiment, *overrides]
        experiment = None
    if _is_file(method):
        return Experiment.load(method, overrides)
    find_method(method)
    own = [
        f"{method}.{option.removeprefix('method.')}" if option.startswith("method.") else option
        for option in overrides
    ]
    return experiments_by_method(experiment or DEMO, [method], own)[method]


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


@command
def split(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write the picture. Default: runs/<name>-split.png."),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show who has which class, as a table and as a picture."""
    from potluck.cli.views import split_entry, split_view
    from potluck.experiment.schema import Experiment

    screen = Screen(json)
    chosen = Experiment.load(experiment, overrides or ())
    data = chosen.load_data(labels_only=True)
    whole = chosen.make_split(data)
    groups = whole.by_group((ground.data, ground.clients) for ground in chosen.group_data(data, whole))
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
    from potluck.files import write_whole
    from potluck.report.plots import split_picture, to_png

    clients = entry["clients"]
    counts, ids = [client["counts"] for client in clients], [client["id"] for client in clients]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {path.parent}: {error.strerror or error}") from error
    write_whole(path, to_png(split_picture(counts, ids, entry["classes"])))
    return path


# --- a real federation ----------------------------------------------------------------------------------


@command
def keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; nothing is overwritten.")],
    server: Annotated[
        str,
        typer.Option(metavar="HOST[,HOST…]", help="Names or addresses under which the server is reached."),
    ],
    clients: Annotated[str, typer.Option(metavar="a,b,c", help="The ids of the clients.")],
    days: Annotated[int, typer.Option(help="How long the certificates hold.")] = 30,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make an authority, a server certificate and client keys, for trying out a federation."""
    try:
        from potluck.deploy.trial_keys import ADVICE, make_keys
    except ImportError as error:
        needed = "making keys needs the package cryptography; install it with: pip install 'potluck[flower]'"
        raise ConfigError(needed) from error

    screen = Screen(json)
    files = make_keys(folder, _words(server), _words(clients), days)
    if json:
        screen.data({"folder": str(folder), "files": [str(path) for path in files]})
    else:
        screen.show(*(str(path) for path in files), f"\n{ADVICE.format(days=days)}".rstrip())


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


# --- the way in -----------------------------------------------------------------------------------------


def _version(asked: bool) -> None:
    if asked:
        from potluck.version import __version__

        typer.echo(f"potluck {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Federated learning where everyone brings their own model."""


def _end(number: int, frame: object) -> NoReturn:
    raise Ended(number)


def main() -> None:
    """Where `potluck` and `python -m potluck` begin."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP: leave it so
            signal.signal(number, _end)
    app()
