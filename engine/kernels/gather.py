"""Many pieces of memory moved at once, and looked at: pages and states into one place, and out of one place.

A row is a piece: where from, where to, bytes, and what to look for. Addresses are the device's; host memory that is
mapped for it is as good a place as its own.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.launch import launch

PIECE = 1 << 16
"""Bytes of a row at most: as many programs share a large piece as a small one."""
CHUNK = 4096
"""Words that a program moves at a time."""
ACROSS = 32
"""Programs that move over the link: enough reads in flight for it, few enough to leave the device to others."""
_ALONG = 1 << 15
"""Bytes of rows that come to the device with the command to copy them."""
ON_DEVICE = 1024
"""Programs at most that move within the device."""


@triton.jit(do_not_specialize=["count"])
def _move(rows, flags, count, COPY: tl.constexpr, CHUNK: tl.constexpr):
    lane = tl.arange(0, CHUNK)
    flag_words = flags.to(tl.pointer_type(tl.int32))
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        row = rows + number * 4
        source = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int32)), 16)
        target = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int32)), 16)
        words = tl.load(row + 2).to(tl.int32) // 16 * 4
        flag = tl.load(row + 3)
        low = tl.where(flag % 2 == 1, 0x7F80, -1)  # the lower half of a word is no number of its own
        bad = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, words, CHUNK):
            at = start + lane
            here = at < words
            data = tl.load(source + at, mask=here, other=0, cache_modifier=".cg")
            if COPY:
                tl.store(target + at, data, mask=here)
            odd = ((data & 0x7F800000) == 0x7F800000) | ((data & 0x7F80) == low)
            bad = bad | odd.to(tl.int32)
        if (flag >= 0) & (tl.max(bad) > 0):
            tl.store(flag_words + flag // 2, 1)


def move(rows: Tensor, flags: int, *, copy: bool = True, programs: int = ON_DEVICE) -> None:
    """``rows`` int64 [n, 4] on the device: address of the source, of the target, bytes (multiples of 16 all three), and
    2 * the number of a word at ``flags`` that becomes 1 if not all float32 numbers in it are finite, one more for
    bfloat16, negative if nobody asks. ``copy`` False: only look."""
    count = rows.shape[0]
    if count:
        grid = (min(count, programs),)
        launch(_move, grid, rows, flags, count, COPY=copy, CHUNK=CHUNK, num_warps=8, early=False)


def upload(rows: NDArray[np.int64], device: torch.device) -> Tensor:
    """Rows for ``move`` on the current stream; nothing waits. The driver takes few bytes along with the command; to pin
    memory for them would take the host 0.1 ms."""
    host = torch.from_numpy(rows)
    if device.type == "cpu":
        return host
    return (host if host.nbytes <= _ALONG else host.pin_memory()).to(device, non_blocking=True)
