"""A site: one client's data, model and secret, and all that it does for a server. No Flower in here.

A site takes orders as bytes and answers in bytes. Of the experiment it hears what concerns its own training; data,
model and secret are its own, and so is the last word on what it agrees to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from potluck.core.card import ClientId
from potluck.core.dataset import Dataset
from potluck.core.modest import Modest, ModestResults
from potluck.core.own_metrics import MetricSettings, measured_anyway, own_metrics, runs_no_other_code
from potluck.core.plain_values import printable, shown
from potluck.core.population import ClientFacts
from potluck.core.rng import Rng, new_secret
from potluck.core.trial import postponed
from potluck.data import AugmentConfig, DataConfig, Split
from potluck.deploy.bounds import (
    MOST_RUNS,
    MOST_TENSORS,
    NO_RUN,
    RUN,
    SENT,
    check_models,
    check_welcome,
    check_work,
)
from potluck.deploy.joined_runs import JoinedRuns
from potluck.deploy.kept_welcome import SUFFIX, KeptWelcome, check_room, rounds_of
from potluck.deploy.orders import Orders
from potluck.deploy.record_files import own_folder, read_own, write_own
from potluck.deploy.resident import Agreed, Resident
from potluck.deploy.site_data import site_data, site_public
from potluck.deploy.site_status import OrderNotes
from potluck.deploy.welcome import welcome
from potluck.deploy.wire import (
    LARGEST_INTRODUCTION,
    Enrolment,
    Order,
)
from potluck.engine.protocol import Outcome
from potluck.engine.settings import EngineSettings
from potluck.errors import (
    ConfigError,
    DataError,
    ModelError,
    PotluckError,
    RunError,
    StepFailed,
    first_line,
)
from potluck.experiment.blocks import Sites
from potluck.experiment.schema import Experiment
from potluck.federation.federation import FactsFromData, Federation, assemble, check_public, public_views
from potluck.federation.groups import GroupData
from potluck.federation.private_models import PrivateModels
from potluck.files import with_checksum, without_checksum
from potluck.methods.registry import find_method
from potluck.models import ModelPool
from potluck.models.build import Entry
from potluck.models.registry import lookup
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
    check_place: Callable[[], None] = dataclasses.field(default_factory=lambda: lambda: None, init=False)
    run: str = dataclasses.field(default="", init=False)
    resident: Resident | None = dataclasses.field(default=None, init=False)

    @functools.cached_property
    def _joined(self) -> dict[str, int]:
        """The runs it has joined, and the most bytes an order of each can have."""
        return {file.stem: _most_of(file) for file in (self.home / "runs").glob(f"*{SUFFIX}")}

    @property
    def most_bytes(self) -> int:
        """The most bytes an order may have: the limit of a welcome, or of a downlink of a joined run."""
        return max([LARGEST_INTRODUCTION, *self._joined.values()])

    def obey(self, order: Order) -> Outcome | Enrolment:
        """Do an order, if the home is where it was: in another one there is no secret, and half of a record."""
        self.check_place()
        return super().obey(order)

    def at(self, run: str) -> Resident:
        """The live client of a run. A worker that was restarted joins again with the welcome it kept."""
        if self.resident is None or run != self.run:
            kept = self._welcome_file(run)
            if not kept.exists():
                raise StepFailed("it has not joined this run yet; greet it first")
            self.enrol(KeptWelcome.read(kept).offer)
        assert self.resident is not None
        return self.resident

    def _welcome_file(self, run: str) -> Path:
        if not RUN.fullmatch(run):
            raise ConfigError(NO_RUN)
        return own_folder(self.home / "runs") / f"{run}{SUFFIX}"

    def enrol(self, offer: Mapping[str, Any]) -> Enrolment:
        """Join a run: a new one from its start, a known one where it was left."""
        if offer.get("potluck") != __version__:
            raise ConfigError(
                f"the server runs potluck {_version_in(offer)}, this site {__version__}; "
                "install the same version on both sides"
            )
        check_welcome(offer)
        run = str(offer["run"])
        kept = self._welcome_file(run)
        if kept.exists() and KeptWelcome.read(kept).offer != offer:
            raise ConfigError(f"run {run} is not as it was when this site joined it; start a new run")
        if self.resident is None or run != self.run:
            if run not in self._joined and len(self._joined) >= MOST_RUNS:
                raise RunError(
                    f"{self.home} has records of {MOST_RUNS:,} runs; remove old ones with potluck prune"
                )
            if not kept.exists():
                check_room(kept.parent, offer)
            joined = JoinedRuns(self.home)
            if run in joined and not kept.exists():
                raise ConfigError(
                    f"run {run} was joined before and its record is removed: joined again, it would repeat private "
                    "noise; start a new run"
                )
            if self.agreement is not None and run not in joined:
                self.agreement.let_join(len(joined))
            resident = self._resident(offer, run, kept.with_suffix(""))
            KeptWelcome(offer, resident.most_bytes).write(kept)
            joined.add(run)  # after the welcome: a run that is counted and has none was removed
            self._joined[run] = resident.most_bytes
            self.resident, self.run = resident, run  # last: it takes part only in what is written down
        self.notes.progress.of(offer)
        return self.resident.enrolment()

    def _resident(self, offer: Mapping[str, Any], run: str, folder: Path) -> Resident:
        """The live client of a run. Models are tried last: what was not agreed to is refused before any work."""
        with postponed() as trials:
            federation = self.federation(dict(offer["experiment"]), run)
            with modest():
                resident = Resident(
                    federation,
                    self.client,
                    folder,
                    self.agreement,
                    fresh=not self.simulated,
                    rounds=rounds_of(offer),
                )
        with modest():
            for trial in trials:
                trial()
        return resident

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
            with modest():
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
            known = printable(", ".join(roster), 200)
            raise ConfigError(f"the server's experiment is for the clients {known}; join as one of them")
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


@contextlib.contextmanager
def modest() -> Iterator[None]:
    """Bound the models that a server describes, and what they make of a sample."""
    bounds = Modest(tensors=MOST_TENSORS)
    with ModestResults(bounds), bounds:
        yield


def _version_in(offer: Mapping[str, Any]) -> str:
    told = offer.get("potluck")
    return printable(told, 50) if isinstance(told, str) else shown(told)


def _most_of(file: Path) -> int:
    """The most bytes an order of a run can have; none if its welcome is damaged, which ends no other run."""
    try:
        return KeptWelcome.read(file).most
    except RunError:
        return 0


def _site_group(data: Dataset, augment: AugmentConfig) -> GroupData:
    """The site's data with its preparation, as a group of one client."""
    prepare = DataConfig(name=data.name, augment=augment).preparation(data).prepare
    return GroupData(data, 1, prepare, bool(augment.operations))


def model_entry(name: str) -> Entry:
    """A model by its registered name, or the function `file.py:build`."""
    if ":" in name:
        return load_function(name)
    if name.endswith(".py"):
        raise ConfigError(f"--model: {name} names a file alone; give {name}:FUNCTION, the one that builds it")
    lookup(name)
    return name


def checked_device(name: str) -> str:
    """The device that a site computes on, if it is there."""
    try:
        device = EngineSettings(device=name).torch_device()
        torch.ones(1, device=device).tolist()
    except ConfigError as error:
        raise ConfigError(str(error).replace("engine.device", "--device")) from error
    except Exception as error:  # each kind of device has its own
        raise ConfigError(
            f"--device: {name!r} does not compute here ({first_line(error)}); use cpu or cuda:0"
        ) from error
    return str(device)


def metric_functions(names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The functions `file.py:function` that a site brings, by their names."""
    return {split_name(name)[1]: _metric_function(name) for name in names}


def _metric_function(name: str) -> Callable[..., Any]:
    """One of them; refuses a function that cannot be called with scores and labels, before a server asks for it."""
    function = load_function(name)
    try:
        inspect.signature(function).bind("scores", "labels")
    except ValueError:
        pass  # it does not say what it takes, as many functions written in C
    except TypeError as error:
        raise ConfigError(
            f"--metric {name}: {split_name(name)[1]} takes other arguments than scores and labels ({error}); "
            "give a function of these two"
        ) from None
    return function


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
