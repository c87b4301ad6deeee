"""`potluck join`: takes part in a federation with a model and data of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.options import AsJson, Ca, Debug, Insecure, Prometheus, check_log
from potluck.cli.screen import Screen
from potluck.errors import ConfigError

Client = Annotated[str, typer.Option(metavar="ID", help="This client's id in the experiment.")]
Model = Annotated[
    str,
    typer.Option(
        metavar="FILE.py:FUNCTION", help="A function that returns the model: a torch.nn.Module, or a name."
    ),
]
Data = Annotated[
    str,
    typer.Option(
        metavar="FILE.py:FUNCTION",
        help="A function that returns the data: {'train': (x, y), 'test': (x, y)}.",
    ),
]
Server = Annotated[str, typer.Option(metavar="HOST:PORT", help="The address of the server.")]
Check = Annotated[
    Path | None,
    typer.Option(
        metavar="EXPERIMENT.yaml",
        help="Do not join: show what would leave this client in a round of the experiment.",
    ),
]
Write = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --check: write an agreement that allows exactly that."),
]
Home = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where this client keeps its state. Default: sites/<id>, or <id>-node.",
    ),
]
Accept = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Do and send only what this agreement allows.")
]
Metric = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE.py:FUNCTION", help="A metric of this site; repeatable."),
]
Only = Annotated[
    str,
    typer.Option(metavar="worker|node", help="Start only this half; the other half runs as another user."),
]
Socket = Annotated[Path | None, typer.Option(metavar="PATH", help="With --only: where worker and node meet.")]
NodeKey = Annotated[
    Path | None, typer.Option(metavar="FILE", help="This node's private key, registered with the server.")
]
Simulated = Annotated[
    bool,
    typer.Option(
        "--simulated", help="For tests: take noise from the experiment's seed, which the server knows."
    ),
]
SiteLog = Annotated[
    str, typer.Option(metavar="text|json", help="How the logs are written; every line has the time.")
]


def join(
    client: Client,
    model: Model = "",
    data: Data = "",
    server: Server = "",
    check: Check = None,
    write: Write = None,
    home: Home = None,
    accept: Accept = None,
    metric: Metric = None,
    only: Only = "",
    socket: Socket = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda:0.")] = "cpu",
    insecure: Insecure = False,
    ca: Ca = None,
    node_key: NodeKey = None,
    simulated: Simulated = False,
    prometheus: Prometheus = None,
    log: SiteLog = "text",
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Join a federation with your own model and data; the server sees neither."""
    if check is not None:
        return _check_site(Screen(json), client, model, data, check, write, metric or ())
    if write is not None:
        raise ConfigError("--write goes with --check; give both, or leave it out")
    check_log(log)
    if not server and only != "worker":
        raise ConfigError("--server is missing; give the address of the server, such as --server host:8000")
    from potluck.deploy.flower.connections import Security
    from potluck.deploy.flower.join import Joining, default_home
    from potluck.deploy.flower.join import join as take_part

    take_part(
        Joining(
            server=server,
            client=client,
            model=model,
            data=data,
            home=(home or default_home(client, only)).resolve(),
            security=Security(insecure, ca, node_key=node_key),
            accept=accept,
            device=device,
            simulated=simulated,
            only=only,
            socket=socket,
            metrics=tuple(metric or ()),
            prometheus=prometheus,
            log=log or "text",
        )
    )


def _check_site(
    screen: Screen,
    client: str,
    model: str,
    data: str,
    experiment: Path,
    write: Path | None,
    metrics: Sequence[str],
) -> None:
    """Rehearse a round on this machine and show what would leave; only the agreement is kept."""
    from potluck.cli.views.rehearsal import rehearsal_entry, rehearsal_sheet
    from potluck.deploy.agreement import check_new
    from potluck.deploy.rehearsal import offered_experiment, propose, read_offered
    from potluck.deploy.resident import enrolment
    from potluck.deploy.site import model_entry, rehearsal_federation
    from potluck.deploy.wire import told_at_enrolment
    from potluck.federation.explain import explain

    if write is not None:
        check_new(write)  # before the work is done
    offered = read_offered(experiment)
    model_entry(model)  # before the experiment is judged: a method of one's own comes with it
    chosen = offered_experiment(offered)
    federation = rehearsal_federation(chosen, client, model, data, metrics)
    agreement, exchanges = propose(federation, client, chosen.training.rounds)
    told, later = (
        told_at_enrolment(enrolment(federation, client)),
        explain(federation, client)["down_scalars"],
    )
    entry = rehearsal_entry(agreement, exchanges, told, later)
    if write is not None:
        agreement.write(write)
    if screen.json:
        screen.data(entry)
    else:
        screen.sheet(rehearsal_sheet(entry, f"client {client}"))
        screen.show(*([f"\ncontract: {write}"] if write is not None else []))
