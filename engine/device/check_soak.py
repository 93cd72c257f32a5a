"""Part ``soak`` of ``engine.device.check``: sessions that come, go and come back, while memory is divided anew.

What every session says is known before, and computed by the CPU in one go. The GPU is then given pieces of it at
random, with the experts that the CPU chooses (``engine.device.agree``), so that every row of every step can be
compared, whatever happened before: what was resumed with what was not interrupted, from all tiers; what was preempted,
aborted, moved. In the end everything is forgotten, and nothing may be left.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import knobs

from engine import native
from engine.api import PAGE, Anchor, Reuse, Sampling, StoreSettings
from engine.device.agree import CHUNK, Known, Led, known
from engine.device.findings import aim, report, verdict
from engine.device.machine import Machine, find_machine
from engine.device.served import LAYERS, Served, model_config, room_for, served, write_model
from engine.kernels.ops import DeviceOps
from engine.loading import OpenStore
from engine.memory.audit import audit, audit_at_rest
from engine.memory.resize import DoesNotFit
from engine.worker import IDLE_SECONDS, open_worker_store

TEXTS, LENGTH, VOCAB = 8, 1500, 1 << 13
ANSWER = 80
"""Tokens at most."""
LIVE = 3
"""Sequences that run at most."""
SECONDS, QUICK, LONG = 300.0, 25.0, 60.0
"""Of a soak, of a quick one, and from which on everything must have happened."""
WARM = 3.0
"""Seconds of a soak before it: allocators take what they will keep."""
TOLD = 15.0
"""Seconds between two lines of progress."""
LEAST_PAGES = 40
"""For the longest sequence, but not for three of them."""
HOST_BYTES = 160 << 20
"""For some of the sessions."""
ROOM: dict[str, Any] = {"kv_bytes": 12 << 20, "checkpoint_bytes": 40 << 20, "max_sequences": LIVE}
RESIDENT = 0.4
"""Of the experts, at the start."""
EXPECTED = ("divided", "resumed on the device", "aborted")
EXPECTED_LATER = ("from host", "preempted")
SLACK = 4 << 20
"""Bytes of the device: what the last step computed."""
GROWTH = 64 << 20
"""Bytes of the process: what the check remembers, and what allocators keep."""
LEFT, WITHIN = 100 << 20, 1.0
"""Bytes of the device that another program leaves, and seconds until it may have more."""
SUBMITS, ABORTS, DIVIDES, FORGETS = 0.2, 0.04, 0.08, 0.002
"""How likely before a step."""


def texts(count: int = TEXTS, length: int = LENGTH, vocab: int = VOCAB) -> dict[str, list[int]]:
    """Nowhere the same token as another."""
    rng = np.random.default_rng(7)
    each = rng.integers(0, vocab // count, (count, length)) * count + np.arange(count)[:, None]
    return {f"t{number}": tokens for number, tokens in enumerate(each.tolist())}


@dataclass
class Sessions:
    """Pieces of known texts said by an engine, until ``stopped``."""

    made: Served
    texts: dict[str, list[int]]
    number: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def submit(self, text: str, prompt: int, answer: int, anchors: tuple[Anchor, ...] = ()) -> str:
        """The first tokens as a prompt, and those that follow."""
        self.number += 1
        name, tokens = f"{text} {self.number}", self.texts[text]
        sampling = Sampling(max_tokens=answer, temperature=0.0, forced=tuple(tokens[prompt : prompt + answer]))
        self.made.submit(name, tokens[:prompt], sampling, session=text, anchors=anchors)
        return name

    def say(self, text: str, prompt: int, answer: int) -> Reuse:
        name = self.submit(text, prompt, answer)
        self.made.run()
        return self.made.done[name].reuse

    def settle(self) -> None:
        """Until nothing is on its way to host memory or disk."""
        memory = self.made.scheduler.memory
        while memory.busy:
            self.made.step()
        store = memory.behind.store
        if store is not None:
            store.flush(60.0)


def resumes(sessions: Sessions) -> None:
    """One session goes on while it is on the device, and again when others have taken its place there."""
    length = len(sessions.texts["t0"])
    sessions.made.scheduler.partition.set(pages=2 * length // PAGE)
    first, second, third = (round(share * length) for share in (0.4, 0.5, 0.6))
    answer = length // 40
    sessions.say("t0", first, answer)
    here = sessions.say("t0", second, answer).device
    for text in sessions.texts.keys() - {"t0"}:
        sessions.say(text, length - 2, 2)
    sessions.settle()
    there = sessions.say("t0", third, answer).host
    report("a session goes on: on the device", f"{here} of {second} tokens", here > first - PAGE)
    report("from host memory", f"{there} of {third} tokens", there > second - PAGE)


def soak(sessions: Sessions, seconds: float, seed: int) -> Counter[str]:
    """Anything, in any order, at any time. -> how often what happened."""
    made, rng, happened = sessions.made, random.Random(seed), Counter[str]()  # noqa: S311
    memory, begin, before, slowest = made.scheduler.memory, time.monotonic(), set(made.done), 0.0
    preempted, told = made.count("preempted"), begin + TOLD
    while (now := time.monotonic()) < begin + seconds and not sessions.stopped.is_set():
        _disturb(sessions, rng, happened)
        start = time.monotonic()
        made.step()
        slowest = max(slowest, time.monotonic() - start)
        happened["steps"] += 1
        if happened["steps"] % 64 == 0:
            audit(memory)
        if now > told:
            ended = len(made.done) - len(before)
            print(
                f"  {now - begin:.0f} s: {happened['steps']} steps, {ended} ended, {resident() >> 20} MiB", flush=True
            )
            told = now + TOLD
    made.run()
    sessions.settle()
    for reply in (made.done[name] for name in made.done.keys() - before):
        happened["resumed on the device"] += reply.reuse.device > 0
        happened["from host"] += reply.reuse.host > 0
        happened["from disk"] += reply.reuse.disk > 0
        happened["aborted"] += reply.reason == "abort"
    happened["preempted"] = made.count("preempted") - preempted
    happened["ms of the longest step"] = round(1e3 * slowest)
    return happened


def _disturb(sessions: Sessions, rng: random.Random, happened: Counter[str]) -> None:
    """What may come between two steps."""
    made, scheduler = sessions.made, sessions.made.scheduler
    open_ones = [name for name in made.answers if name not in made.done]
    if len(open_ones) < 2 * LIVE and rng.random() < SUBMITS:
        text = rng.choice([*sessions.texts])
        answer, length = rng.randrange(1, ANSWER), len(sessions.texts[text])
        prompt = rng.randrange(1, length - answer)
        anchors = [Anchor(rng.randrange(1, prompt + 1), "turn", 50.0) for _ in range(rng.randrange(3))]
        sessions.submit(text, prompt, answer, tuple(sorted(anchors)))
    elif open_ones and rng.random() < ABORTS:
        scheduler.abort(rng.choice(open_ones))
    elif rng.random() < DIVIDES:
        happened["divided"] += _divide(sessions, rng)
    elif rng.random() < FORGETS:
        scheduler.memory.forget(rng.choice([None, *sessions.texts]))


def _divide(sessions: Sessions, rng: random.Random) -> bool:
    partition = sessions.made.scheduler.partition
    most = partition.most
    try:
        partition.set(
            slots=rng.randrange(most.slots // 8, most.slots // 2),
            pages=rng.randrange(LEAST_PAGES, LEAST_PAGES * 3 // 2), states=rng.randrange(1, 9),
        )  # fmt: skip
    except DoesNotFit:
        return False
    return True


@dataclass(frozen=True)
class Held:
    """What an engine has left when nothing runs and everything is forgotten: bytes of the device that torch gave out,
    free blocks of host memory for pages and states, bytes of the process."""

    device: int
    blocks: tuple[float, ...]
    resident: int

    @staticmethod
    def of(made: Served) -> Held:
        """Raises AssertionError where something does not add up."""
        scheduler = made.scheduler
        memory, runner, store = scheduler.memory, scheduler.runner, scheduler.memory.behind.store
        memory.forget(None)
        if store is not None:
            store.forget(None)
        gc.collect()  # engines that were closed before
        audit_at_rest(memory, scheduler.info.max_sequences)
        scheduler.partition.audit()
        device = torch.cuda.memory_allocated() if runner.device.type == "cuda" else 0
        blocks = tuple(number for name, number in runner.gauges().items() if name.startswith("host_"))
        return Held(device, blocks, resident())


def resident() -> int:
    """Bytes of this process in memory that are of no file, now."""
    pages, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(pages) - int(shared)) * mmap.PAGESIZE


@contextmanager
def unrehearsed() -> Iterator[list[str]]:
    """Names of kernels that are asked for meanwhile and were not there."""
    names: list[str] = []
    knobs.runtime.jit_cache_hook = lambda *, fn, **_: names.append(fn.name)
    try:
        yield names
    finally:
        knobs.runtime.jit_cache_hook = None


def soaked(sessions: Sessions, seconds: float) -> None:
    """Everything is accounted for after a soak, and nothing more is held than before."""
    with unrehearsed() as late:
        soak(sessions, WARM, 0)
        before, begin = Held.of(sessions.made), time.monotonic()
        happened = soak(sessions, seconds, 1)
    took, after = time.monotonic() - begin, Held.of(sessions.made)
    report("a soak; steps", f"{happened.pop('steps')} in {took:.0f} s")
    expected = (*EXPECTED, *EXPECTED_LATER) if took > LONG else EXPECTED
    for name, count in (dict.fromkeys(expected, 0) | happened).items():
        report(f"  {name}", str(count), count > 0 or name not in expected)
    more, grown = after.device - before.device, after.resident - before.resident
    report("  bytes of the device that were not given back", str(max(0, more)), more <= SLACK)
    report("  blocks of host memory that are free", f"{after.blocks}", after.blocks == before.blocks)
    report("  bytes of the process more than before", f"{grown / 1e6:.1f} MB", grown <= GROWTH)
    report("  kernels that had not been rehearsed", ", ".join(sorted({*late})) or "none", not late)
    report("  pages, states, slots and leases", "all accounted for")  # an error would have ended this


def makes_way(made: Served) -> None:
    """Another program takes nearly all memory of the device that is free, while nothing is asked."""
    free, partition = torch.cuda.mem_get_info()[0], made.scheduler.partition
    held, start = partition.report()["held_bytes"], time.monotonic()
    other = torch.empty(free - LEFT, dtype=torch.uint8, device=made.scheduler.runner.device)
    while (given := held - partition.report()["held_bytes"]) == 0 and time.monotonic() < start + 2 * WITHIN:
        time.sleep(IDLE_SECONDS)
        made.step()
    took = time.monotonic() - start
    del other
    torch.cuda.empty_cache()
    partition.audit()
    report("another program needs memory: it is given", f"{given / 1e6:.0f} MB", given > 0)
    aim("within", f"{took:.2f} s", took < WITHIN)


def run(
    folder: Path, machine: Machine, there: dict[str, Known], seconds: float, ops: type[Any],
    stopped: threading.Event | None = None, **options: Any,
) -> None:  # fmt: skip
    """One engine whose sessions go on, with a store another one after it, and one for everything else, which may be
    ``stopped`` early."""
    led, said = Led(there, machine.device), {name: [*one.tokens] for name, one in there.items()}
    options = {**ROOM, "chunk_tokens": CHUNK, **options}
    with led.routers(ops):
        with served(folder, machine, **options) as made:
            led.listen(made.scheduler.runner)
            resumes(Sessions(made, said))
        if options.get("open_store") is not None:
            with served(folder, machine, **options) as made:
                led.listen(made.scheduler.runner)
                length = len(said["t0"])
                found = Sessions(made, said).say("t0", round(0.7 * length), 5).disk
                report("by another engine: from disk", f"{found} tokens", found > round(0.6 * length) - PAGE)
        with served(folder, machine, **options) as made:
            led.listen(made.scheduler.runner)
            soaked(Sessions(made, said, stopped=stopped or threading.Event()), seconds)
            if machine.device.type == "cuda":
                makes_way(made)
    led.tell()


def disk(settings: StoreSettings) -> OpenStore | None:
    """What opens a store there; None where the package that it needs is missing."""
    if find_spec("lmdb") is None:
        report("from disk", "not checked: no lmdb here")
        return None
    return lambda fingerprint, page, state, hosted: open_worker_store(
        replace(settings, host_bytes=0) if hosted else settings, fingerprint, page, state
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: %(default)g; SIGTERM ends it early")
    parser.add_argument("--quick", action="store_const", dest="seconds", const=QUICK, help=f"{QUICK:g} seconds")
    options = parser.parse_args()
    begin, stopped = time.monotonic(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    native.__path__.append(str(options.library.parent))  # where the native library is looked for
    machine, config = find_machine(), replace(model_config(quick=True), vocab=VOCAB)
    with tempfile.TemporaryDirectory() as name:
        folder, settings = Path(name), StoreSettings(f"{name}/store", host_bytes=HOST_BYTES)
        write_model(config, folder, machine.device)
        there = known(folder, {name: (tokens[:1], tokens[1:]) for name, tokens in texts().items()}, LAYERS)
        report("a model is written, and the CPU has computed all texts", f"after {time.monotonic() - begin:.1f} s")
        mode = {"device": "cuda", "experts": "hybrid", "gpu_bytes": room_for(config, RESIDENT)}
        run(
            folder, machine, there, options.seconds, DeviceOps, stopped,
            store=settings, open_store=disk(settings), **mode,
        )  # fmt: skip
    return verdict(time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
