"""GPU kernels without a GPU: Triton's interpreter on CPU tensors, for which the variable precedes Triton's import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]
from engine_support import accounted  # noqa: E402, F401 - after every test

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What a kernel leaves unwritten is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
