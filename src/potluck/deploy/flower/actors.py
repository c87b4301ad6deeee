"""The process of a Flower simulation: Flower's nodes, whose orders are carried out by Ray's worker processes.

`simulation` starts it as a program. Only Ray's workers need torch, so it is imported where they use it.
"""

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

from potluck.deploy.flower.apps import ORDER, serve_relay, wrap
from potluck.deploy.flower.pulling import unwrap

if TYPE_CHECKING:
    from potluck.deploy.flower.simulation import SimulatedClients


@functools.cache
def clients_in(folder: str) -> SimulatedClients:
    """The clients of a run, built once per process."""
    from potluck.deploy.flower.simulation import SimulatedClients

    return SimulatedClients(Path(folder))


def client_app(folder: str) -> ClientApp:
    """An app that answers as the client that its node stands for."""
    app = ClientApp()

    @app.query(ORDER)
    def carry(message: Message, context: Context) -> Message:
        order, token = unwrap(message.content)
        reply = clients_in(folder).answer(int(context.node_config["partition-id"]), order)
        return Message(wrap(reply, token), reply_to=message)

    return app


def server_app(path: str) -> ServerApp:
    """An app that relays letters from the socket at a path to the nodes."""
    app = ServerApp()

    @app.main()
    def relay(grid: Grid, context: Context) -> None:
        serve_relay(grid, path)

    return app


def main() -> None:
    """Simulate until the other side of the socket closes it.

    Arguments: socket path, folder of records, number of clients, threads per worker, and perhaps workers.
    """
    path, folder, clients, threads, *workers = sys.argv[1:]
    backend: dict[str, Any] = {"client_resources": {"num_cpus": int(threads), "num_gpus": 0.0}}
    if workers:
        backend["init_args"] = {"num_cpus": int(threads) * int(workers[0])}
    try:
        from potluck.engine.ray.job import use_for_every_driver

        use_for_every_driver()
        run_simulation(server_app(path), client_app(folder), int(clients), backend_config=backend)
    except BaseException:  # else the relay's thread would keep this process alive, and its parent waiting
        traceback.print_exc()
        os._exit(1)
