"""Numbers as people read them."""

from __future__ import annotations


def byte_size(count: float) -> str:
    """Write a number of bytes: 150 kB, 1.1 MB, 2.4 GB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} bytes"
