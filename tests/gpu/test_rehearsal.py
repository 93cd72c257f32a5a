"""Kernels are compiled before the first step, all of them and side by side, and nothing is launched meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def dry(tmp_path: Path, *arguments: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-P", str(Path(__file__).with_name("rehearsal_dry.py")), *arguments]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_are_compiled_and_loaded_and_kept_and_not_launched(tmp_path: Path) -> None:
    """One for 1, one for what 16 divides. What they would have written is 0. Nor are those launched of another model
    that was served before."""
    assert dry(tmp_path, "compile") == {
        "loaded": ["_add"] * 2, "found": 2, "kept": 2, "done": [2, 2], "seen": [0.0] * 8, "launched": 0
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "numbers"), [
    ("hybrid", (3, 8, 20)),
    *(pytest.param(*case, marks=pytest.mark.deep) for case in (
        ("hybrid", (3, 8, 400)), ("hybrid", (3, 6, 400)), ("hybrid", (8, 8, 400)), ("hybrid", (40, 8, 400)),
        ("hybrid", (3, 8, 400, 9)), ("offload", (8, 8, 400)), ("cpu", (8, 8, 400)), ("device", (3, 8, 400)),
        ("device", (20, 8, 400)),
    )),
])  # fmt: skip
def test_serving_asks_for_no_kernel_that_was_not_rehearsed(
    tmp_path: Path, mode: str, numbers: tuple[int, ...]
) -> None:  # fmt: skip
    """Nor where there are more slots than at the rehearsal, which leaves experts as they were, after copies of single
    ones. ``numbers``: as the program takes them."""
    known, late, untouched = dry(tmp_path, "serve", mode, *map(str, numbers))
    assert {"_product", "_attend", "_move", "_look"} < set(known) and late == [] and untouched
