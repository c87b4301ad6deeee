"""A run of a real federation, as the server plays it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.core.card import ClientId
from potluck.deploy.engine import Courier, FlowerEngine
from potluck.deploy.enrolled import sites_of
from potluck.deploy.keyring import KeyRegister
from potluck.deploy.register import FILE, Register
from potluck.deploy.served_run import ServedRun
from potluck.deploy.welcome import welcome
from potluck.engine.retries import Clock
from potluck.errors import ConfigError, RunError
from potluck.experiment.differences import changes_since
from potluck.experiment.export import to_values
from potluck.experiment.overrides import by_dotted_key
from potluck.experiment.schema import Experiment
from potluck.files import refuse_links, write_json
from potluck.live.board import Board
from potluck.live.status_file import kept
from potluck.methods.registry import find_method
from potluck.report.page import write_report
from potluck.runs.environment import check_version
from potluck.runs.folder import RunFolder
from potluck.runs.observers import Observer, Observers
from potluck.runs.observers.board import BoardNotes, lasting
from potluck.runs.observers.checkpoints import saved_round
from potluck.runs.results.run_result import RunResult
from potluck.runs.stored import read_summary

TOLD = "serve.json"  # in the run's folder: how the server was started
FREE = (
    "engine.deadline",
    "engine.patience",
)  # change no number, so they may differ from one start to the next


def play(
    experiment: Experiment,
    courier: Courier,
    folder: RunFolder,
    watcher: Observer | None = None,
    keys: Mapping[ClientId, str] | None = None,
    *,
    exclude: Sequence[ClientId] = (),
    include: Sequence[ClientId] = (),
    told: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    changed_keys: Callable[[], Mapping[ClientId, str]] = dict,
    board: Board | None = None,
) -> RunResult:
    """Run a federation in a folder that is locked: from the start, or from where an earlier server ended.

    `experiment` is one that `prepared` gave. With `keys` every client id belongs to one node key: the one named
    there, else the first it comes with. The clients in `exclude` are left out for good, also when the server starts
    again, until `include` takes them back. `told` is what the folder keeps of how it was started. `changed_keys`
    gives keys that were changed since it was last called; `board` is kept in the folder as `status.json`.
    """
    board = board if board is not None else Board()
    notes = BoardNotes(board)
    watcher = Observers(watcher or Observer(), notes)
    finished = ended(folder, experiment, exclude, include)
    if finished is not None:
        return finished
    note_changes(folder, experiment)
    register, sites = Register(folder), sites_of(experiment).sites
    clients = register.choose(sites, exclude, include)
    if told is not None:
        write_json(folder / TOLD, told)
    register.tell(welcome(experiment, ""), begun=(folder / "config.yaml").exists())
    register.start()
    engine = FlowerEngine(
        courier,
        clients,
        experiment.engine,
        find_method(experiment.method.name).told(),
        welcome(experiment, register.values.run),
        watcher.notice,
        None if keys is None else key_register(register, keys, changed_keys),
        clock,
    )
    engine.excluded = frozenset(sites) - frozenset(clients)
    facts = describe(board, experiment, engine, register).facts
    with kept(folder.path, facts) as notes.renew, lasting(board):
        return ServedRun(experiment, folder, engine, register, watcher).play()


def ended(
    folder: RunFolder, experiment: Experiment, exclude: Sequence[ClientId], include: Sequence[ClientId]
) -> RunResult | None:
    """The result of a run that needs no client any more, with its report; None where there is one to play.

    Refuses what cannot be played in a folder. It looks at files alone, so it comes before anything is started.
    """
    if (folder / "config.yaml").exists():
        _check_same(folder, experiment)
    if (folder / "summary.json").exists():
        return _reported(folder)
    Register(folder).choose(sites_of(experiment).sites, exclude, include)
    return None


def note_changes(folder: RunFolder, experiment: Experiment) -> None:
    """Write down which settings are others from here on, of those that may change while a run goes on."""
    if not (folder / "config.yaml").exists():
        return
    about, now = folder.about(), by_dotted_key(to_values(experiment))
    earlier = about.get("changes", [])
    known = by_dotted_key(about.get("settings", {})) | {one.get("key"): one.get("after") for one in earlier}
    changes = [
        {"round": saved_round(folder.path), "key": key, "before": known.get(key), "after": now[key]}
        for key in FREE
        if known.get(key) != now[key]
    ]
    if changes:
        write_json(folder / "environment.json", about | {"changes": [*earlier, *changes]})


def _reported(folder: RunFolder) -> RunResult:
    """A finished run whose report could not be written, now with it; any other one is refused."""
    if (folder / "report.html").exists():
        raise RunError(f"the run in {folder.path} is finished; choose another --out")
    write_report(folder.path)
    return RunResult(folder.path, read_summary(folder.path, "the same command without it"))


def describe(board: Board, experiment: Experiment, engine: FlowerEngine, register: Register) -> Board:
    """Let an engine write on a board, which has the run and its clients on it already: they are waited for."""
    board.state = "waiting"
    engine.board, board.run, board.rounds = board, register.values.run, experiment.training.rounds
    board.name, board.method = experiment.name, experiment.method.name
    for client in (*engine.ids, *sorted(engine.excluded)):
        board.client(client).excluded = client in engine.excluded
    return board


def prepared(experiment: Experiment) -> Experiment:
    """The experiment as a federation runs it: a checkpoint after every round, own test data only."""
    sites_of(experiment)
    if experiment.evaluate.on == "global":
        raise ConfigError(
            "evaluate.on: the clients of a federation have only test data of their own; use own"
        )
    refuse_predictions(experiment)
    return experiment.variant(checkpoint={"every": 0})


def refuse_predictions(experiment: Experiment) -> None:
    """Predictions tell of single samples; a federation's clients send none."""
    if experiment.evaluate.predictions != "none":
        raise ConfigError("evaluate.predictions: those of a federation stay with its clients; leave it out")


def open_folder(path: Path) -> RunFolder:
    """The run folder, made if it does not exist; one that holds something else is refused."""
    if not path.is_dir():
        return RunFolder.create(path, exact=True)
    refuse_links(path)
    folder = RunFolder(path)
    if not folder.is_ours():
        raise RunError(f"{path} holds something else than a run; choose another folder")
    return folder


def _check_same(folder: RunFolder, experiment: Experiment) -> None:
    about = folder.about()
    check_version(folder.path, about)
    found = changes_since(about.get("settings"), experiment)
    other = next((one for one in found if not one.is_below(*FREE)), None)
    if other is not None:
        raise RunError(
            f"{folder.path} was begun with other settings ({other}); go on with those, or choose another --out"
        )
    if not (folder / FILE).exists():
        raise RunError(f"{folder.path} is no run of a federation; choose another --out")


def key_register(
    register: Register,
    given: Mapping[ClientId, str],
    changed: Callable[[], Mapping[ClientId, str]] = dict,
) -> KeyRegister:
    """The keys of a run's nodes, kept in its folder; a key given by hand replaces a kept one."""
    return KeyRegister({**register.values.keys, **given}, register.keep_keys, changed)
