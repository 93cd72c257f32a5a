"""A part of ``engine.device.check``: checkpoints out of the device and back, right first, then against the link.

Pages and states have the sizes of Qwen3.6-35B-A3B. A restore is the engine's own, planned and layer by layer, from host
memory; what it costs to keep checkpoints is that of decode steps with and without.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from engine.api import PAGE
from engine.bench_shapes import RandomSource, qwen36
from engine.device.bench import Experts
from engine.device.driver import CudaDriver, Driver
from engine.device.findings import aim, report, verdict
from engine.device.graph import DecodeSteps
from engine.device.hosted import GATHERED, RING
from engine.device.lanes import CudaLanes
from engine.device.room import Room
from engine.device.staging import Lanes, Staging, shapes
from engine.experts.layout import FORMATS, Layout
from engine.experts.pool import Pool, aligned
from engine.kernels.ops import DeviceOps
from engine.kernels.resident import ResidentExperts
from engine.layers.loader import Loader
from engine.memory.host import HostTier
from engine.memory.keys import encode
from engine.memory.memory import Memory
from engine.memory.mover import ALL
from engine.memory.restore import AFTER, layer_groups
from engine.memory.store import Staged
from engine.models.model import Cache, Manifest
from engine.models.qwen3_5_moe import LINEAR, Qwen35Moe
from engine.native.library import load_library
from engine.runner import Rows, Runner, make_cache
from engine.sequence import TIP

GPU = torch.device("cuda")
TOKENS = 100_000
LEAST_RATE, MOST_COST = 0.8, 0.01
STEPS_PER_TURN = 192
"""Decode steps between two checkpoints: the median answer of a coding agent."""
_TURNS = 3
"""In a row."""
_SECONDS = 1e9


@dataclass
class Device:
    """Pages and states with something in them, and host memory for ``pages`` and ``states`` of them."""

    manifest: Manifest
    cache: Cache
    lanes: Lanes
    room: Room
    staging: Staging
    close: Callable[[], None]

    @classmethod
    def make(
        cls, manifest: Manifest, counts: tuple[int, int], hosted: tuple[int, int], lanes: Lanes, driver: Driver,
        device: torch.device = GPU, rings: tuple[int, int] = (GATHERED, RING), cache: Cache | None = None,
    ) -> Device:  # fmt: skip
        cache = cache or make_cache(manifest, torch.bfloat16, *counts, device)
        for tensor in (*cache.keys, *cache.values, *cache.states):
            tensor.normal_()
        shaped = shapes(cache)
        memory = aligned(Room.bytes(shaped, rings[1], hosted), 4096)
        memory.zero_()
        pointer = driver.register(memory.data_ptr(), memory.numel())
        room = Room(memory, pointer, shaped, rings[1], hosted)
        staging = Staging(cache, lanes, room, torch.empty(rings[0], dtype=torch.uint8, device=device))
        return cls(manifest, cache, lanes, room, staging, lambda: driver.unregister(memory.data_ptr()))

    @property
    def pages(self) -> list[Tensor]:
        return [tensor for layer in zip(self.cache.keys, self.cache.values, strict=True) for tensor in layer]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def round_trip(device: Device) -> None:
    """Some tokens of some pages, and two states: what is in host memory is what indexing gives, and so is what comes
    back to other places; a number that is none is told of, and of nothing else."""
    where = [(3, PAGE), (0, 17), (7, 1), (5, PAGE), (2, 63)]
    device.pages[1][5, 9, 0, 0] = float("nan")
    staged = device.staging.stage_pages(where)
    staged += filter(None, [device.staging.stage_state(slot, wait=True) for slot in (1, 2)])
    sources = [[tensor[page, :tokens].clone() for tensor in device.pages] for page, tokens in where]
    sources += [[tensor[slot].clone() for tensor in device.cache.states] for slot in (1, 2)]
    for tensor in (*device.pages, *device.cache.states):
        tensor[:8] = 0  # computed after it was staged
    finite = [one.wait() for one in staged]
    report("what is not finite is told", str([int(not one) for one in finite]), finite == [at != 3 for at in range(7)])
    same = all(_bytes(one) == b"".join(map(_of, source)) for one, source in zip(staged, sources, strict=True))
    report("pages and states in host memory", "the bytes of indexing", same)

    before = device.staging.mark()
    landings = [
        device.staging.page_in(page, tokens, ALL, one) for (page, tokens), one in zip(where, staged, strict=False)
    ]
    landings += [device.staging.state_in(slot, ALL, one) for slot, one in zip((2, 1), staged[5:], strict=True)]
    arrival = device.staging.land([one for one in landings if one is not None], before)
    arrival.join()
    back = [[tensor[page, :tokens] for tensor in device.pages] for page, tokens in where]
    back += [[tensor[slot] for tensor in device.cache.states] for slot in (2, 1)]
    same = all(
        _of(a) == _of(b) for source, got in zip(sources, back, strict=True) for a, b in zip(source, got, strict=True)
    )
    report("pages and states back on the device", "the bytes of indexing", same and arrival.finite())
    for one in staged:
        one.drop()
    for tensor in (*device.pages, *device.cache.states):
        tensor[:8].normal_()


def _bytes(staged: Staged) -> bytes:
    return b"".join(map(bytes, staged))


def _of(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()


def restores(device: Device, tokens: int, link: float, samples: int) -> None:
    """A session leaves the device and comes back: all its pages, and the state at its end."""
    manifest, tier = device.manifest, HostTier()
    device.room.reclaim = tier.reclaim
    pages, states = device.pages[0].shape[0], device.cache.states[0].shape[0]
    memory = Memory(
        device.staging, "check", pages=pages, live=2, checkpoints=states - 3, recurrent=True, store=tier,
        groups=layer_groups(manifest.page_layers, manifest.state_layers),
    )  # fmt: skip
    said = torch.randint(0, 200_000, (tokens + 1,)).tolist()
    lease = memory.open(memory.plan(encode(said), ""), "s", side=False)
    if not memory.grow(lease, tokens):
        raise RuntimeError("too few pages")
    table, where = list(lease.table), device.pages[0].device
    kept = [device.pages[-1][table].clone(), device.cache.states[-1][lease.slot].clone()]
    synchronize(where)
    start = time.perf_counter()
    memory.advance(lease, said, tokens)
    memory.close(lease, said, tokens, TIP)
    while memory.busy:
        memory.tick(_SECONDS)
    tier.flush(0.0)
    size = sum(one.size for one in tier._all())
    report("100k tokens to host memory", f"{size / (time.perf_counter() - start) / 1e9:.1f} GB/s")
    times = [_restore(device, memory, said, kept) for _ in range(samples + 1)][1:]
    planned, seconds = (median(each) for each in zip(*times, strict=True))
    rate = size / seconds
    aim(
        f"restore of {size / 1e9:.2f} GB, layer by layer, {1e3 * planned:.1f} ms planned",
        f"{1e3 * seconds:.1f} ms, {rate / 1e9:.1f} GB/s, {rate / link:.0%} of link",
        rate >= LEAST_RATE * link,
    )


def _restore(device: Device, memory: Memory, said: Sequence[int], kept: Sequence[Tensor]) -> tuple[float, float]:
    """Seconds of the plan, and from there until everything is on the device."""
    memory.index.clear()
    where = device.pages[0].device
    synchronize(where)
    tokens, start = encode(said), time.perf_counter()
    plan = memory.plan(tokens, "")
    planned = time.perf_counter()
    lease = memory.open(plan, "s", side=False, layered=True)
    if lease.restore is None:
        raise RuntimeError("nothing had to be restored")
    wait = memory.overlap(lease)
    for layer in (*range(max(device.manifest.recurrent_at, default=0) + 1), AFTER):
        wait(layer)
    synchronize(where)
    end = time.perf_counter()
    same = torch.equal(device.pages[-1][lease.table[: kept[0].shape[0]]], kept[0])
    same &= torch.equal(device.cache.states[-1][lease.slot], kept[1])
    if not lease.restore.poll() or memory.restored(lease, said) is not None or not same:
        raise RuntimeError("what came back is not what left")
    memory.close(lease, said, len(said) - 1, TIP)
    memory.tick(_SECONDS)
    return planned - start, end - planned


def decoding(library: Path, layers: int, turns: int) -> None:
    """Decode steps alone, and with what they fill staged out: a page each 64 steps, a state each turn. Counted is what
    delays tokens. As in a server whose other sequences go on, a state is copied between two steps and leaves beside the
    next one; nobody waits until it is there."""
    config = qwen36(layers)
    pool = Pool(Layout(FORMATS["mxfp4"], config.hidden, config.expert_inner), layers, config.experts)
    pool.fill_random()
    experts = Experts()
    experts.now = ResidentExperts.of_pool(pool, GPU)
    ops = DeviceOps(experts, GPU)
    model = Qwen35Moe(config, Loader(RandomSource(torch.bfloat16, GPU), ops, GPU), 1 << 16, lambda *_: None)
    cache = make_cache(model.manifest, torch.bfloat16, 66, 4, GPU)
    driver = CudaDriver(load_library(library))
    device = Device.make(model.manifest, (66, 4), (64, _TURNS + 1), CudaLanes(GPU), driver, cache=cache)
    runner = Runner(model, ops, torch.bfloat16, cache=cache, mover=device.staging, device=GPU)
    for tensor in (*device.pages, *cache.states):
        tensor.zero_()
    steps = DecodeSteps(model, cache, lambda logits, _: logits.argmax(1), pages=64, scratch=(65, 3), device=GPU)

    took: dict[str, list[float]] = {"a page": [], "a state aside": [], "and out, beside a step": []}
    kept: list[Staged] = []

    def keep(what: str, stage: Callable[[], Iterable[Staged | None]]) -> None:
        begin = time.perf_counter()
        kept.extend(filter(None, stage()))
        took[what].append(time.perf_counter() - begin)

    def aside() -> Iterator[Staged]:
        runner.mover.copy_state(1, 2)
        if not runner.mover.state_finite(2):
            raise RuntimeError("a state is not finite")
        yield from ()

    def answers(staged: bool) -> float:
        """Seconds until the last token is there; what was staged after earlier ones may be on its way."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for number in range(_TURNS * STEPS_PER_TURN):
            position = 2048 + number % STEPS_PER_TURN
            launched = steps.launch([Rows((number % 1000,), position, range(64), 1, logits=True)])
            if staged and number % STEPS_PER_TURN == STEPS_PER_TURN // 2 + 1:
                keep("and out, beside a step", lambda: [runner.mover.stage_state(2)])
            steps.wait(launched)
            if staged and position % PAGE == PAGE - 1:
                keep("a page", lambda at=position // PAGE: runner.mover.stage_pages([(at, PAGE)]))  # type: ignore[misc]
            if staged and number % STEPS_PER_TURN == STEPS_PER_TURN // 2:
                keep("a state aside", aside)
        seconds = time.perf_counter() - start
        while kept:
            one = kept.pop()
            one.wait()
            one.drop()
        return seconds

    ratios = []
    for _ in range(turns + 1):
        alone = answers(False)
        ratios.append((answers(True) / alone, alone))
    cost = median(ratio for ratio, _ in ratios[1:]) - 1
    step = median(alone for _, alone in ratios[1:]) / STEPS_PER_TURN / _TURNS
    aim(
        f"checkpoints and pages of {STEPS_PER_TURN} decode steps, {layers} layers",
        f"{cost:+.2%} of {1e3 * step:.2f} ms per step",
        cost < MOST_COST,
    )
    told = ", ".join(f"{what} {1e6 * median(times):.0f} us" for what, times in took.items())
    report("the host took for", told)
    device.close()


def link(driver: Driver) -> tuple[float, float]:
    """Bytes per second of large copies from pinned memory, and to it."""
    host, there = aligned(1 << 30, 4096).fill_(1), torch.ones(1 << 30, dtype=torch.uint8, device=GPU)
    driver.register(host.data_ptr(), host.numel())
    found = []
    for target, source in ((there, host), (host, there)):
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        found.append(source.nbytes / min(times))
    driver.unregister(host.data_ptr())
    return found[0], found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("restores",), help="not what checkpoints cost decode steps")
    options = parser.parse_args()
    start = time.perf_counter()
    torch.zeros(1, device=GPU)
    driver = CudaDriver(load_library(options.library))
    inward, outward = link(driver)
    report("the link, in and out, one large copy", f"{inward / 1e9:.1f} and {outward / 1e9:.1f} GB/s")
    manifest = qwen36_manifest()
    pages = -(-TOKENS // PAGE) + 16
    device = Device.make(manifest, (pages + 2 * pages // 8, 6), (pages, 4), CudaLanes(GPU), driver)
    round_trip(device)
    restores(device, TOKENS, inward, 3 if options.quick else 7)
    device.close()
    del device
    torch.cuda.empty_cache()
    if options.only != "restores":
        decoding(options.library, *((8, 5) if options.quick else (40, 9)))
    return verdict(time.perf_counter() - start)


def qwen36_manifest() -> Manifest:
    """Of Qwen3.6-35B-A3B."""
    config = qwen36()
    window = (2 * config.keys + config.values, config.conv_width - 1)
    state = (config.value_heads, config.key_dim, config.value_dim)
    linear = tuple(layer for layer, kind in enumerate(config.kinds) if kind == LINEAR)
    return Manifest(
        attention_layers=len(config.kinds) - len(linear),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        recurrent=(window, state) * len(linear),
        attention_at=tuple(layer for layer in range(len(config.kinds)) if layer not in linear),
        recurrent_at=tuple(layer for layer in linear for _ in range(2)),
    )


if __name__ == "__main__":
    sys.exit(main())
