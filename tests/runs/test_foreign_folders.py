"""Run folders that somebody prepared: nothing outside is read, written or removed, and no code runs unasked."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

import potluck
import potluck.core.method
import potluck.runs.loop
from helpers import TINY, changed_experiment, stopped_run
from potluck import files
from potluck.data import split_lines
from potluck.data.split import Split
from potluck.deploy.run import open_folder
from potluck.engine.store.checkpoints import Checkpoints
from potluck.engine.store.manifest import _seal
from potluck.errors import ConfigError, DataError, PotluckError, RunError
from potluck.experiment import overrides
from potluck.experiment.schema import Experiment
from potluck.files import read_bounded, read_json, refuse_links, sha256, write_whole
from potluck.report.log import natural, read_config
from potluck.report.split_file import read_split
from potluck.runs.api import resume, run
from potluck.runs.folder import LOGS, RunFolder
from potluck.runs.kept_models.files import check_models, write_models
from potluck.runs.log_marks import mark_of
from potluck.runs.own_code import check_trusted, own_code, reach
from potluck.runs.pages import write_pages
from potluck.runs.started_here import is_sealed, seal
from potluck.runs.stored import read_client_ids

SETTINGS: dict[str, Any] = TINY | {"evaluate": {"predictions": "last"}, "checkpoint": {"every": 0}}


def experiment(**changes: Any) -> Experiment:
    return changed_experiment(SETTINGS, changes)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_run(experiment(), tmp_path_factory.mktemp("foreign") / "run", 2)


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Somebody's own folder, which has to stay as it is."""
    home = tmp_path / "elsewhere"
    (home / "papers").mkdir(parents=True)
    (home / "letter").write_text("dear you")
    (home / "papers/clients-00000001.safetensors").write_text("mine")
    (home / "papers/round-000009.parquet").write_text("mine too")
    return home


def content(home: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file()}


# --- links ----------------------------------------------------------------------------------------------

INSIDE = [
    ".lock", "metrics.jsonl", "timing.jsonl", "environment.json", "split.json", "config.yaml", "report.html",
    "summary.json", "federation.json", "tuning.json", "trackers.json", ".metrics.jsonl.next", "checkpoints",
    "checkpoints/checkpoint.json", "checkpoints/server-000002.safetensors",
    "checkpoints/.clients-00000009.safetensors",
    "models", "models/.round-000003", "predictions", "predictions/round-000002.parquet", "pilots", "clients",
    "clients/0", "flower", "tensorboard", "wandb", "wandb/run-1",
]  # fmt: skip


TARGETS = ["letter", "papers", "new"]  # a file, a folder, and what is not there
LINKS = [(name, TARGETS[place % 3]) for place, name in enumerate(INSIDE)]


@pytest.mark.parametrize(("name", "target"), LINKS)
def test_a_link_out_of_the_folder_is_never_followed(
    folder: Path, elsewhere: Path, name: str, target: str
) -> None:
    before, link = content(elsewhere), folder / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere / target)
    with pytest.raises(PotluckError) as caught:
        resume(folder)
    assert Path(name).name in str(caught.value)
    for look in (potluck.open, open_folder, write_pages):
        with pytest.raises(PotluckError, match="is a link to another place"):
            look(folder)
    assert content(elsewhere) == before
    assert not (elsewhere / "new").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_a_log_that_has_a_second_name_is_not_written(folder: Path, elsewhere: Path, name: str) -> None:
    shutil.copy(folder / name, elsewhere / "diary")
    (folder / name).unlink()
    os.link(elsewhere / "diary", folder / name)
    before = content(elsewhere)
    with pytest.raises(RunError, match=rf"cannot write .*{name}: it has a second name elsewhere"):
        resume(folder)
    assert content(elsewhere) == before


def test_the_lock_changes_no_file_it_is_linked_to(folder: Path, elsewhere: Path) -> None:
    (folder / ".lock").unlink(missing_ok=True)
    os.link(elsewhere / "letter", folder / ".lock")
    with pytest.raises(RunError, match="it has a second name elsewhere"):
        resume(folder)
    assert (elsewhere / "letter").read_text() == "dear you"


def test_a_file_of_a_checkpoint_with_a_second_name_stays_under_that(folder: Path, elsewhere: Path) -> None:
    for path in (folder / "checkpoints").iterdir():
        os.link(path, elsewhere / path.name)
    before = content(elsewhere)
    resume(folder)
    assert content(elsewhere) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", ".lock", "checkpoints/checkpoint.json"])
def test_a_pipe_does_not_keep_anybody_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for look in (resume, potluck.open, write_pages):
        with pytest.raises(RunError, match="is neither a file nor a folder"):
            look(folder)


def test_a_link_inside_the_folder_may_stay_and_so_may_the_one_to_a_log_of_wandb(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "wandb/run-1").mkdir(parents=True)
    (folder / "wandb/latest").symlink_to("run-1")
    (folder / "wandb/run-1/logs").mkdir()  # W&B keeps the log of its own service elsewhere
    (folder / "wandb/run-1/logs/debug-core.log").symlink_to(tmp_path / "core-debug.log")
    assert resume(folder).summary["rounds"] == 3


def test_a_folder_that_is_itself_reached_by_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(folder)
    assert resume(tmp_path / "latest").summary["rounds"] == 3
    assert len(potluck.open(tmp_path / "latest").clients) == 2


# --- changed while somebody works in it -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "moment"), [("checkpoints", "build"), ("predictions", "prepared"), ("models", "prepared")]
)
def test_a_link_that_appears_later_is_not_followed_either(
    folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    for file in ("server-000002.safetensors", "checkpoint-000009.json", "round-000002.parquet"):
        (elsewhere / "papers" / file).write_text("mine")
    (elsewhere / "papers/.round-000003").mkdir()
    (elsewhere / "papers/.round-000003/mine").write_text("mine")
    before = content(elsewhere)
    agreeing(folder, keep={"models": "last"})

    def swap(value: Any, *_: Any) -> Any:
        if (folder / name).exists():
            (folder / name).rename(folder.parent / "moved")
        (folder / name).symlink_to(elsewhere / "papers")
        return value

    where = {"build": "potluck.runs.api.check_keep", "prepared": "potluck.runs.loop.Run.play"}[moment]
    real = potluck.runs.loop.Run.play
    monkeypatch.setattr(where, swap if moment == "build" else lambda run: real(swap(run)))
    with pytest.raises(PotluckError, match=r"is a link, which is not followed|clients-\d+\S+ cannot be read"):
        resume(folder)
    assert content(elsewhere) == before


@pytest.mark.parametrize("name", ["about.json", "SHA256SUMS", "client-1.safetensors"])
def test_a_link_among_models_that_are_being_written_is_not_followed(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before, save = content(elsewhere), safetensors.torch.save_file

    def planted(tensors: Any, path: Path) -> None:
        if path.name == "client-0.safetensors":
            path.with_name(name).symlink_to(next(one for one in elsewhere.rglob("*") if one.is_file()))
        save(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", planted)
    about = {"files": {"0": "client-0.safetensors", "1": "client-1.safetensors"}}
    states = [(file, {"after_aggregation": {"w": torch.ones(2)}}) for file in about["files"].values()]
    with contextlib.suppress(RunError):
        write_models(tmp_path / "models" / "round-000003", states, about, "{}")
    assert content(elsewhere) == before


def test_settings_are_read_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "executed")))

    def swap(*_: Any) -> None:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump(config | {"plugins": [str(tmp_path / "evil.py")]}))

    monkeypatch.setattr("potluck.runs.resuming.check_trusted", swap)
    assert resume(folder).summary["rounds"] == 3
    assert not (tmp_path / "executed").exists()


def test_what_killed_processes_were_writing_is_removed_and_nothing_else(folder: Path) -> None:
    left = [".report.html.ab", "predictions/.round-000001.parquet.ab", "checkpoints/.checkpoint.json.ab"]
    for name in left:
        (folder / f"{name}.unfinished").write_text("half")
    (folder / "checkpoints/stray").mkdir()
    (folder / "checkpoints/thesis.tex").write_text("mine")
    resume(folder)
    assert not [*folder.rglob("*.unfinished")]
    assert {"stray", "thesis.tex"} <= {path.name for path in (folder / "checkpoints").iterdir()}


# --- manifests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forged",
    [
        {"server": "../../elsewhere/letter"},
        {"server": "/etc/passwd"},
        {"server": ""},
        {"server": "."},
        {"server": "checkpoint.json"},
        {"server": 7},
        {"clients": {"0": "../../elsewhere/papers/clients-00000001.safetensors"}},
        {"clients": {"0": "server-000002.safetensors/../../x"}},
        {"clients": ["clients-00000001.safetensors"]},
        {"clients": None},
        {"sha256": {}},
        {"sha256": None},
        {"round": -1},
        {"round": "2"},
        {"round": 10**30},
        {"round": True},
        {"logs": None},
        {"logs": {"metrics.jsonl": 5}},
        {"logs": {"metrics.jsonl": {"bytes": -5, "sha256": ""}}},
        {"logs": {name: {"bytes": 1} for name in LOGS}},
        {"accepted": 3},
        {"failures": None},
    ],
)
def test_a_forged_manifest_reaches_no_file_outside(folder: Path, elsewhere: Path, forged: Any) -> None:
    before = content(elsewhere)
    for path in (folder / "checkpoints").glob("checkpoint*.json"):
        values = json.loads(path.read_text()) | forged
        values.pop("seal")
        path.write_text(json.dumps(values | {"seal": _seal(values)}))
    with pytest.raises(RunError, match="checkpoint"):
        resume(folder)
    assert content(elsewhere) == before


def resealed(home: Path) -> None:
    """Write the checksums of what is there now into the manifests."""
    for path in home.glob("checkpoint*.json"):
        values = json.loads(path.read_text())
        values.pop("seal")
        values["sizes"] = {one: (home / one).stat().st_size for one in values["sha256"]}
        values["sha256"] = {one: sha256(home / one) for one in values["sha256"]}
        path.write_text(json.dumps(values | {"seal": _seal(values)}))


def test_a_mapping_that_its_method_cannot_use_is_one_sentence(tmp_path: Path) -> None:
    folder = stopped_run(experiment(method="fedproto"), tmp_path / "run", 2)
    (path,) = (folder / "checkpoints").glob("server-*2.safetensors")
    state = safetensors.torch.load_file(path)
    del state["prototypes/classes"]
    safetensors.torch.save_file(state, path)
    resealed(folder / "checkpoints")
    with pytest.raises(RunError, match=r"checkpoints does not fit this run: round 3 fails with KeyError.*; "):
        resume(folder)


def test_a_server_state_without_tensors_under_a_right_checksum_is_named(folder: Path) -> None:
    (path,) = (folder / "checkpoints").glob("server-*2.safetensors")
    path.write_bytes(b"none")
    resealed(folder / "checkpoints")
    with pytest.raises(
        RunError, match=rf"cannot be read: {path.name}: it is not safetensors, .*--from-round 1"
    ):
        resume(folder)


@pytest.mark.parametrize(
    ("who", "damage"),
    [
        ("server", "renamed"),
        ("clients", "renamed"),
        ("clients", "reshaped"),
        ("clients", "added"),
        ("clients", "no tensors"),
    ],
)
def test_other_tensors_under_a_right_checksum_are_one_sentence(folder: Path, who: str, damage: str) -> None:
    home = folder / "checkpoints"
    for path in sorted(home.glob(f"{who}-*.safetensors")):
        state = safetensors.torch.load_file(path)
        name = max(state, key=lambda name: state[name].dim())
        value = state[name].clone() if damage == "added" else state.pop(name)
        other = {"renamed": {"other/x": value}, "reshaped": {name: value[:1].clone()}, "added": {"x": value}}
        safetensors.torch.save_file(state | other.get(damage, {}), path)
        if damage == "no tensors":
            path.write_bytes(b"none")
    resealed(home)
    with pytest.raises(
        RunError, match=rf"is not one of this run: .*({who.rstrip('s')}.*tensor|cannot be read)"
    ):
        resume(folder)


@pytest.mark.parametrize(
    "forged",
    [
        {"mode": None},
        {"when": "later"},
        {"test": 5},
        {"test": {"accuracy": "high"}},
        {"test": {"accuracy": 10**400}},
    ],
)
def test_a_forged_log_that_no_observer_understands_is_named(folder: Path, forged: Any) -> None:
    log = folder / "metrics.jsonl"
    *others, last = log.read_text().splitlines()
    line = {key: value for key, value in (json.loads(last) | forged).items() if value is not None}
    log.write_text("\n".join([*others, json.dumps(line)]) + "\n")
    for path in (folder / "checkpoints").glob("checkpoint*.json"):
        values = json.loads(path.read_text())
        values["logs"][log.name] = mark_of(log.read_bytes())
        path.write_text(json.dumps(values))
    resealed(folder / "checkpoints")
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged, or was not written by potluck"):
        resume(folder)


def test_a_checkpoint_of_another_run_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    stopped_run(experiment(seed=7, models=["mlp-large"]), other, 2)
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(other / "checkpoints", folder / "checkpoints")
    for log in ("metrics.jsonl", "ledger.jsonl", "timing.jsonl"):
        shutil.copy(other / log, folder / log)
    with pytest.raises(RunError, match="is not one of this run"):
        resume(folder)


# --- code and places ------------------------------------------------------------------------------------

EVIL = "from pathlib import Path\nPath({mark!r}).write_text('x')\n"


def agreeing(folder: Path, **changes: Any) -> None:
    """Make a folder say something else of itself, in all places."""
    values = yaml.safe_load((folder / "config.yaml").read_text()) | changes
    about = json.loads((folder / "environment.json").read_text())
    about |= {"settings": about["settings"] | changes, "code": about["code"] | own_code(values)}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "environment.json").write_text(json.dumps(about))


def test_code_beside_a_folder_one_did_not_start_needs_trust(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "executed")))
    agreeing(folder, plugins=[str(tmp_path / "evil.py")])
    with pytest.raises(RunError, match=r"you did not start this run.*evil\.py.*--trust"):
        resume(folder)
    assert not (tmp_path / "executed").exists()
    resume(folder, trust=True)
    assert (tmp_path / "executed").exists()


def test_the_address_of_a_cluster_is_sealed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    begun, other = ({"engine": {"name": "ray", "address": f"10.0.0.5:{port}"}} for port in (6379, 6666))
    about = {"code": {}, "seal": seal(reach(begun, {}))}
    check_trusted(tmp_path, begun, about)
    with pytest.raises(RunError, match=r"you did not start this run .* would use engine\.address; look"):
        check_trusted(tmp_path, other, about)


@pytest.mark.parametrize("file", ["evil.py", "sub\ndir/evil.py"])
@pytest.mark.parametrize("function", ["f", "éf", "f g", "1", ""])
def test_no_spelling_of_a_function_is_run_unasked(folder: Path, file: str, function: str) -> None:
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(EVIL.format(mark=str(folder.parent / "executed")))
    agreeing(folder, metrics=[f"{path}:{function}"])
    with pytest.raises(RunError, match="comes with the run folder, and going on would run it"):
        resume(folder, rounds=9)
    assert not (folder.parent / "executed").exists()


@pytest.mark.parametrize("module", ["posix", "antigravity", "this"])
def test_modules_of_the_library_are_code_too(folder: Path, module: str) -> None:
    agreeing(folder, plugins=[module])
    loaded = module in sys.modules
    with pytest.raises(RunError, match=rf"you did not start this run.*{module}"):
        resume(folder)
    assert (module in sys.modules) == loaded


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_files_follow_the_umask_and_others_cannot_hold_the_lock(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "some.json", b"{}")
        with RunFolder(tmp_path).locked():
            pass
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"some.json": 0o666 & ~umask, ".lock": 0o640 & ~umask}


def test_a_seal_of_another_user_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "own.py").write_text("x = 1\n")
    folder = run(experiment(plugins=[str(tmp_path / "own.py")]), out=tmp_path / "run").folder
    resume(folder)
    key = Path(os.environ["XDG_STATE_HOME"]) / "potluck/seal.key"
    assert key.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("other")))
    with pytest.raises(RunError, match="you did not start this run"):
        resume(folder)
    resume(folder, trust=True)


def test_the_folder_where_one_is_has_no_key_for_seals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert seal({"code": "a"}) is not None
    assert not (tmp_path / "state").exists()
    assert (tmp_path / "home/.local/state/potluck/seal.key").exists()


def test_nobody_else_can_put_a_key_for_seals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = os.umask(0)
    try:
        first = seal({"code": "a"})
    finally:
        os.umask(before)
    home = tmp_path / "state" / "potluck"
    assert [one.stat().st_mode & 0o777 for one in (tmp_path / "state", home, home / "seal.key")] == [
        0o700,
        0o700,
        0o600,
    ]
    assert is_sealed({"code": "a"}, first)
    home.chmod(0o777)  # as earlier versions left it under such a umask
    assert not is_sealed({"code": "a"}, first)
    second = seal({"code": "a"})
    assert second != first
    assert is_sealed({"code": "a"}, second)
    assert home.stat().st_mode & 0o777 == 0o700
    (home / "seal.key").chmod(0o666)
    assert not is_sealed({"code": "a"}, second)


def test_without_a_home_a_run_begins_and_trust_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("x = 1\n")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    folder = run(experiment(plugins=[str(tmp_path / "own.py")]), out=tmp_path / "run").folder
    with pytest.raises(RunError, match="--trust"):
        resume(folder)


@pytest.mark.parametrize(
    ("track", "named"),
    [
        ({"tensorboard": {"clients": True, "folder": "ELSEWHERE"}}, "track.tensorboard.folder"),
        ([{"tensorboard": {"folder": "ELSEWHERE"}}], "track.tensorboard.folder"),
        ({"wandb": {"project": "theirs"}}, "track.wandb"),
        ("mlflow", "track.mlflow"),
        ([{"wandb": None}], "track.wandb"),
    ],
)
def test_a_tracker_writes_nowhere_unasked(folder: Path, elsewhere: Path, track: Any, named: str) -> None:
    before = content(elsewhere)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    text = json.dumps(config | {"track": track}).replace("ELSEWHERE", str(elsewhere))
    (folder / "config.yaml").write_text(text)
    with pytest.raises(RunError, match=rf"you did not start this run.*{named}"):
        resume(folder)
    assert content(elsewhere) == before


@pytest.mark.parametrize(
    ("block", "value"),
    [
        ("models", {"pool": [{"name": "hf-vit", "weights": "evil/repo"}]}),
        (
            "method",
            {"name": "fedavg", "weights": "samples", "small": {"name": "hf-vit", "weights": "evil/repo"}},
        ),
        ("data", {"name": "digit-captions", "tokenizer": "evil/repo"}),
    ],
)
def test_no_repository_that_a_folder_names_is_asked_for(folder: Path, block: str, value: Any) -> None:
    known = yaml.safe_load((folder / "config.yaml").read_text())[block]
    agreeing(folder, **{block: known | value})
    with pytest.raises(RunError, match=r"you did not start this run.*would use evil/repo; look.*--trust"):
        resume(folder)


def test_a_tracker_that_you_add_to_a_run_of_yours_needs_no_trust_next_time(folder: Path) -> None:
    resume(folder, overrides=[{"track": {"tensorboard": {"folder": str(folder.parent / "curves")}}}])
    resume(folder, rounds=4)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_settings_of_wandb_that_come_with_a_folder_are_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (folder, folder.parent):
        (place / "wandb").mkdir()
        (place / "wandb/settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    agreeing(folder, track={"wandb": {"mode": "offline"}})
    told: list[str] = []
    monkeypatch.setattr(potluck.Observer, "advise", lambda self, sentence: told.append(sentence))
    for place in (folder, folder.parent):
        monkeypatch.chdir(place)
        resume(folder, trust=True, rounds=4, watcher=potluck.Observer())
    told = [one for one in told if "wandb" in one]
    assert ["wandb/settings in the current folder may be somebody" in one for one in told] == [True] * 2


# --- comparisons ----------------------------------------------------------------------------------------


def test_a_comparison_with_a_run_elsewhere_is_refused(tmp_path: Path, elsewhere: Path) -> None:
    asked = {key: value for key, value in SETTINGS.items() if key != "method"}
    folder = tmp_path / "compared"
    potluck.compare(methods=["fedavg"], out=folder, **asked, seeds=[0])
    shutil.move(folder / "fedavg-seed0", elsewhere / "moved")
    (folder / "fedavg-seed0").symlink_to(elsewhere / "moved")
    before = content(elsewhere)
    with pytest.raises(RunError, match="fedavg-seed0 is a link to another place"):
        potluck.compare(methods=["fedavg"], out=folder, **asked, seeds=[0])
    with pytest.raises(RunError, match="fedavg-seed0 is a link to another place"):
        potluck.open(folder)
    with pytest.raises(RunError, match="fedavg-seed0 is a link to another place"):
        write_pages(folder)
    assert content(elsewhere) == before


# --- half-made folders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(".lock",), (".lock", "split.json", "contract.json", "environment.json")])
def test_a_half_made_folder_is_told_what_it_is(folder: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    half = tmp_path / "half"
    half.mkdir()
    for name in names:
        shutil.copy(folder / name, half / name) if (folder / name).exists() else (half / name).touch()
    with pytest.raises(RunError, match="its run was stopped before the first round"):
        resume(half)
    run(experiment(), out=half)
    assert len(potluck.open(half).clients) == 2


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_played(
    folder: Path, tmp_path: Path
) -> None:
    wanted = tmp_path / os.fsdecode(b"n\xff")
    with pytest.raises(RunError, match="is not text in UTF-8; rename the folder"):
        run(experiment(), out=wanted)
    with pytest.raises(RunError, match="is not text in UTF-8"):
        potluck.compare(experiment(), methods=["fedavg"], out=wanted)
    assert not wanted.exists()
    for look in (resume, open_folder, potluck.open):
        with pytest.raises(RunError, match="is not text in UTF-8"):
            look(folder.rename(wanted) if folder.exists() else wanted)


def test_a_command_line_that_is_no_text_does_not_spoil_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["potluck", "run", os.fsdecode(b"gr\xf6\xdfe.yaml")])
    folder = run(experiment(), out=tmp_path / "run").folder
    assert read_json(folder / "environment.json")["command"] == "potluck run gr??e.yaml"
    resume(folder, rounds=4)


def test_a_run_that_python_started_as_a_module_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/potluck/__main__.py", "run", "digits.yaml"])
    folder = run(experiment(), out=tmp_path / "run").folder
    assert read_json(folder / "environment.json")["command"] == "python -m potluck run digits.yaml"


def test_a_path_that_is_no_text_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    home = tmp_path / os.fsdecode(b"gr\xf6\xdfe")
    home.mkdir()
    (home / "own.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"the path .*own\.py' is not text in UTF-8; rename it"):
        run(experiment(plugins=[str(home / "own.py")]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    with pytest.raises(RunError, match="has something other than a run; choose another folder"):
        run(experiment(), out=tmp_path / "mine")
    with pytest.raises(RunError, match="so it is not a run folder"):
        resume(tmp_path / "mine")
    (tmp_path / "mine/config.yaml").write_text("site_name: mine")
    with pytest.raises(RunError, match="is not the folder of a run or of a comparison"):
        write_pages(tmp_path / "mine")
    assert Checkpoints(tmp_path / "mine/checkpoints").load() is None


def test_a_file_of_any_size_or_depth_takes_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "environment.json").open("wb") as file:
        file.truncate(1 << 36)  # without a byte on the disk
    with pytest.raises(RunError, match="it has more than 1,073,741,824 bytes"):
        read_json(tmp_path / "environment.json")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(RunError, match=r"deep\.json cannot be read"):
        read_json(tmp_path / "deep.json")
    (tmp_path / "config.yaml").write_text("[" * 20_000)
    with pytest.raises(RunError, match="nested too deeply"):
        read_config(tmp_path)
    assert sorted(["9" * 5000, "10", "9"], key=natural)[:2] == ["9", "10"]


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/checkpoint.json",
        "checkpoints/checkpoint-000002.json",
        "timing.jsonl",
        ".metrics.jsonl.next",
    ],
)
def test_no_file_of_a_folder_is_read_whole_whatever_its_size(folder: Path, name: str) -> None:
    (folder / name).touch()
    os.truncate(folder / name, 1 << 36)  # without a byte on the disk
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30), hard))
    try:
        with contextlib.suppress(RunError):
            resume(folder, rounds=4)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("text", ["", '{"seed": 0,\n', '{"seed": 0,\n"clients": [\n'])
def test_a_split_without_the_end_of_a_line_takes_no_memory(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_lines, "LONGEST", 1 << 20)
    (folder / "split.json").write_text(text)
    os.truncate(folder / "split.json", 1 << 36)  # without a byte on the disk
    for read in (read_split, read_client_ids):
        with pytest.raises(
            RunError, match=r"split\.json cannot be read: it has more than 1,073,741,824 bytes"
        ):
            read(folder / "split.json" if read is read_split else folder)
    with pytest.raises(RunError, match=r"split\.json is damaged"):
        resume(folder)


def test_a_file_of_nothing_but_empty_lists_takes_no_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gigabyte of them would take thirty."""
    monkeypatch.setattr(files, "MOST_BLOCKS", 10_000)
    empty = "[" + "[]," * 10_000 + "[]]"
    for name in ("environment.json", "split.json", "checkpoints/checkpoint.json"):
        whole = (folder / name).read_text()
        (folder / name).write_text(empty)
        with pytest.raises(
            RunError, match=r"it has more values than any file of a run|split\.json is damaged"
        ):
            resume(folder)
        (folder / name).write_text(whole)
    resume(folder)


def test_a_file_that_grows_or_has_no_size_is_read_no_further_than_allowed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        read_bounded(Path("/proc/self/status"), 10)  # its size is 0
    assert b"Name:" in read_bounded(Path("/proc/self/status"))


def test_a_long_file_without_content_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of zeros that are not on the disk would take two gigabytes of memory as a text."""
    path = tmp_path / "a.json"
    path.write_text("{}")
    os.truncate(path, 1 << 27)
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(
        RunError, match=r"a\.json cannot be read: it has 134,217,728 bytes, of which .* on the"
    ):
        read_json(path)
    with pytest.raises(DataError, match=r"the split .* cannot be read \(it has 134,217,728 bytes"):
        Split.load(path)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{there}: &{there} [{', '.join(['*' + before] * 10)}]\n"
    for before, there in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB + "plugins: *f",
        "plugins: &z [*z]",
        "plugins: 5",
        "plugins: true",
        "plugins: []\nx: 2001-99-99",
        "plugins: []\nx: !!bool maybe",
        "plugins: []\nplugins: []",
    ],
)
def test_settings_that_are_none_are_refused_by_whoever_reads_them(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(RunError, match=r"config\.yaml"):
        own_code({"plugins": read_config(tmp_path)["plugins"]})


def test_settings_of_very_many_values_are_refused_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overrides, "_LARGEST", 1000)
    text = "plugins: []\nx:\n" + "- x\n" * 3000
    (tmp_path / "config.yaml").write_text(text)
    monkeypatch.setattr(overrides._Yaml, "construct_document", lambda *given: pytest.fail("all was composed"))
    with pytest.raises(RunError, match=r"config\.yaml, line \d+.* it has too many values for an experiment"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "SHA256SUMS", "plug.py"])
def test_a_small_file_of_any_size_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    os.truncate(tmp_path / name, 1 << 36)  # without a byte on the disk
    with pytest.raises(RunError, match=rf"{name} cannot be read: it has more than [\d,]+ bytes"):
        {"config.yaml": read_config, "SHA256SUMS": check_models}.get(name, _looked_at)(tmp_path)


def _looked_at(folder: Path) -> None:
    own_code({"plugins": [str(folder / "plug.py")]})


@pytest.mark.parametrize(
    "code",
    ["x=" + "-" * 200_000 + "1", "x=" + "a." * 100_000 + "a", "x=" + "(" * 5000, "import " + "a" * 5000],
)
def test_code_that_cannot_be_parsed_is_still_known_by_its_content(tmp_path: Path, code: str) -> None:
    (tmp_path / "plug.py").write_text(code)
    assert len(own_code({"plugins": [str(tmp_path / "plug.py")]})) == 1


def test_names_of_code_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nsa/nsb").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert own_code({"plugins": ["nsa.nsb.x", "a" * 5000 + ".py", "\0.py", "", ".."]}) == {}


def test_a_seal_may_be_any_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert is_sealed({"a": None}, seal({"a": None}))
    assert not is_sealed({"a": None}, "é" * 64)


def test_a_circle_of_links_and_folders_that_are_too_deep_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/loop").symlink_to("loop")
    with pytest.raises(RunError, match="run: loop is a link"):
        refuse_links(tmp_path / "run")
    (tmp_path / "run/loop").unlink()
    here = os.open(tmp_path / "run", os.O_RDONLY)
    for _ in range(25):
        os.mkdir("d" * 200, dir_fd=here)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    with pytest.raises(RunError, match="run cannot be searched for links: File name too long"):
        refuse_links(tmp_path / "run")


def test_folders_that_are_too_deep_to_be_removed_are_refused(folder: Path) -> None:
    (folder / "models/.round-000003" / "/".join("a" * 120)).mkdir(parents=True)
    with pytest.raises(
        RunError, match=r"run: models has folders in folders, more than 100 deep; move it away"
    ):
        resume(folder)
    shutil.move(folder / "models", folder.parent)
    resume(folder)


@pytest.mark.parametrize(
    ("block", "value", "named"),
    [
        ("engine", {"name": {"a": 1}}, r"engine\.name"),
        ("keep", "all", r"environment\.json is damaged"),
        ("training", 5, "training"),
        ("checkpoint", {"every": "soon"}, r"environment\.json is damaged"),
    ],
)
def test_settings_that_are_none_in_what_the_run_knows_of_itself(
    folder: Path, block: str, value: Any, named: str
) -> None:
    about = read_json(folder / "environment.json")
    about["settings"][block] = value
    (folder / "environment.json").write_text(json.dumps(about))
    if block == "checkpoint":
        shutil.rmtree(folder / "checkpoints")
    with pytest.raises(RunError, match=named):
        resume(folder, rounds=4)


def test_a_checksum_of_a_terabyte_keeps_nobody_from_ending(tmp_path: Path) -> None:
    """Without a byte on the disk: its checksum takes a quarter of an hour."""
    for name in ("a.safetensors", "b.safetensors", "about.json"):
        (tmp_path / name).write_text(name)
    sums = {path.name: sha256(path) for path in sorted(tmp_path.iterdir())}
    (tmp_path / "SHA256SUMS").write_text("".join(f"{found}  {name}\n" for name, found in sums.items()))
    check_models(tmp_path)
    (tmp_path / "a.safetensors").write_text("b")
    os.truncate(tmp_path / "b.safetensors", 1 << 40)
    with pytest.raises(RunError, match=r"a\.safetensors is damaged"):
        check_models(tmp_path)
    found = files.by_readers(lambda path, stop: sha256(path, stop=stop), sorted(tmp_path.iterdir()))
    next(found)
    found.close()
