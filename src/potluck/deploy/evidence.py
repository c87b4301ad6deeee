"""What the register tells of settled rounds: whose messages stood out, and who was left out because of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from potluck.core.card import ClientId
from potluck.deploy.register import Register, WentBack
from potluck.deploy.suspects import FACTOR, Suspect, Tie, find_suspect, find_suspects, find_tie

GROWN = 3.0  # times as large as before are messages of those who train on with what another has spoiled


class Evidence:
    """Reads the norms of the rounds that are remembered; `roster` gives the clients that take part now."""

    def __init__(self, register: Register, roster: Callable[[], Collection[ClientId]]) -> None:
        self.register, self.roster = register, roster

    def sent(self, round_: int) -> dict[ClientId, float]:
        """How large the messages of a round were."""
        return self.register.values.norms.get(round_, {})

    def sizes_before(self, round_: int, present: Collection[ClientId]) -> dict[ClientId, float]:
        """How large the last messages of the other clients were, in those rounds before that are remembered."""
        norms = self.register.values.norms
        found = {client: size for one in sorted(norms) if one < round_ for client, size in norms[one].items()}
        absent = [client for client in self.roster() if client in found and client not in present]
        return {client: found[client] for client in absent}

    def suspects(self, round_: int) -> list[Suspect]:
        """Whose messages of a settled round stood out, against those of more than half of all clients.

        Who was not asked has a voice with what it sent before; who was left out of the round counts, and has none.
        Where some were never heard of, these count and have no voice either; or it has stood out in the round
        itself, and against what is usual: else a few that send next to nothing would have another blamed.
        """
        sent = self.sent(round_)
        silent = {one.without: math.inf for one in self.left_out_of(round_)}
        voices = {**self.sizes_before(round_, sent), **silent}
        unheard = {client: math.inf for client in self.roster() if client not in (sent | voices)}
        found = [one for one in find_suspects(sent) if sent[one.client] > FACTOR]
        if found and find_suspect(sent, voices) is not None:
            return found
        return find_suspects(sent, {**unheard, **voices})

    def suspect(self, round_: int) -> Suspect | None:
        """Whose message of a settled round stood out most, if one did."""
        return next(iter(self.suspects(round_)), None)

    def tie(self, round_: int) -> Tie | None:
        """The two halves whose messages of a settled round were very unlike."""
        return find_tie(self.sent(round_))

    def gone(self, round_: int) -> list[ClientId]:
        """Who is out by now, and still has a part in a settled round."""
        return [client for client in self.sent(round_) if client not in self.roster()]

    def left_out_of(self, round_: int) -> list[WentBack]:
        """What was said of the clients that were left out of a round because their messages stood out."""
        known = self.register.values.went_back
        return [one for one in known if one.round == round_ and one.times is not None]

    def stood_out(self, before: int, clients: Collection[ClientId] = ()) -> list[WentBack]:
        """The remembered rounds before one in which one of the clients stood out, the oldest first.

        Where no clients are given, it is the one that stood out last, if not after others had gone on from what
        another one had sent.
        """
        found: list[WentBack] = []
        for round_ in sorted(one for one in self.register.values.norms if one < before):
            suspect = self.suspect(round_)
            if suspect is not None and not self.went_on_from(found, suspect):
                found.append(played_without(suspect, round_))
        wanted = set(clients) or {one.without for one in found[-1:]}
        return [one for one in found if one.without in wanted]

    def went_on_from(self, found: Sequence[WentBack], suspect: Suspect) -> bool:
        """Whether clients have trained on with what another than the suspect had sent in the rounds found.

        Their messages have grown since, beyond those of new models. Then one that stands out may be honest.
        """
        first = self.suspect(found[0].round) if is_other(found, suspect) else None
        return first is not None and suspect.others > GROWN * max(first.others, 1.0)

    def named_before(self, client: ClientId, round_: int) -> WentBack | None:
        """The first of the earlier rounds that a client was left out of, as its message stood out."""
        known = self.register.values.went_back
        earlier = (one for one in known if one.without == client and one.round < round_)
        return next((one for one in earlier if one.times is not None), None)

    def excluded(self) -> list[ClientId]:
        """Who is excluded, of those that a round was played again without."""
        named = {one.without for one in self.register.values.went_back}
        return [client for client in self.register.values.excluded if client in named]


def is_other(found: Sequence[WentBack], suspect: Suspect | None) -> bool:
    """Whether another than the suspect stood out before, and may have spoiled what the suspect trained on."""
    return bool(found) and (suspect is None or found[-1].without != suspect.client)


def played_without(suspect: Suspect, round_: int) -> WentBack:
    """What is written down of a round that is played without a client."""
    return WentBack(round=round_, without=suspect.client, times=float(f"{suspect.times:.4g}"))
