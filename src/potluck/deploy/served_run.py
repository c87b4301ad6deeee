"""A federation from its first start to its end: who takes part, who comes late, and rounds that are taken back.

A change of the roster, or a step back, is a restart without an end of the process: the server goes on from a
checkpoint with a higher incarnation, as after a crash, so that clients undo what it had not accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from potluck.core.card import ClientId
from potluck.core.modest import Modest
from potluck.core.server import Server
from potluck.deploy.donors import is_to_blame
from potluck.deploy.engine import FlowerEngine
from potluck.deploy.enrolled import enrolled_federation
from potluck.deploy.enrolments import keep_enrolments, kept_enrolments
from potluck.deploy.evidence import Evidence, is_other, played_without
from potluck.deploy.federated_run import Conduct, federated_run, fits
from potluck.deploy.groups import Groups
from potluck.deploy.misfits import in_words, without_misfits
from potluck.deploy.register import BadStart, Register, WentBack
from potluck.deploy.suspects import FACTOR, Failing, Setback, Suspect, find_suspect, find_tie, have_diverged
from potluck.deploy.taking_back import (
    all_fail,
    can_take_back,
    excluded_for_good,
    going_back,
    going_further_back,
    half_each,
    no_way_back,
    played_by_all,
    played_by_others,
    spoiled_after,
    spoiled_by,
    spoiled_within,
    take_back,
    undecided,
    work_that_stays,
)
from potluck.engine.cohort import clients_needed
from potluck.engine.evaluation.checks import check_evaluation
from potluck.engine.retries import GROWING, Waits
from potluck.errors import ConfigError, RoundFailed, RunError
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.runs.api import write_start
from potluck.runs.environment import keep_contract
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Run
from potluck.runs.observers import Observer
from potluck.runs.observers.checkpoints import saved_round
from potluck.runs.results.run_result import RunResult

MOST_UNSEEN = 2  # times a round is taken back without a suspect


class Regrouped(Exception):
    """The clients of a run are others from here on, or it went back: it goes on from its last checkpoint."""


class ServedRun:
    """Plays a run of a federation; its folder is locked, and `register` has counted this start."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        engine: FlowerEngine,
        register: Register,
        watcher: Observer,
    ) -> None:
        self.experiment, self.folder, self.engine = experiment, folder, engine
        self.register, self.watcher = register, watcher
        self.fresh = not (folder / "config.yaml").exists()
        # a file without config.yaml is of a start that was ended before it counted
        self.kept = {} if self.fresh else kept_enrolments(folder, engine.fields)
        self.roster: tuple[ClientId, ...] = ()
        self._ready: Federation | None = None  # that of the roster, if it was just built
        self.conduct = Conduct(engine, register)
        self.waits = Waits(GROWING, experiment.engine.patience, engine.clock)
        self._unseen: Counter[int] = Counter()  # how often others played a round in which nobody stood out
        self._failing, self.evidence = Failing(), Evidence(register, lambda: self.roster)

    def play(self) -> RunResult:
        """Gather the clients and play all rounds."""
        self._gather()
        while True:
            run = self._run()
            try:
                return run.play()
            except Regrouped:
                pass
            except RoundFailed as error:
                self._recover(run, error)
            self.register.start()

    def _recover(self, run: Run, error: RoundFailed) -> None:
        """Change what a failed round can be played with; raises the error again where nothing helps."""
        failed = run.state.round + 1
        if error.spoiled:
            self._leave_spoiler(run, failed, error)
            return
        setback = self._setback(run, failed, error)
        if self._leave_revoked(run) or self._start_again(run, setback):
            return
        try:
            self._go_back(run, setback, error)
        except RoundFailed as final:
            if not (
                self._leave_spoiler_within(run, setback)
                or self._take_back_unseen(run, setback)
                or self._draw_others(run, failed, final, final.failures)
                or self._wait_for_others(run, final)
            ):
                raise

    def _setback(self, run: Run, failed: int, error: RoundFailed) -> Setback:
        setback = Setback(failed, run.cohort(failed), error.failures, error.lost, ended=True)
        self._failing.note(setback)
        return setback

    def _most_diverge(self, run: Run, setback: Setback) -> bool:
        """Whether more than half of all clients failed over values in the attempts at a round."""
        return self._failing.are_most(setback, run.federation.population.trainers)

    # --- others in place of those a round failed over ---

    def _draw_others(self, run: Run, failed: int, error: RoundFailed, without: Collection[ClientId]) -> bool:
        """Where a round asks some of the clients only, ask others in place of those it failed over; False if the
        quorum could not be met with them.
        """
        out, new = self._stand_ins(run, failed, without)
        if not new:
            return False
        self.register.replace(failed, out)
        self.watcher.notice(
            f"{error}; round {failed} is played again with {', '.join(new)} in the place of {', '.join(out)}"
        )
        return True

    def _stand_ins(
        self, run: Run, round_: int, without: Collection[ClientId]
    ) -> tuple[list[ClientId], list[ClientId]]:
        """Who is out of a round with these clients, and who comes in their place; nobody if these are too few."""
        population = run.federation.population
        gone = {*run.replaced.get(round_, ()), *run.left_out.get(round_, ()), *without}
        out = [client for client in population.trainers if client in gone]
        cohort, asked = population.cohort_without(round_, out), run.cohort(round_)
        needed = clients_needed(self.experiment.training.quorum, population.cohort_size)
        return out, [client for client in cohort if client not in asked] if len(cohort) >= needed else []

    def _take_back_unseen(self, run: Run, setback: Setback) -> bool:
        """Have others play the round before, if most of all clients cannot go on from there.

        Few clients played it, so that nobody could stand out in it: others are drawn, or those are asked again that
        were asked and had no part in it. Twice at most: it may be the settings.
        """
        settled = setback.round - 1
        if not settled or not self._most_diverge(run, setback) or self._unseen[settled] == MOST_UNSEEN:
            return False
        sent = self.evidence.sent(settled)
        out, new = self._stand_ins(run, settled, sent)
        away = [client for client in run.cohort(settled) if client not in sent]
        if not (new or away) or not self._take_back(settled - 1):
            return False
        self._unseen[settled] += 1
        if new:
            older = {round_: gone for round_, gone in run.replaced.items() if round_ < settled}
            self.register.note(replaced={**older, settled: tuple(out)})
        self.watcher.notice(
            played_by_others(setback.round, out, new) if new else played_by_all(setback.round, away)
        )
        return True

    # --- who takes part ---

    def _gather(self) -> None:
        """Wait for the clients: at first for the start quorum, later for the quorum of those that are known."""
        engine, training = self.engine, self.experiment.training
        known = [client for client in engine.ids if client in self.kept and not engine.is_revoked(client)]
        if self.fresh or not known:
            self.roster = self._first_roster(clients_needed(training.start_quorum, len(engine.ids)))
            return
        engine.enrolled |= {client: self.kept[client] for client in engine.ids if client in self.kept}
        if saved_round(self.folder.path) < training.rounds:  # else only the summary is left to write
            engine.gather(known, clients_needed(training.quorum, len(known)))
        self.roster = tuple(known)

    def _first_roster(self, needed: int) -> tuple[ClientId, ...]:
        """Those who begin. If too few of those that are here fit each other, others are waited for."""
        engine, wanted = self.engine, needed
        unfit: ConfigError | None = None
        while True:
            try:
                engine.gather(needed=wanted)
            except RunError as error:
                raise unfit or error from error
            here = tuple(client for client in engine.ids if client in engine.homes)
            try:
                return self._fitting(here, needed)
            except ConfigError as error:
                if len(here) == len(engine.ids):
                    raise
                self.watcher.notice(f"{error}; waiting for the other clients")
                unfit, wanted = error, len(here) + 1

    def _fitting(self, here: tuple[ClientId, ...], needed: int) -> tuple[ClientId, ...]:
        """Those who can begin together. The others are turned away; if too few are left, the run does not begin."""
        cards = {client: self.engine.enrolled[client].card for client in here}
        facts = {client: {"task": card.task, **card.extra} for client, card in cards.items()}
        self._ready, misfits = without_misfits(here, facts, self._federation, needed)
        if len(here) - len(misfits) < needed:
            told, names = "; ".join(misfits.values()), ",".join(misfits)
            raise ConfigError(f"{told}; have that put right there, or begin without: --exclude {names}")
        for client, reason in misfits.items():
            self.engine.turn_away(client, f"client {client} cannot take part: {reason}")
        return tuple(client for client in here if client not in misfits)

    def _federation(self, roster: tuple[ClientId, ...]) -> Federation:
        return self._built(roster)[0]

    def _built(self, roster: tuple[ClientId, ...]) -> tuple[Federation, Server]:
        """The federation of some clients and its server, if they can be built in the memory that there is."""
        with Modest():
            federation = enrolled_federation(
                self.experiment, {client: self.engine.enrolled[client] for client in roster}
            )
            server = federation.server()
        check_evaluation(self.experiment.evaluate, federation)
        if federation.method.open_option(federation.population) is not None:
            raise ConfigError(
                "an option left open (auto) is chosen by trial runs; choose it before a federation"
            )
        return federation, server

    def _run(self) -> Run:
        """The run with the clients as they are now, where it was left."""
        federation, self._ready = self._ready or self._federation(self.roster), None
        self.kept |= {client: self.engine.enrolled[client] for client in self.roster}
        keep_enrolments(self.folder, self.kept)
        if self.fresh:
            write_start(self.folder, self.experiment, federation)
        else:
            federation.save_split(self.folder / "split.json")
            keep_contract(self.folder, federation)
        values = self.register.values
        run = federated_run(
            self.engine,
            self.experiment,
            self.folder,
            federation,
            self.watcher,
            values.run,
            values.starts,
            self.fresh,
            self.conduct,
            waits=self.waits,
        )
        self.register.keep_choice()
        self.conduct.follow(run)
        self.fresh = False
        out = [
            (one.round, one.without) for one in values.went_back if one.times is not None
        ]  # others are excluded
        out += [(one.round, one.without) for one in values.bad_starts]
        run.left_out = {round_: tuple(client for one, client in out if one == round_) for round_, _ in out}
        run.replaced = values.replaced
        run.examiner.others = self._others()
        run.between_rounds = lambda: self._between_rounds(run)
        self.groups = Groups(federation.method, run.rounds.server.cards)
        run.may_repeat = lambda round_, error: self._may_repeat(run, round_, error)
        run.remarks = self._remarks()
        return run

    def _may_repeat(self, run: Run, round_: int, error: RoundFailed) -> bool:
        """Whether a round is played again as it was.

        Where it spoils the server's state, somebody may stand out in it once those have answered that are lost.
        """
        if error.spoiled:
            taken, suspect = self._spoiler(run, round_, error)
            return bool(error.lost) and suspect is None and not self._stand_ins(run, round_, taken)[1]
        return self._may_pass(run, self._setback(run, round_, error))

    def _may_pass(self, run: Run, setback: Setback) -> bool:
        """Whether a round could succeed if it were played again as it was."""
        return (
            self._bad_donor(run, setback) is None
            and self._bad_update(run, setback) is None
            and not (setback.diverged() and self.evidence.gone(setback.round - 1))
        )

    def _why_absent(self, client: ClientId) -> str:
        if self.engine.is_revoked(client):
            return "its key was revoked"
        return "it was not taken in" if client in self.engine.turned_away else "it has not joined yet"

    def _others(self) -> dict[ClientId, str]:
        """The clients of the experiment that cannot be measured, and why."""
        engine = self.engine
        late = {client: self._why_absent(client) for client in engine.ids if client not in self.roster}
        return late | {client: "it was excluded" for client in engine.excluded if client in self.kept}

    def _remarks(self) -> dict[str, object]:
        values = self.register.values
        went_back = [one.model_dump() for one in values.went_back]
        bad_starts = [one.model_dump() for one in values.bad_starts]
        found = {"excluded": list(values.excluded), "went_back": went_back, "bad_starts": bad_starts}
        return {name: value for name, value in found.items() if value}

    def _between_rounds(self, run: Run) -> None:
        """Take in clients that have come; go back if only one that stands out could still answer."""
        failures, round_ = self.conduct.failures, run.state.round
        if failures:
            setback = Setback(round_, run.cohort(round_), failures)
            if self._start_again(run, setback) and self._take_back(round_ - 1):
                raise Regrouped
            self._go_back(run, setback, None)
        self._renew_groups(run, failures)
        self.engine.look()
        if self._leave_revoked(run) or self._take_in(run):
            raise Regrouped

    def _renew_groups(self, run: Run, failures: Mapping[ClientId, str]) -> None:
        """Let clients begin anew whose part of the server's state none of them can train with any more."""
        round_, accepted = run.state.round, run.rounds.accepted
        self.groups.note(failures, [client for client, last in accepted.items() if last == round_])
        anew = self.groups.begin_anew(run.rounds.server)
        if anew:
            self.watcher.notice(
                f"after round {round_} nobody of {', '.join(anew)} can train with what the server has for them, as "
                "it is not finite or far too large: they begin anew with first weights of one of them"
            )

    def _take_in(self, run: Run) -> bool:
        """Let those join that have come and fit; False if there are none."""
        new = [client for client in self.engine.homes if client not in self.roster]
        joined = [client for client in new if self._admit(client, run)]
        if joined:
            self.watcher.notice(f"taken in after round {run.state.round}: {', '.join(joined)}")
        return bool(joined)

    def _wait_for_others(self, run: Run, error: RoundFailed) -> bool:
        """Where those who began cannot play a round, have others join that were not there; False if none does."""
        while absent := [client for client in self.engine.ids if self._may_come(client)]:
            if all(client not in self.engine.homes for client in absent):
                self.watcher.notice(f"{error}; waiting for the other clients: {', '.join(absent)}")
            try:
                self.engine.gather(absent, 1)
            except RunError:
                return False
            if self._take_in(run):
                return True
        return False

    def _may_come(self, client: ClientId) -> bool:
        """Whether a client could join those that are here."""
        away = client not in self.roster and client not in self.engine.turned_away
        return away and not self.engine.is_revoked(client)

    def _admit(self, client: ClientId, run: Run) -> bool:
        """Let a client join those that are here; if it cannot, it and everyone else hear why."""
        roster = tuple(one for one in self.engine.ids if one in self.roster or one == client)
        why = self._unfit(roster, run)
        if why:
            self.engine.turn_away(client, f"client {client} cannot join after round {run.state.round}: {why}")
        else:
            self.roster = roster
        return not why

    def _leave_revoked(self, run: Run) -> bool:
        """Leave out clients whose keys were revoked; False if there are none, or the run cannot do without them."""
        gone = [client for client in self.roster if self.engine.is_revoked(client)]
        rest = tuple(client for client in self.roster if client not in gone)
        if not gone or not rest or self._unfit(rest, run):
            return False
        self.roster = rest
        names = ", ".join(gone)
        self.watcher.notice(f"left out after round {run.state.round}, as their keys were revoked: {names}")
        return True

    def _unfit(self, roster: tuple[ClientId, ...], run: Run) -> str:
        """Why a run cannot go on with these clients; empty where it can."""
        try:
            _, server = self._built(roster)
        except Exception as error:  # over a stranger's card, perhaps: that does not end the run
            return in_words(error)
        if fits(server, run.rounds.server.snapshot()):
            return ""
        return f"then the {self.experiment.method.name} server would need another state"

    # --- going back ---

    def _leave_spoiler(self, run: Run, round_: int, error: RoundFailed) -> None:
        """Leave out of a round whose message stood out so that the server's state would not be finite after it."""
        taken, suspect = self._spoiler(run, round_, error)
        if suspect is None and self._draw_others(run, round_, error, taken):
            return
        found = self.evidence.stood_out(round_)
        if is_other(found, suspect) and self._go_further_back(spoiled_after(round_), found):
            return
        if suspect is None or self._followed_another(suspect, round_):
            tie = find_tie(taken)
            if tie is None:
                raise error
            raise RoundFailed(half_each(self.folder, error, tie), error.failures, error.lost) from error
        self.watcher.notice(spoiled_by(played_without(suspect, round_)))
        self._leave_out_of(run, suspect, round_)
        self._exclude_for_good(run, suspect, round_)

    def _spoiler(
        self, run: Run, round_: int, error: RoundFailed
    ) -> tuple[dict[ClientId, float], Suspect | None]:
        """How large the messages of such a round were, and whose stood out."""
        sizes = run.rounds.acceptance.sizes
        taken = {client: size for client, size in sizes.items() if client not in error.failures}
        return taken, find_suspect(taken, self.evidence.sizes_before(round_, taken))

    def _leave_out_of(self, run: Run, suspect: Suspect, round_: int) -> None:
        """Have a round played again without a client, and with another in its place where some were drawn."""
        noted = played_without(suspect, round_)
        self.register.note(went_back=(*self.register.values.went_back, noted))
        out, new = self._stand_ins(run, round_, [suspect.client])
        if new:
            self.register.replace(round_, out)

    def _leave_spoiler_within(self, run: Run, setback: Setback) -> bool:
        """The same where clients failed in a round after they had sent something; False if nobody stood out."""
        sizes = run.rounds.acceptance.sizes
        if not setback.diverged() or not all(client in sizes for client in setback.diverging):
            return False
        suspect = find_suspect(sizes, self.evidence.sizes_before(setback.round, sizes))
        if suspect is None:
            return False
        self.watcher.notice(spoiled_within(played_without(suspect, setback.round)))
        self._leave_out_of(run, suspect, setback.round)
        if self._most_diverge(run, setback):
            self._exclude_for_good(run, suspect, setback.round)
        self._failing.forget()
        return True

    def _exclude_for_good(self, run: Run, suspect: Suspect, round_: int) -> None:
        """Exclude a client that was left out of an earlier round as well, after which the run could go on.

        Never half of all clients, and nobody whom the server's state cannot do without. Only one that has what most
        have of the server's state: where two share a part of it, nobody can say which of them has spoiled it. And
        only where the others' messages were of the usual size, else the run diverges, with it or without it.
        """
        client, before = suspect.client, self.evidence.named_before(suspect.client, round_)
        rest, out = tuple(one for one in self.roster if one != client), len(self.evidence.excluded())
        few = 2 * (out + 1) < len(self.roster) + out
        usual = 2 * len(self.groups.of(client, self.roster)) > len(self.roster) and suspect.others <= FACTOR
        if before is None or client not in self.roster or not (few and usual) or self._unfit(rest, run):
            return
        self.roster = rest
        self.engine.exclude(client)
        self.register.exclude(client)
        self.watcher.notice(excluded_for_good(client, before))

    def _start_again(self, run: Run, setback: Setback) -> bool:
        """Leave out whose first weights made everyone fail: another client gives them when it is repeated."""
        donor, failed = self._bad_donor(run, setback), setback.round
        if donor is None:
            return False
        bad = BadStart(round=failed, without=donor)
        self.register.note(bad_starts=(*self.register.values.bad_starts, bad))
        self._failing.forget()
        self.watcher.notice(
            f"round {failed}: most clients fail over values that are not finite or far too large, after client "
            f"{donor} gave the first weights: round {failed} is played again without client {donor}"
        )
        return True

    def _bad_donor(self, run: Run, setback: Setback) -> ClientId | None:
        """Whose first weights made everyone fail; nobody where all others were blamed before.

        A message of the round before that stands out is the nearer reason.
        """
        donor = self._donor(run, setback.round)
        if donor is None or not (is_to_blame(donor, setback) and self._most_diverge(run, setback)):
            return None
        if not all(self.groups.share(donor, client) for client in setback.asked):
            return None  # who gets nothing of it fails for another reason
        if self._bad_update(run, setback) is not None:
            return None
        blamed = sum(one.round == setback.round for one in self.register.values.bad_starts)
        return (
            donor if blamed < len(self.roster) - 1 else None
        )  # not everyone can be wrong: it is the setting

    def _bad_update(self, run: Run, setback: Setback) -> Suspect | None:
        """Whose message of the round before stood out so that everyone fails over what came of it.

        Who gave first weights may train on with them. One alone with its architecture is no proof: it begins anew.
        """
        suspect = self.evidence.suspect(setback.round - 1)
        if suspect is None:
            return None
        donor = self._donor(run, setback.round)
        like = self.groups.of(suspect.client, setback.asked)  # where only they get what it sent
        aside = {*setback.lost, suspect.client, donor}
        if setback.diverged(suspect.client, donor):
            return suspect
        told_by_others = len(like) > 1 and have_diverged(setback.failures, like, aside)
        return suspect if told_by_others and not self._followed_another(suspect, setback.round - 1) else None

    def _followed_another(self, suspect: Suspect, round_: int) -> bool:
        """Whether another client stood out before a round, and the suspect may have gone on from what came of it.

        Of what a few share alone the messages of all others tell nothing.
        """
        found, like = self.evidence.stood_out(round_), self.groups.of(suspect.client, self.roster)
        few = 2 * len(like) <= len(self.roster)
        alike = few and is_other(found, suspect) and found[-1].without in like
        return alike or self.evidence.went_on_from(found, suspect)

    def _donor(self, run: Run, round_: int) -> ClientId | None:
        """Who gave the first weights of a round."""
        return self.engine.donors.of(round_, run.rounds.acceptance.first_sizes)

    def _go_back(self, run: Run, setback: Setback, error: RoundFailed | None) -> None:
        """Take back the round before one that nobody could play, and leave out whose message stood out in it.

        Raises the `error` again where there is nothing to take back; without one, enough clients could play on, and
        so they do. Where somebody who was in that round is out by now, it is played again without them: so the
        operator decides. What a client that was left out did in rounds before comes before what others sent since.
        """
        settled, suspect = setback.round - 1, self._bad_update(run, setback)
        before, most = self.evidence.left_out_of(settled), self._most_diverge(run, setback)
        if error is not None and not most and self._stand_ins(run, setback.round, setback.failures)[1]:
            raise error  # of a few clients that are asked most may lie: others are asked first
        gone = self.evidence.gone(settled) if setback.diverged() and (suspect is None or before) else []
        if gone and self._take_back(settled - 1):
            self._note_back([WentBack(round=settled, without=client) for client in gone], error)
            return
        if error is not None and most:
            found = self.evidence.stood_out(settled, {one.without for one in before})
            if (before or is_other(found, suspect)) and self._go_further_back(all_fail(setback.round), found):
                return
            if found and (suspect is None or self.evidence.went_on_from(found, suspect)):
                told = work_that_stays(setback.round, found, bool(before))
                raise RoundFailed(told, setback.failures, error.lost) from error
        tie = self.evidence.tie(settled) if suspect is None and setback.diverged() else None
        if error is not None and tie is not None:
            told = undecided(self.folder, setback.round, tie, before[-1] if before else None)
            raise RoundFailed(told, setback.failures, error.lost) from error
        if suspect is None or (before and error is None) or self._followed_another(suspect, settled):
            if error is not None:
                raise error
            return
        if not self._take_back(settled - 1):
            if error is None:
                return
            told = no_way_back(self.folder, setback.round, suspect, before[-1] if before else None)
            raise RoundFailed(told, setback.failures, error.lost) from error
        out = self.evidence.suspects(settled) if before else [suspect]  # sites take a round only so often
        for one in out if setback.diverged(suspect.client) and most else ():
            self._exclude_for_good(run, one, settled)
        self._note_back([played_without(one, settled) for one in out], error)

    def _take_back(self, round_: int) -> bool:
        """Make an earlier round the newest; who failed after it may not fail any more."""
        done = can_take_back(self.folder, round_, self.register.values.furthest)
        if done:
            take_back(self.folder, round_)
            self._failing.forget()
        return done

    def _go_further_back(self, why: str, found: Sequence[WentBack]) -> bool:
        """Take back all rounds since the first that is kept of those in which a client stood out; False if none is.

        What it sent there may have spoiled what others sent since.
        """
        furthest = self.register.values.furthest
        kept = [one for one in found if can_take_back(self.folder, one.round - 1, furthest)]
        if not kept:
            return False
        self._take_back(kept[0].round - 1)
        self.register.note(went_back=(*self.register.values.went_back, *kept))
        self.watcher.notice(going_further_back(why, kept))
        return True

    def _note_back(self, went: Sequence[WentBack], error: RoundFailed | None) -> None:
        """Write down that a round was taken back, and say so; without an error the run under way ends here."""
        self.register.note(went_back=(*self.register.values.went_back, *went))
        self.watcher.notice(going_back(went))
        if error is None:
            raise Regrouped
