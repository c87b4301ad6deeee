"""What is shown while runs go on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from potluck.runs.observers import RoundEnd
from potluck.runs.observers.progress import LINES, NOTICES, Pace, clock, showing


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
    assert shown(console).splitlines() == ["run 0: drop them", "run 2: drop others"]


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
