"""What the documents show works: their Python runs, their YAML is an experiment, their commands and files exist."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

import potluck.core.method
import potluck.data.registry
import potluck.methods  # registers them before an example adds to them
import potluck.models.registry
import potluck.testing.contract
from potluck.cli.app import app
from potluck.experiment.schema import Experiment
from potluck.runs.comparisons.plan import experiments_by_method
from potluck.testing.contract import CHECKS

ROOT = Path(__file__).parents[2]
QUICK = 4  # checks of `check_method` in examples; every method of the library meets all of them elsewhere
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "README.zh.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TUTORIAL = ROOT / "docs" / "tutorial.md"  # its blocks build on each other
IN_CHINESE = {ROOT / "README.md": ROOT / "README.zh.md", TUTORIAL: ROOT / "docs" / "tutorial.zh.md"}
APART = [path for path in DOCUMENTS if path not in (TUTORIAL, *IN_CHINESE.values())]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def blocks(language: str, documents: Sequence[Path] = DOCUMENTS) -> list[Any]:
    """The fenced blocks of one language in documents, each under the file and line where it stands."""
    fence = re.compile(rf"^( *)```{language}\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    found = []
    for document in documents:
        text = document.read_text(encoding="utf-8")
        for match in fence.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(textwrap.dedent(match[2]), id=f"{document.name}:{line}"))
    return found


def shown_commands() -> list[Any]:
    """Every `potluck …` of a console or shell block."""
    shown = []
    for block in blocks("console") + blocks("sh"):
        for line in block.values[0].splitlines():
            match = re.match(r"(?:\$ )?(potluck .*)", line)
            if match:
                shown.append(pytest.param(match[1], id=f"{block.id} {match[1]}"))
    return shown


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of its own, registries that forget what an example registers, and the quick checks of a method."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(potluck.testing.contract, "CHECKS", CHECKS[:QUICK])
    for module, name in (
        (potluck.core.method, "_registry"),
        (potluck.models.registry, "_registry"),
        (potluck.data.registry, "_LOADERS"),
    ):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    return tmp_path


def test_there_is_something_to_check() -> None:
    assert len(blocks("python")) >= 5
    assert blocks("yaml")
    assert len(shown_commands()) >= 6


@pytest.mark.parametrize("code", blocks("python", APART))
def test_python_runs(code: str, apart: Path) -> None:
    script = apart / "block.py"
    script.write_text(code, encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")


def test_the_tutorial_runs_from_top_to_bottom(apart: Path) -> None:
    cells = json.loads(TUTORIAL.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    found = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert found == [block.values[0].strip() for block in blocks("python", [TUTORIAL])], "run `make pages`"
    script = apart / "tutorial.py"
    script.write_text(re.sub(r'"rounds": \d+', '"rounds": 1', "\n\n".join(found)), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize(("english", "chinese"), IN_CHINESE.items(), ids=lambda path: path.name)
def test_the_chinese_pages_have_the_same_code_and_headings(english: Path, chinese: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (english, chinese)]
    code = [re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL) for text in texts]
    assert code[0] == code[1]
    outside = [re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL) for text in texts]
    headings = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in outside]
    assert headings[0] == headings[1]
    rows = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in outside]
    assert rows[0] == rows[1]


def test_the_first_block_is_ten_lines_and_leaves_a_report(
    apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Imports and the closing bracket apart, the README opens with ten lines."""
    code = blocks("python")[0].values[0]
    lines = [line for line in code.splitlines() if line and "import" not in line and line != ")"]
    assert len(lines) <= 10
    assert len(re.findall(r"= nn\.", code)) == 3
    test_python_runs(code.replace('"rounds": 10', '"rounds": 1'), apart)
    assert "fedmrl: accuracy" in capsys.readouterr().out
    assert (apart / "runs" / "experiment" / "report.html").exists()


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_is_an_experiment(text: str, tmp_path: Path) -> None:
    path = tmp_path / "shown.yaml"
    path.write_text(text, encoding="utf-8")
    Experiment.load(path)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_example_files_are_experiments(path: Path) -> None:
    Experiment.load(path)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_scripts_run(path: Path, apart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = apart / path.name
    script.write_text(re.sub(r"^ROUNDS = \d+", "ROUNDS = 1", path.read_text(), flags=re.MULTILINE))
    runpy.run_path(str(script), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("line", shown_commands())
def test_commands_exist(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments parse; a `key=value` names a key there is, unless the line is shown because it fails."""
    monkeypatch.chdir(tmp_path)
    shown = blocks("yaml", [ROOT / "docs" / "experiment.md"])[0].values[0]
    (tmp_path / "digits.yaml").write_text(shown, encoding="utf-8")
    shutil.copy(ROOT / "examples" / "hospitals" / "experiment.yaml", tmp_path)
    _, name, *arguments = shlex.split(line, comments=True)
    context = COMMANDS[name].make_context(name, arguments)
    values = context.params
    if "experiment" not in values or values["experiment"] is None or "fedmlr" in line:
        return
    methods = [method for method in values.get("methods", "").split(",") if method]
    if methods:
        experiments_by_method(values["experiment"], methods, values["overrides"] or ())
    else:
        Experiment.load(values["experiment"], values["overrides"] or ())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_text_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"`potluck ([a-z][a-z-]*)", text):
        assert name in COMMANDS, f"{document.name} speaks of `potluck {name}`"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z]+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{document.name}: make {target}"


def test_every_command_is_shown() -> None:
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"`potluck {name}" not in text] == []


def test_every_method_is_in_the_readme_and_the_changelog() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").lower()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in potluck.methods.registry.method_names():
        assert name in readme, name
        assert re.search(rf"^- (`[a-z0-9-]+`, )*`{name}`(, `[a-z0-9-]+`)*: ", changelog, re.MULTILINE), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text)
    for target in targets:
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
