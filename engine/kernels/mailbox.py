"""What kernels store in the mailbox of ``engine.experts.executor``: a request, then the word that the CPU polls; and
how they add its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import begin, cdiv, launch, wait

BLOCK = 256
"""Numbers that a program adds."""


class Mailbox(Protocol):
    """Byte offsets, as ``engine.experts.executor.MailboxLayout``."""

    @property
    def ready(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def arrived(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def plan(self) -> int: ...
    @property
    def weights(self) -> int: ...
    @property
    def y(self) -> int: ...


@dataclass(frozen=True)
class Request:
    """What the CPU needs besides its plan: x [rows, hidden], weights [rows, k]; ``address`` of the mailbox for the
    device."""

    x: Tensor
    weights: Tensor
    address: int
    layout: Mailbox

    @property
    def addresses(self) -> tuple[int, ...]:
        box = self.layout
        return tuple(self.address + offset for offset in (box.ready, box.done, box.x, box.plan, box.weights))

    def number(self, layer: int) -> int:
        """What ``ready`` says."""
        return self.x.shape[0] << 32 | (layer + 1)


@triton.jit
def store(address, at, values, mask):
    """Words from an address in the mailbox on."""
    tl.store(tl.multiple_of(address.to(tl.pointer_type(values.dtype)), 16) + at, values, mask=mask)


@triton.jit
def give_x(x, to_x, size, CHUNK: tl.constexpr):
    for start in range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        store(to_x, at, tl.load(x + at, mask=at < size).to(tl.float32), at < size)


@triton.jit
def release(to, value, ON_DEVICE: tl.constexpr):
    """Store 64 bits where the CPU looks, by one thread: whoever sees them sees all that this program has stored before
    its last barrier."""
    if ON_DEVICE:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }
            """,
            "=r,l,l",
            [to, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:  # the interpreter runs one program after another
        tl.store(to.to(tl.pointer_type(tl.int64)), value)


@triton.jit
def _add_answer(y, answer, counts, size, BLOCK: tl.constexpr):
    begin()
    wait()
    if tl.load(counts + 1) > 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        source = tl.multiple_of(answer.to(tl.pointer_type(tl.float32)), 16)
        # Not from a cache: the CPU writes the same place for every layer.
        added = tl.load(source + at, mask=at < size, other=0.0, cache_modifier=".cv")
        tl.store(y + at, tl.load(y + at, mask=at < size, other=0.0) + added, mask=at < size)


def add_answer(y: Tensor, counts: Tensor, mailbox: int, layout: Mailbox) -> None:
    """y [rows, hidden] += what the CPU computed, if the second of ``counts`` says that it was asked; right after a
    memory operation that waited for it. ``mailbox``: its address for the device."""
    launch(
        _add_answer, (cdiv(y.numel(), BLOCK),),
        y, mailbox + layout.y, counts, y.numel(), BLOCK=BLOCK, num_warps=2, early=False,
    )  # fmt: skip
