"""LG-FedAvg (Liang et al., arXiv 2001.01523, 2020): private representations under layers that all share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, Shapes, shapes_below, state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Declared, Method, MethodConfig, client_step
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.kit.averaging import average
from potluck.kit.requirements import named, one_per_architecture, require_one_form
from potluck.training.fit import fit


def _shared(method: LGFedAvg, meaning: str) -> Contract:
    return {layer: state_of(f"model/{layer}", f"{layer}: {meaning}") for layer in method.config.layers}


class LGFedAvg(Method):
    """The top layers h are averaged, the representation f_k below them stays with its client.

    Up: h_k. Down: h. Client: local epochs of the task's own loss on the whole model h_k(f_k(x)).
    Server: h ← mean of h_k over the cohort; every client has the newest h, also one that did not train.

    With `layers: []` nothing is shared, and the method is Local.

    Deviations: the released code starts from a model that FedAvg has trained, which unlike models cannot have. Here
    private layers start as in every method, and h as a fresh one of the first model of the pool. Its shared layers
    are the last `num_layers_keep` of one architecture; here they are named. It reports the best models so far of
    every client; here models are measured as they are.
    """

    name = "lg-fedavg"
    citation = "Liang et al., arXiv 2001.01523, 2020"
    tasks = "one"
    models = "any, with heads of one form (models.rep_dim and models.adapter give one width)"
    server_needs = "head"
    card_fields = ("width",)
    down: ClassVar[Declared] = lambda method: _shared(method, "the average")
    stays = ("data", "labels", "representations", "model/features")

    class Config(MethodConfig):
        """Options of LG-FedAvg."""

        layers: tuple[str, ...] = option(
            default=("head",),
            description="the modules that are shared, by their names in every model; none: everything is local",
            source="released code: the last layer",
        )
        weights: Literal["samples", "uniform"] = option(
            default="uniform",
            description="weights of the average: all alike, or n_k",
            source="released code; samples: HtFLlib",
        )

        @model_validator(mode="after")
        def _has_something_to_weigh(self) -> Self:
            if not self.layers:
                self.refuse_set("weights", reason="with layers: []; nothing is averaged")
            return self

    def setup(self, population: Population) -> None:
        """The form of the shared layers in each architecture, and what stays."""
        layers = self.config.layers
        if layers != ("head",):
            self.stays = ("data", "labels", *(() if layers else ("model",)))
        self.forms = {
            population.form(client): {
                layer: shapes_below(population.names(client), layer) for layer in layers
            }
            for client in one_per_architecture(population)
        }
        self.shapes = self.forms[population.form(population.ids[0])]

    def check(self, population: Population) -> None:
        """Every shared layer has parameters, and the same form in all models."""
        for layer in self.config.layers:
            forms = {client: self.forms[population.form(client)][layer] for client in population.ids}
            lacking = next((client for client in population.ids if not layer or not forms[client]), None)
            if lacking is not None:
                raise ConfigError(
                    f"{self.name}: {named(population, lacking)} has no layer {layer!r} with parameters "
                    "(method.layers); name modules that all models have, or use fedavg with method.share: layers"
                )
            otherwise = ", or use fedavg, which averages within groups of one architecture"
            require_one_form(population, layer, forms.__getitem__, otherwise)

    def advice(self, population: Population) -> Iterator[str]:
        """Say where nothing is shared."""
        yield from super().advice(population)
        if not self.config.layers:
            yield f"{self.name}: with method.layers: [] nothing is shared; every client trains alone, as in local"

    def expected(self, card: Card, part: str) -> Shapes | None:
        """All clients have the shared layers in one form."""
        return self.shapes.get(part.removeprefix("model/"))

    def server_state(self, task: Task) -> dict[str, Any]:
        """The shared layers."""
        if self.pool is None:
            raise ConfigError(
                f"{self.name}: the server needs to know the form of the shared layers; name the clients' models"
            )
        model = self.pool.build(self.pool.keys[0], task, who="the server's layers")
        return {layer: model.get_submodule(layer) for layer in self.config.layers}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """h."""
        return {layer: server[layer].state() for layer in self.config.layers}

    def receive(self, client: Client, down: Message) -> None:
        """Put the newest h on the private layers."""
        for layer in self.config.layers:
            client[f"model/{layer}"].load(down.group(layer))

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average the shared layers."""
        replies = clients.ask(self.train)
        for layer in self.config.layers:
            server[layer].load(average(replies, layer, self.config.weights))

    @client_step(up=lambda method: _shared(method, "after local training"))
    def train(self, client: Client) -> Content:
        """Local epochs on the whole model, then h_k."""
        fit(client, self.loss)
        return {layer: client[f"model/{layer}"].state() for layer in self.config.layers}
