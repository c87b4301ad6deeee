"""One round: play the method's script, settle. A run adds logs and checkpoints to this."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.contract import largest_size
from potluck.core.server import Server
from potluck.engine.acceptance import Acceptance, known_shapes
from potluck.engine.cohort import Cohort
from potluck.engine.ledger import Ledger
from potluck.engine.protocol import Engine, Stamp
from potluck.errors import PotluckError, RoundFailed, RunError, kind_and_message
from potluck.federation.federation import Federation


def not_finite(server: Server) -> dict[str, Tensor]:
    """Where a server's state is not finite: by name, for those tensors that have such places."""
    floats = {name: value for name, value in server.tensors().items() if value.is_floating_point()}
    places = {name: ~value.isfinite() for name, value in floats.items()}
    return {name: place for name, place in places.items() if bool(place.any())}


def _spreads(after: Tensor, before: Tensor | None) -> bool:
    """Whether places are not finite that were before; of a tensor that has another shape now nobody can tell."""
    if before is None:
        return True
    return after.shape == before.shape and bool((after & ~before).any())


class Rounds:
    """Plays rounds over an engine; remembers for each client the last round whose work was accepted."""

    def __init__(
        self, federation: Federation, engine: Engine, server: Server | None = None, name: str = ""
    ) -> None:
        self.federation, self.engine, self.name = federation, engine, name
        self.server = server if server is not None else federation.server()
        self.accepted: dict[ClientId, int] = {}
        self.incarnation = 0
        self.acceptance = Acceptance(federation.method, self.server)

    def stamp(self, client: ClientId, round_: int, attempt: int, exchange: int = 0) -> Stamp:
        """Which round, attempt and exchange a request belongs to."""
        return Stamp(
            self.name, round_, attempt, exchange, self.accepted.get(client, 0), incarnation=self.incarnation
        )

    def largest_reply(self, client: ClientId, steps: tuple[str, ...]) -> int | None:
        """The most bytes a client may send for these steps; None where the contract sets no limit."""
        method, card = self.federation.method, self.server.cards[client]
        return largest_size(
            method.sent_by(steps), method.symbols(card), known_shapes(method, self.server, card)
        )

    @contextlib.contextmanager
    def _script(self, round_: int) -> Iterator[None]:
        """Where clients are strangers, say in one sentence that a method's own code has failed at the server."""
        try:
            yield
        except (PotluckError, OSError):
            raise
        except Exception as error:
            if not self.acceptance.strangers:
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise RunError(
                f"round {round_}: the server's half of {self.federation.method.name} failed at {place.filename}, "
                f"line {place.lineno} ({kind_and_message(error)}); nothing of the round is kept: fix it, then go "
                f"on after round {round_ - 1} with the same command"
            ) from error

    def _check_finite(self, round_: int, cohort: Cohort, before: Mapping[str, Tensor]) -> None:
        """Refuse a round that made numbers in the server's state not finite: nobody could go on from there.

        Those that were not finite `before` may stay so: a method may mark with them what it does not know yet.
        """
        after = not_finite(self.server)
        name = next((name for name, places in after.items() if _spreads(places, before.get(name))), None)
        if name is not None:
            raise RoundFailed(
                f"round {round_}: the server's state ({name}) is not finite after it; "
                f"{self.federation.method.remedy}",
                cohort.failures,
                cohort.lost,
                spoiled=True,
            )

    def play(
        self,
        round_: int,
        ids: Sequence[ClientId],
        *,
        attempt: int = 1,
        quorum: int = 1,
        ledger: Ledger | None = None,
        before_settling: Callable[[Cohort], None] | None = None,
    ) -> Cohort:
        """One attempt at a round: the work of clients that stay to its end is accepted, that of the others undone.

        `before_settling` is called after the method's script, while the clients are still as training left them.
        """
        cohort = Cohort(
            self.engine,
            self.federation.method,
            self.server,
            ids,
            lambda client, exchange: self.stamp(client, round_, attempt, exchange),
            ledger if ledger is not None else Ledger(round_),
            quorum,
            self.acceptance,
        )
        self.acceptance.begin()
        rng = self.federation.server_rng(round_)
        self.server.enter(round_, rng, {}, "round")
        before = not_finite(self.server) if self.acceptance.strangers else {}
        with (
            rng.as_default(self.federation.device),
            self.engine.at_server(self.server),
            self._script(round_),
        ):
            self.federation.method.round(self.server, cohort)
        if self.acceptance.strangers:
            self._check_finite(round_, cohort, before)
        if before_settling is not None:
            before_settling(cohort)
        self.engine.settle(round_, ids, cohort.ids)
        self.accepted |= dict.fromkeys(cohort.ids, round_)
        return cohort
