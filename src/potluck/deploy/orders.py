"""Orders that come to a client as bytes: each is answered in bytes, and whatever goes wrong becomes a refusal."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from potluck.core.card import ClientId
from potluck.core.plain_values import printable
from potluck.deploy.bounds import check_order
from potluck.deploy.discretion import in_public
from potluck.deploy.progress import EVALUATE, JOIN
from potluck.deploy.resident import Resident
from potluck.deploy.site_status import OrderNotes
from potluck.deploy.wire import Enrolment, Hello, Order, pack_reply, unpack_order
from potluck.engine.protocol import Answer, Failure, Outcome, Request, about
from potluck.errors import PotluckError, StepFailed, kind_and_message
from potluck.files import FULL

MOST_CAUSES = 100  # errors that an error may come from


class Orders(ABC):
    """Takes orders for one client as bytes and always answers in bytes."""

    client: ClientId
    device: str
    notes: OrderNotes

    @abstractmethod
    def enrol(self, offer: Mapping[str, Any]) -> Enrolment:
        """Join a run: a new one from its start, a known one where it was left."""

    @abstractmethod
    def at(self, run: str) -> Resident:
        """The live client of a run."""

    def answer(self, data: bytes) -> bytes:
        """Do an order and answer it; any error becomes a refusal, and the process lives on.

        The site's own code may end with `SystemExit`, and libraries in other languages raise errors that are no
        `Exception`: whatever an order brings about, the next one must find the site here.
        """
        try:
            order = unpack_order(data)
            check_order(order)
            self.notes.begin(*_in_words(order))
            outcome = self.obey(order)
            reply = pack_reply(outcome)
            self._note(order, outcome, len(data), len(reply))
            return reply
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not isinstance(error, PotluckError) and self.notes.room.left > 0:
                with contextlib.suppress(Exception):
                    traceback.print_exc()
            return self.refuse(error, len(data))

    def refuse(self, error: BaseException, received: int = 0) -> bytes:
        """The reply to an order that is not done: one sentence, however long the words of the server in it are."""
        with contextlib.suppress(Exception):
            known = isinstance(error, PotluckError)
            self.notes.refused(str(error) if known else kind_and_message(error), received)
        told = printable(about(self.client, in_public(error)))
        return pack_reply(Failure(self.client, told, lost=is_for_now(error)))

    def _note(self, order: Order, outcome: Outcome | Enrolment, received: int, sent: int) -> None:
        """Note an order that was done."""
        if isinstance(order, Hello):
            self.notes.greeted(order.refused)
            self.notes.answered(received, sent)
        else:
            steps = outcome.report.steps if isinstance(outcome, Answer) else 0
            self.notes.answered(received, sent, order.stamp.exchange, steps)

    def obey(self, order: Order) -> Outcome | Enrolment:
        """Do an order, or raise why not."""
        if isinstance(order, Hello):
            return self.enrol(order.welcome)
        resident = self.at(order.stamp.experiment)
        if order.client != self.client:
            raise StepFailed(
                f"this was meant for client {order.client}; give every client a node and a key of its own"
            )
        if isinstance(order, Request):
            return resident.perform(dataclasses.replace(order, down=order.down.to(self.device)))
        down = None if order.down is None else order.down.to(self.device)
        answer = resident.examine(dataclasses.replace(order, down=down))
        for metric, error in answer.report.errors.items():
            self._note_metric(metric, error)
            answer.report.errors[metric] = f"{error.partition(':')[0]} at the site"
        return answer

    def _note_metric(self, metric: str, error: str) -> None:
        """Log why a metric failed. The error may tell of the site's data, so the server hears its kind alone."""
        if self.notes.room.taken():
            with contextlib.suppress(OSError, ValueError):
                self.notes.log(f"the metric {metric} failed: {error}")


def is_for_now(error: BaseException | None) -> bool:
    """Whether an order that ended so may be done when it comes again: a disk was full, or a folder was moved."""
    seen = 0
    while error is not None and seen < MOST_CAUSES:
        if isinstance(error, OSError) and error.errno in (*FULL, errno.ESTALE):
            return True
        error, seen = error.__cause__, seen + 1
    return False


def _in_words(order: Order) -> tuple[str, int | None, str]:
    """The run and the round of an order, and what it asks for."""
    if isinstance(order, Hello):
        return str(order.welcome.get("run", "")), None, JOIN
    asked = "+".join(order.steps) if isinstance(order, Request) else EVALUATE
    return order.stamp.experiment, order.stamp.round, asked
