"""Damage: a flipped bit, a lost or padded log and a full disk are named, and nothing goes on silently."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

import potluck
from helpers import TINY, StopAfter, changed_experiment, stopped_run
from kills import Kill
from potluck.engine.store.checkpoints import Checkpoints, DamagedCheckpoint
from potluck.engine.store.client_store import ClientStore
from potluck.engine.store.manifest import _seal
from potluck.errors import PotluckError, RunError
from potluck.experiment.schema import Experiment
from potluck.report.reading import reading
from potluck.runs.api import resume, run
from potluck.runs.kept_models import opened
from potluck.runs.kept_models.files import read_state, remove_models, remove_unfinished
from potluck.runs.loop import Interrupted
from potluck.runs.pages import write_pages

SETTINGS: dict[str, Any] = TINY | {
    "partition": {"kind": "iid", "clients": 3},
    "training": {"rounds": 6, "participation": 0.7, "batch_size": 64},
    "checkpoint": {"every": 0},
}
SHORT: dict[str, Any] = {
    "data": {"name": "digits", "samples": 60},
    "training": {"rounds": 2, "batch_size": 64},
}
LOGS = ("metrics.jsonl", "ledger.jsonl", "timing.jsonl")


def experiment(**changes: Any) -> Experiment:
    return changed_experiment(SETTINGS, changes)


def same_logs(one: Path, other: Path) -> bool:
    return all((one / log).read_bytes() == (other / log).read_bytes() for log in LOGS[:2])


def flip(path: Path, place: float = 0.9) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def recounted(path: Path, counts: Any) -> None:
    """Another number of rows per class, which the hash of a split leaves out."""
    split = json.loads(path.read_text())
    split["clients"][0]["counts"] = counts
    path.write_text(json.dumps(split))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment(), out=tmp_path_factory.mktemp("damage") / "run").folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_run(experiment(), tmp_path_factory.mktemp("damage") / "run", 5)


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    """A run that was stopped after round 5, for every test its own."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoints" / Checkpoints.MANIFEST).read_text())
    return found


# --- checkpoints ----------------------------------------------------------------------------------------


def test_the_last_three_checkpoints_are_kept(folder: Path) -> None:
    assert Checkpoints(folder / "checkpoints").rounds() == (3, 4, 5)


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_flipped_bit_in_any_state_is_named(folder: Path, place: float) -> None:
    found = manifest(folder)
    for name in {found["server"], *found["clients"].values()}:
        path = folder / "checkpoints" / name
        flip(path, place)
        with pytest.raises(DamagedCheckpoint, match=rf"round 5 .* {name} is damaged: its SHA-256"):
            Checkpoints(folder / "checkpoints").load()
        flip(path, place)
    assert Checkpoints(folder / "checkpoints").load() is not None


def test_a_damaged_checkpoint_says_how_to_go_on(folder: Path, whole: Path) -> None:
    server = folder / "checkpoints" / manifest(folder)["server"]
    flip(server)
    with pytest.raises(RunError, match=rf"{server.name} is damaged.*round 4 \(.*3, 4\).*--from-round 4"):
        resume(folder)
    assert resume(folder, from_round=4).summary["rounds"] == 6
    assert same_logs(folder, whole)


@pytest.mark.parametrize("damage", [lambda path: flip(path, 0.5), lambda path: path.write_text("")])
def test_a_damaged_manifest_is_named_and_its_copy_goes_on(
    folder: Path, whole: Path, damage: Callable[[Path], Any]
) -> None:
    damage(folder / "checkpoints" / Checkpoints.MANIFEST)
    with pytest.raises(RunError, match=r"checkpoint\.json.*go on from the checkpoint of round 5"):
        resume(folder)
    resume(folder, from_round=5)
    assert same_logs(folder, whole)


def test_an_earlier_round_is_played_on_from_to_the_same_end(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    with pytest.raises(Interrupted):
        resume(folder, from_round=4, watcher=StopAfter(5))
    assert Checkpoints(folder / "checkpoints").rounds() == (4, 5)
    assert len((folder / "timing.jsonl").read_text().splitlines()) == 5
    resume(folder)
    assert same_logs(folder, whole)
    with pytest.raises(RunError, match=r"no checkpoint of round 2; choose from: 4, 5, 6"):
        resume(folder, from_round=2)


def rewritten(home: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifests of a folder, with seals that are right."""
    for path in home.glob("checkpoint*.json"):
        values = json.loads(path.read_text())
        values.pop("seal")
        change(values)
        path.write_text(json.dumps(values | {"seal": _seal(values)}))


def claims_a_terabyte(path: Path) -> None:
    """A file whose own head says so, without a byte of it on the disk."""
    numbers = 1 << 38
    head = {"a": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + 4 * numbers)


def test_a_file_of_another_size_is_not_read(folder: Path) -> None:
    home, found = folder / "checkpoints", manifest(folder)
    assert found["sizes"] == {name: (home / name).stat().st_size for name in found["sha256"]}
    for name in (found["server"], *found["clients"].values()):
        kept = (home / name).read_bytes()
        claims_a_terabyte(home / name)
        with pytest.raises(
            RunError, match=rf"{name} is damaged: it has 1,099,.* and {len(kept):,} were written"
        ):
            resume(folder)
        (home / name).write_bytes(kept)
    rewritten(home, lambda values: values["sizes"].update({name: "1"}))
    with pytest.raises(RunError, match=f"it has no size of {name}"):
        resume(folder)


@pytest.mark.parametrize("known", [False, True])
def test_a_terabyte_that_the_manifest_knows_of_is_not_read(folder: Path, known: bool) -> None:
    home, name = folder / "checkpoints", manifest(folder)["server"]
    claims_a_terabyte(home / name)
    size = (home / name).stat().st_size
    rewritten(home, lambda values: values["sizes"].update({name: size}) if known else values.pop("sizes"))
    with pytest.raises(
        RunError, match=rf"{name}: it has 1,099,.* bytes, of which .* on the disk; .*from-round 4"
    ):
        resume(folder)


def test_a_log_of_a_terabyte_that_the_manifest_knows_of_is_not_read(folder: Path) -> None:
    os.truncate(folder / "ledger.jsonl", 1 << 40)
    mark = {"bytes": 1 << 40, "sha256": ""}
    rewritten(folder / "checkpoints", lambda values: values["logs"].update({"ledger.jsonl": mark}))
    with pytest.raises(RunError, match=r"ledger\.jsonl is damaged: it has 1,099,.* bytes, of which"):
        resume(folder)


def test_a_manifest_without_sizes_is_read_and_the_next_one_has_them(folder: Path, whole: Path) -> None:
    home = folder / "checkpoints"
    rewritten(home, lambda values: values.pop("sizes"))
    resume(folder)
    assert same_logs(folder, whole)
    assert manifest(folder)["sizes"] == manifest(whole)["sizes"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/hosts")])
def test_what_is_no_file_of_an_earlier_checkpoint_is_found_before_training(
    folder: Path, make: Callable[[Path], Any]
) -> None:
    home, rounds = folder / "checkpoints", Checkpoints(folder / "checkpoints").rounds()
    newest = set(manifest(folder)["clients"].values())
    older = json.loads((home / f"checkpoint-{rounds[0]:06d}.json").read_text())["clients"].values()
    name = min(set(older) - newest)
    (home / name).unlink()
    make(home / name)
    before = sorted(home.iterdir())
    with pytest.raises(RunError, match=rf"{name} is no file, and an earlier checkpoint has one"):
        Checkpoints(home).load()
    assert sorted(home.iterdir()) == before


# --- a process that is killed ---------------------------------------------------------------------------


def saved_on(folder: Path, last: int = 5) -> dict[int, list[float]]:
    """Write the checkpoints that are left, each with a state that changes and one that does not; what was there."""
    store, checkpoints = ClientStore(folder=folder), Checkpoints(folder)
    found = checkpoints.load()
    there = {} if found is None else {found.round: found.server["x"].tolist()}
    store.put("a", found.clients["a"] if found else {"w": torch.arange(3.0)})
    try:
        for round_ in range(1 + (found.round if found else 0), last + 1):
            store.put("b", {"w": torch.full((3,), float(round_))})
            checkpoints.save(round_, {"x": torch.full((2,), float(round_))}, store.save(), {})
            checkpoints.wait()
    finally:
        store.close()  # and its threads, which would go on after a kill
    return there


def test_a_kill_at_any_operation_of_a_checkpoint_leaves_a_whole_one(tmp_path: Path) -> None:
    def killed(folder: Path, at: int | None = None) -> int:
        with Kill(at) as kill:
            saved_on(folder)
        return kill.operations

    for at in range(1, killed(tmp_path / "whole") + 1):
        folder = tmp_path / str(at)
        killed(folder, at)
        newest = Checkpoints(folder).newest_round()
        found = saved_on(folder)
        assert found == ({newest: [newest] * 2} if newest else {})
        assert Checkpoints(folder).rounds() == (3, 4, 5)
        whole = [path.name.split("-")[0] for path in sorted((tmp_path / "whole").iterdir())]
        assert [path.name.split("-")[0] for path in sorted(folder.iterdir())] == whole, at


def test_a_kill_while_going_back_leaves_the_run_where_it_was_or_went(tmp_path: Path) -> None:
    saved_on(tmp_path / "whole")
    rounds = set()
    for at in range(1, 20):
        folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / str(at)))
        with Kill(at):
            files = Checkpoints(folder)
            files.load(3)
            files.go_back(3)
        found = Checkpoints(folder).load()
        assert found is not None
        rounds.add(found.round)
    assert rounds == {3, 5}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment(**SHORT), out=tmp_path_factory.mktemp("kills") / "run").folder


@pytest.mark.parametrize("at", ["checkpoint-000001.json", "/checkpoint.json", "report.html"])
def test_a_run_that_was_killed_goes_on_to_the_same_end(tmp_path: Path, short: Path, at: str) -> None:
    with Kill(at) as kill:
        run(experiment(**SHORT), out=tmp_path / "run")
    assert kill.dead
    resume(tmp_path / "run")
    assert same_logs(tmp_path / "run", short)
    assert visible(tmp_path / "run") == visible(short)


def visible(folder: Path) -> set[Path]:
    """The files of a run, without what was half written when it was killed."""
    found = (path.relative_to(folder) for path in folder.rglob("*"))
    return {path for path in found if not any(part.startswith(".") for part in path.parts)}


def test_half_removed_models_are_none(short: Path, tmp_path: Path) -> None:
    models = Path(shutil.copytree(short / "models", tmp_path / "models"))
    with Kill("client-1.safetensors") as kill:
        remove_models(models / "round-000002")
    assert kill.dead
    assert not [*models.glob("round-*")]
    remove_unfinished(models)
    assert not [*models.iterdir()]


def test_states_that_did_not_change_are_the_same_file(tmp_path: Path) -> None:
    store, checkpoints = ClientStore(folder=tmp_path / "c"), Checkpoints(tmp_path / "c")
    store.put("a", {"w": torch.arange(3.0)})
    for round_ in range(1, 6):
        store.put("b", {"w": torch.full((3,), float(round_))})
        checkpoints.save(round_, {"x": torch.full((2,), float(round_))}, store.save(), {})
    assert checkpoints.rounds() == (3, 4, 5)
    assert len(list((tmp_path / "c").glob("clients-*"))) == 4
    earlier = Checkpoints(tmp_path / "c").load(3)
    assert earlier is not None
    assert earlier.server["x"].tolist() == [3, 3]
    checkpoints.go_back(4)
    assert checkpoints.rounds() == (3, 4)
    newest = Checkpoints(tmp_path / "c").load()
    assert newest is not None
    assert newest.round == 4
    checkpoints.close()
    store.close()


# --- logs -----------------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def padded(path: Path) -> None:
    size = path.stat().st_size
    cut_short(path)
    os.truncate(path, size)


def half_a_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:10]
    path.write_bytes(b"".join(lines) + b" " * 500)


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut_short, "is shorter than at the last checkpoint"),
        (Path.unlink, "is missing"),
        (padded, "is damaged"),
        (half_a_line, "is damaged|is shorter"),
        (flip, "is damaged"),
    ],
)
def test_a_damaged_log_is_refused_by_name(
    folder: Path, log: str, damage: Callable[[Path], Any], sentence: str
) -> None:
    damage(folder / log)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=rf"{log} ({sentence}).*put a whole copy of it back"):
        resume(folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_logs_that_lost_their_end_go_on_from_an_earlier_round(folder: Path, whole: Path) -> None:
    cut_short(folder / "metrics.jsonl")
    with pytest.raises(RunError, match="--from-round 4"):
        resume(folder)
    resume(folder, from_round=4)
    assert same_logs(folder, whole)


def test_a_log_that_is_taken_away_while_the_run_goes_on(tmp_path: Path) -> None:
    class Thief(potluck.Observer):
        def round(self, end: Any) -> None:
            if end.round == 2:
                (tmp_path / "run/metrics.jsonl").unlink()

    with pytest.raises(RunError, match=r"metrics\.jsonl became shorter while the run went on"):
        run(experiment(), out=tmp_path / "run", watcher=Thief())


def test_a_finished_run_with_a_changed_digit_is_not_opened(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "run"))
    assert potluck.open(copy).frame() is not None
    content = (copy / "metrics.jsonl").read_bytes()
    place = content.index(b'"loss": ') + len(b'"loss": ')
    (copy / "metrics.jsonl").write_bytes(content[:place] + b"9" + content[place + 1 :])
    for look in (potluck.open, write_pages):
        with pytest.raises(
            RunError, match=r"metrics\.jsonl is damaged: its lines are not those.*copy the folder again"
        ):
            look(copy)
    (copy / "metrics.jsonl").write_bytes(content)
    resume(copy, rounds=8)
    assert potluck.open(copy).summary["rounds"] == 8


@pytest.mark.parametrize("line", ["null", "[1]", '{"rounb": 1}', "{", '{"round": "1"}'])
def test_a_damaged_line_of_a_log_is_named(whole: Path, tmp_path: Path, line: str) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints")))
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    found = potluck.open(copy)
    (copy / "metrics.jsonl").write_text("\n".join([*lines[:3], line, *lines[4:]]) + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 4 is not"):
        potluck.open(copy)
    for read in (found.frame, found.curves):
        with pytest.raises(
            RunError, match=r"metrics\.jsonl, line 4 is damaged: it .*; copy the folder again"
        ):
            read()


# --- small files ----------------------------------------------------------------------------------------


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_text("{}")


def listed(path: Path) -> None:
    path.write_text("[1]")


def without_its_end(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


AFRESH = "; put a whole copy of it back, or start a new run, with the settings in "
MODELS = "; put a whole copy of it back, or remove .*round-000006 to open the run without these models"
SUMS = "models/round-000006/SHA256SUMS"


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("environment.json", halved, f"environment.json cannot be read: .*{AFRESH}"),
        ("environment.json", emptied, f"environment.json says nothing of 'format': it is not whole{AFRESH}"),
        ("environment.json", Path.unlink, f"of a run .*, as it has no environment.json{AFRESH}"),
        ("split.json", halved, f"split.json cannot be read: .*{AFRESH}"),
        ("split.json", Path.unlink, f"split.json is missing: .*{AFRESH}"),
        ("summary.json", halved, "summary.json cannot be read: .*; potluck resume .*run writes it anew"),
        (
            "summary.json",
            listed,
            r"the summary of a run: [\w ]*dictionary; potluck resume .*run writes it anew",
        ),
        (SUMS, Path.unlink, f"SHA256SUMS is missing, .*{MODELS}"),
        (SUMS, halved, f"SHA256SUMS is damaged: .*{MODELS}"),
        (SUMS, without_its_end, f"SHA256SUMS is damaged: .*{MODELS}"),
    ],
)
def test_a_damaged_small_file_says_what_can_still_be_done(
    whole: Path, tmp_path: Path, name: str, damage: Callable[[Path], Any], sentence: str
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    damage(folder / name)
    with pytest.raises(RunError, match=sentence):
        potluck.open(folder).frame()


def test_every_reader_of_a_damaged_file_gives_the_same_advice(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    halved(folder / "environment.json")
    said = set()
    for read in (potluck.open, resume, write_pages, partial(potluck.plot, "curves")):
        with pytest.raises(RunError, match=f"environment.json cannot be read: .*{AFRESH}") as error:
            read(folder)
        said.add(str(error.value))
    assert len(said) == 1


def test_what_can_still_be_done_is_true(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    halved(folder / "summary.json")
    (folder / "models/round-000006/about.json").unlink()
    resume(folder)
    found = potluck.open(folder)
    assert isinstance(found, potluck.RunResult)
    assert found.clients["0"].model() is not None


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("environment.json", halved, f"environment.json cannot be read: .*{AFRESH}"),
        ("split.json", halved, f"split.json is damaged{AFRESH}"),
        *(
            ("split.json", partial(recounted, counts=counts), f"split.json is damaged{AFRESH}")
            for counts in ([], {}, [1], ["a"])
        ),
        (
            "config.yaml",
            lambda path: path.write_bytes(b"\xff"),
            "config.yaml .*; put a whole copy of it back",
        ),
    ],
)
def test_a_damaged_small_file_stops_a_run_before_it_goes_on(
    folder: Path, name: str, damage: Callable[[Path], Any], sentence: str
) -> None:
    damage(folder / name)
    before = (folder / "timing.jsonl").read_bytes()
    with pytest.raises(RunError, match=sentence):
        resume(folder)
    assert (folder / "timing.jsonl").read_bytes() == before


def other_scalars(path: Path) -> None:
    """A number that is another one, in a file that can be read as before."""
    contract = json.loads(path.read_text())
    contract["steps"][0]["down"][0]["scalars"] += 1
    path.write_text(json.dumps(contract, indent=1) + "\n")


def a_terabyte(path: Path) -> None:
    """A file that claims so much, and takes no room."""
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("damage", [halved, flip, other_scalars, a_terabyte, Path.unlink])
def test_a_damaged_contract_is_named_and_written_anew(folder: Path, damage: Callable[[Path], Any]) -> None:
    path = folder / "contract.json"
    before = path.read_bytes()
    damage(path)
    if path.exists():
        with pytest.raises(RunError, match=r"contract\.json .*; put a whole copy .* potluck resume"):
            write_pages(folder)
    resume(folder)
    assert path.read_bytes() == before
    write_pages(folder)


@pytest.mark.parametrize("name", ["checkpoints", "models", "predictions", "report.html", "contract.json"])
def test_a_file_in_place_of_a_folder_is_found_before_training(folder: Path, name: str) -> None:
    path, before = folder / name, (folder / "timing.jsonl").read_bytes()
    if path.is_dir():
        shutil.rmtree(path)
    if path.suffix:
        path.unlink(missing_ok=True)
        path.mkdir()
    else:
        path.write_text("")
    with pytest.raises(RunError, match=rf"{name} is not a (file|folder), and .*; move it out of the way"):
        resume(folder)
    assert (folder / "timing.jsonl").read_bytes() == before


# --- a full disk ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [1, 4, 9, 14, 19, 27])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The disk is full at the n-th write that has to be on it: of a checkpoint, a log, a summary or a model."""
    calls, fsync = [0], os.fsync

    def full(handle: int) -> None:
        calls[0] += 1
        if calls[0] >= which + 4:  # the first four belong to the start of the run
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        run(experiment(), out=tmp_path / "run")
    monkeypatch.setattr(os, "fsync", fsync)
    resume(tmp_path / "run")
    assert same_logs(tmp_path / "run", whole)


def test_a_state_that_does_not_fit_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(RunError, match=r"No space left .*; make room, then continue with: potluck resume"):
        run(experiment(), out=tmp_path / "run")


def test_a_line_that_does_not_fit_leaves_no_part_of_it(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.write, [0]

    def full(handle: int, content: Any) -> int:
        calls[0] += 1
        if calls[0] > 7:
            if len(content) > 20:
                return write(handle, content[:20])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunError, match=r"No space left on device; make room, then continue with"):
        run(experiment(), out=tmp_path / "run")
    monkeypatch.setattr(os, "write", write)
    for log in LOGS:
        assert all(json.loads(line) for line in (tmp_path / "run" / log).read_text().splitlines())
    resume(tmp_path / "run")
    assert same_logs(tmp_path / "run", whole)


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(RunError, match=r"metrics\.jsonl: Read-only file system; copy the folder to a place"):
        resume(folder)


# --- trained models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["client-1.safetensors", "about.json"])
def test_a_flipped_bit_in_a_trained_model_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    potluck.open(folder)
    flip(folder / "models/round-000006" / name, 0.995)
    with pytest.raises(
        RunError, match=rf"models/round-000006/{name} (is damaged: its SHA-256|cannot be read|is not)"
    ):
        potluck.open(folder)


def test_a_trained_model_that_is_gone_is_named(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    (folder / "models/round-000006/client-1.safetensors").unlink()
    with pytest.raises(RunError, match=r"client-1\.safetensors is missing"):
        potluck.open(folder)


@pytest.mark.parametrize("name", ["notes", "client-9.safetensors"])
def test_a_file_that_is_not_on_the_disk_makes_no_room_for_larger_models(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    home = folder / "models/round-000006"
    about = json.loads((home / "about.json").read_text())
    del about["checksums"]
    for group in about["outline"]["groups"]:
        group["task"]["input"] = group["stored"]["shape"] = [1, 1000, 1000]
    (home / "about.json").write_text(json.dumps(about))
    (home / "SHA256SUMS").unlink()
    (home / name).touch()
    os.truncate(home / name, 1 << 40)
    monkeypatch.setattr(opened, "ROOM", 1 << 20)
    with pytest.raises(
        PotluckError, match=r"than there is room for here|client-9.* on the disk; put a whole"
    ):
        potluck.open(folder).clients["0"].predict(torch.zeros(1, 1, 1000, 1000))


def test_a_trained_model_that_is_not_on_the_disk_is_not_read(tmp_path: Path) -> None:
    """One of an earlier version has no checksum that would be wrong."""
    size, path = 1 << 40, tmp_path / "client-0.safetensors"
    head = json.dumps({"both/w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + size)
    with pytest.raises(RunError, match=r"client-0\.safetensors cannot be read .* are on the disk"):
        read_state(path, "after_training")


# --- checkpoints that are gone --------------------------------------------------------------------------


def test_a_run_whose_checkpoints_are_gone_is_not_thrown_away(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints")
    for summary in (True, False):
        if not summary:  # it was stopped, and has rounds that a checkpoint had
            (folder / "summary.json").unlink()
        before = {path: path.read_bytes() for path in folder.rglob("*.json*") if path.name != "status.json"}
        with pytest.raises(RunError, match=r"its checkpoints are gone; put .* --from-round 0"):
            resume(folder)
        assert {path: path.read_bytes() for path in before} == before
    resume(folder, from_round=0)
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_manifests_that_nobody_can_read_are_none_to_remove(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    (folder / "checkpoints" / "checkpoint.json").unlink()
    for path in (folder / "checkpoints").glob("checkpoint-*.json"):
        path.write_bytes(path.read_bytes()[:-3])
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    with pytest.raises(RunError, match=r"no checkpoint in .* can be read, .*--from-round 0"):
        resume(folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before
    resume(folder, from_round=0)
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["clients-abc.safetensors", "clients-.safetensors", "clients-٣.safetensors"])
def test_a_stray_file_among_the_states_is_left_alone(folder: Path, whole: Path, name: str) -> None:
    (folder / "checkpoints" / name).write_text("mine")
    resume(folder)
    assert (folder / "checkpoints" / name).read_text() == "mine"
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_folder_named_like_a_checkpoint_is_left_alone(folder: Path, whole: Path) -> None:
    (folder / "checkpoints" / "checkpoint-000009.json").mkdir()
    resume(folder)
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["round-5", "round-٣", ".round-x", ".round-000003.txt"])
def test_odd_names_among_kept_models_are_left_alone(folder: Path, whole: Path, name: str) -> None:
    (folder / "models").mkdir(exist_ok=True)
    if name.startswith("."):
        (folder / "models" / name).write_text("mine")
    else:
        (folder / "models" / name).mkdir()
        (folder / "models" / name / "about.json").write_text("{}")
    resume(folder)
    assert (folder / "models" / name).exists()
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    potluck.open(folder)


@pytest.mark.parametrize(
    "choice",
    [
        {"option": "d1", "chosen": 8, "curve": [], "rounds": 1, "tolerance": 0},
        {"option": "__class__", "chosen": 8, "rounds": 1, "tolerance": 0}
        | {"curve": [{"value": 8, "validation": 0.5, "scalars": 1, "bytes": 4}]},
    ],
)
def test_a_choice_that_no_pilot_run_made_is_refused_before_training(folder: Path, choice: Any) -> None:
    before = (folder / "metrics.jsonl").read_bytes()
    (folder / "tuning.json").write_text(json.dumps(choice))
    with pytest.raises(RunError, match=r"tuning\.json"):
        resume(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_folder_of_checkpoints_that_cannot_be_written_is_named_before_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tempfile.TemporaryFile

    def refused(dir: Path) -> Any:
        if dir.name == "checkpoints":
            raise PermissionError(13, "Permission denied")
        return usual(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(RunError, match=r"checkpoints.*Permission denied; copy the folder to a place"):
        resume(folder)


def test_a_file_that_may_not_be_read_is_not_called_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "potluck.report.reading.own_place", lambda traceback: None
    )  # as if raised in the library
    with (
        pytest.raises(RunError, match=r"log cannot be read: Permission denied; check its rights"),
        reading(Path("log")),
    ):
        raise PermissionError(13, "Permission denied")
