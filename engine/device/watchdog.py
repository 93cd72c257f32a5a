"""Turns CPU threads that stopped answering into an error, where the device would wait for them for ever."""

from __future__ import annotations

import ctypes
import threading

import torch

from engine.experts.executor import Executor, ExecutorError

PATIENCE = 10.0
_TICK = 0.5
_RELEASE = 0.001


class Watchdog:
    """Looks after an executor from a thread of its own.

    When nobody has looked at the mailbox for ``patience`` seconds, twice in a row (a stopped process wakes up with old
    clocks), y becomes NaN and all waits are answered, now and from then on: the stream drains, and ``check`` says why
    its results are worth nothing.
    """

    def __init__(self, executor: Executor, patience: float = PATIENCE, tick: float = _TICK) -> None:
        self._executor, self._patience, self._tick = executor, patience, tick
        self._stopping, self._dead = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="expert watchdog", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises ExecutorError when the executor is dead, or a request of the device failed since the last call."""
        if self._dead.is_set():
            raise ExecutorError(
                f"the CPU's expert threads have not answered for {self._patience:g} s; restart the engine, and if it "
                "happens again give them fewer cores"
            )
        self._executor.check()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        late = 0
        while late < 2:
            if self._stopping.wait(self._tick):
                return
            late = late + 1 if self._executor.stalled(self._patience) else 0
        self._dead.set()
        mailbox, layout = self._executor.mailbox, self._executor.layout
        mailbox[layout.y : layout.y + 4 * layout.rows * layout.hidden].view(torch.float32).fill_(float("nan"))
        start = mailbox.data_ptr()
        ctypes.c_uint64.from_address(start + layout.error).value = 1
        while not self._stopping.wait(_RELEASE):
            ctypes.c_uint64.from_address(start + layout.done).value = 1
