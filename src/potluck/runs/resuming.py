"""Going on with a run: what may have changed since it began, what is refused, and what is written down.

`environment.json` keeps the settings of a run, and its data, split and code by content. An experiment that is to
go on is compared with that, key by key; `config.yaml` beside it is for people and for `potluck run`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.data import Split
from potluck.engine.registry import LOCAL, RAY
from potluck.errors import ConfigError, RunError
from potluck.experiment.blocks import CheckpointSettings, IndexFile
from potluck.experiment.differences import Difference, changes_since, differences
from potluck.experiment.export import to_values
from potluck.experiment.origins import first_unknown
from potluck.experiment.overrides import Override, read_yaml
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.files import sha256, write_json, write_whole
from potluck.report.again import comparison_of
from potluck.report.format import counted
from potluck.report.reading import reading
from potluck.runs import pilots
from potluck.runs.environment import check_version, data_facts, keep_contract, kept_split, machine
from potluck.runs.fetched_files import check_fetched_files
from potluck.runs.folder import RunFolder
from potluck.runs.observers.checkpoints import begin_again, saved_round
from potluck.runs.own_code import (
    TRUST,
    check_named_code,
    check_own_code,
    check_trusted,
    is_started_here,
    reach,
)
from potluck.runs.started_here import seal

ROUNDS = "training.rounds"
# What decides where work is done, or what is written down about it, but no number.
FREE = (
    "engine.device",
    "engine.workers",
    "engine.streams",
    "engine.compile",
    "engine.memory",
    "engine.address",
    "engine.mixed",
    "checkpoint.every",
    "track",
    "keep",
)
DATA_FOLDER = re.compile(r"(federation\.\d+\.|public\.)?data\.dir")  # data are known by their content
# Of environment.json: what a run must know of itself to go on.
FACTS: dict[str, type] = {
    "settings": dict,
    "code": dict,
    "split": str,
    "changes": list,
    "portable": bool,
    "registered": list,
    "origins": dict,
}


@dataclass(frozen=True)
class Past:
    """A run that has begun: its folder, and what `environment.json` says of it."""

    folder: RunFolder
    about: dict[str, Any]
    from_round: int | None = None  # go on after this round instead of the last that was saved

    @classmethod
    def read(cls, folder: RunFolder, from_round: int | None = None) -> Past:
        """Read what a folder says of its run; one of another version, or one that says too little, is refused."""
        about = folder.about()
        check_version(folder.path, about)
        for key, kind in FACTS.items():
            if not isinstance(about.get(key), kind):
                raise RunError(
                    f"{folder / 'environment.json'} says nothing of {key!r}: it is not whole; {folder.remedy}"
                )
        return cls(folder, about, from_round)

    # --- the experiment that goes on ---

    def experiment(
        self,
        overrides: Sequence[Override] = (),
        rounds: int | None = None,
        trust: bool = False,
        remedy: str = TRUST,
    ) -> Experiment:
        """The experiment in `config.yaml`, which is compared before any code that it names is run.

        `remedy` is what to do about a folder that is not trusted.
        """
        path = self.folder.path
        if not self.about["portable"]:
            raise RunError(
                f"{path} was run from Python with models or data of its own; make the same experiment again there, "
                "experiment = potluck.Experiment.make(…) with all that the run was given, and call "
                "potluck.resume(folder, experiment=experiment)"
            )
        with reading(self.folder / "environment.json"):
            unknown = first_unknown(self.about["registered"])
        if unknown is not None:
            raise RunError(
                f"{path} uses the {unknown}, which a Python program registered; resume it there: "
                "potluck.resume(folder)"
            )
        written = self._written()
        found = differences(self.about["settings"], written)
        # what the file leaves out has its default, which `going_on` compares
        edited = self._refused((one for one in found if one.here is not None), rounds)
        if edited is not None:
            raise RunError(
                f"{path}/config.yaml was edited after the run began: {edited.key} was {edited.there}, now it is "
                f"{edited.here}; {_advice(edited)}"
            )
        if not trust:
            check_trusted(path, written, self.about, remedy)
        check_named_code(path, written, self.about["code"])
        return Experiment.of_file(self.folder / "config.yaml", written, overrides)

    def _written(self) -> dict[str, Any]:
        """What `config.yaml` says."""
        try:
            return read_yaml(self.folder / "config.yaml")
        except ConfigError as error:
            raise RunError(f"{error}; put a whole copy of it back, or start a new run") from error

    def going_on(self, experiment: Experiment, rounds: int | None, compared: bool = False) -> Experiment:
        """The experiment with what pilot runs chose and the rounds asked for; refused if it is another one.

        `compared` is for a run of a comparison that is extended with all others of it.
        """
        experiment = pilots.settled(experiment, self.folder.path)
        if rounds is not None:
            training = experiment.training.model_dump() | {"rounds": rounds}
            experiment = experiment.variant(training=training)
        other = self._refused(changes_since(self.about["settings"], experiment), rounds)
        if other is not None:
            raise RunError(
                f"{self.folder.path} was begun with another {other.key}: {other.there} there, {other.here} now; "
                f"{_advice(other)}"
            )
        with reading(self.folder / "environment.json"):
            if rounds is not None:
                self._check_rounds(rounds)
            self._check_keep(experiment)
        if rounds is not None and not compared:
            self._refuse_part(rounds)
        check_own_code(self.folder.path, experiment, self.about["code"])
        return experiment

    def _refused(self, found: Iterable[Difference], rounds: int | None) -> Difference | None:
        """The first difference that may not be; the number of rounds may, where it is asked for."""
        asked = () if rounds is None else (ROUNDS,)
        return next((one for one in found if not is_free(one) and not one.is_below(*asked)), None)

    def _check_rounds(self, rounds: int) -> None:
        """Any number beyond what is played will do: until its last round no run knows how long it is."""
        played = self.folder.rounds_logged()
        played = played if self.from_round is None else min(played, self.from_round)
        if rounds <= played and rounds != self.about["settings"]["training"]["rounds"]:
            raise RunError(
                f"{self.folder.path} has {counted(played, 'round')} already; ask for more than that, "
                f"not {rounds}"
            )

    def _refuse_part(self, rounds: int) -> None:
        """Refuse more rounds for one run of a comparison, whose tables would then not be those of its runs."""
        path, home = self.folder.path, comparison_of(self.folder.path)
        if home is not None and rounds > self.about["settings"]["training"]["rounds"]:
            raise RunError(
                f"{path} is a run of the comparison {home}; to extend all of its runs, compare again into {home} "
                f"with training.rounds={rounds}; to extend it alone, copy {path} elsewhere and resume the copy"
            )

    def _check_keep(self, experiment: Experiment) -> None:
        """The best round of all can only be kept by a run that has looked for it from the start."""
        before = self.about["settings"].get("keep", {}).get("models")
        if experiment.keep.models == "best" and before != "best" and self._saved_round():
            raise RunError(
                f"{self.folder.path} was run with keep: {before}, so the best of its rounds may not be kept; leave "
                "keep as it is, or start a new run with keep: best"
            )

    # --- what it stands for ---

    def split(self) -> Split:
        """Who has which rows, as written when the run began."""
        return kept_split(self.folder, self.about)

    def check_saved(self) -> None:
        """Refuse to drop rounds whose checkpoint is gone, unless the start is asked for.

        A run that was killed before its first checkpoint begins again: there is nothing else it could do.
        """
        path = self.folder.path
        if self.from_round is not None or any(path.glob("checkpoints/checkpoint*.json")):
            return  # a damaged one is refused when it is loaded
        if (self.folder / "summary.json").exists() or self._saves_due() > 1:
            raise RunError(
                f"{path} has {counted(self.folder.rounds_logged(), 'round')}, but its checkpoints are gone; put "
                f"{self.folder / 'checkpoints'} back, or {begin_again(path)}"
            )

    def _saves_due(self) -> int:
        """How many checkpoints the run had begun before its last round, at least; all but the last were written."""
        with reading(self.folder / "environment.json"):
            every = CheckpointSettings.model_validate(self.about["settings"].get("checkpoint", {})).every
        saves, since = 0, 0.0
        with reading(self.folder / "timing.jsonl"):
            for line in [*self.folder.lines("timing.jsonl")][:-1]:
                since += line["seconds"]
                if since >= every:
                    saves, since = saves + 1, 0.0
        return saves

    def check(self, experiment: Experiment, federation: Federation) -> None:
        """Refuse other data, another split or models that start from other weights."""
        path, now = self.folder.path, data_facts(federation)
        check_fetched_files(path, to_values(experiment), self.about.get("fetched", {}))
        with reading(self.folder / "environment.json"):
            contents = list(_contents(self.about, now, federation))
        for name, there, here in contents:
            if there != here:
                raise RunError(
                    f"the data {name!r} are not those {path} was begun with: the name is the same, samples or "
                    "labels are not; give the same data, or start a new run"
                )
        given = _given_split(experiment, federation)
        if given is not None and given.hash != self.about["split"]:
            raise RunError(
                f"partition: the split given now is not the one {path} was begun with; give the same, or start a "
                "new run"
            )
        if self.about["origins"] and self.about["origins"] != federation.clients.fingerprints():
            raise RunError(
                f"the models given now start from other weights than those {path} began with; give the same "
                "objects, or classes and functions, which build them from the seed"
            )

    def record(self, experiment: Experiment, federation: Federation) -> None:
        """Write down what is different from here on: in `environment.json`, then in `config.yaml`.

        A damaged contract is written anew: the report at the end of the run needs it.
        """
        settings, now = to_values(experiment), machine(federation)
        found = [
            *changes_since(self.about["settings"], experiment),
            *differences({key: self.about.get(key) for key in now}, now),
        ]
        if found or self.about["settings"] != settings:  # or it has keys that its version did not know
            round_ = self._saved_round()
            changes = [
                {"round": round_, "key": one.key, "before": one.there, "after": one.here} for one in found
            ]
            about = self.about | now | {"settings": settings, "changes": [*self.about["changes"], *changes]}
            write_json(self.folder / "environment.json", about | {"seal": self._seal(settings)})
        keep_contract(self.folder, federation)
        written = experiment.to_yaml().encode()
        if sha256(self.folder / "config.yaml") != hashlib.sha256(written).hexdigest():
            write_whole(self.folder / "config.yaml", written)

    def _seal(self, settings: dict[str, Any]) -> str | None:
        """The seal of changed settings: yours if the run reached nothing before, or if you started it."""
        before = self.about["settings"]
        mine = not reach(before, self.about["code"]) or is_started_here(before, self.about)
        return seal(reach(settings, self.about["code"])) if mine else self.about.get("seal")

    def _saved_round(self) -> int:
        """The round after which the run goes on."""
        return saved_round(self.folder.path) if self.from_round is None else self.from_round


def is_free(one: Difference) -> bool:
    """Whether a setting may change while a run goes on; engines that keep states in its folder may, too."""
    if one.key == "engine.name" and (one.there, one.here) in ((LOCAL, RAY), (RAY, LOCAL)):
        return True
    return one.is_below(*FREE) or DATA_FOLDER.fullmatch(one.key) is not None


def _advice(one: Difference) -> str:
    if one.key == ROUNDS and one.here is not None:
        return f"to continue to another last round, ask for it: --rounds {one.here} (in Python rounds={one.here})"
    return "set it back, or start a new run"


def _contents(
    about: dict[str, Any], now: dict[str, Any], federation: Federation
) -> Iterator[tuple[str, str | None, str | None]]:
    """Every data set by name, with the hash of its content then and now."""
    data = [group.data for group in federation.clients.groups]
    for one, there, here in zip(data, about.get("data", ()), now.get("data", ()), strict=False):
        yield one.name, there, here
    public = federation.population.public()
    if public is not None:
        yield public.name, about.get("public"), now["public"]


def _given_split(experiment: Experiment, federation: Federation) -> Split | None:
    """The split that the experiment brings along, as an object or a file; None if it is made from the seed."""
    given = [group.partition for group in experiment.groups]
    files = [experiment.folder / one.file for one in given if isinstance(one, IndexFile)]
    own = any(isinstance(one, Split) for one in given) or bool(files)
    there = all(file.exists() for file in files)  # the folder has a copy, so that the file may be gone
    return experiment.make_split(federation.data) if own and there else None
