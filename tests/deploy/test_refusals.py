"""What is refused, with real processes: strangers at the door, wrong uploads, a server that asks for too much.

Every refusal is named in a log, and the rounds go on with the others.
"""

import contextlib

import pytest
import sites
from federations import Federation, engine

from potluck.deploy.flower.connections import Security, free_port
from potluck.deploy.flower.processes import start_supernode
from potluck.deploy.trial_keys import make_keys

pytest.importorskip("flwr")
pytestmark = pytest.mark.faults

METHOD = {"name": "fedmrl", "d1": 8}


@pytest.fixture
def federation(tmp_path):
    with contextlib.closing(Federation(tmp_path)) as found:
        yield found


def test_strangers_are_refused_and_the_others_go_on(federation):
    folder = federation.folder
    keys, other = federation.secure([*sites.IDS, "spy"]), folder / "other"
    make_keys(other, ["127.0.0.1"], ["unknown"])

    def shown(key, ca=keys / "ca.crt"):
        return "--ca", str(ca), "--node-key", str(key)

    wrong_ca = federation.join("1", *shown(keys / "clients" / "1", other / "ca.crt"), name="wrong-ca")
    plain = federation.join("1", "--insecure", name="plain")
    assert [process.popen.wait(60) for process in (wrong_ca, plain)] == [2, 2]
    assert "is not to be trusted" in federation.log("join-wrong-ca")
    assert "speaks TLS, and this would be plain text" in federation.log("join-plain")
    for security in (Security(insecure=True), Security(ca=other / "ca.crt")):  # nor does Flower let them in
        federation.processes.append(
            start_supernode(federation.address, security, folder, folder / "none", free_port())
        )

    federation.join("1", *shown(other / "clients" / "unknown"), name="unknown")
    for client in sites.IDS:
        federation.join(client, *shown(keys / "clients" / client))
    server = federation.serve(sites.federated(METHOD, 3, **engine()))
    federation.wait(lambda: federation.rounds() == 1)
    federation.join("1", *shown(keys / "clients" / "spy"), name="spy")
    federation.wait(lambda: "was not taken in" in federation.log("serve"))
    federation.finish(server)

    assert "client 1: the key of its node, SHA256:" in federation.log("serve")
    assert "goes on without" not in federation.log("serve")
    assert "does not know the node's key" in federation.log("join-unknown")
    superlink = (folder / "operator" / "superlink.log").read_text()
    assert superlink.count("Activated node_id") == len([*sites.IDS, "spy"])
    assert "No SuperNode found with the given public key" in superlink
    assert sites.log(federation.run) == sites.serial(METHOD, folder / "serial", rounds=3)


TAMPERED_SITE = """
import dataclasses, pathlib, torch
import potluck.deploy.orders as own
from potluck.engine.protocol import Answer
from potluck.core.message import Message

FOLDER, HONEST = pathlib.Path(__file__).parent, own.pack_reply
CHANGES = {
    "shape": lambda tensors: {name: value.reshape(-1) for name, value in tensors.items()},
    "nan": lambda tensors: {name: value * torch.nan for name, value in tensors.items()},
    "extra": lambda tensors: tensors | {"spy": torch.zeros(1)},
    "oversized": lambda tensors: tensors | {"spy": torch.zeros(1 << 22)},
}

def tampered(reply):
    if isinstance(reply, Answer) and reply.up:
        file = FOLDER / "faults"
        fault, *rest = file.read_text().split()
        file.write_text(" ".join(rest))
        reply = dataclasses.replace(reply, up=Message(CHANGES[fault](dict(reply.up))))
    return HONEST(reply)

own.pack_reply = tampered
"""


def test_wrong_uploads_are_refused_and_the_others_go_on(federation):
    folder, faults = federation.folder, ["shape", "nan", "extra", "oversized"]
    shown = federation.tied(sites.IDS)
    for client in sites.IDS:
        federation.join(client, *shown[client], tampered=TAMPERED_SITE if client == "1" else "")
    (folder / "1" / "faults").write_text(" ".join(faults))
    federation.finish(federation.serve(sites.federated(METHOD, len(faults), **engine())))

    told = federation.log("serve")
    sentences = ["has shape", "is not finite", "tensor 'spy' is not declared", "its reply has more than the"]
    for round_, sentence in enumerate(sentences, start=1):
        (line,) = [line for line in told.splitlines() if f"round {round_} goes on without" in line]
        assert f"round {round_} goes on without client 1" in line
        assert sentence in line
    away = {("1", round_) for round_ in range(1, len(faults) + 1)}
    assert sites.log(federation.run) == sites.serial(METHOD, folder / "serial", away, rounds=len(faults))


GREEDY_SERVER = """
import dataclasses, sys, torch
import potluck.deploy.engine as own
from potluck.cli.app import main
from potluck.engine.protocol import Request
from potluck.core.message import Message

HONEST = own.pack_order
CHANGES = {
    2: lambda order: dataclasses.replace(order, steps=("train", "spy")),
    3: lambda order: dataclasses.replace(order, down=Message({**order.down, "spy": torch.zeros(1)})),
    4: lambda order: dataclasses.replace(order, down=Message({**order.down, "spy": torch.zeros(1 << 22)})),
}

def greedy(order):
    if isinstance(order, Request) and order.client == "1" and order.stamp.round in CHANGES:
        order = CHANGES[order.stamp.round](order)
    return HONEST(order)

own.pack_order = greedy
main()
"""


def test_a_server_that_asks_for_more_than_was_pinned_is_refused_at_the_site(federation):
    folder, experiment = federation.folder, sites.federated(METHOD, 4, **engine())
    contract, file = folder / "contract.json", sites.write_experiment(folder / "pinned.yaml", experiment)
    site = sites.write_site(folder / "1", "1")
    words = ["-m", "potluck", "join", "--client", "1", "--check", str(file), "--write", str(contract)]
    checked = federation.start("check", *words, "--model", f"{site}:build", "--data", f"{site}:load")
    assert checked.popen.wait(120) == 0, federation.log("check")
    for client in sites.IDS:
        federation.join(client, *(("--accept", str(contract)) if client == "1" else ()))
    greedy = folder / "greedy.py"
    greedy.write_text(GREEDY_SERVER)
    federation.finish(federation.serve(experiment, program=(str(greedy),)))

    served, worker = federation.log("serve"), (folder / "1" / "home" / "worker.log").read_text()
    sentences = ["fedmrl has no step 'spy'", "which this site has not agreed to", "an order has 16,"]
    for round_, sentence in enumerate(sentences, start=2):
        (line,) = [line for line in served.splitlines() if f"round {round_} goes on without" in line]
        assert f"round {round_} goes on without client 1: " in line
        assert sentence in line
        assert f"refused: {line.partition('client 1: client 1: ')[2]}" in worker
    away = {("1", 2), ("1", 3), ("1", 4)}
    assert sites.log(federation.run) == sites.serial(METHOD, folder / "serial", away, rounds=4)
