"""Lines of the logs of `potluck serve`, `join` and their workers: with the time, as text or as JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from typing import Any, TextIO

from potluck.core.plain_values import printable

VARIABLE = "POTLUCK_LOG"  # `json` in the environment of a worker: it writes as `join` does
KINDS = ("text", "json")


def line(sentence: str, as_json: bool, **facts: Any) -> str:
    """One line of a log: the time, what happened, and facts such as the round, which JSON has as fields."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    said = printable(sentence)
    known = {name: value for name, value in facts.items() if value is not None}
    if as_json:
        return json.dumps({"time": now, "message": said, **known})
    return f"{now} {said}"


class Log:
    """Writes lines to a stream, standard error by default."""

    def __init__(self, as_json: bool | None = None, stream: TextIO | None = None) -> None:
        self.as_json = os.environ.get(VARIABLE) == "json" if as_json is None else as_json
        self.stream = stream

    def __call__(self, sentence: str, **facts: Any) -> None:
        """Write one line; where the disk has no room for it, it is lost, and nothing ends over that."""
        try:
            print(line(sentence, self.as_json, **facts), file=self.stream or sys.stderr, flush=True)
        except BrokenPipeError:  # who read the log is gone
            raise
        except OSError:
            pass
