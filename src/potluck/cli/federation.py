"""`potluck serve`, `gate`, `keys` and `prune`: a federation over the network."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.exits import Stopped
from potluck.cli.options import (
    RUNS,
    AsJson,
    Ca,
    Debug,
    Exclude,
    ExperimentFile,
    Include,
    Insecure,
    LogForm,
    Overrides,
    PagePort,
    Prometheus,
    check_experiment,
    check_log,
    words,
)
from potluck.cli.run import watched
from potluck.cli.screen import Screen
from potluck.errors import ConfigError, StoppedComplete
from potluck.version import install_command

Certificate = Annotated[Path | None, typer.Option(metavar="FILE", help="TLS: the server's certificate.")]
Key = Annotated[Path | None, typer.Option(metavar="FILE", help="TLS: the server's private key.")]


def serve(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="The address where clients join; a SuperLink that runs there is used."
        ),
    ] = "127.0.0.1:8000",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The run folder; a run that is there is continued. Default: runs/<name>."
        ),
    ] = None,
    insecure: Insecure = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    node_keys: Annotated[
        bool | None,
        typer.Option(
            "--node-keys/--no-node-keys",
            help="Accept only nodes whose key is registered with Flower; a client id belongs to its first key. "
            "Default: with TLS.",
        ),
    ] = None,
    client_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder with <id>.pub of every client. These keys are registered; clients can use no others.",
        ),
    ] = None,
    exclude: Exclude = None,
    include: Include = None,
    prometheus: Prometheus = None,
    page: PagePort = None,
    log: LogForm = "",
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run an experiment with clients that join over the network, on Flower.

    After a crash, the same command continues the same run, and so does potluck resume.
    """
    check_experiment(experiment)
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
                chosen, folder, address, security, watcher, listed(exclude), listed(include), prometheus, page
            ),
            every_notice=True,  # the log must say who was refused, and why
            log=log,
        )
    except StoppedComplete:
        raise
    except KeyboardInterrupt as error:
        raise Stopped(shlex.join(["potluck", *sys.argv[1:]])) from error


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

    It waits for a SuperLink that is away, and tells nodes to try again. SIGHUP reloads the certificate.
    """
    from potluck.deploy.flower.connections import Security
    from potluck.deploy.flower.processes import require_flower

    require_flower()
    from potluck.deploy.flower.gate import gate as let_through
    from potluck.deploy.logs import Log

    let_through(listen, superlink, Security(insecure, ca, certificate, key), Log(as_json=False))


def keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; nothing is overwritten.")],
    server: Annotated[
        str,
        typer.Option(metavar="HOST[,HOST…]", help="Names or addresses at which clients reach the server."),
    ],
    clients: Annotated[str, typer.Option(metavar="a,b,c", help="The ids of the clients.")],
    days: Annotated[int, typer.Option(help="How long the certificates are valid, in days.")] = 30,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make an authority, a server certificate and client keys, for trying out a federation."""
    try:
        from potluck.deploy.trial_keys import ADVICE, make_keys
    except ImportError as error:
        how = install_command("flower")
        raise ConfigError(f"making keys needs the package cryptography; install it with: {how}") from error

    screen = Screen(json)
    ids = words(clients)
    if not ids:
        raise ConfigError("--clients: name the clients, at least one: each gets a key of its own")
    files = make_keys(folder, words(server), ids, days)
    if json:
        screen.data({"folder": str(folder), "files": [str(path) for path in files]})
    else:
        screen.show(*(str(path) for path in files), f"\n{ADVICE.format(days=days)}".rstrip())


def prune(
    home: Annotated[Path, typer.Argument(metavar="HOME", help="The home folder of a site (join --home).")],
    keep: Annotated[int, typer.Option(min=0, help="How many of the most recent runs to keep.")] = 0,
    unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished",
            help="Also remove runs that never reached their last round, or whose files are damaged.",
        ),
    ] = False,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Remove what a site has kept of finished runs; its secret, data and model stay.

    The site will not join a removed run again.
    """
    from dataclasses import asdict

    from potluck.core.plain_values import printable
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
    told = [f"removed run {printable(one.run)} (round {one.round}, {size(one.nbytes)})" for one in gone]
    damaged = [
        f"run {printable(one.run)} stays: {printable(one.damaged)}; --unfinished removes it"
        for one in left
        if one.damaged
    ]
    Screen(json).show(*(told or [f"nothing to remove{kept}"]), *damaged)
