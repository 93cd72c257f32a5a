"""The twin of ``engine.kernels.gather``, over memory that the processor can address."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray


def move(rows: NDArray[np.int64], flags: int, *, copy: bool = True) -> None:
    """As ``engine.kernels.gather.move``, piece by piece."""
    for source, target, size, flag in rows.tolist():
        if copy:
            ctypes.memmove(target, source, size)
        if flag >= 0 and not _finite(np.frombuffer((ctypes.c_char * size).from_address(source), np.uint32), flag % 2):
            ctypes.c_int32.from_address(flags + 4 * (flag // 2)).value = 1


def _finite(words: NDArray[np.uint32], half: int) -> bool:
    exponents = [np.uint32(0x7F800000), *([np.uint32(0x7F80)] if half else [])]
    return not any(((words & exponent) == exponent).any() for exponent in exponents)
