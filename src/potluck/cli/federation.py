"""`potluck serve`, `gate`, `join` and `keys`: a federation over the network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.exits import Stopped
from potluck.cli.options import RUNS, AsJson, Debug, Exclude, ExperimentFile, Include, Overrides, words
from potluck.cli.run import watched
from potluck.cli.screen import Screen
from potluck.errors import ConfigError

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Plain text; on this machine (127.0.0.1) that is the default.")
]
Ca = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TLS: the certificate of the authority both sides trust.")
]
Certificate = Annotated[Path | None, typer.Option(metavar="FILE", help="TLS: the server's certificate.")]
Key = Annotated[Path | None, typer.Option(metavar="FILE", help="TLS: the server's private key.")]
Prometheus = Annotated[
    int | None,
    typer.Option(min=1, max=65535, metavar="PORT", help="Tell the state at 127.0.0.1:PORT/metrics."),
]


def serve(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients join; a SuperLink there is used.")
    ] = "127.0.0.1:8000",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The run folder; a run there goes on. Default: runs/<name>."),
    ] = None,
    insecure: Insecure = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    node_keys: Annotated[
        bool | None,
        typer.Option(
            "--node-keys/--no-node-keys",
            help="Take in only nodes whose key was registered with Flower; a client id belongs to its first key. "
            "Default: with TLS.",
        ),
    ] = None,
    client_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With <id>.pub of every client: registered, and the only key it can come with.",
        ),
    ] = None,
    exclude: Exclude = None,
    include: Include = None,
    prometheus: Prometheus = None,
    log: Annotated[
        str, typer.Option(metavar="text|json", help="Lines with the time, in place of the progress display.")
    ] = "",
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run an experiment with clients that join over the network, on Flower.

    Started again after a crash, the same command goes on with the same run; so does potluck resume.
    """
    from potluck.deploy.flower.connections import Security
    from potluck.deploy.flower.resume import listed
    from potluck.deploy.flower.serve import serve as play
    from potluck.experiment import Experiment

    check_log(log)
    chosen = Experiment.load(experiment, overrides or ())
    tied = ca is not None if node_keys is None else node_keys
    security = Security(insecure, ca, certificate, key, node_keys=tied, client_keys=client_keys)
    folder = out or RUNS / chosen.name
    try:
        watched(
            Screen(json),
            chosen.method.name,
            lambda watcher: play(
                chosen, folder, address, security, watcher, listed(exclude), listed(include), prometheus
            ),
            every_notice=True,  # the log must say who was refused, and why
            log=log,
        )
    except KeyboardInterrupt as error:
        raise Stopped(["potluck", *sys.argv[1:]]) from error


def gate(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where nodes connect.")] = "127.0.0.1:8443",
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the SuperLink is, on this machine.")
    ] = "127.0.0.1:8000",
    insecure: Insecure = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    debug: Debug = False,
) -> None:
    """Let nodes through to a SuperLink, and keep its control API closed to all but this machine.

    A SuperLink that is away is waited for: nodes are told to try again. SIGHUP reads the certificate again.
    """
    from potluck.deploy.flower.connections import Security
    from potluck.deploy.flower.processes import require_flower

    require_flower()
    from potluck.deploy.flower.gate import gate as let_through

    screen = Screen(json=False)
    security = Security(insecure, ca, certificate, key)
    let_through(
        listen, superlink, security, lambda said: screen.err.print(said, soft_wrap=True, markup=False)
    )


def join(
    client: Annotated[str, typer.Option(metavar="ID", help="This client's id in the experiment.")],
    model: Annotated[
        str, typer.Option(metavar="FILE.py:FUNCTION", help="Gives the model: a torch.nn.Module, or a name.")
    ] = "",
    data: Annotated[
        str,
        typer.Option(metavar="FILE.py:FUNCTION", help="Gives the data: {'train': (x, y), 'test': (x, y)}."),
    ] = "",
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.")] = "",
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="EXPERIMENT.yaml", help="Join nobody: show what would leave in a round of this."
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --check: write the agreement that allows just that."),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where this client keeps its state. Default: sites/<id>."),
    ] = None,
    accept: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Do and send only what this agreement allows.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:FUNCTION", help="A metric of this site's own; may be given several times."
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(metavar="worker|node", help="Start this half alone; the other runs as another user."),
    ] = "",
    socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --only: where worker and node meet.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda:0.")] = "cpu",
    insecure: Insecure = False,
    ca: Ca = None,
    node_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This node's private key, registered with the server.")
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated", help="Noise from the experiment's seed, which the server knows: for tests."
        ),
    ] = False,
    prometheus: Prometheus = None,
    log: Annotated[
        str, typer.Option(metavar="text|json", help="How the logs are written; every line has the time.")
    ] = "text",
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Take part in a federation with a model and data of one's own; the server sees neither."""
    if check is not None:
        return _check_site(Screen(json), client, model, data, check, write, metric or ())
    if write is not None:
        raise ConfigError("--write goes with --check")
    check_log(log)
    if not server and only != "worker":
        raise ConfigError("--server is missing: where is the server?")
    from potluck.deploy.flower.connections import Security
    from potluck.deploy.flower.join import Joining, default_home
    from potluck.deploy.flower.join import join as take_part

    security = Security(insecure, ca, node_key=node_key)
    place = (home or default_home(client)).resolve()
    joining = Joining(
        server,
        client,
        model,
        data,
        place,
        security,
        accept,
        device,
        simulated,
        only,
        socket,
        tuple(metric or ()),
        prometheus,
        log or "text",
    )
    take_part(joining)


def check_log(log: str) -> None:
    """Refuse a form of the log that there is not."""
    from potluck.deploy.logs import KINDS

    if log and log not in KINDS:
        raise ConfigError(f"--log: {log!r} is neither {' nor '.join(KINDS)}")


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
    from potluck.deploy.rehearsal import propose
    from potluck.deploy.resident import enrolment
    from potluck.deploy.site import rehearsal_federation
    from potluck.deploy.wire import told_at_enrolment
    from potluck.experiment import Experiment

    chosen = Experiment.load(experiment)
    federation = rehearsal_federation(chosen, client, model, data, metrics)
    agreement, exchanges = propose(federation, client)
    entry = rehearsal_entry(agreement, exchanges, told_at_enrolment(enrolment(federation, client)))
    if write is not None:
        agreement.write(write)
    if screen.json:
        screen.data(entry)
    else:
        screen.sheet(rehearsal_sheet(entry, f"client {client}"))
        screen.show(*([f"\nagreement: {write}"] if write is not None else []))


def keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; nothing is overwritten.")],
    server: Annotated[
        str,
        typer.Option(metavar="HOST[,HOST…]", help="Names or addresses under which the server is reached."),
    ],
    clients: Annotated[str, typer.Option(metavar="a,b,c", help="The ids of the clients.")],
    days: Annotated[int, typer.Option(help="How long the certificates hold.")] = 30,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make an authority, a server certificate and client keys, for trying out a federation."""
    try:
        from potluck.deploy.trial_keys import ADVICE, make_keys
    except ImportError as error:
        needed = "making keys needs the package cryptography; install it with: pip install 'potluck[flower]'"
        raise ConfigError(needed) from error

    screen = Screen(json)
    files = make_keys(folder, words(server), words(clients), days)
    if json:
        screen.data({"folder": str(folder), "files": [str(path) for path in files]})
    else:
        screen.show(*(str(path) for path in files), f"\n{ADVICE.format(days=days)}".rstrip())


def prune(
    home: Annotated[Path, typer.Argument(metavar="HOME", help="The home folder of a site (join --home).")],
    keep: Annotated[int, typer.Option(min=0, help="How many of the runs used last stay.")] = 0,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Remove runs too that never came to their last round.")
    ] = False,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Remove what a site has kept of finished runs; its secret, data and model stay."""
    from dataclasses import asdict

    from potluck.deploy.pruning import kept_runs
    from potluck.deploy.pruning import prune as remove
    from potluck.report.format import size

    gone = remove(home, keep, unfinished)
    stay = kept_runs(home)
    if json:
        runs = {"removed": gone, "kept": stay}
        return Screen(json).data({name: [asdict(one) for one in each] for name, each in runs.items()})
    left = [one for one in stay if not one.finished]
    kept = f"; {len(left)} unfinished {'run stays' if len(left) == 1 else 'runs stay'}" if left else ""
    told = [f"removed run {one.run} (round {one.round}, {size(one.nbytes)})" for one in gone]
    Screen(json).show(*(told or [f"nothing to remove{kept}"]))
