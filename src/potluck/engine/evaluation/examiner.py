"""The server's half of an evaluation: whom it asks at which moment of a round, and the log lines of the answers.

Every value is logged per client, round, moment and mode; means, spreads and "best" are views of that log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from potluck.core.card import ClientId
from potluck.core.message import LastMessage
from potluck.engine.acceptance import no_message
from potluck.engine.evaluation.asking import Asking
from potluck.engine.evaluation.examined import Examined, Line
from potluck.engine.evaluation.log_lines import read_together, split_parts
from potluck.engine.evaluation.metric_notices import MetricNotices
from potluck.engine.evaluation.predictions import read_predictions
from potluck.engine.evaluation.settings import EvaluateSettings, Moment, chosen_modes
from potluck.engine.evaluation.unbounded import UnboundedNumbers
from potluck.engine.ledger import Ledger
from potluck.engine.protocol import Answer, Examination, Failure
from potluck.engine.retries import Waits
from potluck.engine.rounds import Rounds


class Examiner:
    """Has the clients of a run measured, and makes log lines of what they answer."""

    def __init__(
        self,
        rounds: Rounds,
        settings: EvaluateSettings,
        last: int,
        notice: Callable[[str], None],
        attempts: int = 1,
        waits: Waits | None = None,
        quorum: float = 0.0,
    ) -> None:
        """`last` is the last round of the run, which is always evaluated; `notice` hears who was not measured.

        `attempts`, `waits` and `quorum` say how often clients that gave no answer are asked (`Asking`).
        """
        self.rounds, self.federation = rounds, rounds.federation
        self.settings, self.last, self.notice = settings, last, notice
        self.modes = chosen_modes(settings, rounds.federation.method.modes)
        self.metrics = rounds.federation.clients.metrics
        self.facts = {name: metric.facts for name, metric in self.metrics.items()}
        self.others: Mapping[ClientId, str] = {}  # who belongs here and cannot be asked, with the reason
        self.asking = Asking(rounds.engine, notice, attempts, waits or Waits(), quorum)
        self._notices = MetricNotices(self.facts, notice)
        self._unbounded = UnboundedNumbers(self.facts, notice)
        self._messages = LastMessage()

    def examine(
        self, when: Moment, cohort: Sequence[ClientId], round_: int, attempt: int, ledger: Ledger
    ) -> list[Examined]:
        """Measure clients at one moment of a round; an empty list where the settings do not ask for it."""
        if not self.is_due(round_) or when not in self.settings.when:
            return []
        everyone = self.settings.who == "all" and when != "after_training"
        ids = self.federation.population.ids if everyone else cohort
        asked = self._examinations(when, ids, round_, attempt, ledger)
        unasked = {one.client: one for one in asked if isinstance(one, Failure)}
        examinations = [one for one in asked if isinstance(one, Examination)]
        outcomes = self.asking.outcomes(examinations, round_, round_ >= self.last) | unasked
        absent = {one.client: one.reason for one in outcomes.values() if isinstance(one, Failure)}
        for reason in absent.values():
            self.notice(f"round {round_}: {reason} (not evaluated)")
        answers = [outcome for outcome in outcomes.values() if isinstance(outcome, Answer)]
        lines = self.lines(when, round_, answers)
        predictions = tuple(read_predictions(answers, self.modes, self.settings.on, self.federation))
        missing = self._missing(when, round_, absent | (dict(self.others) if everyone else {}))
        return [Examined(round_, when, lines, predictions, self.facts, missing)]

    def is_due(self, round_: int) -> bool:
        """Whether a round is evaluated at all."""
        return round_ % self.settings.every == 0 or round_ == self.last

    def lines(self, when: Moment, round_: int, answers: Sequence[Answer]) -> tuple[Line, ...]:
        """The log lines of all answers."""
        found = read_together([answer.report.metrics for answer in answers])
        lines: list[Line] = []
        further = tuple(self.metrics)
        for answer, numbers in zip(answers, found, strict=True):
            sizes = self._sizes(answer.client)
            told = self.federation.population.task_of(answer.client).rules.told
            parts = {
                mode: split_parts(mode, numbers, sizes, self.settings.judge, told, further)
                for mode in self.modes
            }
            lines += self._client_lines(when, round_, answer.client, parts)
        first = round_ == min(self.settings.every, self.last)
        strangers = self.rounds.acceptance.strangers
        self._notices.look_at(lines, answers, first and not strangers)
        if strangers:
            lines = self._unbounded.judge(round_, lines)
        return tuple(lines)

    def observed(self, round_: int, lines: Sequence[Line]) -> list[Line]:
        """The log lines of what a method noted of clients; strangers may have told it anything."""
        strangers = self.rounds.acceptance.strangers
        return self._unbounded.judge_observed(round_, lines) if strangers else [*lines]

    def _missing(self, when: Moment, round_: int, absent: Mapping[ClientId, str]) -> tuple[Line, ...]:
        """The log lines of clients that were not measured."""
        return tuple(
            line
            for client, reason in absent.items()
            for line in self._client_lines(
                when, round_, client, {mode: {"missing": reason} for mode in self.modes}
            )
        )

    def _client_lines(
        self, when: Moment, round_: int, client: ClientId, parts: Mapping[str, Line]
    ) -> list[Line]:
        """The log lines of a client: `parts` has what stands in the line of each mode."""
        closing = {"held_out": True} if client in self.federation.population.held_out else {}
        return [
            {"round": round_, "client": client, "when": when, "mode": mode} | part | closing
            for mode, part in parts.items()
        ]

    def _examinations(
        self, when: Moment, ids: Sequence[ClientId], round_: int, attempt: int, ledger: Ledger
    ) -> list[Examination | Failure]:
        """An examination for each client; a failure for a stranger for whom no message can be made."""
        asked: list[Examination | Failure] = []
        for client in ids:
            try:
                asked.append(self._examination(when, client, round_, attempt, ledger))
            except Exception as error:
                if not self.rounds.acceptance.strangers:
                    raise
                asked.append(Failure(client, no_message(client, "evaluate", error)))
        return asked

    def _examination(
        self, when: Moment, client: ClientId, round_: int, attempt: int, ledger: Ledger
    ) -> Examination:
        """Clients are measured on the newest downlink, except after training: then as training left them."""
        down = None
        if when != "after_training":
            down = self._messages.of(self.federation.method.downlink(self.rounds.server, client))
            ledger.add(client, "evaluate", "down", "evaluate", down)
        stamp = self.rounds.stamp(client, round_, attempt)
        kept = self.settings.predictions != "none"
        own = self._own_metrics(client) if self.metrics else ()
        return Examination(client, down, stamp, self.modes, self.settings.on, own, kept)

    def _own_metrics(self, client: ClientId) -> tuple[str, ...]:
        """The names of the experiment's own metrics that a client is measured by."""
        task = self.federation.population.task_of(client)
        return tuple(name for name, metric in self.metrics.items() if metric.fits(task))

    def _sizes(self, client: ClientId) -> dict[str, int]:
        """How many samples a client's measures are taken over, per split."""
        samples = self.federation.population.samples(client)
        common = self.settings.on == "global"
        test = len(self.federation.clients.shared_test(client)) if common else samples["test"]
        return {"test": test, "validation": samples["validation"]}
