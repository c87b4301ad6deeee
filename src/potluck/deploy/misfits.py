"""Who cannot begin a federation together with the others: another task, say, or other public samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from potluck.core.card import ClientId
from potluck.core.plain_values import printable
from potluck.core.task import Task
from potluck.errors import ConfigError, Misfits, PotluckError
from potluck.federation.federation import Federation

Build = Callable[[tuple[ClientId, ...]], Federation]


def without_misfits(
    roster: tuple[ClientId, ...], tasks: Mapping[ClientId, Task], classes: int | None, build: Build
) -> tuple[Federation, dict[ClientId, str]]:
    """The federation of those who can begin together, and the others, each with the reason.

    Those whose task is not the one that most have are left out together, then at most one more. If that does not
    help, the experiment is to blame, and the error of building it with everyone is raised. Those who cannot
    take part whoever else does are left out before.
    """
    try:
        return build(roster), {}
    except Misfits as error:
        left = tuple(client for client in roster if client not in error.reasons)
        if not left:
            raise
        federation, others = without_misfits(left, {one: tasks[one] for one in left}, classes, build)
        return federation, error.reasons | others
    except PotluckError as error:
        everyone: PotluckError = error
    except Exception as error:  # over a stranger's card, perhaps
        everyone = ConfigError(f"a federation of {', '.join(roster)} cannot be set up: {in_words(error)}")
        everyone.__cause__ = error
    usual = _usual_task(tasks, classes)
    alike = tuple(client for client in roster if tasks[client] == usual)
    singly = (tuple(other for other in alike if other != client) for client in alike)
    for left in (alike, *singly):
        if not left or left == roster:
            continue
        try:
            federation = build(left)
        except Exception:  # it is not these who can begin together
            continue
        out = [client for client in roster if client not in left]
        return federation, {client: _reason(client, left, roster, build) for client in out}
    raise everyone


def in_words(error: Exception) -> str:
    """What an error says, with its type where it is none of the library's own sentences."""
    told = str(error) if isinstance(error, PotluckError) else f"{type(error).__name__}: {error}"
    return printable(told)


def _usual_task(tasks: Mapping[ClientId, Task], classes: int | None) -> Task:
    """The task that most clients have, of those with as many classes as the experiment says; of two the first."""
    fitting = [task for task in tasks.values() if classes in (None, task.classes)]
    counted = Counter(fitting or tasks.values())
    return counted.most_common(1)[0][0]


def _reason(client: ClientId, left: Sequence[ClientId], roster: Sequence[ClientId], build: Build) -> str:
    """Why a client cannot begin with those that are left."""
    try:
        build(tuple(one for one in roster if one in left or one == client))
    except Exception as error:  # over a stranger's card
        return in_words(error)
    return f"client {client} fits those that are left, but not together with others"
