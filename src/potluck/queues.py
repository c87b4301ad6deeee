"""Hardware queues of a GPU."""

from __future__ import annotations

import os

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def ask_for_queues() -> None:
    """Ask the CUDA driver for 32 hardware queues, unless the user has set a number.

    Its default is eight; with 32 the streams of a cohort hardly wait for each other. The driver reads the variable
    once, when CUDA starts, and a script may start it with `torch.cuda.is_available()`: so this is called when
    potluck is imported.
    """
    os.environ.setdefault(VARIABLE, "32")
