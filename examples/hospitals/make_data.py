"""Deal scikit-learn's digits to three hospitals, each with digits of its own: python make_data.py

In earnest every hospital has its data already, and nobody has all of it as this script does.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

HERE = Path(__file__).parent
# How many of each digit a hospital has seen, from 0 to 9.
SEEN = {
    "north": (60, 60, 60, 60, 60, 4, 4, 4, 4, 4),
    "east": (4, 4, 4, 4, 4, 60, 60, 60, 60, 60),
    "west": (20, 0, 20, 0, 20, 0, 20, 0, 20, 0),
}
TESTED = 0.25  # share that is kept to test on

Arrays = dict[str, np.ndarray]


def deal(name: str, pools: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> Arrays:
    """A hospital's part; no sample goes to two of them."""
    order = np.random.default_rng(sum(map(ord, name)))
    rows = np.concatenate([pool[:wanted] for pool, wanted in zip(pools, SEEN[name], strict=True)])
    pools[:] = [pool[wanted:] for pool, wanted in zip(pools, SEEN[name], strict=True)]
    order.shuffle(rows)
    test, train = np.split(rows, [int(len(rows) * TESTED)])
    return {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}


def write_npz(folder: Path, part: Arrays) -> None:
    np.savez(folder / "digits.npz", **part)


def write_parquet(folder: Path, part: Arrays) -> None:
    for split in ("train", "test"):
        pixels = [image.ravel() for image in part[f"x_{split}"]]
        pq.write_table(pa.table({"pixels": pixels, "digit": part[f"y_{split}"]}), folder / f"{split}.parquet")


def main() -> None:
    images, y = load_digits(return_X_y=True)
    x = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    pools = [np.flatnonzero(y == digit) for digit in range(10)]
    for name, write in (("north", write_npz), ("east", write_parquet), ("west", write_npz)):
        folder, part = HERE / name / "data", deal(name, pools, x, y)
        folder.mkdir(exist_ok=True)
        write(folder, part)
        print(f"{folder}: {len(part['y_train'])} samples to train on, {len(part['y_test'])} to test on")


if __name__ == "__main__":
    main()
