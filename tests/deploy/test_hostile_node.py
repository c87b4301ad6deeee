"""A node that lies to Flower itself, with real processes: it is named and left out, and nobody else is."""

import contextlib
from pathlib import Path

import pytest
import sites
from federations import Federation, engine

pytest.importorskip("flwr")
pytestmark = pytest.mark.faults

METHOD, ROUNDS = {"name": "fedmrl", "d1": 8}, 3
NODE = Path(__file__).with_name("hostile_node.py")


def test_a_malformed_array_and_a_reply_never_uploaded_cost_their_sender_alone(tmp_path):
    with contextlib.closing(Federation(tmp_path)) as federation:
        server = federation.serve(sites.federated(METHOD, ROUNDS, **engine(deadline=30)))
        for client in ("0", "1"):
            federation.join(client)
        federation.wait(lambda: "waiting at" in federation.log("serve"))
        liar = tmp_path / "liar"
        federation.start("liar", str(NODE), federation.address, "2", str(liar))
        for number, fault in ((1, "array"), (2, "never")):
            federation.wait(lambda number=number: federation.rounds() == number)
            (liar / "fault").write_text(fault)
        federation.finish(server)
        told = federation.log("serve")
        assert "round 2 goes on without client 2: its reply cannot be read: IndexError" in told
        late = "it announced a reply and did not send all of it within 30 s"
        assert f"round 3 goes on without client 2: {late}" in told
        assert "connection to Flower is lost" not in told
        expected = sites.serial(METHOD, tmp_path / "serial", away={("2", 2), ("2", 3)}, rounds=ROUNDS)
        assert sites.log(federation.run) == expected
