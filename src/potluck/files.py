"""Writing files whole or not at all, and reading JSON files of a run."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from potluck.errors import RunError


def write_whole(path: Path, data: bytes) -> None:
    """Write a file through a temporary one, so that it is complete even if the machine stops."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file of a run."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing: {path.parent} is no run folder") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
