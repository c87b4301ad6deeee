"""Local: every client trains alone. Every comparison has it, as the line to beat."""

from __future__ import annotations

from potluck.core.client import Client
from potluck.core.message import Content
from potluck.core.method import Clients, Method, PrivateModelConfig, client_step
from potluck.core.server import Server
from potluck.training.fit import fit


class Local(Method):
    """Training alone ("Standalone"). Up: nothing. Down: nothing. Loss: the task's own."""

    name = "local"
    citation = "the baseline without communication"
    tasks = "any"
    models = "any"

    class Config(PrivateModelConfig):
        """No options."""

    def round(self, server: Server, clients: Clients) -> None:
        """Everyone trains; nothing crosses."""
        clients.ask(self.train)

    @client_step
    def train(self, client: Client) -> Content | None:
        """Local epochs on private data."""
        fit(client, self.loss)
        return None
