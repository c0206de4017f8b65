"""Freed memory is kept for the next step instead of being handed back to the system."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""

_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed for the rest of this process; return whether it will.

    A training step on the CPU allocates and frees every activation. By default glibc returns large blocks to the
    system, which then hands the same memory out again page by page, cleared: between a tenth and a fifth of the time
    of a step of ResNet-18 on 32x32 images. Elsewhere (another libc, another system) nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _LARGEST))
