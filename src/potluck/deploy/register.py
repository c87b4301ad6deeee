"""What a run of a federation remembers from one start of its server to the next: `federation.json`."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.core.card import ClientId
from potluck.errors import ConfigError, RunError, nearest
from potluck.files import read_checked, write_checked
from potluck.runs.folder import RunFolder

FILE = "federation.json"
EPOCH = 1_735_689_600  # 2025: a start is numbered by the milliseconds since
REMEMBERED = 4  # rounds whose messages are known by their norms


class WentBack(BaseModel):
    """A round that was taken back and played again without one client, as every client failed after it."""

    model_config = ConfigDict(frozen=True)

    round: int = Field(ge=1)
    without: ClientId
    times: float | None = None  # as large as the median of the others' was its message; None: it is out since


class BadStart(BaseModel):
    """A round that was played again without one client, as nobody could train with the first weights it gave."""

    model_config = ConfigDict(frozen=True)

    round: int = Field(ge=1)
    without: ClientId


class Doubted(BaseModel):
    """A client that let evaluations wait in vain, as `Lapses` remembers it."""

    model_config = ConfigDict(frozen=True)

    times: int = Field(ge=1)
    left: int = Field(ge=-1)  # evaluated rounds, from now on
    since: int = Field(ge=0)


class _Values(BaseModel):
    model_config = ConfigDict(extra="ignore")

    run: Annotated[str, Field(pattern=r"^[0-9A-Za-z]{1,64}$")]
    starts: int = Field(ge=0)
    told: str = ""  # a digest of what clients were told of the experiment
    keys: dict[ClientId, str] = {}
    excluded: tuple[ClientId, ...] = ()
    went_back: tuple[WentBack, ...] = ()
    bad_starts: tuple[BadStart, ...] = ()
    replaced: dict[int, tuple[ClientId, ...]] = {}  # by round, in whose place others were drawn
    furthest: int = Field(default=0, ge=0)  # round that was ever settled, also if it was taken back since
    norms: dict[int, dict[ClientId, float]] = {}  # by round and client, of what was sent
    last_norms: dict[ClientId, dict[str, float]] = {}  # as `LastNorms` has them
    doubted: dict[ClientId, Doubted] = {}
    late: dict[ClientId, Doubted] = {}  # the same of training


class Register:
    """The name of a run, how often its server was started, the keys of its clients, and who is out."""

    def __init__(self, folder: RunFolder) -> None:
        """What the folder has; a new run gets a name that no other has."""
        self.path = folder / FILE
        new = {"run": secrets.token_hex(8), "starts": 0}
        values = read_checked(self.path) if self.path.exists() else new
        try:
            self.values = _Values.model_validate(values)
            self._out = self.values.excluded  # as chosen now, which is kept once the run has started with it
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "all of it"
            raise RunError(
                f"{self.path} was not written by potluck: {where}: {first['msg']}; restore the file"
            ) from None

    def note(self, **changes: Any) -> None:
        """Change some values; they are on disk when this returns."""
        self.values = self.values.model_copy(update=changes)
        write_checked(self.path, self.values.model_dump(mode="json", exclude_defaults=True))

    def tell(self, offer: Mapping[str, Any], begun: bool) -> None:
        """Keep what clients are told. A run that has not begun gets another name where that has changed.

        Sites that had joined it keep what they were told under the old name, and would refuse anything else.
        """
        told = hashlib.sha256(json.dumps(offer, sort_keys=True).encode()).hexdigest()
        if told != self.values.told:
            renamed = {"run": secrets.token_hex(8)} if self.values.told and not begun else {}
            self.note(told=told, **renamed)

    def start(self) -> int:
        """The number of one more start, larger than all before; clients undo what an earlier one had not accepted.

        It comes from the clock, so that a folder restored from a backup, which does not know of the starts since,
        has a larger one than these too.
        """
        self.note(starts=max(self.values.starts + 1, int(1000 * (time.time() - EPOCH))))
        return self.values.starts

    def choose(
        self, clients: Sequence[ClientId], exclude: Sequence[ClientId], include: Sequence[ClientId]
    ) -> tuple[ClientId, ...]:
        """Leave clients out for good, or take them back; gives those that take part. `keep_choice` keeps it."""
        for client in (*exclude, *include):
            if client not in clients:
                raise ConfigError(
                    f"{client!r} is none of the experiment's clients; {nearest(client, clients)}"
                )
        both = next((client for client in exclude if client in include), None)
        if both is not None:
            raise ConfigError(f"--exclude and --include both name {both}; choose one")
        out = {*self.values.excluded, *exclude} - {*include}
        left = tuple(client for client in clients if client not in out)
        if not left:
            raise ConfigError("--exclude: all clients would be out; start a new run with others")
        self._out = tuple(client for client in clients if client in out)
        return left

    def keep_choice(self) -> None:
        """Keep who is out, now that the run goes on with the others; before, a choice could make it impossible."""
        if self._out != self.values.excluded:
            self.note(excluded=self._out)

    def exclude(self, client: ClientId) -> None:
        """Leave a client out for good."""
        self._out = (*self.values.excluded, client)
        self.keep_choice()

    def keep_keys(self, keys: Mapping[ClientId, str]) -> None:
        """Keep the keys of the clients' nodes."""
        self.note(keys=dict(keys))

    def replace(self, round_: int, clients: Sequence[ClientId]) -> None:
        """Have others drawn in the place of clients that a round failed over; those of older rounds are dropped."""
        known = {one: out for one, out in self.values.replaced.items() if one > round_ - REMEMBERED}
        self.note(replaced=known | {round_: tuple(clients)})

    def keep_round(
        self,
        round_: int,
        norms: Mapping[ClientId, float],
        last_norms: Mapping[ClientId, Mapping[str, float]],
        doubted: Mapping[ClientId, Mapping[str, int]],
        late: Mapping[ClientId, Mapping[str, int]],
    ) -> None:
        """Keep how large the messages of a round were, where those of older rounds are dropped; and of every client
        what it sent last, and whether it is doubted.
        """
        known = {**self.values.norms, round_: dict(norms)}
        self.note(
            furthest=max(self.values.furthest, round_),
            norms={one: known[one] for one in sorted(known) if round_ - REMEMBERED < one <= round_},
            last_norms={client: dict(values) for client, values in last_norms.items()},
            doubted={client: Doubted(**values) for client, values in doubted.items()},
            late={client: Doubted(**values) for client, values in late.items()},
        )
