"""What would leave a site: the values it tells at enrolment, and the tensors of a rehearsed round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from potluck.deploy.agreement import Agreement
from potluck.deploy.rehearsal import Exchange
from potluck.federation.explain import REPORT
from potluck.report.format import count, size
from potluck.report.render import Column, Sheet, words


def rehearsal_entry(
    agreement: Agreement, exchanges: Sequence[Exchange], enrolment: Mapping[str, Any], later: int = 0
) -> dict[str, Any]:
    """What the site would tell and send, and the agreement that allows just that: `join --check --json`.

    A server has little to send before its first round: `later` is how many scalars may come in a further one.
    """
    first = sum(one.down.scalars for one in exchanges)
    return {
        "enrolment": json.loads(json.dumps(enrolment)),
        "leaves": [
            {
                "step": "+".join(exchange.steps),
                "name": name,
                "shape": list(tensor.shape),
                "type": str(tensor.dtype).removeprefix("torch."),
                "scalars": tensor.numel(),
                "bytes": tensor.nbytes,
            }
            for exchange in exchanges
            for name, tensor in exchange.up.items()
        ],
        "messages": [
            {"step": "+".join(one.steps), "up_bytes": one.up.nbytes, "down_bytes": one.down.nbytes}
            for one in exchanges
        ],
        "down_scalars": {"first": first, "later": max(later, first)},
        "agreement": agreement.model_dump(mode="json"),
    }


def rehearsal_sheet(entry: Mapping[str, Any], client: str) -> Sheet:
    """A row for every tensor that would leave in a round; the rest in notes below."""
    columns = (
        words("step", itemgetter("step")),
        words("name", itemgetter("name")),
        words("shape", lambda line: f"({', '.join(map(str, line['shape']))})"),
        words("type", itemgetter("type")),
        Column("scalars", itemgetter("scalars"), count),
        Column("size", itemgetter("bytes"), size),
    )
    return Sheet(f"leaves {client} in a round", columns, entry["leaves"], _notes(entry))


def _notes(entry: Mapping[str, Any]) -> tuple[str, ...]:
    agreement, messages = entry["agreement"], entry["messages"]
    up, down = (sum(message[f"{way}_bytes"] for message in messages) for way in ("up", "down"))
    scalars = sum(line["scalars"] for line in entry["leaves"])
    number = "one message" if len(messages) == 1 else f"{len(messages)} messages"
    return (
        f"In all {count(scalars)} scalars, {size(up)} in {number}; {size(down)} come to the site{_later(entry)}.",
        f"Once, at enrolment: {_enrolment(entry['enrolment'])}. With every reply: {', '.join(REPORT)}"
        f"{_own(agreement['metrics'])}.",
        f"{agreement['method']} with {_options(agreement['options'])}.",
    )


def _later(entry: Mapping[str, Any]) -> str:
    """More may come once the server has something of the others."""
    first, later = entry["down_scalars"]["first"], entry["down_scalars"]["later"]
    return f" in this first round, up to {count(later)} scalars in a later one" if later > first else ""


def _own(metrics: Sequence[str]) -> str:
    return f" (beside those of its task: {', '.join(metrics)})" if metrics else ""


def _enrolment(told: Mapping[str, Any]) -> str:
    """Every value that the client tells when it joins."""
    samples, task = told["samples"], ", ".join(f"{name} {value}" for name, value in told["task"].items())
    parts = ", ".join(f"{part} {number}" for part, number in samples.items())
    further = [f"{name} {value}" for name, value in told["extra"].items()]
    return "; ".join([f"client {told['client']}", f"samples ({parts})", f"task ({task})", *further])


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "no options"
