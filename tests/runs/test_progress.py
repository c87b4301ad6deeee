"""What is shown while runs go on."""

from __future__ import annotations

import io
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import potluck
from helpers import StopAfter
from potluck.errors import RunError
from potluck.runs.loop import Interrupted
from potluck.runs.observers import RoundEnd
from potluck.runs.observers.progress import LINES, NOTICES, SWITCH, Pace, clock, progress_display, showing


def play(console: Console, rounds: int, done: int = 0, runs: int = 1, notices: int = 0) -> None:
    """Runs that go well, as a display sees them."""
    with showing(console, runs) as display:
        for number in range(runs):
            watcher = display.watch(f"run {number}")
            watcher.begin("name", "method", rounds, done)
            for notice in range(notices):
                watcher.notice(f"client {notice} is [bold]away")
            for round_ in range(done + 1, rounds + 1):
                watcher.round(RoundEnd(round_, rounds, 0.5, 1.0, 2.0))
            watcher.end(Path("folder"))


def plain() -> Console:
    return Console(file=io.StringIO(), width=200)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("rounds", [1, 7, 20, 21, 500, 9999])
def test_plain_lines_stay_few_and_tell_first_and_last(rounds: int) -> None:
    console = plain()
    play(console, rounds)
    lines = shown(console).splitlines()
    assert len(lines) <= LINES + 2
    assert lines[0].startswith(f"run 0: round 1/{rounds}, accuracy 50.00 %")
    assert lines[-1] == f"run 0: round {rounds}/{rounds}, accuracy 50.00 %"


def test_a_resumed_run_says_where_it_goes_on() -> None:
    console = plain()
    play(console, 10, done=4)
    assert shown(console).splitlines()[:2] == [
        "run 0: going on after round 4",
        "run 0: round 5/10, accuracy 50.00 %, 0:10 left",
    ]


def test_notices_do_not_drown_the_rest() -> None:
    console = plain()
    play(console, 1, notices=500)
    lines = shown(console).splitlines()
    assert len(lines) == NOTICES + 2
    assert lines[0] == "run 0: client 0 is [bold]away"


def test_the_same_advice_is_given_once_to_all_runs() -> None:
    console = plain()
    with showing(console, 3) as display:
        for number, sentence in enumerate(["drop them", "drop them", "drop others"]):
            display.watch(f"run {number}").advise(sentence)
            display.watch("fedin").advise(f"fedin: {sentence}")  # a method may begin with its own name
    told = ["run 0: drop them", "fedin: drop them", "run 2: drop others", "fedin: drop others"]
    assert shown(console).splitlines() == told


def test_a_terminal_gets_bars_with_round_accuracy_and_time() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    play(console, 3, runs=2, notices=1)
    text = shown(console)
    for words in ("round 3/3", "accuracy 50.00 %", "2/2 runs", "[bold]away"):
        assert words in text


def test_time_left_follows_the_usual_round_not_the_slow_first_one() -> None:
    pace = Pace(10)
    pace.add(RoundEnd(1, 10, None, None, 60.0))
    for round_ in (2, 3, 4):
        left = pace.add(RoundEnd(round_, 10, None, None, 1.0))
    assert left == 6.0


def test_a_clock() -> None:
    assert [clock(7), clock(725), clock(11220)] == ["0:07", "12:05", "3:07:00"]


# --- in Python ------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "data": "digits",
    "partition": {"kind": "iid", "clients": 2},
    "models": ["mlp-small"],
    "method": "fedavg",
    "training": {"rounds": 2, "batch_size": 256},
    "engine": {"device": "cpu", "workers": 1},
}
ONE_CLASS = {"kind": "pathological", "clients": 2, "classes_per_client": 1}  # which advice is about
ADVISED = TINY | {"partition": ONE_CLASS}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH)


@pytest.mark.usefixtures("asked")
def test_a_run_from_python_shows_the_lines_of_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    potluck.run(**TINY, out=tmp_path / "run")
    shown = capfd.readouterr()
    assert [line.split(",")[0] for line in shown.err.splitlines()] == [
        "fedavg: round 1/2",
        "fedavg: round 2/2",
    ]
    assert shown.out == ""


@pytest.mark.usefixtures("asked")
def test_progress_is_turned_off_by_argument_and_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    potluck.run(**TINY, out=tmp_path / "argument", progress=False)
    monkeypatch.setenv(SWITCH, "0")
    potluck.run(**TINY, out=tmp_path / "environment")
    assert capfd.readouterr().err == ""
    potluck.run(**TINY, out=tmp_path / "shown", progress=True)
    assert "round 2/2" in capfd.readouterr().err


@pytest.mark.usefixtures("asked")
def test_a_resumed_run_says_where_it_goes_on_in_python_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Interrupted):
        potluck.run(**TINY, out=tmp_path / "run", observers=[StopAfter(1)])
    capfd.readouterr()
    potluck.resume(tmp_path / "run")
    assert capfd.readouterr().err.startswith("fedavg: going on after round 1\nfedavg: round 2/2")


@pytest.mark.usefixtures("asked")
def test_pilot_runs_stay_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tune = {"candidates": [4, 8], "rounds": 1}
    asked = TINY | {"method": {"name": "fedmrl", "d1": "auto", "tune": tune}}
    asked["partition"] = {"kind": "iid", "clients": 2, "validation": 0.1}
    potluck.run(**asked, out=tmp_path / "run")
    rounds = [line for line in capfd.readouterr().err.splitlines() if "round " in line and "/" in line]
    assert [line.split(",")[0] for line in rounds] == ["fedmrl: round 1/2", "fedmrl: round 2/2"]


def test_advice_is_a_warning_at_the_users_line_and_stays_in_the_result(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = potluck.run(**ADVISED, out=tmp_path / "run", progress=False)
    (advice,) = [one for one in caught if issubclass(one.category, potluck.PotluckAdvice)]
    assert "of one class alone" in str(advice.message)
    assert Path(advice.filename) == Path(__file__)
    assert result.advice == [str(advice.message)]
    assert "of one class alone" in (result.folder / "report.html").read_text()


@pytest.mark.usefixtures("asked")
def test_advice_that_is_shown_is_no_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", potluck.PotluckAdvice)
        result = potluck.run(**ADVISED, out=tmp_path / "run")
    assert capfd.readouterr().err.count("of one class alone") == 1
    assert len(result.advice) == 1


def test_an_interrupted_run_has_the_summary_of_a_whole_one(tmp_path: Path) -> None:
    whole = potluck.run(**ADVISED, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        potluck.run(**ADVISED, out=tmp_path / "cut", observers=[StopAfter(1)])
    cut = potluck.resume(tmp_path / "cut")
    assert cut.advice == whole.advice != []
    timed = {"seconds_per_round"}
    assert {key: value for key, value in cut.summary.items() if key not in timed} == {
        key: value for key, value in whole.summary.items() if key not in timed
    }


def test_several_runs_without_a_display_give_the_same_advice_once() -> None:
    with warnings.catch_warnings(record=True) as caught, progress_display(False, runs=2) as display:
        warnings.simplefilter("always")
        for label in ("local", "fedavg"):
            display.watch(label).advise("drop them")
        display.skip("fedproto: finished before")
    assert [str(one.message) for one in caught] == ["drop them"]


class Output:
    """What IPython gives for an output that can be drawn anew."""

    def __init__(self) -> None:
        self.drawn: list[dict[str, str]] = []

    def update(self, picture: dict[str, str], raw: bool) -> None:
        self.drawn.append(picture)


def test_a_notebook_gets_one_output_that_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output()

    def display(picture: dict[str, str], raw: bool, display_id: bool) -> Output:
        output.update(picture, raw)
        return output

    module = types.ModuleType("IPython.display")
    monkeypatch.setattr(module, "display", display, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    play(Console(file=io.StringIO(), force_jupyter=True), 3, notices=1)
    last = output.drawn[-1]
    for words in ("client 0 is [bold]away", "round 3/3", "accuracy 50.00 %"):
        assert words in last["text/plain"]
    assert "<pre" in last["text/html"]


def test_a_measure_that_is_no_share_is_a_plain_number() -> None:
    console = plain()
    with showing(console) as display:
        watcher = display.watch("run")
        watcher.begin("name", "method", 1, 0)
        watcher.round(RoundEnd(1, 1, -0.25, 1.0, 2.0, "R²", is_share=False))
    assert shown(console).strip() == "run: round 1/1, R² -0.25"


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_standard_error_that_is_full_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    monkeypatch.setenv(SWITCH, "1")
    result = potluck.run(
        data={"name": "digits", "samples": 100}, partition={"kind": "iid", "clients": 2}, models=["mlp-small"],
        method="fedavg", training={"rounds": 1}, engine={"device": "cpu"}, out=tmp_path / "run",
    )  # fmt: skip
    assert (result.folder / "summary.json").exists()
    print("nothing more to lose", file=sys.stderr)


ESCAPES = "yes\x1b]0;mine\x07\x1b[2J\x9b"


def test_no_text_of_the_data_moves_the_cursor() -> None:
    console = Console(file=io.StringIO(), width=200)
    with showing(console) as display:
        watcher = display.watch(ESCAPES)
        watcher.begin("name", "method", 1, 0)
        watcher.advise(f"a class is called {ESCAPES}")
        watcher.notice(f"client {ESCAPES} is away")
    assert "a class is called yes?]0;mine??[2J?" in shown(console)
    assert not {"\x1b", "\x07", "\x9b"} & {*shown(console)}
    with pytest.warns(potluck.PotluckAdvice) as caught, progress_display(False) as quiet:
        quiet.watch("run").advise(ESCAPES)
    assert "\x1b" not in str(caught[0].message)
    assert str(RunError(ESCAPES)) == "yes?]0;mine??[2J?"
