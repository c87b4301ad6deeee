"""The folder with the clients' public keys, which the operator may change while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from potluck.core.card import ClientId
from potluck.deploy.fingerprints import client_keys
from potluck.errors import ConfigError, PotluckError

Marks = dict[str, tuple[int, int, int]]


class KeyFolder:
    """The keys in `<client>.pub`, read again when a file was replaced, added or removed.

    `renewed` is called before changed keys count, so that Flower hears of them; it may raise a `PotluckError`, and
    is called again at the next look.
    """

    def __init__(
        self,
        folder: Path,
        clients: Iterable[ClientId],
        notice: Callable[[str], None],
        renewed: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.clients = folder, tuple(clients)
        self.notice, self.renewed = notice, renewed
        self._marks: Marks = {}
        self._complaint = ""

    def read(self, begun: bool) -> dict[ClientId, str]:
        """The key of every client; in a run that has `begun`, one whose file is gone has none any more."""
        marks = self._look() if begun else {}
        keys = client_keys(self.folder, self.clients, may_lack=begun)
        self._marks = marks or self._look()
        return keys

    def changed(self) -> dict[ClientId, str]:
        """All keys if the folder has changed, else none; while it makes no sense, the earlier keys count."""
        try:
            marks = self._look()
            if marks == self._marks:
                return {}
            keys = client_keys(self.folder, self.clients, may_lack=True)
            self.renewed()
        except (PotluckError, OSError, ValueError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self.notice(f"the changed keys do not count yet: {error}")
            return {}
        self._marks, self._complaint = marks, ""
        return keys

    def _look(self) -> Marks:
        """What tells a changed file from one that is as it was."""
        try:
            paths = [self.folder / f"{client}.pub" for client in self.clients]
            found = {path.name: path.stat() for path in paths if path.exists()}
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be read: {error.strerror or error}; check its rights"
            ) from error
        if not found:
            raise ConfigError(f"{self.folder} holds no key of any client; put <id>.pub of each there")
        return {name: (one.st_ino, one.st_mtime_ns, one.st_size) for name, one in found.items()}
