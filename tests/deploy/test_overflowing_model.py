"""A message of ordinary size whose model gives no finite numbers: the server runs it on public data."""

from dataclasses import replace

import sites
import torch
from links import Link, Told, serve

from potluck.core.message import Message
from potluck.deploy import wire
from potluck.deploy.site import Site
from potluck.engine.protocol import Answer

NORMED = {"name": "resnet18", "stem": "cifar", "width": 8}
MODELS = {"0": "conv-small", "1": "mlp-small", "2": NORMED}


def without_variances(order, data):
    """Client 2 says that nothing varies in its batch norms, so that each enlarges what it sees."""
    answer = wire.unpack_reply(data)
    if not (isinstance(answer, Answer) and order.client == "2" and getattr(order, "purpose", "") == "train"):
        return data
    zeros = {
        name: torch.zeros_like(value) for name, value in answer.up.items() if name.endswith("running_var")
    }
    return wire.pack_reply(replace(answer, up=Message({**answer.up, **zeros})))


def test_its_client_is_left_out_and_named_and_the_others_go_on(tmp_path):
    link, told = Link(tmp_path), Told()
    for number, model in enumerate(MODELS.values()):
        client = str(number)
        link.sites[number] = Site(client, model, sites.loader(client), tmp_path / client, simulated=True)
    link.tamper = without_variances
    method = {"name": "feddf", "steps": 4, "every": 2, "batch": 20}
    asked = sites.federated(method, 2, models={"pool": MODELS, "rep_dim": 16})
    result = serve(link, tmp_path / "run", asked, told)
    left_out = [one for one in told.notices if "goes on without client 2" in one]
    assert [one.partition(":")[0] for one in left_out] == [
        f"round {round_} goes on without client 2" for round_ in (1, 2)
    ]
    assert all("what its model says of public data is not finite" in one for one in left_out)
    assert result.summary["failures"].keys() == {"2"}
