"""Builds, checks and times everything that needs a GPU, part by part, and ends in a short table.

Plain Python: it runs where only torch and Triton are installed, from the root of a copy of the repository. Each part is
a process of its own with a time limit, so that one that hangs or crashes is a line of the table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

EXAMPLES = """examples:
  PYTHONPATH=. python3 -P -m engine.device.check
  PYTHONPATH=. python3 -P -m engine.device.check --quick --part kernels --part handshake
"""


@dataclass(frozen=True)
class Part:
    """``command``: a module and its arguments, ``{library}`` for the native library that was built. Seconds at most.
    ``quick``: whether it takes that option."""

    summary: str
    command: tuple[str, ...]
    seconds: int
    quick: bool = True


PARTS = {
    "kernels": Part("model kernels against their torch twins", ("engine.kernels.check",), 240, False),
    "prefill": Part("prefill kernels, likewise, and their speed", ("engine.kernels.check_prefill",), 300, False),
    "experts": Part("expert kernels and residency, likewise", ("engine.kernels.check_experts",), 240),
    "decode": Part(
        "a decode step with all experts on the device: its kernels, and with and without early launches",
        ("engine.device.check_decode",), 180,
    ),
    "handshake": Part(
        "what it takes to reach the CPU from a graph", ("engine.device.check_offload", "handshake", "{library}"), 60,
        False,
    ),
    "arena": Part("moving the border between slots, pages and states", ("engine.device.check_arena",), 60, False),
    "executor": Part(
        "CPU experts on real threads", ("engine.device.check_offload", "executor", "{library}"), 60, False
    ),
    "layer": Part(
        "an offloaded layer against all experts on the device",
        ("engine.device.check_offload", "layer", "{library}"),
        120,
    ),
    "prefill-layers": Part(
        "calls of many rows over offloaded experts", ("engine.device.check_offload", "prefill", "{library}"), 180
    ),
    "checkpoints": Part(
        "pages and states to host memory and back, against the link",
        ("engine.device.check_checkpoints", "{library}"),
        60,
    ),
    "serve": Part(
        "the scheduler over offloaded experts, against the CPU's", ("engine.device.check_serve", "{library}"), 180
    ),
    "soak": Part(
        "sessions that come, go and come back, while memory is divided anew",
        ("engine.device.check_soak", "{library}"), 480,
    ),
    "bandwidth": Part("what the machine can do", ("engine.bench_bandwidth", "--library", "{library}"), 180),
}  # fmt: skip


def build(folder: Path) -> Path:
    """The native library, built apart from any that is installed. Raises CalledProcessError."""
    for command in (
        ("cmake", "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"),
        ("cmake", "--build", str(folder), "--parallel"),
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "_native.so"


def run(part: Part, library: Path, quick: bool) -> tuple[str, float]:
    """How it ended, and seconds."""
    command = [argument.format(library=library) for argument in part.command] + ["--quick"] * (quick and part.quick)
    start = time.monotonic()
    try:
        code = subprocess.run(
            [sys.executable, "-P", "-m", *command],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            timeout=part.seconds,
            check=False,
        ).returncode
        result = "ok" if code == 0 else f"failed ({code})"
    except subprocess.TimeoutExpired:
        result = f"no end after {part.seconds} s"
    return result, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and samples")
    parser.add_argument("--library", type=Path, metavar="FILE", help="a native library instead of building one")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        library = options.library or build(Path(folder))
        results.append(("build", "ok", time.monotonic() - start))
        for name in options.part or PARTS:
            print(f"\n== {name}: {PARTS[name].summary}", flush=True)
            results.append((name, *run(PARTS[name], library, options.quick)))
    print("\n== summary")
    for name, result, seconds in results:
        print(f"{name:10} {result:24} {seconds:6.1f} s")
    return 0 if all(result == "ok" for _, result, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
