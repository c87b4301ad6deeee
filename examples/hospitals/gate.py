"""A gate before the SuperLink: nodes reach the fleet API through it, and nobody reaches anything else.

    python gate.py --listen 0.0.0.0:8443 --superlink 127.0.0.1:8000 --keys keys

docs/deploy.md says why. What is not a known kind of call to the fleet API is answered with 404 and goes nowhere.
It needs what Flower has installed: httpx, starlette, uvicorn.
"""

import argparse
import re
import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

CALL = re.compile(r"[a-z]+(-[a-z]+)*")  # pull-messages, send-node-heartbeat, …
HOP = {"host", "connection", "keep-alive", "transfer-encoding", "upgrade"}  # concern one connection alone


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP}


def gate(superlink: str, ca: Path) -> Starlette:
    verify = ssl.create_default_context(cafile=ca)
    client = httpx.AsyncClient(base_url=f"https://{superlink}", verify=verify, timeout=None, trust_env=False)

    async def forward(request: Request) -> Response:
        call = request.path_params["call"]
        if not CALL.fullmatch(call):
            return PlainTextResponse("there is no such call", 404)
        headers = passed_on(request.headers)
        sent = client.build_request("POST", f"/v1/fleet/{call}", content=request.stream(), headers=headers)
        answer = await client.send(sent, stream=True)
        done = BackgroundTask(answer.aclose)
        return StreamingResponse(
            answer.aiter_raw(), answer.status_code, passed_on(answer.headers), background=done
        )

    return Starlette(routes=[Route("/v1/fleet/{call}", forward, methods=["POST"])])


def main() -> None:
    parser = argparse.ArgumentParser(description="Let nodes through to the fleet API, and nothing else.")
    parser.add_argument("--listen", default="127.0.0.1:8443", help="address and port the nodes connect to")
    parser.add_argument("--superlink", default="127.0.0.1:8000", help="where the SuperLink is")
    parser.add_argument(
        "--keys", type=Path, default=Path("keys"), help="folder with ca.crt, server.crt, server.key"
    )
    given = parser.parse_args()
    host, _, port = given.listen.rpartition(":")
    uvicorn.run(
        gate(given.superlink, given.keys / "ca.crt"),
        host=host,
        port=int(port),
        ssl_certfile=given.keys / "server.crt",
        ssl_keyfile=given.keys / "server.key",
        log_level="warning",
    )


if __name__ == "__main__":
    main()
