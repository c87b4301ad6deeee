"""The installed version of potluck, and how to add to it."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any
from urllib.parse import unquote, urlsplit

try:
    __version__ = version("potluck")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.1.0"


def install_command(extra: str) -> str:
    """What to type to add an extra to potluck, installed as it is here: from a wheel, a clone or an index."""
    origin = _origin()
    url = str(origin.get("url", ""))
    place = unquote(urlsplit(url).path) if url.startswith("file:") else url
    source = f"{place or 'potluck'}[{extra}]"
    if vcs := origin.get("vcs_info"):
        source = f"potluck[{extra}] @ {vcs['vcs']}+{url}"
    editable = "-e " if (origin.get("dir_info") or {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(source)}"


def _origin() -> dict[str, Any]:
    """What the installer wrote down of where potluck came from; nothing where it came from an index."""
    try:
        found = json.loads(distribution("potluck").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
