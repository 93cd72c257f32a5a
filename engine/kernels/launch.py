"""Kernels that come in before the ones ahead of them have ended.

Programmatic dependent launch, of GPUs of compute capability 9.0 and above: a kernel's programs may be on the device and
bring in what no kernel writes (weights), while the kernel before still runs. Between kernels of 2 us each that counts
for as much as the work itself. The order of reads and writes stays as without it, by these rules:

* a kernel for ``launch`` calls ``begin`` first, or where the next one would no longer be in its way, and ``wait``
  before it touches anything but weights, what a batch says (segments, positions, pages) and, in a decode step, the
  state that it changes itself and keys of earlier steps, which no kernel ahead of it writes, in all its programs: it
  cannot end before those ahead of it have, so that one ``wait`` waits for all of them. What it only asks for ahead may
  be anything;
* what is not a kernel (copies, memory operations of the stream) and kernels of others order themselves; only a kernel
  right after a memory operation says ``early=False``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda
from triton.runtime import driver

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


@triton.jit
def ask(address, nbytes):
    """Ask for ``nbytes`` from ``address`` on, which 16 divides, to come into the second-level cache: all but what is
    over a multiple of 16 there, none if they are negative. One thread does it for a program."""
    if AVAILABLE:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred asks;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 asks, thread, 0;
            setp.gt.and.s32 asks, $2, 0, asks;
            @asks cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }
            """,
            "=r,l,r",
            [address.to(tl.int64), nbytes & -16],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, early: bool = True, stream: int | None = None, **constants: Any
) -> None:
    """Start a kernel that follows the rules above; ``early=False``: after all before it. ``constants``: its own, by
    name and each of one type wherever it comes from, and Triton's. ``stream``: other than torch's current one.

    Triton takes 10 to 30 us to find out that it has compiled a kernel already, more than the device for many of them.
    So what it compiled is kept here, by what it would have been compiled anew for, and started as it would start it."""
    if _INTERPRETED:
        kernel[grid](*arguments, **constants)
        return
    device = torch.cuda.current_device()
    early = early and Switch.on and bool(AVAILABLE.value)
    kinds: list[object] = [id(kernel), device, early, *constants, *constants.values()]
    given = specialise(arguments, kinds)
    compiled = _compiled.get(key := tuple(kinds))
    if compiled is None:
        compiled = _compiled[key] = _Compiled.of(kernel, grid, arguments, constants, early)
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device) if stream is None else stream
    compiled.run(x, y, z, stream, compiled.function, compiled.packed, None, None, None, *given, *compiled.constants)


class _Compiled(NamedTuple):
    """What Triton starts a ``triton.compiler.CompiledKernel`` with."""

    run: Callable[..., None]
    function: int
    packed: tuple[Any, ...]
    constants: tuple[object, ...]

    @classmethod
    def of(
        cls, kernel: Any, grid: tuple[int, ...], arguments: Sequence[object], constants: dict[str, Any], early: bool
    ) -> Self:  # fmt: skip
        given, later = kernel.params[: len(arguments)], kernel.arg_names[len(arguments) :]
        if any(parameter.is_constexpr for parameter in given):
            raise TypeError(f"{kernel.__name__}: constants are given by name")
        compiled = kernel.run(*arguments, grid=grid, warmup=True, launch_pdl=early, **constants)
        run = compiled.run  # loads it
        return cls(run, compiled.function, compiled.packed_metadata, tuple(constants[name] for name in later))


def forget() -> None:
    """Ask Triton for every kernel again."""
    _compiled.clear()


_compiled: dict[tuple[object, ...], _Compiled] = {}
_SHORT, _LONG = 1 << 31, 1 << 63


def specialise(arguments: Sequence[Any], kinds: list[object]) -> list[Any]:
    """Appends to ``kinds`` what Triton compiles a kernel anew for: types, what is 1, what 16 divides. -> the arguments,
    addresses in place of tensors."""
    given: list[Any] = []
    for value in arguments:
        kind = type(value)
        if kind is int:
            if value == 1:
                kinds.append(1)
            elif -_SHORT <= value < _SHORT:
                kinds.append(3 if value & 15 else 2)
            else:
                kinds.append((value >= _LONG, value & 15 == 0))
        elif kind is tuple:
            kinds += tuple, len(value)
            value = tuple(specialise(value, kinds))
        elif isinstance(value, Tensor):
            kinds.append(value.dtype)
            value = value.data_ptr()
            kinds.append(value & 15 == 0)
        elif kind in _PLAIN:
            kinds.append(kind)
        else:
            raise TypeError(f"no argument of a kernel: {value!r}")
        given.append(value)
    return given


_PLAIN = (float, bool, NoneType)


def cdiv(size: int, of: int) -> int:
    """As Triton's, which may stand in kernels too and takes 6 us for that."""
    return -(-size // of)


def next_power_of_2(size: int) -> int:
    """Likewise; 1 for 0."""
    return 1 << max(0, size - 1).bit_length()
