"""The process of a Flower simulation: nodes of Flower's, whose orders processes of Ray's carry out."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from potluck.deploy.flower.apps import ORDER, serve_relay, unwrap, wrap

if TYPE_CHECKING:
    from potluck.deploy.flower.simulation import SimulatedClients


@functools.cache
def clients_in(folder: str) -> SimulatedClients:
    """The clients of a run, once in a process."""
    from potluck.deploy.flower.simulation import SimulatedClients

    return SimulatedClients(Path(folder))


def client_app(folder: str) -> ClientApp:
    """An app that answers as whichever client its node stands for."""
    app = ClientApp()

    @app.query(ORDER)
    def carry(message: Message, context: Context) -> Message:
        order, token = unwrap(message.content)
        reply = clients_in(folder).answer(int(context.node_config["partition-id"]), order)
        return Message(wrap(reply, token), reply_to=message)

    return app


def server_app(path: str) -> ServerApp:
    """An app that does what whoever listens at a socket asks."""
    app = ServerApp()

    @app.main()
    def relay(grid: Grid, context: Context) -> None:
        serve_relay(grid, path)

    return app


def main() -> None:
    """Simulate until the other side of the socket is gone; told are socket, records, clients, threads, workers."""
    path, folder, clients, threads, *workers = sys.argv[1:]
    backend: dict[str, Any] = {"client_resources": {"num_cpus": int(threads), "num_gpus": 0.0}}
    if workers:
        backend["init_args"] = {"num_cpus": int(threads) * int(workers[0])}
    try:
        run_simulation(server_app(path), client_app(folder), int(clients), backend_config=backend)
    except BaseException:  # the relay's thread would keep the process, and whoever waits for it
        traceback.print_exc()
        os._exit(1)
