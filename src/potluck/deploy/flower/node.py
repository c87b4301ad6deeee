"""A SuperNode of Flower's that ends when it no longer works, and notes how its calls are answered.

    python -P -m potluck.deploy.flower.node PULSE OPTIONS OF flower-supernode …

Flower's own program stays alive after its loop has ended over an answer that it does not retry, and would never
take part again; so it does after the helper that starts its apps has ended. `potluck join` starts this one anew
when it has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from potluck.deploy.node_pulse import BAD_INPUT, PulseFile, distrust_of

FLEET = "/v1/fleet/"
ENDED = 3  # exit code of a node whose loop has ended
HELPER = "flower-superexec"  # Flower's process that starts an app for every message
GRACE = 15.0  # seconds from the end of the helper: a node that is being ended ends within them


def noting(send: Callable[..., httpx.Response], pulse: PulseFile) -> Callable[..., httpx.Response]:
    """The same `httpx.Client.send`, with the outcome of every call to the server noted."""

    def noted(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        call = request.url.path.removeprefix(FLEET)
        if call == request.url.path:
            return send(self, request, **options)
        try:
            response = send(self, request, **options)
        except httpx.TransportError as error:
            pulse.note(call, 0, distrusted=distrust_of(str(error)))
            raise
        pulse.note(call, response.status_code, response.headers.get("date"))
        return response

    return noted


def answering(push: Callable[..., None], pulse: PulseFile) -> Callable[..., None]:
    """Flower's function that pushes a reply for each message pulled, until the newest one has its own.

    Flower takes whatever reply is there. One too many, to a message of a run that has ended, would go out in place
    of the next one, and every later reply would come an order too late.
    """

    def pushed(state: Any, **others: Any) -> None:
        stored = getattr(state, "msg_store", {})  # messages and replies by their ids, oldest first
        asked = [name for name, one in [*stored.items()] if not one.message.metadata.reply_to_message_id]
        with pulse.at_work():
            push(state=state, **others)
            while asked and asked[-1] in stored:
                push(state=state, **others)

    return pushed


class Watching(subprocess.Popen[bytes]):
    """A child process; when the helper has ended the node signs off, as it would pull orders and answer none."""

    def __init__(self, args: Any, *others: Any, **options: Any) -> None:
        super().__init__(args, *others, **options)
        if HELPER in str(args[0]):
            threading.Thread(target=self._end_with_it, daemon=True).start()

    def _end_with_it(self) -> None:
        code = self.wait()
        time.sleep(GRACE)
        print(f"ERROR :   {HELPER} has ended with {code}, and without it no order is answered\n", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        _exit(ENDED)


def _end(arguments: threading.ExceptHookArgs) -> None:
    """A thread has died, that of the heartbeats for one: without it the node would count as gone."""
    traceback.print_exception(arguments.exc_value)
    _exit(ENDED)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that serves Flower's apps would keep the process alive


def _check_proxies() -> None:
    """End where the environment names proxies in a form that no call can be made with."""
    try:
        httpx.Client().close()
    except (httpx.InvalidURL, ValueError, ImportError) as error:
        print(
            f"error: the proxies of the environment cannot be used ({error}); correct HTTPS_PROXY, HTTP_PROXY, "
            "ALL_PROXY or NO_PROXY",
            flush=True,
        )
        _exit(BAD_INPUT)


def main() -> None:
    """Run the SuperNode until its loop ends."""
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    pulse = PulseFile(Path(sys.argv.pop(1)))
    _check_proxies()
    httpx.Client.send = noting(httpx.Client.send, pulse)  # type: ignore[method-assign]
    loop._push_messages = answering(loop._push_messages, pulse)
    subprocess.Popen = Watching  # type: ignore[misc,assignment]
    threading.excepthook = _end
    code = ENDED
    try:
        flower_supernode()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else ENDED
    except BaseException:
        traceback.print_exc()
    _exit(code)


if __name__ == "__main__":
    main()
