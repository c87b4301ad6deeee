"""Where the command `potluck` and `python -m potluck` start."""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command line and run it; Ctrl-C while it is loaded ends it without a traceback, too."""
    try:
        from potluck.cli.app import main as start

        start()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
