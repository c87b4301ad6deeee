"""`potluck resume` of a federation: `serve` writes down what it was told, and another start goes on with that."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.core.card import ClientId
from potluck.deploy.flower.connections import Security
from potluck.deploy.run import FREE, TOLD
from potluck.errors import RunError
from potluck.experiment.export import to_values
from potluck.experiment.overrides import apply_override
from potluck.experiment.schema import Experiment
from potluck.files import read_json
from potluck.runs.started_here import is_sealed, seal

FLOWER = "flower"  # in a run's folder: what Flower keeps, and its logs


class Told(BaseModel):
    """What `serve` was told: where to listen, with which files, and the experiment; no secret is in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path  # of the run, as it was then
    address: str
    insecure: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    node_keys: bool = False
    client_keys: Path | None = None
    experiment: dict[str, Any]
    seal: str | None = None  # of all of it, by the user who called `serve`

    @property
    def sealed(self) -> dict[str, str | None]:
        """What the seal is of."""
        return {"serve": self.model_dump_json(exclude={"seal"})}

    @property
    def security(self) -> Security:
        """TLS and keys, as they were given."""
        return Security(
            self.insecure,
            self.ca,
            self.certificate,
            self.key,
            node_keys=self.node_keys,
            client_keys=self.client_keys,
        )


def to_keep(folder: Path, experiment: Experiment, address: str, security: Security) -> dict[str, Any]:
    """What a run folder keeps of a call of `serve`; paths are whole, so that it can be resumed from anywhere."""
    files = {name: getattr(security, name) for name in ("ca", "certificate", "key", "client_keys")}
    values: dict[str, Any] = {
        "folder": folder.resolve(),
        "address": address,
        "insecure": security.insecure,
        "node_keys": security.node_keys,
        "experiment": to_values(experiment),
        **{name: None if path is None else Path(path).resolve() for name, path in files.items()},
    }
    told = Told.model_validate(values)
    return told.model_dump(mode="json") | {"seal": seal(told.sealed)}


def is_served(folder: Path) -> bool:
    """Whether a folder is that of a federation."""
    return (folder / TOLD).is_file()


def read_told(folder: Path, trust: bool = False) -> Told:
    """What `serve` was told; one of another folder or user could open a door of its choice, and needs `trust`."""
    path = folder / TOLD
    try:
        told = Told.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise RunError(
            f"{path} was not written by potluck: {where}: {first['msg']}; restore the file"
        ) from None
    elsewhere = told.folder != folder.resolve()
    if not trust and (elsewhere or not is_sealed(told.sealed, told.seal)):
        why = f"{TOLD} says {told.folder}" if elsewhere else f"or {TOLD} was changed since"
        raise RunError(
            f"{folder} was not begun here by you ({why}): going on would listen at {told.address}, and use the "
            f"files and the code that {TOLD} names; read it first, then say --trust"
        )
    return told


@contextlib.contextmanager
def own_flower(folder: Path) -> Iterator[None]:
    """Begin without what Flower has kept in a folder that you did not begin here; its logs stay.

    From its database a SuperLink would take up an app of whoever wrote it, and send that to every site.
    """
    try:
        read_told(folder)
    except RunError:
        for path in (folder / FLOWER).iterdir() if (folder / FLOWER).is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.suffix not in (".log", ".pid"):
                path.unlink()
    yield


def method_of(folder: Path) -> str:
    """The method of a federation, as its progress lines begin with it."""
    try:
        return str(read_json(folder / TOLD)["experiment"]["method"]["name"])
    except (RunError, KeyError, TypeError):
        return folder.name


def experiment_of(told: Told, overrides: Sequence[str], rounds: int | None) -> Experiment:
    """The experiment of a federation, which goes on as it was begun but for settings that change no number."""
    fixed = [one for one in overrides if one.partition("=")[0] not in FREE]
    if fixed or rounds is not None:
        what = fixed[0] if fixed else f"--rounds {rounds}"
        raise RunError(
            f"{what}: a federation goes on as its clients joined it, and only {' and '.join(FREE)} may change; "
            "start a new run for other settings"
        )
    values = copy.deepcopy(told.experiment)
    for override in overrides:
        apply_override(values, override)
    return Experiment.make(**values)


def listed(clients: Sequence[str] | None) -> list[ClientId]:
    """Clients named on a command line: `--exclude west --exclude south`, or `--exclude west,south`."""
    return [name.strip() for one in clients or () for name in one.split(",") if name.strip()]
