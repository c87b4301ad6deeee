"""`potluck new method NAME`: a file with a small method that works, and its test, to start from."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from potluck.cli.options import AsJson, Debug
from potluck.cli.screen import Screen
from potluck.errors import ConfigError, RunError

NAME = re.compile("[a-z][a-z0-9]*([-_][a-z0-9]+)*", re.IGNORECASE | re.ASCII)

METHOD = Template('''"""$title: say here what it does, in a sentence."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from potluck import (
    Batch,
    Client,
    ClientId,
    Clients,
    Content,
    Message,
    Method,
    MethodConfig,
    Model,
    Server,
    Task,
    average,
    build,
    client_step,
    fit,
    option,
    state_of,
)


class $title(Method):
    """A private model and a shared small one learn from each other's scores.

    Up: the small model. Down: the averaged small model. Stays: data, labels, the private model.
    Loss: CE(own) + CE(small) + weight·(KL(own, small) + KL(small, own)).
    """

    name = "$name"
    citation = ""  # authors, venue, year
    stays = ("data", "labels", "model")
    modes = ("model", "small")  # ways to predict; the first is the reported one
    down = {"small": state_of("small", "the averaged small model")}

    class Config(MethodConfig):
        """Options of $name; `potluck explain $name --plugin $stem.py --options` lists them."""

        small: str = option(default="mlp-small", description="the shared architecture", source="ours")
        weight: float = option(default=0.5, ge=0, description="weight of the mutual term", source="ours")

    def server_state(self, task: Task) -> dict[str, Any]:
        """What the server keeps from round to round."""
        return {"small": build(self.config.small, task)}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """What a client keeps; `model` is its own."""
        return {"model": model, "small": build(self.config.small, task)}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """What a client needs of the server's newest state."""
        return {"small": server["small"].state()}

    def receive(self, client: Client, down: Message) -> None:
        """Install it, and do nothing else."""
        client["small"].load(down.group("small"))

    def round(self, server: Server, clients: Clients) -> None:
        """One round, as the server sees it."""
        replies = clients.ask(self.train)
        server["small"].load(average(replies, "small", weights="samples"))

    @client_step(up={"small": state_of("small", "the small model after local training")})
    def train(self, client: Client) -> Content:
        """Local epochs, then what leaves the client."""
        fit(client, self.loss)
        return {"small": client["small"].state()}

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """What a client minimises, term by term."""
        own, small = client["model"](batch.x), client["small"](batch.x)
        return {
            "own": client.task.loss(own, batch.y, batch.weight),
            "small": client.task.loss(small, batch.y, batch.weight),
            "mutual": self.config.weight * batch.mean(divergence(own, small) + divergence(small, own)),
        }

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """The scores in one of the `modes`, after `receive`: here each is the name of a model."""
        scores: Tensor = client[mode](batch.x)
        return scores


def divergence(scores: Tensor, target: Tensor) -> Tensor:
    """KL(target, scores) of every sample; the target is a constant."""
    return F.kl_div(scores.log_softmax(1), target.detach().softmax(1), reduction="none").sum(1)
''')

TEST = Template('''"""Tests of $name: python -m pytest test_$stem.py"""

import math

import potluck
import torch

from $stem import $title, divergence


def test_contract():
    """State, wire, randomness, lost replies, captured steps: what every method must keep to."""
    potluck.check_method("$name")


def test_divergence_by_hand():
    """All of the target on one of two classes, the scores even: log 2. Replace it by numbers of your paper."""
    found = divergence(torch.zeros(1, 2), torch.tensor([[99.0, 0.0]]))
    assert math.isclose(float(found), math.log(2), rel_tol=1e-5)


class Given:
    """Clients that answer as the test says."""

    def __init__(self, replies):
        self.replies = replies

    def ask(self, step, down=None, only=None):
        return self.replies


def test_the_server_by_hand():
    """Clients of 1 and 3 samples that send zeros and ones: the average is 3/4."""
    method, task = $title(), potluck.Task("classification", 2, (1, 8, 8))
    server = potluck.Server(task, cards={})
    server.declare(method.server_state(task))
    small = server["small"].state()
    sent = {
        "a": {"small": {name: torch.zeros_like(value) for name, value in small.items()}},
        "b": {"small": {name: torch.ones_like(value) for name, value in small.items()}},
    }
    method.round(server, Given(potluck.Replies.of(sent, samples={"a": 1, "b": 3})))
    for value in server["small"].state().values():
        torch.testing.assert_close(value, torch.full_like(value, 0.75))


def test_a_round(tmp_path):
    result = potluck.run(
        data="digits",
        partition={"kind": "iid", "clients": 2},
        models=["mlp-small", "mlp-large"],
        method={"name": "$name", "weight": 1.0},
        training={"rounds": 1},
        out=tmp_path / "run",
    )
    assert (result.folder / "report.html").exists()
''')

NEXT = """\
{method} and {test} are written. Next:
- `python -m pytest {test}` checks the method against the contract (pip install pytest);
- `potluck compare EXPERIMENT.yaml --methods fedavg,{name} --plugin {method}` compares it with others;
- `potluck explain {name} --plugin {method}` shows what leaves a client, and with --options what can be set.
The page "Write a method" of the documentation explains each part."""


def new(
    kind: Annotated[str, typer.Argument(metavar="method", help="What to make: a method.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, such as my-method or FedMine.")],
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where to write it. Default: here.")
    ] = Path(),
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a new method and its test, to start from."""
    if kind != "method":
        raise ConfigError(f"potluck new makes methods, not {kind!r}; write: potluck new method NAME")
    stem = _checked(name)
    title = "".join(word[0].upper() + word[1:] for word in re.split("[-_]", name))
    words = {"name": stem.replace("_", "-"), "stem": stem, "title": title}
    files = {folder / f"{stem}.py": METHOD, folder / f"test_{stem}.py": TEST}
    _write({path: template.substitute(words) for path, template in files.items()})
    method, test = map(str, files)
    screen = Screen(json)
    if json:
        screen.data({"name": words["name"], "method": method, "test": test})
    else:
        screen.show(NEXT.format(method=method, test=test, name=words["name"]))


def _checked(name: str) -> str:
    """The name of the file; refuses a name that is taken, or would hide a module."""
    from potluck.methods.registry import method_names

    stem = name.lower().replace("-", "_")
    if not NAME.fullmatch(name) or keyword.iskeyword(stem):
        raise ConfigError(
            f"{name!r} cannot be a method's name; use letters, digits and single hyphens, such as my-method or "
            "FedMine"
        )
    if stem.replace("_", "-") in method_names():
        raise ConfigError(f"there is a method {name!r} already; choose another name")
    if importlib.util.find_spec(stem) is not None and not Path(f"{stem}.py").exists():
        raise ConfigError(f"{stem}.py would hide the module {stem!r}; choose another name")
    return stem


def _write(files: dict[Path, str]) -> None:
    """Both files or none; nothing is overwritten."""
    from potluck.files import make_folders, write_whole

    for path in files:
        if path.exists():
            raise RunError(f"{path} is there already; choose another name or folder, or remove it")
    for path, text in files.items():
        try:
            make_folders(path.parent, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"cannot make the folder {path.parent}: {error.strerror or error}; choose another place"
            ) from error
        write_whole(path, text.encode())
