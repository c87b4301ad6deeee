"""The homes of a run as its driver sees them: started, asked, lost and replaced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from potluck.engine.ray.actor import HomeActor
from potluck.engine.ray.alike import Machines
from potluck.engine.ray.cluster import Cluster
from potluck.engine.ray.handles import Home, Lost, in_short, why_none
from potluck.engine.ray.owed import AnyRequest
from potluck.engine.ray.parcel import Parcel, pack
from potluck.engine.ray.room import START, machines, spots_with_room
from potluck.engine.ray.spots import Spot, choose_spots, home_settings
from potluck.engine.settings import EngineSettings
from potluck.engine.wire import TensorFrame
from potluck.errors import ConfigError, RunError, first_line
from potluck.federation.builder import Recipe

PATIENCE = 120.0  # seconds to wait for a machine when a run has lost all of them
LEAVE = 2.0  # seconds to clear up in
TICK = 1.0  # seconds between looks at deadlines and at new homes
LOSSES = 3  # homes lost in a row, for each there was, before nobody tries again
PAUSE = 2.0, 16.0  # seconds between attempts to replace a home: the first, doubled each time, and the longest


class Homes:
    """All homes of a run. One that is lost is replaced; the engine gives its requests to others."""

    def __init__(
        self,
        cluster: Cluster,
        recipe: Recipe,
        settings: EngineSettings,
        most: int,
        notice: Callable[[str], None],
    ) -> None:
        nodes = cluster.nodes()
        self.cluster, self.settings, self.notice = cluster, settings, notice
        own = home_settings(settings, nodes)
        self.values = own.model_dump(mode="json")
        self.spots = choose_spots(settings, str(own.device), nodes, most)
        self.machines = Machines(settings.mixed, notice)
        self.alive: list[Home] = []
        self.coming: list[Home] = []  # replacements that are not open yet
        self.known: list[Home] = []  # all that were ever open
        self.losses = 0  # in a row, without an answer in between
        self.again = 0.0  # when the next replacement may be tried
        self.why = ""  # the last home was lost, or none came
        self._code = {name: file.read_bytes() for name, file in recipe.files().items()}
        self._nodes = nodes
        self._parcel = ray.put(_packed(recipe))
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # --- starting ---

    def _start(self) -> None:
        homes = [self._make(spot) for spot in self._spots_with_room()]
        self.coming = homes  # so that `close` ends them, whatever happens now
        for home in self._as_they_open(self._greeted(homes)):
            try:
                self._admit(home, self._opened(home))
            except Lost as loss:
                self._give_up(home, str(loss))
        for found in (self.alive, self.known):
            found.sort(key=homes.index)
        self.coming = []
        if not self.alive:
            raise ConfigError(f"engine.name: no home can be started on the Ray cluster: {self.why}")

    def _spots_with_room(self) -> list[Spot]:
        return spots_with_room(self.spots, self.cluster, self._nodes, self.notice)

    def _make(self, spot: Spot, anywhere: bool = False) -> Home:
        options = {"max_restarts": 0, "max_task_retries": 0, **spot.options(anywhere)}
        return Home(ray.remote(HomeActor).options(**options).remote(), spot)

    def _greeted(self, homes: Sequence[Home]) -> list[Home]:
        """The homes that say hello in time; the others are given up."""
        greetings = {home.actor.hello.remote(): home for home in homes}
        _, slow = ray.wait(list(greetings), num_returns=len(homes), timeout=START)
        if slow:
            names = machines([greetings[ref].spot for ref in slow], self._nodes)
            self.notice(f"{names}: a home takes more than {START:g} s to start; waiting for it")
        _, late = ray.wait(list(greetings), num_returns=len(homes), timeout=self.settings.deadline)
        for ref in late:
            self._give_up(
                greetings.pop(ref), f"it did not start within engine.deadline, {self.settings.deadline:g} s"
            )
        return [home for ref, home in greetings.items() if self._meets(home, ref)]

    def _meets(self, home: Home, greeting: Any) -> bool:
        """Ask a home its name; False if it is gone, as when its machine died and the cluster does not know yet."""
        name = machines([home.spot], self._nodes)
        try:
            home.node, home.process, home.machine, version = ray.get(greeting)
        except RayError as error:
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                self._give_up(home, f"{name}: {in_short(error)}")
                return False
            raise ConfigError(f"engine.name: no home can be started on {name}: {why_none(error)}") from error
        self.machines.check_version(home.node, version)
        return True

    def _give_up(self, home: Home, why: str) -> None:
        """Go on without a home that could not be started; another one is asked for later."""
        self._kill(home)
        self._count_loss(why)
        self.notice(f"a home could not be started: {why}")

    def _open(self, home: Home) -> Any:
        home.opening = home.actor.open.remote(self._code, self._parcel, self.values, home.spot.share)
        return home.opening

    def _warm(self, homes: Sequence[Home]) -> None:
        for home in homes:
            home.actor.warm.remote()

    def _as_they_open(self, homes: Sequence[Home]) -> Iterator[Home]:
        """Open homes, and give them in the order in which they are ready: one that refuses is heard at once.

        The first of each machine finds out whether its data are the driver's. The others there load the code
        meanwhile, and follow it.
        """
        others: dict[str, list[Home]] = {}
        for home in homes:
            others.setdefault(home.machine, []).append(home)
        opening = {self._open(there[0]): there[0] for there in others.values()}
        self._warm([home for there in others.values() for home in there[1:]])
        while opening:
            ready, _ = ray.wait(list(opening), num_returns=1, timeout=self.settings.deadline)
            for home in [opening.pop(ref) for ref in ready or list(opening)]:
                yield home
                opening |= {self._open(other): other for other in others.pop(home.machine, ())[1:]}

    def _opened(self, home: Home) -> Mapping[str, Any]:
        """What a home says when it is open, or why it refuses; `Lost` if it is gone."""
        try:
            about: Mapping[str, Any] = ray.get(home.opening, timeout=self.settings.deadline)
            return about
        except GetTimeoutError:
            return {"refused": f"it is not ready within engine.deadline ({self.settings.deadline:g} s)"}
        except RayTaskError as error:
            return {"refused": f"its clients cannot be made: {first_line(error.cause or error)}"}
        except RayError as error:
            raise Lost(f"{home.node}: {in_short(error)}") from error

    def _admit(self, home: Home, about: Mapping[str, Any]) -> None:
        """Take a home that is like the others; a `ConfigError` says why another one is refused."""
        if "refused" in about:
            raise ConfigError(f"engine.name: {home.node}: {about['refused']}")
        home.fingerprint, home.opening, home.used = about["fingerprint"], None, about["used"]
        self.machines.check(home.node, home.fingerprint)
        self.alive.append(home)
        self.known.append(home)

    # --- losing and replacing ---

    def lose(self, home: Home, why: str) -> list[AnyRequest]:
        """Give a home up; returns the requests that it has not answered, the one it was at first."""
        self._kill(home)
        self.alive.remove(home)
        home.lost = True
        self._count_loss(f"{home.node}: {why}")
        self.notice(f"a home on {home.node} is lost ({why}); its clients go on elsewhere")
        left = [*(home.call.waiting if home.call is not None else ()), *home.share]
        home.call = None
        home.share.clear()
        if self.losses <= LOSSES * len(self.spots):
            self._replace(home.spot)
        return left

    def _count_loss(self, why: str) -> None:
        """A home was lost or did not come. The next attempt waits: a cluster learns late which machine is gone."""
        first, longest = PAUSE
        self.again = time.monotonic() + min(first * 2**self.losses, longest)
        self.losses += 1
        self.why = why

    def refill(self) -> None:
        """Ask again for homes that could not be replaced; admit those that came."""
        self._arrivals()
        if time.monotonic() >= self.again:
            for spot in self.spots[len(self.alive) + len(self.coming) :]:
                self._replace(spot)

    def _replace(self, spot: Spot) -> None:
        home = self._make(spot, anywhere=True)
        home.node = "another machine"
        self.coming.append(home)
        self._open(home)

    def _arrivals(self, seconds: float = 0.0) -> None:
        """Admit replacements that are open by now, or within some seconds; those that failed are dropped."""
        refs = {home.opening: home for home in self.coming}
        ready = ray.wait(list(refs), num_returns=1, timeout=seconds)[0] if refs else []
        for home in map(refs.__getitem__, ready):
            self.coming.remove(home)
            try:
                about = self._opened(home)
                if "refused" not in about:
                    hello = home.actor.hello.remote()
                    home.node, home.process, home.machine, _ = ray.get(hello, timeout=self.settings.deadline)
                self._admit(home, about)
            except (ConfigError, Lost, RayError) as error:
                self._give_up(home, first_line(error))

    def wait_for_one(self) -> None:
        """Wait until there is a home; a `RunError` if none comes."""
        started = time.monotonic()
        while not self.alive:
            waited = time.monotonic() - started
            may_try = waited <= PATIENCE or self.losses <= LOSSES * len(self.spots)
            if not self.coming and may_try and time.monotonic() >= self.again:
                self._replace(self.spots[0])
            patience = max(PATIENCE, self.settings.deadline) if self._has_machines() else PATIENCE
            if not (self.coming or may_try) or waited > patience:
                raise RunError(
                    f"no home is left on the Ray cluster, and none can be started ({self.why or 'none came'}); "
                    "when its machines are back, go on with potluck resume"
                )
            self._arrivals(TICK)

    def _has_machines(self) -> bool:
        """Whether some machine is alive that a home fits on, be it slow."""
        spot = self.spots[0]
        return any(node.cpus >= spot.cpus and node.gpus >= spot.gpus for node in self.cluster.nodes())

    # --- asking ---

    def replies(self) -> Iterator[tuple[Home, tuple[AnyRequest, TensorFrame] | Lost]]:
        """Wait for the next replies; a home that is gone or overdue gives `Lost`."""
        busy = {home.call.replies: home for home in self.alive if home.call is not None}
        ready = ray.wait(list(busy), num_returns=1, timeout=TICK, fetch_local=False)[0] if busy else []
        for home in map(busy.__getitem__, ready):
            try:
                found: Sequence[tuple[AnyRequest, TensorFrame] | Lost] = home.next_replies()
                self.losses = 0
            except Lost as loss:
                found = [loss]
            yield from ((home, one) for one in found)
        for home in [*busy.values()]:
            if home.call is not None and home.is_hung(self.settings.deadline):
                yield (
                    home,
                    Lost(f"no answer and no work within engine.deadline, {self.settings.deadline:g} s"),
                )
        self._arrivals()

    # --- ending ---

    def abandon(self) -> None:
        """End the homes that are at work: what they still send would be taken for the answer to a later request."""
        for home in [*self.alive]:
            home.share.clear()
            if home.call is not None:
                self._kill(home)
                self.alive.remove(home)

    def close(self) -> None:
        """End all homes; those at rest clear up before."""
        idle = [home.actor.leave.remote() for home in self.alive if home.call is None and self._code]
        if idle and ray.is_initialized():
            ray.wait(idle, num_returns=len(idle), timeout=LEAVE)
        for home in [*self.alive, *self.coming]:
            self._kill(home)
        self.alive, self.coming = [], []

    def _kill(self, home: Home) -> None:
        with contextlib.suppress(Exception):  # it may be gone, or the cluster with it
            ray.kill(home.actor, no_restart=True)


def _packed(recipe: Recipe) -> Parcel:
    try:
        return pack(recipe)
    except Exception as error:  # objects of the user's raise what they like
        raise ConfigError(
            "engine.name: what was given from Python cannot be sent to other processes "
            f"({first_line(error)}); name data and models in the experiment, or use engine.name=local"
        ) from error
