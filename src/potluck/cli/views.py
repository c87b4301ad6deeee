"""What the command line shows besides progress: a wire contract, a split, the list of methods."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from potluck.report.format import NOTHING, count, size
from potluck.report.render import Column, Sheet

if TYPE_CHECKING:
    from potluck.core.dataset import Dataset
    from potluck.core.method import Method
    from potluck.data import Split
    from potluck.deploy.agreement import Agreement
    from potluck.deploy.rehearsal import Exchange
    from potluck.federation.federation import Federation

MOST_ROWS = 40  # clients or architectures that a table shows
MOST_CLASSES = 20  # classes that have a column of their own

# --- methods --------------------------------------------------------------------------------------------


def method_entry(method: type[Method]) -> dict[str, Any]:
    """One method as `potluck methods --json` lists it."""
    example = method()
    sent = [name for step in method.steps() for name in example.up_contract(step)]
    received = [name for step in method.steps() for name in example.down_contract(step)]
    return {
        "name": method.name,
        "citation": method.citation,
        "needs_public_data": method.needs_public_data,
        "models": method.models,
        "sends": list(dict.fromkeys(sent)),
        "receives": list(dict.fromkeys(received)),
    }


def methods_sheet(entries: Sequence[Mapping[str, Any]]) -> Sheet:
    """The methods, a row each."""
    names = ("method", "published", "models of the clients", "sends", "receives", "public data")
    rows = tuple(
        (
            entry["name"],
            entry["citation"] or NOTHING,
            entry["models"],
            ", ".join(entry["sends"]) or "nothing",
            ", ".join(entry["receives"]) or "nothing",
            "needed" if entry["needs_public_data"] else NOTHING,
        )
        for entry in entries
    )
    notes = ("`potluck explain METHOD` shows what each of these is and how large.",)
    sheet = Sheet(f"{len(rows)} methods", tuple(Column(name, "left") for name in names), rows, notes)
    return sheet.without_empty_columns()


# --- the wire -------------------------------------------------------------------------------------------


def explain_entry(federation: Federation) -> dict[str, Any]:
    """The contract for the first client, with bytes, and the totals for one client of each kind."""
    from potluck.federation.explain import explain

    explained = explain(federation)
    for step in explained["steps"]:
        for direction in ("up", "down"):
            contract = getattr(federation.method, f"{direction}_contract")(step["name"])
            for entry in step[direction]:
                width = contract[entry["name"]].dtype.itemsize
                entry["bytes"] = None if entry["scalars"] is None else width * entry["scalars"]
    totals = [explain(federation, client) for client in _one_per_kind(federation)]
    explained["clients"] = [
        {**one["client"], "up_scalars": one["up_scalars"], "down_scalars": one["down_scalars"]}
        for one in totals
    ]
    return explained


def _one_per_kind(federation: Federation) -> list[str]:
    first: dict[str, str] = {}
    for client in federation.population.ids:
        first.setdefault(federation.clients.kind(client), client)
    return list(first.values())[:MOST_ROWS]


def explain_view(explained: Mapping[str, Any], experiment: str) -> RenderableType:
    """What leaves a client, what comes to it, what never leaves."""
    client, steps = explained["client"], explained["steps"]
    head = Text.assemble((explained["method"], "bold"), f"  {explained['citation']}".rstrip())
    about = Text(f"sizes for client {client['id']} ({client['model']}) of {experiment}", "dim")
    if explained["open"] is not None:
        tried = ", ".join(map(str, explained["open"]["candidates"]))
        about.append(
            f"\n{explained['open']['option']} is chosen of {tried} before the first round; these are the largest"
        )
    leaves = _crossing(steps, "up", explained["up_scalars"])
    comes = _crossing(steps, "down", explained["down_scalars"])
    parts: list[RenderableType] = [
        head,
        about,
        _panel("leaves the client", Group(leaves, _small(explained)), "yellow"),
        _panel("comes to the client", comes, "cyan"),
        _panel("never leaves the client", Text(", ".join(explained["stays"])), "green"),
    ]
    if len(explained["clients"]) > 1:
        parts.append(_by_kind(explained["clients"]))
    return Group(*parts)


def _panel(title: str, content: RenderableType, color: str) -> Panel:
    heading = Text(title, f"bold {color}")
    return Panel(content, title=heading, title_align="left", border_style=color, box=box.ROUNDED)


NUMBERS = ("scalars", "size")
PURPOSES = {"train": "every round", "setup": "once, where the server lacks it", "evaluate": "to evaluate"}


def _crossing(steps: Sequence[Mapping[str, Any]], direction: str, total: int) -> RenderableType:
    """The tensors that cross in one direction, and the total of a round."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("name", "shape", "scalars", "size", "when", "meaning"):
        number = name in NUMBERS
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for step in steps:
        for entry in step[direction]:
            when = PURPOSES[step["purpose"]]
            if "times" in step:
                when = f"{count(step['times'][direction])} times a round"
            numbers = (count(entry["scalars"]), size(entry["bytes"]))
            row = (entry["name"], entry["shape"], *numbers, when, entry["meaning"])
            table.add_row(*map(Text, row))
    if not table.row_count:
        return Text("nothing")
    return Group(table, Text(f"in all {count(total)} scalars a round", "bold"))


def _small(explained: Mapping[str, Any]) -> Text:
    """The two small records that cross besides messages."""
    return Text.assemble(
        ("\nonce, at enrolment: ", "dim"),
        _listed(explained["card"]),
        ("\nwith every reply: ", "dim"),
        _listed(explained["report"]),
    )


def _listed(entries: Iterable[Mapping[str, str]]) -> str:
    return "; ".join(f"{entry['name']} ({entry['meaning']})" for entry in entries)


def _by_kind(clients: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("model", "client", "scalars up", "scalars down"):
        table.add_column(name, justify="right" if name.startswith("scalars") else "left")
    for client in clients:
        row = (client["model"], client["id"], count(client["up_scalars"]), count(client["down_scalars"]))
        table.add_row(*map(Text, row))
    return table


# --- what would leave a site ----------------------------------------------------------------------------


def rehearsal_entry(
    agreement: Agreement, exchanges: Sequence[Exchange], enrolment: Mapping[str, Any]
) -> dict[str, Any]:
    """What would be told at enrolment and sent in a rehearsed round, and the agreement that allows just that."""
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
        "agreement": agreement.model_dump(mode="json"),
    }


def rehearsal_sheet(entry: Mapping[str, Any], client: str) -> Sheet:
    """A row for every tensor that would leave in a round."""
    rows = tuple(
        (
            *(line["step"], line["name"], f"({', '.join(map(str, line['shape']))})", line["type"]),
            *(count(line["scalars"]), size(line["bytes"])),
        )
        for line in entry["leaves"]
    )
    columns = (*(Column(name, "left") for name in ("step", "name", "shape", "type")), *map(Column, NUMBERS))
    return Sheet(f"leaves {client} in a round", columns, rows, _rehearsal_notes(entry))


def _rehearsal_notes(entry: Mapping[str, Any]) -> tuple[str, ...]:
    from potluck.federation.explain import REPORT

    agreement, messages = entry["agreement"], entry["messages"]
    up, down = (sum(message[f"{way}_bytes"] for message in messages) for way in ("up", "down"))
    scalars = sum(line["scalars"] for line in entry["leaves"])
    number = "one message" if len(messages) == 1 else f"{len(messages)} messages"
    return (
        f"In all {count(scalars)} scalars, {size(up)} in {number}; {size(down)} come to the site.",
        f"Once, at enrolment: {_enrolment(entry['enrolment'])}. With every reply: {', '.join(REPORT)}.",
        f"{agreement['method']} with {_options(agreement['options'])}.",
    )


def _enrolment(told: Mapping[str, Any]) -> str:
    """Every value that a client tells when it joins."""
    samples, task = told["samples"], ", ".join(f"{name} {value}" for name, value in told["task"].items())
    parts = ", ".join(f"{part} {number}" for part, number in samples.items())
    further = [f"{name} {value}" for name, value in told["extra"].items()]
    return "; ".join([f"client {told['client']}", f"samples ({parts})", f"task ({task})", *further])


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "no options"


# --- the split ------------------------------------------------------------------------------------------


def split_entry(data: Dataset, split: Split) -> dict[str, Any]:
    """Who has which class: what `potluck split --json` prints."""
    counts = split.counts(data.labels, data.label_count)
    clients = [
        {
            "id": client.id,
            "train": len(client.train),
            "validation": len(client.validation),
            "test": len(client.test),
            "counts": row.tolist(),
        }
        for client, row in zip(split.clients, counts, strict=True)
    ]
    classes = list(data.label_names) or [str(number) for number in range(data.label_count)]
    about = {"data": data.name, "classes": classes, "hash": split.hash, "held_out": list(split.held_out)}
    return about | {"clients": clients}


def split_view(entry: Mapping[str, Any]) -> RenderableType:
    """A row per client: its parts, and its training samples of each class, darker where there are more."""
    clients, classes = entry["clients"], entry["classes"]
    few = len(classes) <= MOST_CLASSES
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("client", "train", "validation", "test"):
        table.add_column(name, justify="left" if name == "client" else "right")
    for name in classes if few else ("classes", "most of"):
        table.add_column(Text(name), justify="right", overflow="fold")
    for client in clients[:MOST_ROWS]:
        id = f"{client['id']} (held out)" if client["id"] in entry["held_out"] else client["id"]
        parts = [count(client[part]) for part in ("train", "validation", "test")]
        held = _shaded(client["counts"]) if few else _largest(client["counts"], classes)
        table.add_row(Text(id), *parts, *held)
    return Group(table, Text("\n".join(_split_notes(entry))))


def _shaded(counts: Sequence[int]) -> list[Text]:
    """Training samples per class, on a ground that grows with the share."""
    most = max(max(counts), 1)
    shades = [237 + round(14 * number / most) for number in counts]
    return [
        Text(str(number), f"{'black' if shade > 244 else 'white'} on color({shade})") if number else Text("·")
        for number, shade in zip(counts, shades, strict=True)
    ]


def _largest(counts: Sequence[int], classes: Sequence[str]) -> list[Text]:
    """How many classes a client has, and the three it has most of."""
    ranked = sorted(range(len(counts)), key=lambda label: -counts[label])
    top = [f"{classes[label]} ({counts[label]})" for label in ranked[:3] if counts[label]]
    return [Text(str(sum(number > 0 for number in counts))), Text(", ".join(top))]


def _split_notes(entry: Mapping[str, Any]) -> list[str]:
    clients = entry["clients"]
    sizes = sorted(client["train"] for client in clients)
    notes = [
        f"{count(len(clients))} clients, {count(sum(sizes))} training samples, from {count(sizes[0])} to "
        f"{count(sizes[-1])} a client; split {entry['hash'][:12]}"
    ]
    if len(clients) > MOST_ROWS:
        notes.insert(0, f"the first {MOST_ROWS} clients are shown; --json has them all")
    return notes
