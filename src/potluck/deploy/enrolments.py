"""The enrolments of a run, kept in its folder: a server that starts again knows clients that are away."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.deploy.wire import KEY, Enrolment, told_at_enrolment, unpack_reply
from potluck.errors import MessageError, RunError
from potluck.files import read_checked, write_checked
from potluck.runs.folder import RunFolder

FILE = "enrolments.json"


def keep_enrolments(folder: RunFolder, enrolments: Mapping[ClientId, Enrolment]) -> None:
    """Write down what the clients told when they joined, whole."""
    told = {client: told_at_enrolment(one) for client, one in enrolments.items()}
    write_checked(folder / FILE, {"clients": told})


def kept_enrolments(folder: RunFolder, fields: Iterable[str]) -> dict[ClientId, Enrolment]:
    """The enrolments of a run, none if there are none yet; they are checked as if they came over the network."""
    path = folder / FILE
    if not path.exists():
        return {}
    told, wanted = read_checked(path).get("clients"), set(fields)
    if not isinstance(told, dict):
        raise RunError(f"{path} was not written by potluck: it is no mapping; restore the file")
    found = {client: _read(client, about) for client, about in told.items()}
    for client, one in found.items():
        if one is None or one.card.client != client or set(one.card.extra) != wanted:
            raise RunError(f"{path}: the enrolment of client {client} cannot be read; restore the file")
    return {client: one for client, one in found.items() if one is not None}


def _read(client: ClientId, about: Any) -> Enrolment | None:
    if not isinstance(about, dict):
        return None
    try:
        reply = unpack_reply(
            Message().encode({KEY: json.dumps({**about, "reply": "card", "client": client})})
        )
    except MessageError:
        return None
    return reply if isinstance(reply, Enrolment) else None
