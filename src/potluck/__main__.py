"""Where the command `potluck` and `python -m potluck` start."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Load the command line and run it; Ctrl-C while it is loaded ends it without a traceback."""
    try:
        from potluck.cli.app import main as start

        start()
    except KeyboardInterrupt as error:
        print("stopped", file=sys.stderr)
        sys.exit(128 + getattr(error, "number", signal.SIGINT))
    except Warning as warning:  # of a library, while it is loaded
        from potluck.errors import of_a_warning

        print(f"error: {of_a_warning(warning)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
