"""Addresses that users write as `host:port`."""

from __future__ import annotations


def port_of(text: str) -> int | None:
    """The number of a port; None if it is none.

    >>> port_of("8000"), port_of("99999"), port_of("0"), port_of("9" * 5000), port_of("²")
    (8000, None, None, None, None)
    """
    number = int(text) if text.isdecimal() and len(text) <= len("65535") else 0
    return number if 0 < number < 65536 else None
