"""`potluck serve`: a run whose clients join over Flower."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from potluck.core.card import ClientId
from potluck.deploy.enrolled import sites_of
from potluck.deploy.flower.certificates import dates_told, tls_of
from potluck.deploy.flower.connections import Security, is_open, split_address
from potluck.deploy.flower.processes import require_flower
from potluck.deploy.flower.relay import relaying
from potluck.deploy.flower.resume import FLOWER, own_flower, to_keep
from potluck.deploy.key_folder import KeyFolder
from potluck.deploy.register import FILE as REGISTER
from potluck.deploy.run import ended, open_folder, play, prepared
from potluck.errors import ConfigError
from potluck.experiment.blocks import Sites
from potluck.experiment.schema import Experiment
from potluck.live.board import Board
from potluck.live.page import shown
from potluck.live.prometheus import exposed
from potluck.live.snapshot import Follower, Watch
from potluck.live.status_file import about_here
from potluck.runs.observers import Observer
from potluck.runs.results.run_result import RunResult


def serve(
    experiment: Experiment,
    folder: Path,
    address: str,
    security: Security,
    watcher: Observer,
    exclude: Sequence[ClientId] = (),
    include: Sequence[ClientId] = (),
    prometheus: int | None = None,
    page: int | None = None,
) -> RunResult:
    """Run an experiment over the SuperLink at an address. Flower's logs are in `flower/` in the run's folder.

    `prometheus` is a port of this machine on which the state of the run is told, `page` one for a browser.
    """
    require_flower()
    split_address(address)
    security.check(address, ("ca", "certificate", "key"))
    tls_of(security)  # a SuperLink of our own would end over files that are none, and not name them
    for sentence in dates_told(security):
        watcher.notice(sentence)
    experiment = prepared(experiment)
    files = key_folder(experiment, security, watcher)
    keys = chosen_keys(files, security, address, begun=(folder / REGISTER).exists())
    home, board, sites = open_folder(folder), starting_board(experiment), sites_of(experiment).sites

    def facts() -> dict[str, Any]:
        return board.facts() | about_here(folder)

    place, patience = (home / FLOWER).resolve(), experiment.engine.patience
    with (
        home.locked(),  # before anything that another server in this folder uses is touched
        own_flower(folder),
        exposed(prometheus, Follower(folder, facts=facts).look),
        shown(page, Watch([folder], facts)) as url,
        contextlib.ExitStack() as stack,
    ):
        finished = ended(home, experiment, exclude, include)  # before Flower, which takes a while, is started
        if finished is not None:
            return finished
        if url:
            watcher.notice(f"this run can be followed at {url}")
        connected = relaying(address, security, place, patience, watcher.notice, sites)
        courier = stack.enter_context(connected)
        watcher.notice(f"waiting at {address} for the clients of {experiment.name}")
        for client in (client for client, key in (keys or {}).items() if not key):
            watcher.notice(
                f"client {client} has no key in {security.client_keys}: it is out until it has one"
            )
        if files is not None:
            files.renewed = courier.superlink.renew_keys
        return play(
            experiment,
            courier,
            home,
            watcher,
            keys,
            exclude=exclude,
            include=include,
            told=to_keep(folder, experiment, address, security),
            changed_keys=dict if files is None else files.changed,
            board=board,
        )


def starting_board(experiment: Experiment) -> Board:
    """The board of a server whose clients are known, and none of them is connected so far."""
    rounds = experiment.training.rounds
    board = Board(name=experiment.name, method=experiment.method.name, state="starting", rounds=rounds)
    for client in sites_of(experiment).sites:
        board.client(client)
    return board


def key_folder(experiment: Experiment, security: Security, watcher: Observer) -> KeyFolder | None:
    """The folder of the clients' keys, if there is one."""
    if security.client_keys is None:
        return None
    assert isinstance(experiment.partition, Sites)
    return KeyFolder(security.client_keys, experiment.partition.sites, watcher.notice)


def chosen_keys(
    files: KeyFolder | None, security: Security, address: str, begun: bool = False
) -> dict[str, str] | None:
    """The keys of the clients that are known from the start; none where clients are not tied to keys.

    Flower makes every node sign with its key, registered or not, so a node does own the key it shows. In a run that
    has `begun` a client whose file is gone has no key any more.
    """
    if files is not None:
        return files.read(begun)
    if security.node_keys and not is_open(address):
        raise ConfigError(
            "node keys are asked for, and a SuperLink that is started now knows none: give --client-keys, or "
            "start one and register them, or --no-node-keys to take in whoever comes"
        )
    return {} if security.node_keys else None
