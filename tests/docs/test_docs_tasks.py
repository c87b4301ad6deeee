"""The tables of docs/tasks.md are those of the code."""

import re
from pathlib import Path

import pytest

from potluck.core.task import Task
from potluck.core.task_kinds import TASK_KINDS
from potluck.methods.registry import find_method, method_names

TEXT = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^\| (`.*) \|$", TEXT, re.MULTILINE)]
KINDS = {row[0].strip("`"): row[1:] for row in ROWS if len(row) == 5}
METHODS = {row[0].strip("`"): row[1:] for row in ROWS if len(row) == 6}
COLUMNS = ("classification", "multi-label", "segmentation", "retrieval", "regression")
WORDS = {  # as the table writes the metrics that `conclude` returns
    "correct": "accuracy",
    "mean_ap": "mean AP",
    "f1": "F1",
    "mean_iou": "mean IoU",
    "pixel_accuracy": "pixel accuracy",
    "mean_recall": "mean recall",
    "r2": "R²",
    "mse": "MSE",
    "mae": "MAE",
    "loss": "loss",
}


def test_every_kind_and_method_has_its_row() -> None:
    assert list(KINDS) == list(TASK_KINDS)
    own = [name for name in method_names() if find_method(name).__module__.startswith("potluck.")]
    assert list(METHODS) == sorted(own)


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_a_row_names_the_metrics_in_their_order(kind: str) -> None:
    told = [WORDS.get(name, "six recalls") for name in TASK_KINDS[kind].told]
    assert KINDS[kind][-1].split(", ") == list(dict.fromkeys(told))


@pytest.mark.parametrize("name", METHODS)
def test_a_row_says_what_the_method_takes(name: str) -> None:
    method = find_method(name)
    taken = "each" if method.tasks == "any" else "one"
    expected = [taken if method.takes(Task(kind, 2, (1, 8, 8))) else "–" for kind in COLUMNS]  # type: ignore[arg-type]
    assert METHODS[name] == expected
