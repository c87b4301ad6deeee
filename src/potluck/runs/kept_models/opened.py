"""The kept models of a run folder, made live again without the data they were trained on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.method import Method
from potluck.core.modest import Modest
from potluck.core.state import Moments
from potluck.errors import ConfigError, ModelError, RunError, nearest
from potluck.federation.federation import Federation
from potluck.files import size_of
from potluck.models import Entries, ModelPool
from potluck.models.unwrap import own_name
from potluck.report.log import read_config
from potluck.report.reading import reading
from potluck.runs.folder import RunFolder
from potluck.runs.kept_models.files import (
    ABOUT,
    SUMS,
    check_models,
    kept_rounds,
    models_remedy,
    read_state,
    round_folder,
)
from potluck.runs.kept_models.given import Plugins, given_models, method_of
from potluck.runs.kept_models.keeping import FOLDER
from potluck.runs.kept_models.outline import Outline, without_data
from potluck.runs.own_code import fetched, is_started_here
from potluck.runs.own_objects import sources_of
from potluck.runs.stored import read_about

ROOM = 1 << 30  # bytes that any tensor of an opened model may have
Remake = Callable[[], tuple[Method, ModelPool]]  # a fresh method, and the models of the run


class OpenedModels:
    """The kept models of a run; nothing is read or built before it is needed."""

    def __init__(
        self,
        folder: Path,
        models: Entries | None = None,
        remake: Remake | None = None,
        plugins: Plugins = False,
    ) -> None:
        """`models` and `plugins` as in `potluck.open`; `remake` is for the process that played the run."""
        self.folder, self._given, self._remake, self._plugins = folder, models, remake, plugins

    @cached_property
    def kept_round(self) -> int | None:
        """The round they are from; None if no models are kept."""
        return next(reversed(kept_rounds(self.folder / FOLDER)), None)

    @property
    def round(self) -> int:
        """The round they are from."""
        if self.kept_round is None:
            raise RunError(f"{self.folder} has no trained models: {self.why_none}")
        return self.kept_round

    @property
    def why_none(self) -> str:
        """Why no models are kept, in words."""
        with reading(self.folder / "config.yaml"):
            keep = read_config(self.folder).get("keep")
        if keep == "none" or (isinstance(keep, dict) and keep.get("models") == "none"):
            return "it was run with keep: none"
        return "they were above keep.limit, are at the sites of a federation, or were removed from the folder"

    @cached_property
    def about(self) -> dict[str, Any]:
        """What `about.json` says of them."""
        home = round_folder(self.folder / FOLDER, self.round)
        return read_about(home / ABOUT, models_remedy(home))

    def check_files(self) -> None:
        """Refuse models whose files are not what was written; those of an earlier version have no checksums."""
        if self.kept_round is None:
            return
        about, home = self.about, round_folder(self.folder / FOLDER, self.kept_round)
        if "checksums" in about or (home / SUMS).exists():
            check_models(home)

    def check_given(self) -> None:
        """Refuse given models that are not those of the run; warn of one whose source was edited since."""
        if self._given is None or self.kept_round is None:
            return
        given_models(self.about["outline"], self._given)
        known = RunFolder(self.folder).about().get("code", {})
        for name, content in sources_of(self._given).items():
            if known.get(name, content) != content:
                warnings.warn(
                    f"{name} is not the code that {self.folder} was made with: what its models predict may differ "
                    "from what was measured",
                    stacklevel=5,
                )

    def class_names(self, client: ClientId) -> tuple[str, ...]:
        """What the classes of a client's task are called."""
        outline = self.about["outline"]
        if client not in outline["clients"]:
            return self.federation.population.class_names(client)
        return tuple(outline["groups"][outline["clients"][client]["group"]]["class_names"])

    @cached_property
    def federation(self) -> Federation:
        """The clients without their data."""
        outline = self.about["outline"]
        remake = self._remake or partial(method_of, outline, self._given, self._plugins)
        with self._reading(), self._modest():
            if self._remake is None and self._plugins is not True:
                self._refuse_weights(outline)
            method, pool = remake()
            return without_data(outline, method, pool)

    def _refuse_weights(self, outline: Outline) -> None:
        """Refuse weights that the folder names, files or repositories, unless you started its run with them."""
        about = RunFolder(self.folder).about()
        settings = about["settings"]
        known = fetched(settings) if is_started_here(settings, about) else ()
        named = fetched({"method": outline["method"], "models": outline["pool"]["architectures"]})
        if others := {*named} - {*known}:
            raise RunError(
                f"{self.folder}: you did not start this run on this machine as it is now, and its models would use "
                f"{', '.join(sorted(others))}; look at that first, then pass plugins=True to potluck.open"
            )

    def client(self, client: ClientId, moment: str) -> Client:
        """A live client in its state at a moment of the kept round."""
        with self._reading():
            path = self._file(client, moment)
            state = read_state(path, moment)
            with self._modest():
                live = self.federation.clients.build_client(client)
        with self._reading(path.name):
            _check_fits(live, state)
            live.restore(state)
            return live

    def _reading(self, name: str = ABOUT) -> AbstractContextManager[None]:
        """What goes wrong with these models, other than by code of the user's, is the fault of their files."""
        home = round_folder(self.folder / FOLDER, self.round)
        return reading(home / name, models_remedy(home))

    def _modest(self) -> Modest:
        """Lets nobody describe a model that is far larger than what was kept of it."""
        files = round_folder(self.folder / FOLDER, self.round).glob("*.safetensors")
        return Modest(max(ROOM, 2 * max(map(_size, files), default=0)))

    def _file(self, client: ClientId, moment: str) -> Path:
        """The file with a client's state at a moment."""
        moments, files = self.about["moments"], self.about["files"]
        if moment not in moments:
            raise ConfigError(f"of the moment {moment!r} no models are kept; {nearest(moment, moments)}")
        if client not in files:
            raise RunError(
                f"client {client} was never measured, so its model is not kept (evaluate.who: sampled); "
                "measure all clients with evaluate.who=all"
            )
        path = round_folder(self.folder / FOLDER, self.round) / Path(files[client]).name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise RunError(
                f"{path} leads out of the run folder and is not read; put the models into the folder"
            )
        return path


def _size(path: Path) -> int:
    try:
        return size_of(path)
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror or error}; {models_remedy(path.parent)}"
        ) from error


def _check_fits(live: Client, state: dict[str, Tensor]) -> None:
    """Refuse a model whose tensors are not those that were kept."""
    for name, part in live.parts.items():
        if part.module is None or isinstance(part.content, Moments):
            continue
        prefix = f"{name}/"
        kept = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
        own = part.tensors()
        for key in dict.fromkeys([*own, *kept]):
            found, wanted = (_shape(tensors.get(key)) for tensors in (own, kept))
            if found != wanted:
                called = f"{prefix}{own_name(part.module, key)}"
                raise ModelError(
                    f"client {live.id}: the tensor {called} is {wanted} in the trained model and {found} in the "
                    "one that was given; give the class that was trained"
                )


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
