"""Whether something looks on while torch computes."""

from __future__ import annotations

import torch


def is_watched() -> bool:
    """Whether something counts, records or replaces operations: it knows torch's own, and may have no values."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
