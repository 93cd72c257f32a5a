"""What the tests of this folder share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.api import Request, Sampling

ROOT = Path(__file__).resolve().parents[2]
FAKE_WORKER = (sys.executable, "-P", str(Path(__file__).with_name("fake_worker.py")))
HANG_SECONDS = 60
"""Only a guard: nothing here is expected to take this long."""
ENDLESS = 1 << 40
"""More tokens than any test waits for."""


@dataclass(frozen=True)
class WorkerHandle:
    process: subprocess.Popen[bytes]
    socket: Path


StartWorker = Callable[..., WorkerHandle]


def child_environment() -> dict[str, str]:
    """Child processes import this tree, installed or not."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def asked(request_id: str, tokens: tuple[int, ...] = (1, 2, 3), max_tokens: int = 5) -> Request:
    return Request(request_id, tokens, Sampling(max_tokens=max_tokens))
