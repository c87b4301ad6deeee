"""A site: one client's data, model and secret, and all that it does for a server. No Flower in here.

A site takes orders as bytes and answers in bytes. Of the experiment it hears what concerns its own training; data,
model and secret are its own, and so is the last word on what it agrees to.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from potluck.core.card import ClientId
from potluck.core.dataset import Dataset
from potluck.core.modest import Modest
from potluck.core.own_metrics import MetricSettings, measured_anyway, own_metrics, runs_no_other_code
from potluck.core.population import ClientFacts
from potluck.core.rng import Rng, new_secret
from potluck.data import AugmentConfig, DataConfig, Split
from potluck.deploy.bounds import (
    MOST_RUNS,
    MOST_TENSORS,
    NO_RUN,
    RUN,
    check_models,
    check_welcome,
    check_work,
)
from potluck.deploy.joined_runs import JoinedRuns
from potluck.deploy.orders import Orders
from potluck.deploy.record_files import own_folder, read_own, write_own
from potluck.deploy.resident import Agreed, Resident
from potluck.deploy.site_data import site_data, site_public
from potluck.deploy.site_status import OrderNotes
from potluck.deploy.welcome import SENT, welcome
from potluck.deploy.wire import (
    LARGEST_INTRODUCTION,
    Enrolment,
)
from potluck.errors import (
    ConfigError,
    DataError,
    ModelError,
    PotluckError,
    RunError,
    StepFailed,
)
from potluck.experiment.blocks import Sites
from potluck.experiment.schema import Experiment
from potluck.federation.federation import FactsFromData, Federation, assemble, check_public, public_views
from potluck.federation.groups import GroupData
from potluck.federation.private_models import PrivateModels
from potluck.files import with_checksum, without_checksum, write_json
from potluck.methods.registry import find_method
from potluck.models import ModelPool
from potluck.models.build import Entry
from potluck.plugins import load_function, split_name
from potluck.version import __version__

REHEARSAL = "rehearsal"  # the run of `join --check`
SECRET = "secret"


def site_metric(name: str, own: Mapping[str, Callable[..., Any]]) -> MetricSettings:
    """A metric that the server names: a function that the site brings, or one of the libraries that it knows.

    What the site brings comes first: its contract has the name, which a library's function must not stand under.
    """
    key = split_name(name)[1]
    if key in own:
        return MetricSettings(name=own[key], called=key)
    if not runs_no_other_code(name):
        raise ConfigError(
            f"the server asks for the metric {name!r}, which this site does not bring; "
            f"join with --metric FILE.py:{key}, or ask the server to leave it out"
        )
    return MetricSettings(name=name)


def site_facts(
    client: ClientId, data: Dataset, split: Split, models: PrivateModels
) -> Callable[[ClientId], ClientFacts]:
    """A site knows itself, and takes the others to be like itself; together they may hold all classes.

    Whether the clients fit together is for the server to check.
    """
    own = FactsFromData([GroupData(data, 1)], split, models)(client)
    other = dataclasses.replace(own, known={"classes_held": tuple(range(data.task.classes))}.get)
    return lambda asked: own if asked == client else other


def kept_secret(folder: Path, run: str) -> Rng:
    """The client's secret, made when it joins for the first time; every run has its own branch of it.

    Were two runs to draw the same noise, a server that sees both could subtract it.
    """
    file = folder / SECRET
    if not file.exists() and not file.is_symlink():
        own_folder(folder)
        write_own(file, json.dumps(with_checksum({"secret": new_secret()})).encode())
    try:
        return Rng(int(without_checksum(json.loads(read_own(file)))["secret"]), ("secret", run))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(
            f"{file} holds no secret that is as it was written; bring it back from a copy, or remove it and join "
            "new runs only"
        ) from error


@dataclasses.dataclass
class Site(Orders):
    """Everything a client brings: `model` and `load` are its own, `home` is where its records are kept.

    `metrics` are its own functions of scores and labels, by the names under which a server may ask for them.
    `simulated` takes the secret from the experiment's seed, as a simulation does: the numbers are the same then,
    and the server could draw them too.
    """

    client: ClientId
    model: Entry
    load: Callable[..., Any]
    home: Path
    agreement: Agreed | None = None
    device: str = "cpu"
    simulated: bool = False
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    notes: OrderNotes = dataclasses.field(default_factory=OrderNotes, init=False)
    run: str = dataclasses.field(default="", init=False)
    resident: Resident | None = dataclasses.field(default=None, init=False)

    @functools.cached_property
    def _joined(self) -> dict[str, int]:
        """The runs it has joined, and the most bytes an order of each can have."""
        return {file.stem: _most_of(file) for file in (self.home / "runs").glob("*.json")}

    @property
    def most_bytes(self) -> int:
        """The most bytes an order may have: the limit of a welcome, or of a downlink of a joined run."""
        return max([LARGEST_INTRODUCTION, *self._joined.values()])

    def at(self, run: str) -> Resident:
        """The live client of a run. A worker that was restarted joins again with the welcome it kept."""
        if self.resident is None or run != self.run:
            kept = self._welcome_file(run)
            if not kept.exists():
                raise StepFailed("it has not joined this run yet; greet it first")
            self.enrol(_kept_welcome(kept)["welcome"])
        assert self.resident is not None
        return self.resident

    def _welcome_file(self, run: str) -> Path:
        if not RUN.fullmatch(run):
            raise ConfigError(NO_RUN)
        return own_folder(self.home / "runs") / f"{run}.json"

    def enrol(self, offer: Mapping[str, Any]) -> Enrolment:
        """Join a run: a new one from its start, a known one where it was left."""
        if offer.get("potluck") != __version__:
            raise ConfigError(
                f"the server runs potluck {offer.get('potluck')}, this site {__version__}; "
                "install the same version on both sides"
            )
        check_welcome(offer)
        run = str(offer["run"])
        kept = self._welcome_file(run)
        if kept.exists() and _kept_welcome(kept)["welcome"] != offer:
            raise ConfigError(f"run {run} is not as it was when this site joined it; start a new run")
        if self.resident is None or run != self.run:
            if run not in self._joined and len(self._joined) >= MOST_RUNS:
                raise RunError(
                    f"{self.home} has records of {MOST_RUNS:,} runs; remove old ones with potluck prune"
                )
            joined = JoinedRuns(self.home)
            if run in joined and not kept.exists():
                raise ConfigError(
                    f"run {run} was joined before and its record is removed: joined again, it would repeat private "
                    "noise; start a new run"
                )
            if self.agreement is not None and run not in joined:
                self.agreement.let_join(len(joined))
            federation = self.federation(dict(offer["experiment"]), run)
            folder = kept.with_suffix("")
            with Modest(tensors=MOST_TENSORS):
                resident = Resident(
                    federation,
                    self.client,
                    folder,
                    self.agreement,
                    fresh=not self.simulated,
                    rounds=_rounds(offer),
                )
            write_json(kept, {"welcome": offer, "most": resident.most_bytes})
            joined.add(run)  # after the welcome: a run that is counted and has none was removed
            self._joined[run] = resident.most_bytes
            self.resident, self.run = resident, run  # last: it takes part only in what is written down
        return self.resident.enrolment()

    def federation(self, values: dict[str, Any], run: str) -> Federation:
        """A run as this site sees it: what the server told, with the site's own data, model and secret."""
        experiment = self._experiment(values)
        assert isinstance(experiment.partition, Sites)
        self.resident = (
            None  # room for another run's client; a welcome that was refused has not ended this one
        )
        torch.set_num_threads(experiment.engine.threads)
        given = self._loaded()
        data, split = site_data(given, self.client, experiment.partition.classes)
        own = experiment.training.per_client.get(self.client)
        check_work((own and own.epochs) or experiment.training.epochs, len(split[self.client].train))
        try:
            with Modest(tensors=MOST_TENSORS):
                return self._assembled(experiment, given, data, split, run, self._wanted(values))
        except ConfigError as error:
            if f"({self._models(experiment).label(self.client)})" in str(error):
                raise ModelError(str(error)) from error  # it tells of the site's model: for its log alone
            raise

    def _loaded(self) -> Any:
        """What the site's own function loads; whatever it says about its data is for the site's log alone."""
        try:
            return self.load()
        except PotluckError as error:
            raise DataError(str(error)) from error

    def _wanted(self, values: Mapping[str, Any]) -> list[MetricSettings]:
        """The metrics that the server asks for, as far as the site brings them and agreed to them."""
        wanted = [site_metric(str(name), self.metrics) for name in values.get("metrics", ())]
        if self.agreement is not None:
            self.agreement.let_measure([one.key for one in wanted if one.name not in measured_anyway()])
        return wanted

    def _experiment(self, values: Mapping[str, Any]) -> Experiment:
        """What the server told, if this site would take part in it; nothing is loaded or built."""
        if self.agreement is not None:
            self.agreement.admit_options(str(values["method"].get("name")), values["method"])
        self._wanted(values)
        told = (*SENT, "data", "engine", "partition", *(("public",) if "public" in values else ()))
        missing = next((key for key in told if key not in values), None)
        if missing is not None:
            raise ConfigError(
                f"the server's welcome cannot be read: {missing} is missing; "
                "run the same version of potluck on both sides"
            )
        experiment = Experiment.make(**{key: values[key] for key in told})
        if not isinstance(experiment.partition, Sites) or not isinstance(experiment.data, DataConfig):
            raise ConfigError(
                "the server's experiment has data or a split of its own, and a site brings its own data; "
                "ask for one without"
            )
        if self.agreement is not None:
            self.agreement.let_play(experiment.training.rounds)
        roster = experiment.partition.sites
        if self.client not in roster:
            raise ConfigError(
                f"the server's experiment is for the clients {', '.join(roster)}; join as one of them"
            )
        check_models(len(experiment.pool().keys))
        return experiment

    def _assembled(
        self,
        experiment: Experiment,
        given: Any,
        data: Dataset,
        split: Split,
        run: str,
        wanted: Sequence[MetricSettings],
    ) -> Federation:
        """The federation of a run from what the site has loaded."""
        assert isinstance(experiment.partition, Sites)
        assert isinstance(experiment.data, DataConfig)
        roster = experiment.partition.sites
        chosen = find_method(experiment.method.name)(experiment.method, experiment.pool())
        public = None
        if chosen.needs_public_data and experiment.public is not None:
            public = experiment.public_samples(chosen, site_public(given, experiment, self.client))
        models, groups = self._models(experiment), [_site_group(data, experiment.data.augment)]
        overrides = experiment.training.per_client
        seeds = experiment.all_seeds()
        named = PrivateModels(experiment.pool(), roster, seeds).architecture(
            self.client
        )  # as the server knows it
        secret = seeds.secret(self.client) if self.simulated else kept_secret(self.home, run)
        federation = assemble(
            chosen,
            roster,
            site_facts(self.client, data, split, models),
            models,
            groups,
            split,
            seeds=seeds,
            training=experiment.training.for_clients(),
            overrides={self.client: overrides[self.client]} if self.client in overrides else {},
            publics=public_views(public, groups, seeds),
            representatives=[self.client],
            others_unknown=True,
            architecture=lambda client: named,
            secret=lambda client: secret,
            device=self.device,
            precision=experiment.engine.precision,
            metrics=own_metrics(wanted, {self.client: data.task}, self.home),
        )
        check_public(federation.population)
        return federation.prepared()

    def _models(self, experiment: Experiment) -> PrivateModels:
        """The site's own model, adapted as the experiment says."""
        settings = experiment.models
        pool = ModelPool({self.client: self.model}, settings.rep_dim, adapter=settings.adapter)
        return PrivateModels(pool, [self.client], experiment.all_seeds(), settings.init == "per_client")


def _rounds(offer: Mapping[str, Any]) -> int:
    """The rounds of a run that was read as an experiment before."""
    return int(offer["experiment"]["training"]["rounds"])


def _kept_welcome(file: Path) -> dict[str, Any]:
    """The welcome of a run that this site has joined, as it was kept."""
    try:
        kept = json.loads(read_own(file))
        return {"welcome": kept["welcome"], "most": int(kept["most"])}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"{file} cannot be read: {error}; bring it back from a copy, or ask the server for a new run"
        ) from error


def _most_of(file: Path) -> int:
    """The most bytes an order of a run can have; none if its welcome is damaged, which ends no other run."""
    try:
        return int(_kept_welcome(file)["most"])
    except RunError:
        return 0


def _site_group(data: Dataset, augment: AugmentConfig) -> GroupData:
    """The site's data with its preparation, as a group of one client."""
    prepare = DataConfig(name=data.name, augment=augment).preparation(data).prepare
    return GroupData(data, 1, prepare, bool(augment.operations))


def model_entry(name: str) -> Entry:
    """A model by its registered name, or the function `file.py:build`."""
    return load_function(name) if ":" in name else name


def metric_functions(names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The functions `file.py:function` that a site brings, by their names."""
    return {split_name(name)[1]: load_function(name) for name in names}


def rehearsal_federation(
    experiment: Experiment, client: ClientId, model: str, data: str, metrics: Sequence[str] = ()
) -> Federation:
    """The federation of a site that only rehearses; its secret is thrown away afterwards."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as home:
        brought = metric_functions(metrics)
        site = Site(client, model_entry(model), load_function(data), Path(home), metrics=brought)
        told = welcome(experiment, REHEARSAL)
        check_welcome(told)
        return site.federation(told["experiment"], REHEARSAL)
