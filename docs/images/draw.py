"""Draw the README pictures and print its table from a finished demo: python docs/images/draw.py runs/demo."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from potluck.report.log import Curve
from potluck.report.pictures.curves import accuracy_over_rounds
from potluck.report.pictures.files import to_png
from potluck.report.pictures.split import split_picture
from potluck.report.render import Sheet, markdown, words
from potluck.report.sheets import comparison_sheet, row_label


def main(demo: Path) -> None:
    """Write demo-accuracy.png, the same for phones and demo-split.png beside this file."""
    comparison = json.loads((demo / "comparison.json").read_text())
    curves = [
        Curve(entry["method"], np.array(entry["curve"]["rounds"]), np.array(entry["curve"]["mean"]))
        for entry in comparison["methods"]
    ]
    split = json.loads((demo / "local-seed0" / "split.json").read_text())
    counts = [client["counts"] for client in split["clients"]]
    names = [client["id"] for client in split["clients"]]
    here = Path(__file__).parent
    (here / "demo-accuracy.png").write_bytes(to_png(accuracy_over_rounds(curves, reference="local")))
    (here / "demo-accuracy-narrow.png").write_bytes(to_png(accuracy_over_rounds(curves, "local", room=2.9)))
    (here / "demo-split.png").write_bytes(to_png(split_picture(counts, names, split["class_names"])))
    print(markdown(table(comparison)))


def table(comparison: Mapping[str, Any]) -> Sheet:
    """The main table with the columns that fit a phone."""
    sheet = comparison_sheet(comparison)
    kept = [column for column in sheet.columns if column.name not in ("method", "mode", "time")]
    return replace(sheet, columns=(words("method", row_label), *kept))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
