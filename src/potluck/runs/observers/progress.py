"""The progress of runs: bars on a terminal and in a notebook, a few plain lines on standard error anywhere else.

`progress_display` is what `potluck.run(..., progress=...)` shows; `showing` draws on a console that is given.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from potluck.core.plain_values import harmless
from potluck.report.format import percent
from potluck.report.render import console_on
from potluck.runs.observers.base import Observer, RoundEnd
from potluck.runs.observers.warner import Warner

SWITCH = "POTLUCK_PROGRESS"  # environment variable: 0 turns the progress display of Python off
LINES = 20  # plain lines per run, however many rounds it has
NOTICES = 10  # notices shown per run; summary.json counts all failures
BARS = 12  # with more runs than this a bar is removed when its run is done
WIDTH = 100  # characters in a line of a notebook
REDRAW = 0.2  # seconds between two drawings in a notebook


class Pace:
    """Estimates the time left from the median of the last rounds, because the first round is slower."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._seconds: deque[float] = deque(maxlen=20)

    def add(self, end: RoundEnd) -> float:
        """Count a round; gives the seconds left after it."""
        self._seconds.append(end.seconds)
        recent = sorted(self._seconds)
        return recent[len(recent) // 2] * (self.rounds - end.round)


def clock(seconds: float) -> str:
    """Seconds as a clock shows them: 0:07, 12:05, 3:07:00."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Display:
    """Shows the progress of one or several runs; each run has an observer of its own."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.notices: float = NOTICES  # how many are shown per run
        self.advised: set[str] = set()  # advice already shown, for all runs together

    def watch(self, label: str) -> Observer:
        """The observer of one run, which is shown under this label."""
        raise NotImplementedError

    def say(self, sentence: str) -> None:
        """Print a line beside the progress."""
        self.console.print(Text(harmless(sentence)), soft_wrap=True)

    def skip(self, sentence: str) -> None:
        """Count a run that was complete before."""
        self.say(sentence)
        self.run_ended()

    def run_ended(self) -> None:
        """Count a run that is complete."""


class QuietDisplay(Display):
    """Shows no progress; advice becomes warnings of Python."""

    def watch(self, label: str) -> Observer:
        """An observer that warns."""
        return Warner(self.advised)

    def say(self, sentence: str) -> None:
        """Print nothing."""


class _Reporter(Observer):
    """What lines and bars have in common: the time left, and a limit on notices."""

    def __init__(self, display: Display, label: str) -> None:
        self.display, self.label = display, harmless(label)
        self.pace = Pace(0)
        self._noticed = 0

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Start to estimate the time left; say so if the run goes on."""
        self.pace = Pace(rounds)
        if 0 < done < rounds:
            self.display.say(f"{self.label}: going on after round {done}")

    def advise(self, sentence: str) -> None:
        """Show advice once, though several runs may give it."""
        if sentence not in self.display.advised:
            self.display.advised.add(sentence)
            named = sentence.startswith(f"{self.label}: ")  # advice of a method may begin with its name
            self.display.say(sentence if named else f"{self.label}: {sentence}")

    def notice(self, sentence: str) -> None:
        """Show the first notices, then say that there are more."""
        self._noticed += 1
        if self._noticed <= self.display.notices:
            self.display.say(f"{self.label}: {sentence}")
        elif self._noticed == self.display.notices + 1:
            self.display.say(f"{self.label}: further notices are not shown; summary.json counts the failures")

    def end(self, folder: Path) -> None:
        """Tell the display that the run is complete."""
        self.display.run_ended()


class PlainDisplay(Display):
    """For output that is no terminal: about twenty lines a run."""

    def watch(self, label: str) -> Observer:
        """An observer that prints lines."""
        return _Lines(self, label)


class _Lines(_Reporter):
    """Prints a line after the first round, the last, and evenly between."""

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Choose the rounds that are printed."""
        super().begin(name, method, rounds, done)
        self._first, self._step = done + 1, -(-(rounds - done) // LINES) or 1

    def round(self, end: RoundEnd) -> None:
        """Print a line if the round is one of the chosen."""
        left = self.pace.add(end)
        printed = end.round in (self._first, end.rounds) or end.round % self._step == 0
        if printed:
            rest = f", {clock(left)} left" if end.round < end.rounds else ""
            self.display.say(f"{self.label}: round {end.round}/{end.rounds}{_accuracy(end)}{rest}")


def _accuracy(end: RoundEnd) -> str:
    if end.accuracy is None:
        return ""
    without = f" without {', '.join(end.missing)}" if end.missing else ""
    return (
        f", {end.measure} {percent(end.accuracy) if end.is_share else format(end.accuracy, '.4g')}{without}"
    )


class LiveDisplay(Display):
    """For a terminal: a bar per run, and one for all runs if there are several."""

    def __init__(self, console: Console, runs: int) -> None:
        super().__init__(console)
        self.runs = runs
        self.bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
            _Field("count"),
            _Field("accuracy"),
            _Field("time"),
            console=console,
            expand=True,
        )
        self._all: TaskID | None = None
        if runs > 1:
            self._all = self.bars.add_task("all runs", total=runs, count=f"0/{runs} runs")

    def watch(self, label: str) -> Observer:
        """An observer that moves a bar."""
        return _Bar(self, label)

    def say(self, sentence: str) -> None:
        """Print above the bars."""
        self.bars.console.print(Text(harmless(sentence)), soft_wrap=True)

    def run_ended(self) -> None:
        """Move the bar of all runs."""
        if self._all is not None:
            self.bars.advance(self._all)
            done = int(self.bars.tasks[0].completed)
            self.bars.update(self._all, count=f"{done}/{self.runs} runs")

    def moved(self) -> None:
        """A bar has changed; on a terminal it is drawn anew several times a second anyway."""


class NotebookDisplay(LiveDisplay):
    """For a notebook: the same bars and sentences in one output of the cell, which is drawn anew."""

    def __init__(self, console: Console, runs: int) -> None:
        from IPython.display import display  # only in a notebook, which has it

        super().__init__(console, runs)
        self._said: list[str] = []
        self._drawn = time.monotonic()
        self._output = display(self._picture(), raw=True, display_id=True)

    def say(self, sentence: str) -> None:
        """Show a sentence above the bars."""
        self._said.append(harmless(sentence))
        self.draw()

    def moved(self) -> None:
        """Draw anew, a few times a second at most."""
        if time.monotonic() - self._drawn >= REDRAW:
            self.draw()

    def draw(self) -> None:
        """Draw sentences and bars as they are now."""
        self._drawn = time.monotonic()
        self._output.update(self._picture(), raw=True)

    def _picture(self) -> dict[str, str]:
        """Sentences and bars for a notebook, and for a file that it is saved to as text."""
        page = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False, color_system=None)
        page.print(self.bars.get_renderable())
        assert isinstance(page.file, io.StringIO)
        text = "\n".join([*self._said, page.file.getvalue().rstrip()])
        return {"text/plain": text, "text/html": f'<pre style="line-height: 1.4">{html.escape(text)}</pre>'}


class _Field(ProgressColumn):
    """A column that shows one named text of each bar."""

    def __init__(self, name: str) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self.name = name

    def render(self, task: Task) -> Text:
        """The text, empty until there is one."""
        return Text(harmless(str(task.fields.get(self.name, ""))))


class _Bar(_Reporter):
    """The bar of one run: round, accuracy, time left."""

    def __init__(self, display: LiveDisplay, label: str) -> None:
        super().__init__(display, label)
        self.bars, self.moved = display.bars, display.moved
        self._keep = display.runs <= BARS
        self._task: TaskID | None = None

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Show the bar; a run that begins again, with other clients, goes on with a new one."""
        super().begin(name, method, rounds, done)
        self._started = time.monotonic()
        if self._task is not None:
            self.bars.remove_task(self._task)
        self._task = self.bars.add_task(
            self.label, total=rounds, completed=done, count=f"round {done}/{rounds}", time=""
        )
        self.moved()

    def round(self, end: RoundEnd) -> None:
        """Move the bar."""
        left = self.pace.add(end)
        assert self._task is not None
        self.bars.update(
            self._task,
            completed=end.round,
            count=f"round {end.round}/{end.rounds}",
            accuracy=_accuracy(end).removeprefix(", "),
            time=f"{clock(left)} left",
        )
        self.moved()

    def end(self, folder: Path) -> None:
        """Show how long the run took, or remove the bar where there are too many."""
        assert self._task is not None
        self.bars.update(self._task, time=f"in {clock(time.monotonic() - self._started)}")
        if not self._keep:
            self.bars.remove_task(self._task)
        super().end(folder)


@contextlib.contextmanager
def showing(console: Console, runs: int = 1) -> Iterator[Display]:
    """Show the progress of some runs on a console: bars on a terminal and in a notebook, else lines."""
    if console.is_jupyter:
        notebook = NotebookDisplay(console, runs)
        try:
            yield notebook
        finally:
            notebook.draw()
    elif console.is_terminal:
        display = LiveDisplay(console, runs)
        with display.bars:
            yield display
    else:
        yield PlainDisplay(console)


@contextlib.contextmanager
def progress_display(progress: bool | None = None, runs: int = 1) -> Iterator[Display]:
    """The display of runs that are started from Python; without one, advice becomes warnings.

    None means yes, unless the environment says `POTLUCK_PROGRESS=0`. Each run is told to `display.watch(label)`.
    """
    console = console_on(stderr=True)
    if wanted(progress):
        with showing(console, runs) as display:
            yield display
    else:
        yield QuietDisplay(console)


def wanted(progress: bool | None) -> bool:
    """Whether progress is shown: as asked for, else as the environment says."""
    return os.environ.get(SWITCH, "1") != "0" if progress is None else progress
