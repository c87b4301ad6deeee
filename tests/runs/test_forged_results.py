"""Finished runs, comparisons and sweeps that somebody changed: nothing else than their logs say is shown."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from torch import nn

import potluck
from helpers import TINY
from potluck.errors import RunError
from potluck.report.latex import comparison_table
from potluck.runs.comparisons.comparison import Comparison, Sweep
from potluck.runs.kept_models.keeping import FOLDER as MODELS
from potluck.runs.pages import write_pages
from potluck.runs.results.run_result import RunResult

RUN, LOG = "fedproto-seed0", "metrics.jsonl"
EVIL = r"\input{/etc/passwd}"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = TINY | {"training": {"rounds": 2, "batch_size": 64}, "evaluate": {"predictions": True}}
    home = tmp_path_factory.mktemp("forged") / "all"
    potluck.compare(potluck.Experiment.make(**settings), methods=["fedproto"], out=home)
    return home


@pytest.fixture
def home(played: Path, tmp_path: Path) -> Path:
    """The folder of a comparison, for every test its own."""
    return Path(shutil.copytree(played, tmp_path / "all"))


@pytest.fixture
def folder(home: Path) -> Path:
    """The folder of one of its runs."""
    return home / RUN


@pytest.fixture
def alone(folder: Path, tmp_path: Path) -> Path:
    """A copy of that run, which belongs to no comparison."""
    return Path(shutil.copytree(folder, tmp_path / "alone"))


def changed(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def longer(folder: Path, **other: Any) -> None:
    """Add a line to the log, like the last one."""
    line = json.loads((folder / LOG).read_text().splitlines()[-1]) | other
    with (folder / LOG).open("a") as file:
        file.write(json.dumps(line) + "\n")


def opened(folder: Path) -> RunResult:
    result = potluck.open(folder)
    assert isinstance(result, RunResult)
    return result


def compared(folder: Path) -> Comparison:
    result = potluck.open(folder)
    assert isinstance(result, Comparison)
    return result


# --- names that lead elsewhere --------------------------------------------------------------------------


@pytest.mark.parametrize("up", ["..", "absolute"])
def test_a_comparison_and_a_sweep_name_folders_beside_them_only(home: Path, up: str) -> None:
    outside = Path(shutil.copytree(home, home.parent / "outside"))
    name = f"../{outside.name}" if up == ".." else str(outside)
    changed(
        home / "comparison.json", lambda value: value["methods"][0]["runs"].update({"0": f"{name}/{RUN}"})
    )
    with pytest.raises(
        RunError, match=r"comparison\.json names .*outside.*, which is not a folder beside it"
    ):
        potluck.open(home)
    sweep = home.parent / "sweep"
    sweep.mkdir()
    (sweep / "sweep.json").write_text(json.dumps({"settings": {name: {"seed": 1}}}))
    with pytest.raises(RunError, match=r"sweep\.json names .*outside.*, which is not a folder beside it"):
        potluck.open(sweep)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("experiment.yaml", lambda path: path.write_bytes(b"\xff"), r"experiment\.yaml is damaged"),
        ("experiment.yaml", make_folder, r"experiment\.yaml is damaged"),
        (f"{RUN}/report.html", make_folder, r"report\.html: there is a folder of that name; move it away"),
    ],
)
def test_pages_blame_the_file_that_is_wrong(
    home: Path, name: str, damage: Callable[[Path], Any], sentence: str
) -> None:
    damage(home / name)
    with pytest.raises(RunError, match=sentence):
        write_pages(home)


def test_pages_clear_what_killed_calls_left_and_nothing_of_a_living_one(home: Path) -> None:
    names = (
        ".comparison.html.ab12cd34",
        f"{RUN}/.report.html.ab12cd34",
        ".comparison.html.12345678",
        ".mine",
    )
    left = [home / f"{name}.unfinished" for name in names]
    for path in left:
        path.write_text("half")
    with left[2].open() as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        write_pages(home)
    assert [path.exists() for path in left] == [False, False, True, True]


# --- logs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [3_000, 50_000])
def test_a_line_that_is_nested_deeply_ends_no_process(folder: Path, depth: int) -> None:
    shutil.rmtree(folder / "checkpoints")
    result = opened(folder)
    line = (folder / LOG).read_text().splitlines()[0]
    with (folder / LOG).open("a") as file:
        file.write(line.replace("}", '}, "x": ' + '{"a": ' * depth + "1" + "}" * depth, 1) + "\n")
    for read in (
        lambda: potluck.open(folder),
        result.frame,
        lambda: potluck.open(folder.parent),
        result.plot,
    ):
        with pytest.raises(RunError, match=r"metrics\.jsonl, line \d+ is damaged: .*nested more deeply"):
            read()


def test_a_log_that_goes_on_after_its_end_is_refused(home: Path, folder: Path) -> None:
    longer(folder, round=1)
    for place in (folder, home):
        with pytest.raises(RunError, match=r"metrics\.jsonl is damaged: it is longer than it was at the end"):
            potluck.open(place)


def test_rounds_without_a_checkpoint_may_follow_the_last_one(alone: Path) -> None:
    potluck.resume(alone, rounds=3, overrides=["checkpoint.every=never"])
    assert opened(alone).summary["rounds"] == 3


# --- what is said of the log ----------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["last", "worst_tenth", "coverage", "per_client"])
def test_a_summary_that_says_something_else_than_the_log_is_refused(folder: Path, key: str) -> None:
    lie: Any = {"0": 0.99, "1": 0.99} if key == "per_client" else 0.99
    changed(folder / "summary.json", lambda value: value["accuracy"].update({key: lie}))
    with pytest.raises(
        RunError, match=rf"summary\.json does not agree with metrics\.jsonl.* accuracy\.{key}"
    ):
        potluck.open(folder)


@pytest.mark.parametrize(
    ("lie", "beside"),
    [
        ({"rounds": 3}, r"timing\.jsonl beside it: rounds"),
        ({"seconds_per_round": 9.0}, r"timing\.jsonl beside it: seconds_per_round"),
        ({"messages": {"up": {"scalars": 1}}}, r"ledger\.jsonl beside it: messages\.up\.scalars"),
        ({"method": "fedmrl"}, r"environment\.json beside it: method"),
        ({"seed": 8}, r"environment\.json beside it: seed"),
        ({"split": "0" * 64}, r"environment\.json beside it: split"),
    ],
)
def test_a_summary_that_says_something_else_than_the_other_files_is_refused(
    folder: Path, lie: dict[str, Any], beside: str
) -> None:
    changed(folder / "summary.json", lambda value: value.update(lie))
    for read in (potluck.open, write_pages):
        with pytest.raises(RunError, match=rf"summary\.json does not agree with {beside} is another"):
            read(folder)


@pytest.mark.parametrize("block", ["accuracy", "difference", "measured"])
def test_a_comparison_that_says_something_else_than_the_logs_is_refused(home: Path, block: str) -> None:
    def lie(value: Any) -> None:
        entry = next(one for one in value["methods"] if one["method"] == "fedproto")
        (entry["measured"][0]["worst_tenth"] if block == "measured" else entry[block])["mean"] = 0.99

    changed(home / "comparison.json", lie)
    with pytest.raises(RunError, match=rf"comparison\.json does not agree with the logs.*{block}.*mean"):
        potluck.open(home)


def test_a_comparison_without_its_runs_is_still_shown(home: Path) -> None:
    shutil.rmtree(home / RUN)
    assert "fedproto" in repr(potluck.open(home))


# --- runs of a comparison -------------------------------------------------------------------------------


def test_a_run_of_a_comparison_is_checked_like_any_other(home: Path, folder: Path) -> None:
    model = folder / MODELS / "round-000002/client-0.safetensors"
    model.write_bytes(model.read_bytes()[:-3000] + bytes(3000))
    with pytest.raises(RunError, match=r"client-0\.safetensors is damaged"):
        compared(home).run("fedproto")
    log = (folder / LOG).read_text()
    (folder / LOG).write_text(log.replace('"accuracy": 0.', '"accuracy": 1.'))
    with pytest.raises(RunError, match=r"fedproto-seed0/metrics\.jsonl is damaged"):
        compared(home).frame()


def test_a_model_without_a_checksum_is_refused(folder: Path) -> None:
    sums = folder / MODELS / "round-000002/SHA256SUMS"
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(line for line in lines if "client-0" not in line))
    with pytest.raises(RunError, match=r"client-0\.safetensors has no line in SHA256SUMS"):
        potluck.open(folder)


# --- LaTeX ----------------------------------------------------------------------------------------------


def test_no_text_of_a_comparison_is_a_command_of_latex(home: Path) -> None:
    value = json.loads((home / "comparison.json").read_text())
    value |= {"name": EVIL, "data": EVIL, "partition": {"kind": EVIL}, "view": EVIL}
    for entry in value["methods"]:
        for one in (entry, *entry["measured"]):
            one |= {"when": EVIL, "mode": EVIL, "against": EVIL, "method": EVIL}
    assert r"\input" not in comparison_table(value)
    assert r"\textbackslash{}input" in comparison_table(value)


# --- everything else ------------------------------------------------------------------------------------


def shown(folder: Path) -> None:
    """Look at everything that a folder has."""
    result = potluck.open(folder)
    repr(result)
    result.frame()
    result.plot()
    if isinstance(result, RunResult):
        str(result)
        result.curves()
        result.confusion()
        result.clients["0"].classify(torch.zeros(2, 1, 8, 8))
    else:
        result.summary()
        result.latex()


def of_accuracy(**other: Any) -> Callable[[Path], None]:
    return lambda path: changed(path, lambda value: value["accuracy"].update(other))


def with_values(**other: Any) -> Callable[[Path], None]:
    return lambda path: changed(path, lambda value: value.update(other))


def with_line(**other: Any) -> Callable[[Path], None]:
    """A line more in a log that no checkpoint knows."""

    def add(path: Path) -> None:
        shutil.rmtree(path.parent / "checkpoints")
        longer(path.parent, **other)

    return add


def of_group(**other: Any) -> Callable[[Path], None]:
    """Another outline, and no checksums that would tell."""

    def change(path: Path) -> None:
        changed(path, lambda value: value.pop("checksums") and value["outline"]["groups"][0].update(other))
        path.with_name("SHA256SUMS").unlink()

    return change


def of_parquet(**other: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        import pandas as pd

        pd.read_parquet(path).assign(**other).to_parquet(path)

    return change


def of_a_stranger(path: Path) -> None:
    """Predictions of somebody who is not a client of the run."""
    file = path / Path(PREDICTIONS).name
    table = parquet.read_table(file)
    names = pa.array(["spy"] * len(table), pa.string())
    parquet.write_table(table.set_column(table.schema.get_field_index("client"), "client", names), file)


ABOUT = f"{RUN}/models/round-000002/about.json"
PREDICTIONS = f"{RUN}/predictions/round-000002.parquet"
TEST = {"accuracy": 0.5, "loss": 1.0, "samples": 9}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (f"{RUN}/config.yaml", lambda path: path.write_text("plugins: 5")),
        (f"{RUN}/config.yaml", lambda path: path.write_text("x: 2001-99-99")),
        (f"{RUN}/config.yaml", lambda path: path.write_text("x: !!bool maybe")),
        (f"{RUN}/environment.json", with_values(metrics={"accuracy": 5})),
        (f"{RUN}/summary.json", with_values(rounds=10**400)),
        (f"{RUN}/summary.json", with_values(messages={"up": {"scalars": "a"}})),
        (f"{RUN}/summary.json", of_accuracy(held_out=5)),
        (f"{RUN}/summary.json", of_accuracy(mode="none")),
        (f"{RUN}/{LOG}", with_line(**{"test.samples": 5})),
        (f"{RUN}/{LOG}", with_line(test=TEST | {"accuracy": [1]})),
        (f"{RUN}/{LOG}", with_line(test=TEST | {"accuracy": int("9" * 400)})),
        (f"{RUN}/{LOG}", with_line(test=TEST | {"samples": "x"}, round=1)),
        (f"{RUN}/{LOG}", with_line(mode="\ud800")),
        (ABOUT, of_group(stored={"type": "float32", "shape": [10**8] * 8})),
        (ABOUT, of_group(mean=[0.0] * 1000)),
        (ABOUT, of_group(class_names=["one"])),
        (ABOUT, lambda path: changed(path, lambda value: value["files"].update({"0": "a\0"}))),
        (PREDICTIONS, of_parquet(scores=5)),
        (PREDICTIONS, of_parquet(client=None)),
        (f"{RUN}/predictions", of_a_stranger),
        (PREDICTIONS, lambda path: (path.unlink(), path.mkdir())),
        (f"{RUN}/split.json", lambda path: changed(path, lambda value: value["clients"][0]["train"].pop())),
        ("comparison.json", with_values(level="x")),
        ("comparison.json", with_values(methods=["a"])),
        ("comparison.json", with_values(view=EVIL)),
        ("sweep.json", lambda path: path.write_text('{"settings": ["a"]}')),
        ("sweep.json", lambda path: path.write_text('{"settings": {"fedproto-seed0": 5}}')),
    ],
)
def test_what_makes_no_sense_is_said_of_its_file(
    home: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    damage(home / name)
    with pytest.raises(RunError, match=Path(name).name.replace(".", r"\.")):
        shown(home / name.split("/")[0] if "/" in name else home)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("tuning.json", {}),
        ("timing.jsonl", {}),
        ("environment.json", {"registered": [5]}),
        ("environment.json", {"models": True}),
    ],
)
def test_what_makes_no_sense_stops_a_run_that_goes_on(alone: Path, name: str, other: dict[str, Any]) -> None:
    if other:
        changed(alone / name, lambda value: value.update(other))
    else:
        (alone / name).write_text("[5]")
    with pytest.raises(RunError, match=name.replace(".", r"\.")):
        potluck.resume(alone, rounds=3)


def test_a_link_to_itself_is_said(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    for call in (potluck.open, potluck.resume):
        with pytest.raises(RunError, match=r"damaged|link"):
            call(folder)


def test_other_files_beside_predictions_are_left_alone(alone: Path) -> None:
    shutil.copy(alone / "predictions/round-000002.parquet", alone / "predictions/round-abc.parquet")
    assert set(opened(alone).predictions()["round"]) == {2}
    potluck.resume(alone, rounds=3)
    assert (alone / "predictions/round-abc.parquet").exists()


class Broken(nn.Module):
    """A user's model that cannot be built."""

    def __init__(self) -> None:
        super().__init__()
        raise ValueError("no weights at hand")


def test_an_error_in_code_of_the_user_is_not_blamed_on_a_file(folder: Path) -> None:
    changed(folder / "models/round-000002/about.json", lambda value: value.pop("checksums"))
    (folder / "models/round-000002/SHA256SUMS").unlink()
    result = potluck.open(folder, models={"0": Broken})
    assert isinstance(result, RunResult)
    with pytest.raises(Exception, match="no weights at hand") as caught:
        result.clients["0"].model()
    assert "damaged" not in str(caught.value)


def test_a_sweep_is_opened(home: Path) -> None:
    sweep = home.parent / "sweep"
    shutil.copytree(home, sweep / "a")
    (sweep / "sweep.json").write_text(json.dumps({"settings": {"a": {"seed": 0}}}))
    assert isinstance(potluck.open(sweep), Sweep)
