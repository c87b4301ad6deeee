"""The base of methods in which one small shared model works beside each private one."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Declared, Method, MethodConfig
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.kit.averaging import average
from potluck.models import build
from potluck.models.build import source_name, unpack


class SharedSmall(Method):
    """Sends the small model θ around and averages it; a subclass writes the step `train`, which returns θ_k."""

    down: ClassVar[Declared] = lambda method: {
        "small": state_of("small", f"the small model's averaged parameters{method.architecture}")
    }
    train: Any
    architecture = ""  # ends a sentence about the small model, as soon as it is known

    class Config(MethodConfig):
        """The shared model and its average."""

        small: Any = option(
            default=None,
            description="the shared architecture; default: the one of the pool with the fewest parameters",
            source="the papers; the smallest of the pool: FedMRL's released code, CNN-5 of five CNNs",
        )
        weights: Literal["samples", "uniform"] = option(
            default="samples",
            description="what the average weighs a client by: its training samples, or all alike",
            source="paper; uniform: HtFLlib",
        )

    def setup(self, population: Population) -> None:
        """Find out which architecture is shared."""
        self.architecture = self._in_words(population.task)

    def _in_words(self, task: Task) -> str:
        """Which architecture the small model is, nothing where that is not known yet."""
        if self.config.small is not None:
            return f" ({source_name(unpack(self.config.small)[0])})"
        if self.pool is None:
            return ""
        name = self.pool.smallest(task)  # of a class or function the key has its position before the name
        return f" ({name.partition(':')[2] or name}, the smallest of the pool)"

    def check(self, population: Population) -> None:
        """The small model must suit the task, on a made-up batch, and have something to train."""
        small = self.build_small(population.task)
        if not any(value.requires_grad for value in small.parameters()):
            raise ConfigError(
                f"{self.name}: the small model{self.architecture} has no parameters that are trained, so clients "
                "would share nothing; name another one in method.small, or use local"
            )

    def build_small(self, task: Task, width: int | None = None) -> Model:
        """The small model; `width` is that of its representation, by default its own."""
        if self.config.small is not None:
            return build(self.config.small, task, rep_dim=width, who="method.small")
        if self.pool is None:
            raise ConfigError(
                f"{self.name}: name the small model (method.small): the server knows no client's"
            )
        return self.pool.build(self.pool.smallest(task), task, rep_dim=width, who="method.small")

    def server_state(self, task: Task) -> dict[str, Any]:
        """The small model."""
        return {"small": self.build_small(task)}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The newest θ."""
        return {"small": server["small"].state()}

    def receive(self, client: Client, down: Message) -> None:
        """Install the newest θ."""
        client["small"].load(down.group("small"))

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average the small models."""
        replies = clients.ask(self.train)
        server["small"].load(average(replies, "small", self.config.weights))
