"""Draw every kind of picture for docs/gallery.md, with the commands that the page shows, and write the page.

python tools/gallery.py            run the experiments, draw the pictures, write the page (some minutes)
python tools/gallery.py --page     write the page alone
python tools/gallery.py --runs DIR keep the runs in a folder; those that are there are not run again
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from potluck.cli.app import app

ROOT = Path(__file__).parents[1]
PAGE, IMAGES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "images" / "gallery"
LARGEST = 60_000  # bytes of a picture
WIDEST = 960  # pixels

FILES = {
    "digits.yaml": """\
name: digits
data: digits
partition: {kind: dirichlet, alpha: 0.3, clients: 8}
models: [mlp-small, mlp-large, conv-small, conv-large]
method: {name: fedmrl, d1: 32}
training: {rounds: 15, batch_size: 16, optimizer: {name: sgd, lr: 0.02, momentum: 0.9}}
evaluate: {predictions: true}
""",
    "alphas.yaml": """\
name: alphas
data: digits
partition: {kind: dirichlet, alpha: 0.3, clients: 6}
models: [mlp-small, conv-small]
method: {name: fedmrl, d1: 32}
training: {rounds: 6, batch_size: 16, optimizer: {name: sgd, lr: 0.02, momentum: 0.9}}
sweep:
  partition.alpha: [0.1, 0.3, 1.0]
""",
    "rates.yaml": """\
name: rates
data: digits
partition: {kind: dirichlet, alpha: 0.3, clients: 6}
models: [mlp-small, conv-small]
method: {name: fedmrl}
training: {rounds: 5, batch_size: 16, optimizer: {name: sgd, momentum: 0.9}}
variants:
  grid:
    method.d1: [8, 16, 32]
    training.optimizer.lr: [0.01, 0.02, 0.05]
""",
}
RUNS = (
    "potluck compare digits.yaml --methods fedavg,fedproto,fedmrl --seeds 0,1,2 --out runs/digits",
    "potluck compare alphas.yaml --methods fedproto,fedmrl --seeds 0,1 --out runs/alphas",
    "potluck compare rates.yaml --seeds 0,1 --out runs/rates",
)
TRACED = """\
import potluck

result = potluck.run(
    data="digits", partition={"kind": "iid", "clients": 4}, models=["mlp-small", "conv-small"],
    method="fedproto", training={"rounds": 2}, out="runs/traced",
    observers=[potluck.RoundTrace(2)],  # records the second round, for the time line
)
figure = potluck.plot("timeline", result)  # a matplotlib figure
potluck.plot("cka", result, clients=["0", "1"], samples=100, out="cka.pdf")  # also written
potluck.plot("curves", "runs/traced", out="curves.svg")
"""
ONE = "runs/digits/fedmrl-seed0"


@dataclass(frozen=True)
class Shown:
    """A picture of the page: its heading, what to see in it, and the command that made it."""

    title: str
    text: str
    command: str

    @property
    def image(self) -> str:
        """The name of its file."""
        return Path(shlex.split(self.command)[-1]).name


def shown(title: str, text: str, words: str, name: str = "") -> Shown:
    """A picture made by `potluck plot`; the words are the kind, the runs and their options."""
    return Shown(title, text, f"potluck plot {words} --out {name or words.split()[0]}.png")


PICTURES = (
    shown(
        "Curves with spread",
        "One line per method: the mean over clients and seeds. The picture of a single run has one line per moment "
        "and mode, with the spread over its clients.",
        "curves runs/digits",
    ),
    shown(
        "Gains client by client",
        "Each client compared with the same client under Local. Losses are hatched. This is the right half of "
        "FedMRL's Fig. 3.",
        "gains runs/digits",
    ),
    shown(
        "Differences with intervals",
        "The paired difference to Local with its bootstrap interval. A hollow mark is a tie.",
        "differences runs/digits",
    ),
    shown("Scores of clients", "The last evaluated round, best client first.", f"clients {ONE}"),
    shown(
        "Who has which class",
        "The area of a bubble is the number of training samples. This picture works before the first round.",
        f"split {ONE}",
    ),
    shown(
        "Scores against rounds and bytes",
        "Bytes are those sent and received in training, by all clients together, on a logarithmic scale.",
        "cost runs/digits",
    ),
    shown(
        "Curves over an option",
        "Any setting in which runs differ, here Dirichlet's α of the split (FedMRL's Figs. 5 to 7). The runs may "
        "come from a sweep or from variants, or be listed one by one.",
        "option runs/alphas --over alpha",
    ),
    shown(
        "Several lines over an option",
        "If runs differ in two settings, there is one line per value of the other.",
        "option runs/rates --over d1",
        "option-lines",
    ),
    shown("Heat map over two options", "The same runs as a table.", "grid runs/rates --over d1,lr"),
    shown(
        "Linear CKA between clients, by stage",
        "How similar the clients' representations of the same test samples are, at most 1 (FedIN's Figs. 6 and 7). "
        "Stages are the stem, the blocks of layers and the features, as far as all models have them. `--stages` "
        "names others.",
        f"cka {ONE} --clients 2,3,6,7",
    ),
    shown(
        "Features by t-SNE",
        "The same samples as four clients represent them, by class and by client (FedIN's Figs. 3 and 8). The "
        "marks are the class numbers, so the picture can be read in grey. `--classes` shows some classes only.",
        f"tsne {ONE}",
    ),
    shown("Features by PCA", "The first two principal components.", f"pca {ONE}"),
    shown(
        "Confusion matrices",
        "From kept predictions (`evaluate: {predictions: true}`), or else from kept models and the clients' test "
        "data.",
        f"confusion {ONE}",
    ),
    shown(
        "Time of each round",
        "From `timing.jsonl`, which every run has: training, evaluation, and anything else that took time.",
        f"timeline {ONE}",
    ),
    shown(
        "Time line of one round",
        "From a trace recorded by `potluck.RoundTrace`. This one is from a CPU: one lane per thread. On a GPU "
        "there is one lane per stream, with kernels and copies apart. A trace does not say which client a bar "
        "belongs to.",
        "timeline runs/traced",
        "trace",
    ),
    shown(
        "The wire",
        "What is sent in which step, and how large it is. The sizes of messages come from the ledger.",
        "wire runs/digits/fedproto-seed0",
    ),
)
OPENING = """\
# Gallery

Every picture that `potluck plot` draws, each with the command that made it. Click a small one to go there, and a
large one to see it alone.

"""
USAGE = """
## Draw your own

A picture needs a run folder and nothing else:

```bash
potluck plot                                      # lists the kinds
potluck plot curves runs/digits --out curves.pdf  # .png, .pdf or .svg
```

PDF and SVG files have real text, for papers. All pictures have the same fonts, line widths and colours. The colours
are those of Okabe and Ito, which colour-blind readers can tell apart. Lines also have different marks and losses
are hatched, so pictures can be printed in grey.

`split`, `curves`, `clients`, `cost`, `timeline` and `wire` also work while a run is still going. `cka`, `tsne` and
`pca` use the kept models of a finished run and a few hundred test samples. If a run cannot give a picture, one
sentence says what to do.

In Python, `potluck.plot` takes folders, or what `potluck.run`, `potluck.compare` and `potluck.open` return:

"""


def page() -> str:
    """The text of docs/gallery.md: all pictures small, then each with its command, then how to draw one's own."""
    parts = [OPENING, '<div class="thumbnails">\n', *map(thumbnail, PICTURES), "</div>\n"]
    for one in PICTURES:
        parts.append(f"\n## {one.title}\n\n{one.text}\n\n![{one.title}](images/gallery/{one.image})\n\n")
        parts.append(fenced("bash", f"{one.command}\n"))
    parts += [USAGE, fenced("python", TRACED), "\n## The runs behind the pictures\n\n"]
    parts.append(
        "Three experiment files and three commands. `make gallery` runs them and makes this page.\n\n"
    )
    for name, text in FILES.items():
        parts.append(fenced("yaml", f"# {name}\n{text}") + "\n")
    parts.append(fenced("bash", "\n".join(RUNS) + "\n"))
    return "".join(parts)


def thumbnail(one: Shown) -> str:
    """A small picture that leads to its section."""
    section = re.sub(r"[^a-z0-9]+", "-", one.title.lower().replace(",", "")).strip("-")
    return (
        f'<a href="#{section}"><img alt="{one.title}" src="images/gallery/{one.image}" width="200">'
        f"<br>{one.title}</a>\n"
    )


def fenced(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text}```\n"


def small_png(content: bytes) -> bytes:
    """A PNG of at most `WIDEST` pixels and few colours, so that the page loads quickly."""
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    if picture.width > WIDEST:
        picture = picture.resize(
            (WIDEST, round(picture.height * WIDEST / picture.width)), Image.Resampling.LANCZOS
        )
    for colors in (128, 64, 32, 16):
        buffer = io.BytesIO()
        picture.quantize(colors, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= LARGEST:
            break
    return buffer.getvalue()


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def call(command: str) -> None:
    """Run a command of the page."""
    print(command, flush=True)
    app(shlex.split(command)[1:], standalone_mode=False)


def make(folder: Path) -> None:
    """Run the experiments in a folder, and draw the pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with inside(folder):
        for name, text in FILES.items():
            Path(name).write_text(text, "utf-8")
        for command in RUNS:
            call(command)
        if not Path("runs/traced/trace.json").exists():
            Path("traced.py").write_text(TRACED, "utf-8")
            subprocess.run([sys.executable, "traced.py"], check=True)
        for one in PICTURES:
            call(one.command)
            (IMAGES / one.image).write_bytes(small_png(Path(one.image).read_bytes()))


def main() -> None:
    """Make the page, and unless it is wanted alone its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--runs", type=Path, help="where the runs are, or go")
    options = parser.parse_args()
    if not options.page:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.runs or Path(temporary)).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            make(folder)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
