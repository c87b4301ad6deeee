"""Who comes from outside reaches Flower's fleet API and not its control API, with real processes.

The SuperLink listens on 127.0.0.1; 127.0.0.2, another address of this machine, is the outside.
"""

import contextlib
import os
import re
import shutil
import ssl
import sys
from pathlib import Path

import pytest
import sites
from federations import Federation, engine

from potluck.deploy.flower.connections import free_port, is_open
from potluck.deploy.flower.processes import Process

httpx = pytest.importorskip("httpx")
pytest.importorskip("flwr")
pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
OUTSIDE = "127.0.0.2"
CLOSED = (
    "/v1/control/start-run",
    "/v1/control/list-nodes",
    "/v1/runtime/get-nodes",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/..%2fcontrol%2fstart-run",
    "/v1/fleet/../control/start-run",
    "//v1/control/start-run",
    "/V1/Control/start-run",
    "/docs",
    "/openapi.json",
)


def gate(federation, keys, port):
    words = ["--listen", f"{OUTSIDE}:{port}", "--superlink", federation.address, "--ca", str(keys / "ca.crt")]
    words += ["--certificate", str(keys / "server.crt"), "--key", str(keys / "server.key")]
    return [sys.executable, "-m", "potluck", "gate", *words]


def nginx(federation, keys, port):
    """The configuration of the guide, with this machine's paths and ports."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("there is no nginx")
    guide = (ROOT / "docs" / "deploy.md").read_text()
    (block,) = re.findall(r"```nginx\n(.*?)```", guide, re.DOTALL)
    changes = {
        "listen 8443": f"listen {OUTSIDE}:{port}",
        "/etc/potluck/keys": str(keys),
        "127.0.0.1:8000": federation.address,
    }
    for old, new in changes.items():
        assert old in block
        block = block.replace(old, new)
    place = federation.folder / "nginx"
    place.mkdir()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = "".join(f"{kind}_temp_path {place}/{kind};\n" for kind in kinds)
    outer = f"pid {place}/pid;\nerror_log {place}/error.log;\nworker_processes 1;\nevents {{}}\n"
    (place / "nginx.conf").write_text(f"{outer}http {{\naccess_log off;\n{own}{block}}}\n")
    return [program, "-p", str(place), "-c", str(place / "nginx.conf"), "-g", "daemon off;"]


@pytest.mark.parametrize("remedy", [gate, nginx])
def test_from_outside_the_fleet_api_answers_and_the_control_api_does_not(tmp_path, remedy):
    with contextlib.closing(Federation(tmp_path)) as federation:
        keys = federation.secure(sites.IDS, ["127.0.0.1", OUTSIDE, "localhost"])
        outside = f"{OUTSIDE}:{free_port()}"
        words = remedy(federation, keys, outside.partition(":")[2])
        federation.processes.append(Process(words, tmp_path / "remedy.log", os.environ))
        federation.wait(lambda: is_open(outside), 30)
        superlink = federation.address.replace("127.0.0.1", OUTSIDE)
        assert not is_open(superlink)  # but for the remedy, nobody is there

        trust = ssl.create_default_context(cafile=keys / "ca.crt")
        with httpx.Client(base_url=f"https://{outside}", verify=trust, trust_env=False) as client:
            answers = {path: client.post(path).status_code for path in CLOSED}
            assert client.post("/v1/fleet/pull-messages").status_code not in (404, 405, 502)
            assert client.get("/v1/fleet/pull-messages").status_code in (403, 404, 405)
        assert {path: code for path, code in answers.items() if code not in (404, 405)} == {}
        listed = {address: federation.flwr(address, keys, "supernode", "list").returncode == 0
                  for address in (federation.address, outside)}  # fmt: skip
        assert listed == {federation.address: True, outside: False}

        for client in sites.IDS:
            key = keys / "clients" / client
            federation.join(client, "--ca", str(keys / "ca.crt"), "--node-key", str(key), server=outside)
        federation.finish(federation.serve(sites.federated({"name": "fedmrl", "d1": 8}, 1, **engine())))
        assert "goes on without" not in federation.log("serve")
