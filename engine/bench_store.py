"""What the checkpoint store costs and gives on this machine.

    python -P -m engine.bench_store [--directory DIR] [--tokens 100000] [--megabytes 256] [--json]

Everything is compared with a baseline in the same run, in turn with it: looking a prompt up with hashing it, restoring
with plain sequential reads of the same files, prefilling beside the restore with restoring first, decoding with a store
with decoding without.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.api import PAGE, EngineConfig, Request, Sampling
from engine.bench_overlap import forget_files, overlap, rows
from engine.checkpoint import write_tiny
from engine.memory import resume
from engine.memory.history import History
from engine.memory.index import PageIndex
from engine.memory.keys import PAGE_BYTES, encode, page_key, root_key
from engine.memory.pages import PagePool
from engine.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.memory.store import StateStore
    from sessions.store.store import Store

PAGE_COMPONENTS = (PAGE * 2 * 256 * 2,) * 20
"""Bytes of a page of Qwen3.6-35B-A3B: keys and values of 10 layers, 2 heads of 256 in bfloat16; 1.3 MB."""
READ = 1 << 20
STEPS = 128
EXAMPLES = """examples:
  ft bench store
  ft bench store --directory /mnt/fast --megabytes 1024
  ft bench store --tokens 20000 --megabytes 32 --pairs 4 --rounds 3    short, and less certain"""
MAX_LOOK_UP, MIN_RESTORE, MAX_DECODE, MAX_WRITTEN = 3.0, 0.8, 0.01, 1.3


@dataclass(frozen=True)
class Paired:
    """B over A, of runs in turn: the median ratio and its 95 % interval by rank, which outliers do not move."""

    ratio: float
    low: float
    high: float
    pairs: int


def paired(a: Callable[[], float], b: Callable[[], float], pairs: int) -> tuple[Paired, float, float]:
    """Runs A B A B ...; also the medians of each."""
    first, second = [], []
    for _ in range(pairs):
        first.append(a())
        second.append(b())
    ratios = sorted(y / x for x, y in zip(first, second, strict=True))
    rank = max(0, math.floor(pairs / 2 - 0.98 * math.sqrt(pairs)))
    found = Paired(statistics.median(ratios), ratios[rank], ratios[-1 - rank], pairs)
    return found, statistics.median(first), statistics.median(second)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def opened(directory: Path, pages: tuple[int, ...], **options: object) -> Store:
    from sessions.store.config import StoreConfig
    from sessions.store.store import open_store

    return open_store(StoreConfig(directory, "bench", pages, (), **options))  # type: ignore[arg-type]


def fill(store: Store, tokens: bytes, data: Sequence[memoryview]) -> None:
    """A page for each 64 of ``tokens``, all with the same bytes; waits while the queue is full."""
    key = root_key("bench", "")
    for start in range(0, len(tokens) - PAGE_BYTES + 1, PAGE_BYTES):
        page = tokens[start : start + PAGE_BYTES]
        parent, key = key, page_key(key, page)
        while store.page(parent, key, page) is None:
            store.put_page(parent, key, page, data, position=(start + PAGE_BYTES) // 4)
            if store.page(parent, key, page) is None:
                time.sleep(0.01)
    if not store.flush(600.0):
        raise RuntimeError("the store could not write; is the disk full?")


def text(count: int, seed: int = 0) -> bytes:
    return encode(np.random.default_rng(seed).integers(0, 150_000, count).tolist())


# ── the measurements ────────────────────────────────────────────────────────────────────────────────────────────────


def look_up(directory: Path, count: int) -> dict[str, float]:
    """A prompt of ``count`` tokens that only the store has, through the engine's planner, against its hash chain; both
    from the ids of a request."""
    tokens = text(count)
    ids = tuple(np.frombuffer(tokens, np.uint32).tolist())
    before = resident()
    store = opened(directory, (64,), host_bytes=0, settle_seconds=0.0)
    fill(store, tokens, [memoryview(bytes(64))])
    index = PageIndex(PagePool(2), False, lambda _: None, lambda _: None)
    history, root = History(1), root_key("bench", "")

    def chain() -> None:
        key, encoded = root, encode(ids)
        for start in range(0, len(encoded) - PAGE_BYTES + 1, PAGE_BYTES):
            key = page_key(key, encoded[start : start + PAGE_BYTES])

    def plan() -> None:
        found = resume.plan(index, cast("StateStore", store), history, root, encode(ids), recurrent=False)
        if found.position < count - PAGE:
            raise RuntimeError("the store does not have what was put there")

    ratio, hashing, looking = paired(lambda: timed(chain), lambda: timed(plan), 15)
    for seed in range(1, 1 + max(0, 1_000_000 // count - 1)):
        fill(store, text(count, seed), [memoryview(bytes(64))])
    stored = store.stats()["extents"] * PAGE
    grown = resident() - before
    store.close()
    return {
        "hash_ms": 1e3 * hashing,
        "look_up_ms": 1e3 * looking,
        "look_up_ratio": ratio.ratio,
        "ram_bytes_per_million_tokens": grown / stored * 1e6,
    }


def restore(directory: Path, megabytes: int) -> dict[str, float]:
    """Reading pages through the store, verified, against reading the same files from end to end."""
    size = sum(PAGE_COMPONENTS)
    count = max(16, megabytes * 1_000_000 // size)
    tokens = text(count * PAGE)
    store = opened(directory, PAGE_COMPONENTS, host_bytes=0, settle_seconds=0.0, quota_bytes=64 << 30)
    fill(store, tokens, [memoryview(os.urandom(part)) for part in PAGE_COMPONENTS])
    stats = store.stats()
    store.close()
    store = opened(directory, PAGE_COMPONENTS, host_bytes=0)
    segments = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > READ]
    into = [[memoryview(bytearray(part)) for part in PAGE_COMPONENTS] for _ in range(count)]
    root = root_key("bench", "")

    def plain() -> float:
        forget_files(segments)
        buffer, total, start = bytearray(READ), 0, time.perf_counter()
        for path in segments:
            descriptor = os.open(path, os.O_RDONLY)
            while got := os.readv(descriptor, [buffer]):
                total += got
            os.close(descriptor)
        return total / (time.perf_counter() - start)

    def through() -> float:
        forget_files(segments)
        start, key, readings = time.perf_counter(), root, []
        for at in range(count):
            page = tokens[PAGE_BYTES * at : PAGE_BYTES * (at + 1)]
            parent, key = key, page_key(key, page)
            ref = store.page(parent, key, page)
            if ref is None:
                raise RuntimeError("the store does not have what was put there")
            readings.append(store.read(ref, into[at]))
        if not all(reading.wait() for reading in readings):
            raise RuntimeError("the store read something wrong")
        return count * size / (time.perf_counter() - start)

    ratio, sequential, restored = paired(plain, through, 7)
    store.close()
    return {
        "sequential_bytes_per_second": sequential,
        "restore_bytes_per_second": restored,
        "restore_ratio": ratio.ratio,
        "written_over_unique": stats["bytes_written"] / (count * size),
    }


def decode(directory: Path, pairs: int) -> dict[str, object]:
    """Decoding 128 tokens at a time with and without a store, of a model whose steps take milliseconds. What is left
    to write after a run is written before the next, so that a run pays for its own writes only."""
    model = write_tiny("qwen3_5_moe", directory / "model", hidden=512, layers=8, context=1 << 17)
    config = EngineConfig(str(model), kv_bytes=256 << 20, checkpoint_bytes=64 << 20, threads=1)

    def store_of(_: str, pages: tuple[int, ...], states: tuple[int, ...], hosted: bool) -> StateStore:
        from sessions.store.config import StoreConfig
        from sessions.store.store import open_store

        return cast("StateStore", open_store(StoreConfig(directory / "store", "bench", pages, states)))

    without = Scheduler.load(config, lambda *_: None)
    with_store = Scheduler.load(config, lambda *_: None, open_store=store_of)
    number = 0

    def run(scheduler: Scheduler) -> float:
        nonlocal number
        number += 1
        forced = tuple(np.random.default_rng(number).integers(0, 250, STEPS).tolist())
        scheduler.submit(Request(f"{number}", forced[:1], Sampling(STEPS, forced=forced)))
        scheduler.step()
        seconds = timed(lambda: [scheduler.step() for _ in range(STEPS)])
        if scheduler.memory.behind.store is not None:
            scheduler.memory.behind.store.flush(10.0)
        return seconds

    run(without), run(with_store)
    ratio, _, seconds = paired(lambda: run(without), lambda: run(with_store), pairs)
    with_store.close(10.0)
    return {"decode_ms_per_token": 1e3 * seconds / STEPS, "decode_cost": asdict(ratio)}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="ft bench store",
        description="What the store costs and gives here. Ends with 1 when a goal is missed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="on the disk to measure (default: the temporary folder)"
    )
    for name, metavar, default, least, text in (
        ("--tokens", "TOKENS", 100_000, 64, "of the prompt that is looked up"),
        ("--megabytes", "MB", 256, 1, "to restore, in memory and on disk"),
        ("--pairs", "N", 30, 2, "of decoding without and with a store"),
        ("--rounds", "N", 9, 2, "of turns that are restored"),
    ):
        parser.add_argument(
            name, type=_at_least(least), default=default, metavar=metavar, help=f"{text} (default: {default})"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    try:
        found, turns = measure(options)
    except OSError as error:
        folder = options.directory or gettempdir()
        problem = f"cannot use {folder} ({error.strerror or error}): name a folder that is there, and has room"
        print(f"ft bench store: {problem}, with --directory DIR", file=sys.stderr)
        return 1
    found["first_token_by_suffix"] = turns
    cost = found["decode_cost"]
    goals = {
        f"look-up at most {MAX_LOOK_UP:g} times hashing": _number(found["look_up_ratio"]) <= MAX_LOOK_UP,
        f"restore at least {MIN_RESTORE:.0%} of sequential reads": _number(found["restore_ratio"]) >= MIN_RESTORE,
        f"written at most {MAX_WRITTEN:g} times what is unique": _number(found["written_over_unique"]) <= MAX_WRITTEN,
        f"decode costs less than {MAX_DECODE:.0%} more, or the interval does not say": isinstance(cost, dict)
        and cost["low"] - 1 < MAX_DECODE,
        "first token, as decided, no later than restored first, or the interval does not say": all(
            one["decided_low"] <= 1 for one in turns.values()
        ),
    }
    if options.json:
        print(json.dumps({**found, "missed": [goal for goal, met in goals.items() if not met]}, indent=2))
    else:
        show(found, rows(turns), goals)
    return 0 if all(goals.values()) else 1


def measure(options: argparse.Namespace) -> tuple[dict[str, object], dict[str, dict[str, float]]]:
    """Numbers, and those of restored turns by what is new behind them. Raises OSError for a folder of no use."""
    with TemporaryDirectory(prefix="ft-bench-store-", dir=options.directory) as scratch:
        root = Path(scratch)
        found: dict[str, object] = {
            **look_up(root / "look_up", options.tokens),
            **restore(root / "restore", options.megabytes),
            **decode(root, options.pairs),
        }
        return found, overlap(root / "overlap", max(1, options.megabytes // 2), options.rounds)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return number


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def show(found: dict[str, object], turns: dict[str, str], goals: dict[str, bool]) -> None:
    table = {
        "hashing the prompt": f"{_number(found['hash_ms']):.2f} ms",
        "looking it up": f"{_number(found['look_up_ms']):.2f} ms, {_number(found['look_up_ratio']):.2f} times",
        "RAM of the index": f"{_number(found['ram_bytes_per_million_tokens']) / 1e6:.1f} MB per million tokens",
        "sequential reads": f"{_number(found['sequential_bytes_per_second']) / 1e6:,.0f} MB/s",
        "restore, verified": f"{_number(found['restore_bytes_per_second']) / 1e6:,.0f} MB/s, "
        f"{_number(found['restore_ratio']):.2f} times",
        "written over unique": f"{_number(found['written_over_unique']):.3f}",
        "decode": f"{_number(found['decode_ms_per_token']):.3f} ms per token with a store",
    }
    cost = found["decode_cost"]
    if isinstance(cost, dict):
        table["with over without a store"] = (
            f"{cost['ratio']:.4f} (95 % of {cost['pairs']} pairs: {cost['low']:.4f} to {cost['high']:.4f})"
        )
    table |= turns
    width = max(map(len, table))
    for name, value in table.items():
        print(f"{name:<{width}}  {value}")
    for goal, met in goals.items():
        print(f"{'met' if met else 'MISSED':<{width}}  {goal}")


if __name__ == "__main__":
    sys.exit(main())
