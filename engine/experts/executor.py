"""Experts on the CPU: called directly, or asked by a device through a mailbox in host memory.

The mailbox is lines of 64 bytes, one unsigned 64-bit integer at the start of each, and then the data of one request:

* ``ready``: rows << 32 | (layer + 1), stored by the device once x, plan and weights are; set to 0 when it is seen.
* ``done``: 1 when y is there. The device sets it to 0 before it asks.
* ``error``: 1, set before ``done``, when y could not be computed and is NaN instead; ``check`` says why.
* ``served``: the number of requests so far.
* ``arrived``: 1, stored by the device when its own side of the layer is finished; only for measuring.
* ``x`` float32 [rows, hidden]; ``plan`` int32 [rows, ranks, 2], an expert or -1, and the first of the parts that are
  asked for, up to the last one; ``weights`` float32 [rows, ranks]; ``y`` float32 [rows, hidden].

y[row] is the sum over ranks, in order, of the weight times the parts asked for. Its bits depend neither on the other
rows nor on the threads and the instruction set.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.experts.layout import MOST_PARTS
from engine.experts.pool import Pool, aligned
from engine.native.library import (
    EXPERT_SETS,
    ExecutorSpec,
    NativeLibraryError,
    core_cpus,
    find_library,
    load_library,
    supported_instruction_sets,
)

_LINE = 64
_FORMATS = ("bf16", "int8", "mxfp4")
"""In the order of ``ExpertFormat`` in executor.h."""
_TEXT = 1024
COARSE = 1e-4
"""What results with activations of 16 bits are off at most, relative to those of 23: half of it was measured."""


class ExecutorError(RuntimeError):
    """A request could not be computed; the text says what was wrong with it."""


@dataclass(frozen=True)
class MailboxLayout:
    """Where everything is in the mailbox: offsets in bytes, and ``nbytes`` of whole pages."""

    rows: int
    ranks: int
    hidden: int

    ready = 0
    done = _LINE
    error = 2 * _LINE
    served = 3 * _LINE
    arrived = 4 * _LINE
    x = 5 * _LINE

    @property
    def plan(self) -> int:
        return _after(self.x, 4 * self.rows * self.hidden)

    @property
    def weights(self) -> int:
        return _after(self.plan, 8 * self.rows * self.ranks)

    @property
    def y(self) -> int:
        return _after(self.weights, 4 * self.rows * self.ranks)

    @property
    def nbytes(self) -> int:
        return -(-(self.y + 4 * self.rows * self.hidden) // mmap.PAGESIZE) * mmap.PAGESIZE


class Executor:
    """Threads that compute experts of ``pool`` for requests of up to ``rows`` rows with ``ranks`` experts each."""

    def __init__(
        self,
        pool: Pool,
        rows: int,
        ranks: int,
        threads: int = 0,
        exact: bool = True,
        instruction_set: str = "auto",
        library: Path | None = None,
        *,
        shares: bool = False,
    ) -> None:
        """``threads`` 0: one on every core but one, which is left to Python, each bound to its core.

        ``exact``: bf16 is multiplied with float32 activations, int8 and mxfp4 with integers of 23 bits that share a
        scale by 32 k: no further from the true product than sums in float32. Not ``exact``: with integers of 16 bits,
        which is faster where the processor and not the memory is the limit, and off by less than ``COARSE``.
        ``shares``: threads without work leave their cores at once to others, and do not look for the next request.
        Raises NativeLibraryError, and ValueError for sizes below 1."""
        if rows < 1 or ranks < 1 or threads < 0:
            raise ValueError(f"an executor needs rows, ranks and threads, not {rows}, {ranks} and {threads}")
        self._library = load_library(library or find_library())
        supported = supported_instruction_sets(self._library, EXPERT_SETS)
        self.instruction_set = supported[0] if instruction_set == "auto" else instruction_set
        if self.instruction_set not in supported:
            raise NativeLibraryError(
                f"instruction set {instruction_set!r} cannot run here: --instruction-set is auto, or one of "
                f"{', '.join(supported)}"
            )
        cpus = core_cpus()[1:] or core_cpus()
        self.threads = threads or len(cpus)
        bound = cpus if threads == 0 else []
        self.pool = pool
        self.layout = MailboxLayout(rows, ranks, pool.layout.hidden)
        self.mailbox = aligned(self.layout.nbytes, mmap.PAGESIZE)
        """uint8 [layout.nbytes]"""
        self._failed = self.mailbox[self.layout.error : self.layout.error + 8].numpy().view(np.int64)
        self.times: npt.NDArray[np.int64] = np.zeros((pool.layers, 3), np.int64)
        """Of every layer's last request: nanoseconds from when it was seen until it was done, and until the device's
        side arrived (0: not known, or not asked by one), and the number of parts computed."""
        spec = self._spec(bound, exact)
        handle = self._library.ft_executor_create(self.instruction_set.encode(), ctypes.byref(spec))
        self._handle = ctypes.c_void_p(handle)
        if not self._handle:
            raise NativeLibraryError(f"{self.threads} threads could not be started: ask for fewer (--threads)")
        # The memory that the threads use is kept until they have stopped.
        kept = (pool, self.mailbox, self.times)
        if shares:
            self._library.ft_executor_share_cores(self._handle)
        self._finalize = weakref.finalize(self, _destroy, self._library, self._handle, kept)

    def run(self, layer: int, x: Tensor, plan: Tensor, weights: Tensor) -> Tensor:
        """What a device would get for the same data; shapes as in the mailbox. Raises ValueError."""
        rows, ranks, hidden = x.shape[0], self.layout.ranks, self.layout.hidden
        for name, tensor, shape, dtype in (
            ("x", x, (rows, hidden), torch.float32),
            ("plan", plan, (rows, ranks, 2), torch.int32),
            ("weights", weights, (rows, ranks), torch.float32),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
                raise ValueError(f"{name} must be {dtype} {list(shape)} in host memory, not {list(tensor.shape)}")
        x, plan, weights = x.contiguous(), plan.contiguous(), weights.contiguous()
        y = torch.empty_like(x)
        text = ctypes.create_string_buffer(_TEXT)
        if self._library.ft_executor_run(
            self._handle,
            layer,
            rows,
            x.data_ptr(),
            plan.data_ptr(),
            weights.data_ptr(),
            y.data_ptr(),
            text,
            _TEXT,
        ):
            raise ValueError(text.value.decode())
        return y

    def rouse(self) -> None:
        """A device is about to ask: threads that went to sleep wake up meanwhile, and look for requests for some
        milliseconds. Tens of microseconds where they sleep, next to nothing where they do not."""
        self._library.ft_executor_rouse(self._handle)

    def read(self) -> int:
        """Reads the whole MiB of the pool with the threads that compute, as fast as they can. -> bytes read"""
        nbytes = self.pool.nbytes >> 20 << 20
        self._library.ft_executor_read(self._handle, self.pool.address(0), nbytes)
        return nbytes

    def check(self) -> None:
        """Raises ExecutorError, once, when a request from the mailbox failed."""
        if not self._failed.item():
            return
        text = ctypes.create_string_buffer(_TEXT)
        if self._library.ft_executor_error(self._handle, text, _TEXT):
            raise ExecutorError(text.value.decode())

    def stalled(self, seconds: float) -> bool:
        """Whether nobody has looked at the mailbox for so long: a request takes too long, or the thread is gone."""
        return bool(self._library.ft_executor_silence(self._handle) > seconds * 1e9)

    def close(self) -> None:
        """Stops the threads. No device may ask any more, and nothing else may be called."""
        self._finalize()

    def _spec(self, cpus: list[int], exact: bool) -> ExecutorSpec:
        pool, layout, box = self.pool, self.pool.layout, self.layout
        spec = ExecutorSpec(
            threads=self.threads,
            cpu_count=len(cpus),
            cpus=(ctypes.c_int32 * len(cpus))(*cpus),
            exact=exact,
            format=_FORMATS.index(layout.format.name),
            pool=pool.address(0),
            stride=pool.stride,
            layers=pool.layers,
            experts=pool.experts,
            hidden=layout.hidden,
            inner=layout.inner,
            parts=layout.parts,
            bounds=(ctypes.c_int64 * (MOST_PARTS + 1))(*layout.bounds),
            rows=box.rows,
            ranks=box.ranks,
            mailbox=self.mailbox.data_ptr(),
            times=self.times.ctypes.data,
        )
        for name in ("ready", "done", "error", "served", "arrived", "x", "plan", "weights", "y"):
            setattr(spec, name, getattr(box, name))
        return spec


def _destroy(library: ctypes.CDLL, handle: ctypes.c_void_p, kept: object) -> None:
    library.ft_executor_destroy(handle)


def _after(offset: int, nbytes: int) -> int:
    return -(-(offset + nbytes) // _LINE) * _LINE
