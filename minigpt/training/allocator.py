"""Memory that one training step frees is what the next one wants."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MXFAST = -1, -3, 1  # of glibc's mallopt
LARGE = 32 << 20  # bytes; the most that glibc takes for a limit
CACHED = 7  # freed pieces of one size that glibc keeps for a thread
PIECES = [size for size in range(24, 104, 16) for _ in range(CACHED)]  # bytes; all that is cut off beside a block

_spare: list[int] = []  # addresses of as many pieces


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks for the process instead of handing them back to the system.

    Getting them again costs a page fault for every 4 KiB: on a virtual machine a tenth to a fifth of a training step.
    Those of 32 MiB and more, of which a step has few, do go back: their holes would stay empty. Where there is another
    C library nothing happens.
    """
    glibc = _glibc()
    if glibc is not None:
        glibc.mallopt(M_TRIM_THRESHOLD, -1)  # never
        glibc.mallopt(M_MMAP_THRESHOLD, LARGE)
        glibc.mallopt(M_MXFAST, 0)  # what is left beside an aligned block joins it again when it is freed


def join_freed_memory() -> None:
    """Empty this thread's cache of small freed pieces, so that the large free blocks they lie between become one.

    A block of PyTorch is aligned: glibc cuts a piece off before it, and freed, that piece goes to the thread's cache.
    There it keeps two free blocks apart for good, and neither is large enough for the next of its own size. Spare
    pieces fill the cache for a moment, so that what was in it goes back to the heap.
    Takes a tenth of a millisecond.
    """
    glibc = _glibc()
    if glibc is None:
        return
    cached = [glibc.malloc(size) for size in PIECES]
    for piece in _spare + cached:
        glibc.free(piece)
    _spare[:] = [glibc.malloc(size) for size in PIECES]


@lru_cache(maxsize=1)
def _glibc() -> ctypes.PyDLL | None:
    """The C library, if it is glibc; what is called here is too short to let other threads run meanwhile."""
    library = ctypes.PyDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "mallopt"):
        return None
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    return library
