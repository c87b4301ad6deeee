"""What leaves a client, what comes to it and what never does, with real names and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from potluck.core.card import ClientId
from potluck.core.card_fields import find_field
from potluck.core.contract import Contract, Field, Shapes, declared_scalars, scalars_formula, shapes_of
from potluck.core.method import Method
from potluck.core.task import Task
from potluck.federation.federation import Federation

Steps = Sequence[Mapping[str, Any]]
REPORT = {
    "steps": "how many gradient steps were done",
    "loss": "the mean of each loss term",
    "metrics": "when evaluated: sums of right answers and losses, or the scores of its task, over its own test and "
    "validation samples",
}
ALWAYS_TOLD = {
    "samples": "how many samples the client has to train, to validate and to test on",
    "task": "kind of task, number of classes, shape of a sample",
}


def explain(federation: Federation, client: ClientId | None = None) -> dict[str, Any]:
    """The wire contract of a method in an experiment, sized for one client (default: the first)."""
    client = client if client is not None else federation.population.ids[0]
    method, live = federation.method, federation.clients.build_client(client)
    symbols = method.symbols(federation.population.card(client)) | {
        "C_k": len(federation.population.classes_held(client))
    }

    def shapes(part: str) -> Shapes | None:
        return shapes_of(live[part].wire()) if part in live else None

    def sized(contract: Contract) -> list[dict[str, Any]]:
        return [_entry(name, field, symbols, shapes) for name, field in contract.items()]

    repeats, option = method.repeats(federation.population), method.open_option(federation.population)
    steps = [
        {
            "name": name,
            "purpose": info.purpose,
            **_repeated(repeats.get(name)),
            "up": sized(method.up_contract(name)),
            "down": sized(method.down_contract(name)),
        }
        for name, info in method.steps().items()
    ]
    return {
        "method": method.name,
        "citation": method.citation,
        "client": {"id": client, "model": federation.population.label(client)},
        "steps": steps,
        "card": [{"name": name, "meaning": meaning} for name, meaning in _card(method, live.task).items()],
        "report": [
            {"name": name, "meaning": meaning} for name, meaning in told_in_reports(federation).items()
        ],
        "stays": list(method.stays),
        "server_needs": method.server_needs,
        "open": None if option is None else {"option": option.name, "candidates": list(option.candidates)},
        **{f"{way}_scalars": _total(steps, way) for way in ("up", "down")},
        **{f"{way}_formula": _formula(steps, way) for way in ("up", "down")},
    }


def told_in_reports(federation: Federation) -> dict[str, str]:
    """What comes with every reply; metrics that the experiment asks for are named."""
    own = ", ".join(federation.clients.metrics)
    return REPORT | ({"metrics": f"{REPORT['metrics']}; also {own}"} if own else {})


def _repeated(times: tuple[int, int] | None) -> dict[str, Any]:
    return {} if times is None else {"times": dict(zip(("up", "down"), times, strict=True))}


def _card(method: Method, task: Task) -> dict[str, str]:
    told = ALWAYS_TOLD | {name: find_field(name).meaning for name in method.told()}
    if task.kind == "regression":
        told["task"] = "kind of task, number of outputs, shape of a sample"
    return told


def _entry(name: str, field: Field, symbols: Mapping[str, int], shapes: Any) -> dict[str, Any]:
    scalars = declared_scalars(field, symbols, shapes)
    if field.like is None:
        shape = f"({field.shape})"
    else:
        tensors = shapes(field.like)
        shape = f"all of {field.like!r}" + (f": {len(tensors)} tensors" if tensors is not None else "")
    return {
        "name": name,
        "shape": shape,
        "scalars": scalars,
        "formula": scalars_formula(field),
        "meaning": field.meaning,
        "optional": field.optional,
    }


def _total(steps: Steps, direction: str) -> int:
    """Scalars of one client and round: the messages of the steps that train."""
    return sum((entry["scalars"] or 0) * times for times, entry in _each_round(steps, direction))


def _formula(steps: Steps, direction: str) -> str:
    """The same as a formula; empty where nothing crosses."""
    terms = (
        f"{times}·{entry['formula']}" if times > 1 else entry["formula"]
        for times, entry in _each_round(steps, direction)
    )
    return " + ".join(terms)


def _each_round(steps: Steps, direction: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """What the steps that train send or take, and how often."""
    for step in steps:
        if step["purpose"] == "train":
            times = step.get("times", {direction: 1})[direction]
            yield from ((times, entry) for entry in step[direction])
