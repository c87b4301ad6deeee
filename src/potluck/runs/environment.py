"""What the numbers of a run depend on: settings, data and code by content, versions, device, threads, precision."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from potluck.data import Split
from potluck.errors import ConfigError, DataError, RunError
from potluck.experiment.export import to_values
from potluck.experiment.origins import registered_here
from potluck.experiment.schema import Experiment
from potluck.federation.explain import explain
from potluck.federation.federation import Federation
from potluck.files import LARGEST_JSON, read_bounded, write_whole
from potluck.report.log import CONTRACT
from potluck.runs.fetched_files import fetched_files
from potluck.runs.folder import FORMAT, RunFolder
from potluck.runs.own_code import own_code, reach, texts_in
from potluck.runs.own_objects import own_sources
from potluck.runs.started_here import seal
from potluck.version import __version__


def environment(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """What `environment.json` says: the settings, what they stand for by content, machine and versions."""
    settings = to_values(experiment)
    check_texts(settings)
    named = own_code(settings)
    origins = {} if experiment.portable else federation.clients.fingerprints()
    return {
        "format": FORMAT,
        "potluck": __version__,
        **machine(federation),
        "portable": experiment.portable,
        "registered": registered_here(experiment.method.name, experiment.groups, experiment.plugins),
        "settings": settings,
        "code": named | own_sources(experiment),
        "fetched": fetched_files(settings),
        "seal": seal(reach(settings, named)),  # that you began this run here, for `resume`
        "split": federation.split.hash,
        "views": views_hash(federation.split),
        **data_facts(federation),
        "contract": hashlib.sha256(contract_text(federation)).hexdigest(),
        "origins": origins,
        "metrics": {name: own.facts.to_json() for name, own in federation.clients.metrics.items()},
        "modes": list(federation.method.modes),
        "changes": [],  # what was changed while the run went on, and after which round
        "models": {
            client: federation.population.label(client) for client in federation.population.ids[:1000]
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": _command(),
    }


def check_texts(settings: Mapping[str, Any]) -> None:
    """Refuse a path that is no text: no file of the run could hold it and be read again."""
    for text in texts_in(settings):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the path {text!r} is not text in UTF-8; rename it, or give another one"
            ) from error


def _command() -> str:
    """The words of the command line; letters that are no text are replaced."""
    program, *words = sys.argv or [""]
    path = Path(program)
    name = f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name
    return " ".join([name, *words]).encode(errors="replace").decode()


def machine(federation: Federation) -> dict[str, str]:
    """Versions and device, which may change the last digits."""
    device = federation.device
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def data_facts(federation: Federation) -> dict[str, Any]:
    """The content of the data of each group as hashes, and of the public data; sites keep theirs to themselves."""
    data = [group.data for group in federation.clients.groups]
    public = federation.population.public()
    facts: dict[str, Any] = {"data": [one.fingerprint for one in data]} if any(map(len, data)) else {}
    return facts | ({} if public is None else {"public": public.data.fingerprint})


def views_hash(split: Split) -> str | None:
    """A hash of what clients do to their samples, also of what the hash of the split leaves out; None: nothing."""
    found = {split.ids[place]: split.clients[place].view for place in sorted(split.clients.changes)}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest() if found else None


def kept_split(folder: RunFolder, about: Mapping[str, Any]) -> Split:
    """Who has which rows, as written when the run began; `about` knows it by its hash."""
    path = folder / "split.json"
    try:
        split = Split.load(path)
    except DataError as error:
        raise RunError(f"{path} is damaged; {folder.remedy}") from error
    if (split.hash, views_hash(split)) != (about.get("split"), about.get("views")):
        raise RunError(f"{path} is not the split this run began with; {folder.remedy}")
    return split


def contract_text(federation: Federation) -> bytes:
    """The content of `contract.json`."""
    return (json.dumps(explain(federation), indent=1) + "\n").encode()


def keep_contract(folder: RunFolder, federation: Federation) -> None:
    """Write a contract anew that is lost or damaged, if it can be made as it was: it is no input of a run."""
    path, known = folder / CONTRACT, folder.about().get("contract")
    if known is None:
        return
    with contextlib.suppress(OSError):  # whatever is there, it is not the contract
        if hashlib.sha256(read_bounded(path, LARGEST_JSON, follow=False)).hexdigest() == known:
            return
    content = contract_text(federation)
    if hashlib.sha256(content).hexdigest() != known:
        raise RunError(
            f"{path} is damaged: its SHA-256 is not the one that was noted; put a whole copy of it back, or start "
            "a new run"
        )
    write_whole(path, content)


def check_version(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse to go on with a run of another version, which may compute other numbers."""
    if about.get("format") != FORMAT or about.get("potluck") != __version__:
        raise RunError(
            f"{folder} was made by potluck {about.get('potluck')} (format {about.get('format')}), this is "
            f"{__version__} (format {FORMAT}); install that version to resume it, or start a new run"
        )
