"""Where the command `potluck` and `python -m potluck` start."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Load the command line and run it; Ctrl-C while it is loaded ends it without a traceback, too."""
    gc.set_threshold(
        50_000, 20, 20
    )  # loading makes some 100,000 objects that stay: look through them less often
    try:
        from potluck.cli.app import main as start

        start()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
