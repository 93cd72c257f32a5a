"""Time to the first token of a turn whose beginning only the disk has: for `ft bench store`.

The same prompt each time but for its last tokens, in turn: restored before it is prefilled; restored layer by layer
beside the prefill; as the scheduler decides; and not restored, as its beginning is in memory. A model with pages as
large, and in as many parts, as those of Qwen3.6-35B-A3B; little else of it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.api import PAGE, EngineConfig, Request, Sampling, Tokens
from engine.checkpoint import write_tiny
from engine.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.memory.store import StateStore

SUFFIXES = (16, 64, 256)
_LAYERS, _HIDDEN = 10, 512


def forget_files(paths: Sequence[Path]) -> None:
    """Have the system drop what it keeps of these files, as far as it does."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def device_bytes() -> int:
    """What this process has had read from the disk itself, so not from memory."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class _Turns:
    """A conversation in the store, and turns of different lengths that go on from it."""

    def __init__(self, directory: Path, megabytes: int) -> None:
        model = write_tiny("qwen2_moe", directory / "model", hidden=_HIDDEN, layers=_LAYERS, context=1 << 17)
        self._store = directory / "store"
        config = EngineConfig(str(model), kv_bytes=3 * (megabytes << 20), checkpoint_bytes=1 << 20, threads=1)

        def store_of(_: str, pages: tuple[int, ...], states: tuple[int, ...], hosted: bool) -> StateStore:
            from sessions.store.config import StoreConfig
            from sessions.store.store import open_store

            return cast("StateStore", open_store(StoreConfig(self._store, "bench", pages, states, host_bytes=0)))

        self.scheduler = Scheduler.load(config, lambda *_: None, open_store=store_of)
        page = int(self.scheduler.stats().values["page_bytes"])
        self._random = np.random.default_rng(5)
        self._start = tuple(self._random.integers(0, 250, PAGE * max(2, megabytes * 1_000_000 // page)).tolist())
        self.size = len(self._start) // PAGE * page
        self.scheduler.submit(Request("start", self._start, Sampling(max_tokens=0)))
        self._rest()
        store = self.scheduler.memory.behind.store
        if store is None or not store.flush(600.0):
            raise RuntimeError("the store could not write; is the disk full?")

    def restored(self, suffix: int, overlap: bool | None) -> tuple[float, float]:
        """Seconds to the first token, and the share of the restored bytes that the disk itself delivered. ``overlap``
        None: as the scheduler decides."""
        self.scheduler.memory.forget(None)
        forget_files(list(self._store.rglob("*.seg")))
        self.scheduler.pace.always = overlap
        before = device_bytes()
        seconds = self.first_token(suffix, self.size)
        return seconds, (device_bytes() - before) / self.size

    def first_token(self, suffix: int, restored: int = 0) -> float:
        """Of a side request, as the store gets nothing of one. ``restored``: bytes that have to be."""
        text = (*self._start, *self._random.integers(0, 250, suffix).tolist())
        had = self.scheduler.stats().values["restored_bytes"]
        start = time.perf_counter()
        self.scheduler.submit(Request("turn", text, Sampling(max_tokens=1, temperature=0.0), side=True))
        while not any(isinstance(reply, Tokens) for reply in self.scheduler.step()):
            pass
        seconds = time.perf_counter() - start
        self._rest()
        if self.scheduler.stats().values["restored_bytes"] - had != restored:
            raise RuntimeError("another part of the prompt was restored than was to be")
        return seconds

    @property
    def overlapped(self) -> float:
        """Restores that a forward went along with."""
        return self.scheduler.stats().values["overlapped_restores"]

    def _rest(self) -> None:
        while not self.scheduler.idle:
            self.scheduler.step()


def overlap(directory: Path, megabytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """By tokens of the suffix: medians over rounds, and medians of the ratios to restoring first in each."""
    turns = _Turns(directory, megabytes)
    found = {}
    for suffix in SUFFIXES:
        turns.restored(suffix, False), turns.first_token(suffix)
        first, beside, decided, memory = list[float](), list[float](), list[float](), list[float]()
        cold, chosen = list[float](), list[float]()
        for number in range(rounds):
            ways = [(False, first), (True, beside), (None, decided)]
            for always, into in ways[number % 3 :] + ways[: number % 3]:
                before = turns.overlapped
                seconds, share = turns.restored(suffix, always)
                into.append(seconds)
                cold.append(share)
                if always is None:
                    chosen.append(turns.overlapped - before)
            memory.append(turns.first_token(suffix))
        found[str(suffix)] = {
            "restored_first_ms": 1e3 * statistics.median(first),
            "in_memory_ms": 1e3 * statistics.median(memory),
            "overlapped_ratio": _ratio(beside, first),
            "decided_ratio": _ratio(decided, first),
            "decided_low": _low(decided, first),
            "in_memory_ratio": _ratio(memory, first),
            "decided_to_overlap": statistics.mean(chosen),
            "read_from_disk": min(cold),
        }
    turns.scheduler.close(10.0)
    return found


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def _low(of: Sequence[float], to: Sequence[float]) -> float:
    """The lower end of the 95 % interval of the median ratio, by rank."""
    ratios = sorted(a / b for a, b in zip(of, to, strict=True))
    return ratios[max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))]


def rows(found: dict[str, dict[str, float]]) -> dict[str, str]:
    return {
        f"first token after {suffix} tokens": (
            f"{one['restored_first_ms']:.0f} ms restored first; times that: overlapped {one['overlapped_ratio']:.2f}, "
            f"as decided {one['decided_ratio']:.2f} (overlapped {one['decided_to_overlap']:.0%}), "
            f"in memory {one['in_memory_ratio']:.2f}; at least {one['read_from_disk']:.0%} from the disk"
        )
        for suffix, one in found.items()
    }
