"""What `--help` shows and what the shell completes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from potluck.cli import completion
from potluck.cli.app import PANELS, app
from potluck.cli.examples import EXAMPLES, FIRST
from potluck.data import names
from potluck.methods.registry import find_method, method_names
from potluck.runs.pictures.api import KINDS

COMMANDS = [command.__name__ for commands in PANELS.values() for command in commands]


def shown(*words: str) -> str:
    """The help as one line of words, as a wide terminal has it."""
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.replace("│", " ").split())


def test_commands_are_listed_in_groups_with_examples() -> None:
    text = shown()
    assert all(panel in text for panel in PANELS)
    assert all(f"$ {line}" in text for line in FIRST)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_explained_and_every_example_can_be_read(name: str) -> None:
    command, text = typer.main.get_command(app).commands[name], shown(name)  # type: ignore[attr-defined]
    for one in command.params:
        assert " ".join(one.help.split()) in text
        assert len(one.help) > 4
    for line in EXAMPLES[name]:
        assert f"$ {line}" in text
        potluck, said, *words = shlex.split(line)
        assert (potluck, said) == ("potluck", name)
        command.make_context(name, words)


def test_what_is_completed_is_what_there_is() -> None:
    shipped = [name for name in method_names() if find_method(name).__module__.startswith("potluck.")]
    assert completion.method_names() == shipped
    assert names() == completion.DATA_SETS
    assert tuple(KINDS) == completion.PICTURES


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("re", "resume report"),
        ("explain fedp", "fedproto fedprox"),
        ("compare x.yaml --methods fedavg,fedp", "fedavg,fedproto fedavg,fedprox"),
        ("plot cos", "cost"),
        ("resume runs/", "runs/b runs/b/c"),
        ("run x.yaml method=fedp", "method=fedproto method=fedprox"),  # as zsh and fish ask
        ("run x.yaml method = fedp", "fedproto fedprox"),  # as bash asks
        ("run x.yaml seed = 1 data = mn", "mnist"),
        ("run x.yaml seed=", ""),
    ],
)
def test_completion(line: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/b/c").mkdir(parents=True)
    Path("runs/b/comparison.json").touch()
    Path("runs/b/c/config.yaml").touch()
    words = ["potluck", *line.split(" ")]
    asked = {
        "_POTLUCK_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    result = CliRunner().invoke(app, [], env=asked, prog_name="potluck")
    assert result.stdout.split() == found.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("name", [r"\$(touch x)", r"\"", "`id`", "a b", "~", "a;b", "*", "a\nb", "a:b"])
def test_completion_leaves_out_what_a_shell_would_run(
    name: str, shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder has the name that its maker gave it, and zsh evaluates what is completed."""
    monkeypatch.chdir(tmp_path)
    for folder in (Path("runs", name), Path("runs", "größe-1.5"), Path(name)):
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
    asked = {
        "_POTLUCK_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "potluck report ",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": "potluck\nreport\n",
        "COMP_CWORD": "2",
    }
    result = CliRunner().invoke(app, [], env=asked, prog_name="potluck")
    wanted = "runs/größe-1.5"
    assert result.stdout.strip() == (f"_arguments '*: :((\"{wanted}\"))'" if shell == "zsh" else wanted)
