"""The SuperLink that `potluck serve` uses: one that listens already, or one that it starts and starts again."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from potluck.core.card import ClientId
from potluck.deploy.fingerprints import bare_keys
from potluck.deploy.flower.certificates import check_server
from potluck.deploy.flower.commands import NAME, flwr
from potluck.deploy.flower.connections import Security, from_here, is_open
from potluck.deploy.flower.processes import Process, start_superlink
from potluck.errors import ConfigError, RunError
from potluck.files import WRITING, opened, read_json, write_json
from potluck.version import __version__

DATABASE = "superlink.db"  # of a SuperLink of our own: it knows its nodes again when it is started again
KEPT = "superlink.json"  # beside it: the keys that are registered, and the relays that may still run
INSTALLED = "apps"  # Flower runs an app of the same version that lies here, whatever is in it
IN_USE = "already in use"  # what Flower says of a key that it knows
APP = f"""\
[project]
name = "potluck-relay"
version = "{__version__}"
dependencies = []

[tool.flwr.app]
publisher = "potluck"

[tool.flwr.app.components]
serverapp = "potluck.deploy.flower.apps:server"
clientapp = "potluck.deploy.flower.apps:client"

[tool.flwr.app.config]
socket = ""
"""


class Superlink:
    """A SuperLink at an address, and the relays that were submitted to it from this run's folder."""

    def __init__(
        self,
        address: str,
        security: Security,
        home: Path,
        notice: Callable[[str], None],
        clients: Sequence[ClientId] = (),
    ) -> None:
        """`clients` are those whose keys a SuperLink of our own is told, if there is a folder of keys."""
        self.address, self.security, self.home, self.notice = address, security, home, notice
        self.clients = clients
        self.own: Process | None = None

    def open(self) -> None:
        """Use the SuperLink that listens, or start one, which knows the clients' keys."""
        self.home.mkdir(parents=True, exist_ok=True)
        self._name()
        if is_open(self.address):
            check_server(from_here(self.address), self.security)
            self.notice(f"a SuperLink is at {self.address} already: it is used, and left running")
            return
        self.notice(f"starting Flower at {self.address}: this takes seconds, on a busy machine minutes")
        self._start()
        self._register()

    def lost(self) -> str:
        """Why the SuperLink cannot answer, or nothing."""
        if self.own is not None and not self.own.alive:
            code = self.own.popen.returncode
            how = f"by signal {code - 128}" if code > 128 else f"with exit code {code}"
            return f"the SuperLink has ended {how}, see {self.own.log}"
        return "" if is_open(self.address) else f"nobody listens at {self.address}"

    def mend(self) -> None:
        """Start a SuperLink of our own again if it has ended; `RunError` while there is none."""
        if self.own is not None and not self.own.alive:
            self.own.end()
            self._start()
            self._register_again()
            self.notice(f"the SuperLink at {self.address} is started again")
        if why := self.lost():
            raise RunError(why)

    def _register_again(self) -> None:
        """Tell a SuperLink that was started again of the keys it does not know, as when its database is lost."""
        try:
            self._register()
        except ConfigError as error:
            raise RunError(str(error)) from error

    def renew_keys(self) -> None:
        """Tell Flower of keys that were changed; an operator's SuperLink is told by the operator."""
        if self.own is not None:
            self._register()
        else:
            self.notice(
                f"the clients' keys have changed: the SuperLink at {self.address} is not ours, so tell it too "
                "(flwr supernode register, unregister)"
            )

    def distrust(self) -> str:
        """It takes runs and starts none, as one whose helper has ended: end it if it is our own, so that `mend`
        starts it again, else say what to do.
        """
        if self.own is None:
            return "; restart the SuperLink, its flower-superexec may have ended"
        self.own.end()
        return ""

    def submit(self, path: Path) -> None:
        """Have Flower start a relay that connects to a socket; relays of earlier starts are stopped."""
        self._stop_relays()
        if (self.home / INSTALLED).exists():
            shutil.rmtree(self.home / INSTALLED)
        # Flower packs, runs and sends to every site whatever lies in the app's folder: nobody else can write here.
        with tempfile.TemporaryDirectory(prefix="potluck-") as app:
            Path(app, "pyproject.toml").write_text(APP)
            # `flwr run` wants the SuperLink's name before its options
            given = flwr(self.home, "run.log", "the run", "run", "--run-config", f'socket="{path}"', app)
        self._keep(relays=[*self._kept().get("relays", []), str(given.get("run-id", ""))])

    def close(self) -> None:
        """End a SuperLink of our own; a relay ends by itself when its server is gone."""
        if self.own is not None:
            self.own.end()

    def _start(self) -> None:
        database = self.home / DATABASE
        if not database.exists():
            (self.home / KEPT).unlink(missing_ok=True)  # it tells of another SuperLink
        _make_private(database)
        self.own = start_superlink(self.address, self.security, self.home, database)

    def _name(self) -> None:
        """Write the configuration that tells Flower's commands where the SuperLink is."""
        trust = "insecure = true"
        if self.security.ca is not None:
            trust = f'root-certificates = "{self.security.ca.resolve()}"'
        text = f'[superlink.{NAME}]\naddress = "{from_here(self.address)}"\n{trust}\n'
        (self.home / "config.toml").write_text(text)

    def _stop_relays(self) -> None:
        for run in self._kept().get("relays", []):
            with contextlib.suppress(RunError):  # it has ended, or the SuperLink knows it no longer
                flwr(self.home, "run.log", "the end of a relay", "stop", run)
        self._keep(relays=[])

    def _register(self) -> None:
        """Register the clients' keys, then strike off those that are no longer among them.

        Flower takes no key twice, so none is struck off before it has taken all that are to count from now on.
        """
        if self.security.client_keys is None or not self.security.node_keys:
            return
        kept: dict[str, str] = self._kept().get("keys", {})
        known = {" ".join(key.split()[:2]): node for key, node in kept.items()}  # without comments
        keys = bare_keys(self.security.client_keys, self.clients)
        for key, path in keys.items():
            if key not in known:
                known[key] = self._register_one(path)
                self._keep(keys=known)
        for key in [key for key in known if key not in keys]:
            self._unregister_one(known[key])
            del known[key]
            self._keep(keys=known)

    def _register_one(self, path: Path) -> str:
        """Register a key; the number of its node."""
        try:
            words = "supernode", "register", str(path.resolve())
            return str(flwr(self.home, "keys.log", f"the key {path}", *words).get("node-id", ""))
        except RunError as error:
            if IN_USE not in str(error):  # else a server has died between registering and writing that down
                raise
            self.notice(
                f"Flower had the key {path} before; one that was struck off does not come back: make a new one"
            )
            return ""

    def _unregister_one(self, node: str) -> None:
        """Have Flower forget a key. Where it does not, the key still is that of no client any more."""
        try:
            flwr(self.home, "keys.log", "the end of a key", "supernode", "unregister", node)
        except RunError as error:
            self.notice(str(error))

    def _kept(self) -> dict[str, Any]:
        path = self.home / KEPT
        return dict(read_json(path)) if path.exists() else {}

    def _keep(self, **changes: Any) -> None:
        write_json(self.home / KEPT, self._kept() | changes)


def _make_private(database: Path) -> None:
    """Make a database that its owner alone can read, whatever the umask: what every site sends passes through it.

    Its journals get the rights that it has.
    """
    try:
        with opened(database, os.O_WRONLY | os.O_CREAT, mode=0o600) as handle:
            os.fchmod(handle, 0o600)
    except OSError as error:
        raise RunError(f"cannot write {database}: {error.strerror or error}; {WRITING}") from error
