"""The welcomes of the runs that a site has joined, kept on its disk: a worker that starts again joins with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.core.plain_values import whole
from potluck.deploy.bounds import MOST_ROUNDS
from potluck.deploy.record_files import keep_names, read_own
from potluck.deploy.wire import LARGEST_INTRODUCTION, LARGEST_OPEN
from potluck.errors import ConfigError, RunError
from potluck.files import with_checksum, without_checksum, write_whole

SUFFIX = ".json"  # of the file beside a record
MOST_KEPT = 64 << 20  # bytes of all welcomes of a site


@dataclass(frozen=True)
class KeptWelcome:
    """A welcome, and the most bytes that an order of its run can have."""

    offer: Mapping[str, Any]
    most: int

    @property
    def rounds(self) -> int:
        """The rounds of the run, as the server told them."""
        return rounds_of(self.offer)

    def write(self, file: Path) -> None:
        """Keep it, in a file with its own checksum; it is on the disk when this returns."""
        value = with_checksum({"welcome": self.offer, "most": self.most})
        write_whole(file, f"{_text(value)}\n".encode())
        keep_names(file.parent)

    @classmethod
    def read(cls, file: Path) -> KeptWelcome:
        """The welcome in a file, as it was kept; one that was changed or cut since is refused."""
        try:
            kept = _checked(json.loads(read_own(file)))
            most = whole(kept["most"], 0, 2 * LARGEST_OPEN, "the size of an order")
            found = cls(dict(kept["welcome"]), most)
            rounds_of(found.offer)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise RunError(
                f"{file} cannot be read ({error}); bring it back from a copy, or ask the server for a new run"
            ) from error
        return found


def _checked(kept: Any) -> dict[str, Any]:
    """What was kept. Earlier versions wrote no checksum: such a file has these two keys alone."""
    return kept if isinstance(kept, dict) and kept.keys() == {"welcome", "most"} else without_checksum(kept)


def rounds_of(offer: Mapping[str, Any]) -> int:
    """The rounds of a run in its welcome."""
    return whole(offer["experiment"]["training"]["rounds"], 0, MOST_ROUNDS, "a number of rounds")


def check_room(runs: Path, offer: Mapping[str, Any]) -> None:
    """Refuse a welcome that is larger than any on the wire, or for which a site has no room beside the others."""
    size = len(_text(offer))
    if size > LARGEST_INTRODUCTION:
        raise ConfigError(
            f"the server's welcome has {size:,} letters; this site keeps {LARGEST_INTRODUCTION:,}: ask for less"
        )
    kept = sum(file.lstat().st_size for file in runs.glob(f"*{SUFFIX}"))
    if kept + size > MOST_KEPT:
        raise RunError(
            f"the welcomes in {runs} have {kept:,} bytes, and {size:,} more are beyond the {MOST_KEPT:,} that a "
            "site keeps; remove old runs with potluck prune"
        )


def _text(value: Any) -> str:
    """As short as JSON can be; indented, what is nested deeply would grow without a bound."""
    return json.dumps(value, separators=(",", ":"))
