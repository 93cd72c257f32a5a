"""Kernels that come in before the ones ahead of them have ended.

Programmatic dependent launch, of GPUs of compute capability 9.0 and above: a kernel's programs may be on the device and
bring in what no kernel writes (weights), while the kernel before still runs. Between kernels of 2 us each that counts
for as much as the work itself. The order of reads and writes stays as without it, by these rules:

* a kernel for ``launch`` calls ``begin`` first, and ``wait`` before it touches anything but weights and a batch's
  segments, which no kernel writes, in all its programs: it cannot end before those ahead of it have, so that one
  ``wait`` waits for all of them. What it only asks for ahead may be anything;
* what is not a kernel (copies, memory operations of the stream) and kernels of others order themselves; only a kernel
  right after a memory operation says ``early=False``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = tl.constexpr(
    not _INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
)
LINE = 64
"""Bytes that a request to memory brings in at the least."""


class Switch:
    """``on``: whether kernels are launched early; what is captured into a graph stays as it was. For measurements."""

    on = True


@triton.jit
def begin():
    """Let the programs of the kernel behind come in as soon as all of this one have begun."""
    if AVAILABLE:
        cuda.gdc_launch_dependents()


@triton.jit
def wait():
    """After this, everything that earlier kernels wrote can be read, and what they read can be written."""
    if AVAILABLE:
        cuda.gdc_wait()


@triton.jit
def prefetch(addresses):
    """Ask for the memory at a block of pointers to come into the second-level cache, LINE bytes each."""
    if AVAILABLE:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [addresses.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, early: bool = True, **options: Any) -> None:
    """Start a kernel that follows the rules above; ``early=False``: after all before it."""
    kernel[grid](*arguments, launch_pdl=early and Switch.on and bool(AVAILABLE.value), **options)
