"""Threads of this process that stop, as if they had died: for checks of what happens then."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from engine.experts.executor import Executor

_TRACE = """
import ctypes, os, sys
trace = ctypes.CDLL(None, use_errno=True).ptrace
trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
for thread in map(int, sys.argv[1:]):
    for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
        if trace(request, thread, None, None):
            sys.exit(os.strerror(ctypes.get_errno()))
print("frozen", flush=True)
sys.stdin.read()
"""
_SET_TRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)


@contextmanager
def executor_threads() -> Iterator[set[int]]:
    """Fills with the threads of executors that are made meanwhile."""
    threads, make = set[int](), Executor.__init__

    def noted(*arguments: object, **options: object) -> None:
        before = _threads()
        make(*arguments, **options)  # type: ignore[arg-type]
        threads.update(_threads() - before)

    with patch.object(Executor, "__init__", noted):
        yield threads


@contextmanager
def frozen(threads: set[int]) -> Iterator[None]:
    """These do nothing until the end. Raises OSError where this is not allowed."""
    ctypes.CDLL(None).prctl(_SET_TRACER, _ANYBODY)
    command = [sys.executable, "-c", _TRACE, *map(str, threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        try:
            if not (tracer.stdout and tracer.stdout.readline()):
                raise OSError("threads cannot be stopped here")
            yield
        finally:
            tracer.communicate()  # threads go on when who traces them is gone


def _threads() -> set[int]:
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}
