"""Taking back a round of a federation: its checkpoint, and the sentences where that is not possible."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.core.card import ClientId
from potluck.deploy.exchanges import BASES
from potluck.deploy.register import WentBack
from potluck.deploy.suspects import Suspect, Tie
from potluck.engine.store.checkpoints import Checkpoints
from potluck.report.again import to_go_on
from potluck.runs.folder import RunFolder


def can_take_back(folder: RunFolder, round_: int, furthest: int) -> bool:
    """Whether an earlier round is kept by the server, and by clients that have played all rounds since.

    Those that went on from the `furthest` round may not have their start any more, also if they went back since.
    """
    files = Checkpoints(folder / "checkpoints")
    return round_ in files.rounds() or (round_ == 0 and max(furthest, files.newest_round()) < BASES)


def take_back(folder: RunFolder, round_: int) -> None:
    """Make the checkpoint of an earlier round, which is kept, the newest one."""
    files = Checkpoints(folder / "checkpoints")
    if round_ == 0:
        manifests = sorted(
            files.folder.glob("checkpoint*.json"), key=lambda path: path.name == files.MANIFEST
        )
        for path in manifests:  # the newest last: until it is gone, the run stands where it stood
            path.unlink()
    else:
        files.load(round_)
        files.go_back(round_)


def going_back(went: Sequence[WentBack]) -> str:
    """What is said when a round is taken back."""
    round_, clients = went[0].round, ", ".join(one.without for one in went)
    times = went[0].times
    if times is None:
        why = f"client {clients} was in round {round_} and is out by now"
    elif len(went) == 1:
        why = (
            f"in round {round_} the message of client {clients} was {times:.3g} times as large as the median of "
            "the others'"
        )
    else:
        why = (
            f"in round {round_} the messages of client {clients} were up to {times:.3g} times as large as the "
            "median of the others'"
        )
    again = f"round {round_} is played again without client {clients}"
    return f"{all_fail(round_ + 1)}; {why}: going back, {again}"


def going_further_back(why: str, went: Sequence[WentBack]) -> str:
    """What is said when several rounds are taken back, in the first of which a client's message stood out."""
    first = went[0]
    return (
        f"{why}; in round {first.round} the message of client {first.without} was {first.times:.3g} times as large "
        f"as the median of the others': going back, round {first.round} and all since are played again, "
        f"{' and '.join(f'without client {client} in {rounds}' for client, rounds in _rounds_of(went).items())}"
    )


def _rounds_of(went: Sequence[WentBack]) -> dict[ClientId, str]:
    """The rounds of each client, in words."""
    rounds: dict[ClientId, list[str]] = {}
    for one in went:
        rounds.setdefault(one.without, []).append(str(one.round))
    return {client: f"round{'s' * (len(found) > 1)} {', '.join(found)}" for client, found in rounds.items()}


def excluded_for_good(client: ClientId, before: WentBack) -> str:
    """What is said when a client is excluded that was left out of a round before."""
    return (
        f"client {client} was left out of round {before.round} for the same reason, and the others could go on: it "
        f"is excluded from the run from here on, as by --exclude {client} (--include {client} takes it back)"
    )


def spoiled_within(one: WentBack) -> str:
    """What is said when a round is repeated in which clients failed over what another had sent before in it."""
    return (
        f"{all_fail(one.round)}; the message of client {one.without} in it was {one.times:.3g} times as "
        f"large as the median of the others': round {one.round} is played again without client {one.without}"
    )


def spoiled_after(round_: int) -> str:
    """What has happened when a round would spoil the server's state."""
    return f"round {round_}: the server's state would not be finite after it"


def spoiled_by(one: WentBack) -> str:
    """What is said when a round is repeated that would have spoiled the server's state."""
    return (
        f"{spoiled_after(one.round)}; the message of client {one.without} "
        f"was {one.times:.3g} times as large as the median of the others': round {one.round} is played again "
        f"without client {one.without}"
    )


def played_by_others(failed: int, out: Sequence[ClientId], new: Sequence[ClientId]) -> str:
    """What is said when a round is taken back that few clients played, and nobody stood out in it."""
    return (
        f"{all_fail(failed)}, and nobody stood out in round {failed - 1}: going back, round {failed - 1} is "
        f"played again with {', '.join(new)} in the place of {', '.join(out)}"
    )


def played_by_all(failed: int, away: Sequence[ClientId]) -> str:
    """What is said when a round is taken back in which nobody stood out, and that some had no part in."""
    return (
        f"{all_fail(failed)}, and nobody stood out in round {failed - 1}: going back, round {failed - 1} is "
        f"played again, also with {', '.join(away)}, who had no part in it"
    )


def half_each(folder: RunFolder, error: Exception, tie: Tie) -> str:
    """Why a run stops whose state half of the clients have spoiled, and how it goes on."""
    larger, smaller = ", ".join(tie.larger), ", ".join(tie.smaller)
    return (
        f"{error}; the message of client {larger} was {tie.times:.3g} times as large as that of client {smaller}, "
        f"and neither are a majority: look into both, and if need be go on without one side: "
        f"{_without(folder, tie.larger)}, or {_without(folder, tie.smaller)}"
    )


def no_way_back(folder: RunFolder, failed: int, suspect: Suspect, before: WentBack | None) -> str:
    """Why a run stops whose last round cannot be taken back, or was, and how it goes on."""
    return (
        f"{all_fail(failed, before)}; in round {failed - 1} the message of client {suspect.client} was "
        f"{suspect.times:.3g} times as large as the median of the others': look into it, and if need be go on "
        f"without it: {_without(folder, (suspect.client,))}"
    )


def work_that_stays(failed: int, found: Sequence[WentBack], left_out: bool = True) -> str:
    """Why a run stops where clients have left their mark in rounds that stay; `left_out`: of its last round."""
    rounds = _rounds_of(found)
    too = " too" if left_out else ""
    told = ", ".join(f"client {client} stood out in {which}{too}" for client, which in rounds.items())
    last, names = WentBack(round=failed - 1, without=", ".join(rounds)), ",".join(rounds)
    return (
        f"{all_fail(failed, last if left_out else None)}; {told}, and what came of that is not taken back, so that "
        f"large messages of others prove nothing: start a new run without client {names} (another --out, with "
        f"--exclude {names})"
    )


def undecided(folder: RunFolder, failed: int, tie: Tie, before: WentBack | None) -> str:
    """Why a run stops in which half of the clients stand against the other half, and how it goes on."""
    larger, smaller = ", ".join(tie.larger), ", ".join(tie.smaller)
    return (
        f"{all_fail(failed, before)}; in round {failed - 1} the message of client {larger} was "
        f"{tie.times:.3g} times as large as that of client {smaller}, and neither are a majority: "
        f"look into both, and if need be go on without one side: {_without(folder, tie.larger)}, "
        f"or {_without(folder, tie.smaller)}"
    )


def _without(folder: RunFolder, clients: tuple[ClientId, ...]) -> str:
    return f"{to_go_on(folder.path, portable=True)} --exclude {','.join(clients)}"


def all_fail(failed: int, before: WentBack | None = None) -> str:
    """What has happened when nobody can go on."""
    told = f"round {failed}: most clients fail over values that are not finite or far too large"
    if before is None:
        return told
    return f"{told}, also after round {before.round} was played again without client {before.without}"
