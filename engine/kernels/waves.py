"""``engine.experts.waves`` on the device: one program each, the same integers; and what moves bytes for it.

Experts are a vector; who comes before whom is counted a chunk of the others at a time. Lists that are made in one order
and read in another go through memory, with a barrier between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.experts.residency import ENTRIES, ONE, SHIFT, SPAN, WINDOW, Residency
from engine.experts.waves import Fetches, Waves
from engine.kernels.launch import cdiv, launch, next_power_of_2

CHUNK = 32
MOVERS, PIECES = 128, 8
"""Programs that move experts within the device, and how many of them share one."""
WORDS = 2048
"""That one of them moves at a time."""
FETCHERS, FETCHED_WORDS, FETCH_WARPS = 32, 2048, 4
"""Programs that fetch, what one of them moves at a time, and with how many warps: enough to keep a link busy, and each
so small that it fits beside a program of a product."""
SUMS = 1024
_LONG = (1 << 62) - 1


@triton.jit
def _before(counts, wanted, o, e, rows, experts):
    """[others, experts]: whether an other is wanted and comes first, with more rows or a lower id; and its rows."""
    there = o < experts
    other_rows = tl.load(counts + o, mask=there, other=0)
    first = (other_rows[:, None] > rows[None, :]) | ((other_rows[:, None] == rows[None, :]) & (o[:, None] < e[None, :]))
    return first & (wanted & there)[:, None], other_rows


@triton.jit(do_not_specialize=["layer"])
def _divide(
    counts, slot_of, costs, brought, counters, todo, on_cpu, where, asked, told, layer, experts, parts,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, CPU: tl.constexpr, HALF: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, EXPERTS)
    here = e < experts
    link, cpu = tl.load(costs).to(tl.int64), tl.load(costs + 1).to(tl.int64)
    row, exchange, share = tl.load(costs + 2).to(tl.int64), tl.load(costs + 3).to(tl.int64), tl.load(costs + 4)
    rows = tl.load(counts + e, mask=here, other=0)
    found = tl.load(slot_of + layer * experts + e, mask=here, other=0)
    routed = here & (rows > 0)
    missing = routed & (found < 0)
    there = routed & (found >= 0)
    count = tl.sum(missing.to(tl.int32))
    rank = e * 0
    earlier = rank.to(tl.int64)
    for chunk in range(0, EXPERTS, CHUNK):
        o = chunk + tl.arange(0, CHUNK)
        other_found = tl.load(slot_of + layer * experts + o, mask=o < experts, other=0)
        other_rows = tl.load(counts + o, mask=o < experts, other=0)
        first, other_rows = _before(counts, (other_found < 0) & (other_rows > 0), o, e, rows, experts)
        rank += tl.sum(first.to(tl.int32), axis=0)
        earlier += tl.sum(tl.where(first, (cpu + other_rows * row)[:, None], 0), axis=0)
    on_link = count
    if CPU:
        left = tl.sum(tl.where(missing, cpu + rows * row, 0)) - earlier + exchange
        time = tl.where(missing, tl.maximum(rank * link, left), LONG)
        best = tl.min(time)
        chosen = tl.max(tl.where(missing & (time == best), rank, -1))
        on_link = tl.where(count * link <= best, count, chosen)
        on_link = tl.where(share >= 0, (count * share + HALF) >> 16, on_link)
    goes = missing & (rank < on_link)
    stays = missing & (rank >= on_link)
    tl.store(todo + e, goes.to(tl.int32), mask=here)
    tl.store(on_cpu + e, stays.to(tl.int32), mask=here)
    tl.store(where + e, tl.where(there, found, -1), mask=here)
    pairs = tl.sum(tl.where(stays, rows, 0))
    hits = there & (tl.load(brought + layer * experts + e, mask=here, other=0) == 0)
    tl.store(brought + layer * experts + e, 0, mask=here)
    tl.store(asked + 1, pairs)
    tl.store(told + layer * 4, tl.sum(there.to(tl.int32)))
    tl.store(told + layer * 4 + 1, on_link)
    tl.store(told + layer * 4 + 2, count - on_link)
    tl.store(told + layer * 4 + 3, pairs)
    tl.store(counters, tl.load(counters) + tl.sum(hits.to(tl.int32)) * parts)
    tl.store(counters + 2, tl.load(counters + 2) + (count - on_link) * parts)


def divide(state: Residency, waves: Waves, counts: Tensor, layer: int, where: Tensor, *, cpu: bool) -> None:
    """As the function of the same name in engine.experts.waves, for contiguous tensors on the device."""
    launch(
        _divide, (1,),
        counts, state.slot_of, waves.costs, waves.brought, state.counters, waves.todo, waves.on_cpu, where,
        waves.asked, waves.told, layer, state.experts, state.parts,
        EXPERTS=_experts(state), CHUNK=CHUNK, CPU=cpu, HALF=ONE // 2, LONG=_LONG, num_warps=8,
        early=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "base", "room"])
def _take(
    counts, slot_of, owner, todo, brought, where, fetch, number, counters, part_bytes,
    layer, experts, parts, base, room,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, ROOM: tl.constexpr, FIRST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    e, place = tl.arange(0, EXPERTS), tl.arange(0, ROOM)
    here, inside, slot = e < experts, place < room, base + place
    flat = layer * experts + e
    whole_bytes = tl.load(part_bytes + parts).to(tl.int64)
    if AHEAD:
        wanted = here & (tl.load(slot_of + flat, mask=here, other=0) < 0)
        rank = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    else:
        wanted = here & (tl.load(todo + e, mask=here, other=0) > 0)
        rows = tl.load(counts + e, mask=here, other=0)
        rank = e * 0
        for chunk in range(0, EXPERTS, CHUNK):
            o = chunk + tl.arange(0, CHUNK)
            other = tl.load(todo + o, mask=o < experts, other=0) > 0
            first, _ = _before(counts, other, o, e, rows, experts)
            rank += tl.sum(first.to(tl.int32), axis=0)
    total = tl.sum(wanted.to(tl.int32))

    holds = tl.load(owner + slot, mask=inside, other=-1)
    free = inside
    if FIRST | AHEAD:
        of = tl.where(holds >= 0, holds // experts, -2)
        free = inside & (of != layer)
    position = tl.cumsum(free.to(tl.int32), axis=0) - 1
    goes = free & (position < total)
    given = tl.minimum(total, tl.sum(free.to(tl.int32)))
    tl.store(fetch + position * 3, slot, mask=goes)
    tl.store(slot_of + holds, -1, mask=goes & (holds >= 0))
    tl.debug_barrier()  # owners and what is to do have been read, the list of slots is there

    taken = wanted & (rank < given)
    mine = tl.load(fetch + rank * 3, mask=taken, other=-1)
    tl.store(slot_of + flat, mine, mask=taken)
    tl.store(owner + mine, flat, mask=taken)
    tl.store(fetch + rank * 3 + 1, flat, mask=taken)
    tl.store(fetch + rank * 3 + 2, parts, mask=taken)
    if AHEAD:
        tl.store(brought + flat, 1, mask=taken)
    else:
        tl.store(where + e, mine, mask=here)
        tl.store(todo + e, 0, mask=taken)
    tl.store(number, given)
    tl.store(counters + 1, tl.load(counters + 1) + given * parts)
    tl.store(counters + 3, tl.load(counters + 3) + given * whole_bytes)


def take(
    state: Residency, waves: Waves, fetches: Fetches, counts: Tensor, layer: int, where: Tensor, base: int, room: int,
    *, first: bool, ahead: bool,
) -> None:  # fmt: skip
    """As the function of the same name in engine.experts.waves."""
    launch(
        _take, (1,),
        counts, state.slot_of, state.owner, waves.todo, waves.brought, where, fetches.fetch, fetches.counts,
        state.counters, state.part_bytes, layer, state.experts, state.parts, base, room,
        EXPERTS=_experts(state), CHUNK=CHUNK, ROOM=next_power_of_2(2 * state.experts), FIRST=first, AHEAD=ahead,
        num_warps=8, early=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _place(
    come, slot_of, owner, brought, counters, part_bytes, layer, experts, parts, EXPERTS: tl.constexpr
):  # fmt: skip
    e = tl.arange(0, EXPERTS)
    flat = layer * experts + e
    slot = tl.load(come + e, mask=e < experts, other=-1)
    coming = slot >= 0
    holds = tl.load(owner + slot, mask=coming, other=-1)
    tl.store(slot_of + holds, -1, mask=holds >= 0)
    tl.debug_barrier()  # what was there is not any more
    new = coming & (tl.load(slot_of + flat, mask=coming, other=0) < 0)
    tl.debug_barrier()  # that was read
    tl.store(owner + slot, tl.where(new, flat, -1), mask=coming)
    tl.store(slot_of + flat, slot, mask=new)
    tl.store(brought + flat, 1, mask=new)
    count = tl.sum(coming.to(tl.int32))
    tl.store(counters + 1, tl.load(counters + 1) + count * parts)
    tl.store(counters + 3, tl.load(counters + 3) + count * tl.load(part_bytes + parts).to(tl.int64))


def place(state: Residency, waves: Waves, come: Tensor, layer: int) -> None:
    """As the function of the same name in engine.experts.waves."""
    launch(
        _place, (1,),
        come, state.slot_of, state.owner, waves.brought, state.counters, state.part_bytes, layer,
        state.experts, state.parts, EXPERTS=_experts(state), num_warps=8, early=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "rows", "ring", "tail", "share"])
def _keep(
    ids, slot_of, owner, value, clock, hand, limit, pace, bump, seeds, moves, moved,
    layer, experts, ranks, tail, rows, ring, share,
    EXPERTS: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
    SHIFT: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    e, lane = tl.arange(0, EXPERTS), tl.arange(0, RANKS)
    here, flat = e < experts, layer * experts + e
    per_step, usable, start = tl.load(pace), tl.load(limit), tl.load(hand)
    step = tl.load(clock) + tl.where(layer == 0, rows, 0)
    now = step * per_step + layer * tl.load(pace + 1)
    worth = tl.load(value + flat, mask=here, other=0)
    recent = e * 0
    for row in range(0, tail):
        chosen = tl.load(ids + row * ranks + lane, mask=lane < ranks, other=-1)
        active = tl.sum((chosen[:, None] == e[None, :]).to(tl.int32), axis=0)
        then = now - (tail - 1 - row) * per_step
        ahead = then - worth
        distance = tl.minimum(tl.maximum(ahead, -SPAN), SPAN)
        added = tl.load(bump + tl.minimum(tl.abs(distance) >> SHIFT, ENTRIES - 1))
        worth = tl.where(active > 0, tl.where(ahead >= 0, then, worth) + added, worth)
        recent += active
    slot = tl.load(slot_of + flat, mask=here, other=-1)
    may = here & (recent > 0) & (slot >= 0) & (slot < ring)
    mine = here & (slot >= ring)
    tl.store(value + flat, worth, mask=here & (recent > 0))
    tl.store(seeds + e, tl.where(mine, 2, may.to(tl.int32)), mask=here)
    tl.debug_barrier()  # values are the new ones
    worth -= now
    rank, turn = e * 0, e * 0  # among those that come, the most valuable first; among those that may go, the least
    for chunk in range(0, EXPERTS, CHUNK):
        o = chunk + tl.arange(0, CHUNK)
        kind = tl.load(seeds + o, mask=o < experts, other=0)[:, None]
        theirs = (tl.load(value + layer * experts + o, mask=o < experts, other=0) - now)[:, None]
        same = (theirs == worth[None, :]) & (o[:, None] < e[None, :])
        rank += tl.sum(((kind == 1) & ((theirs > worth[None, :]) | same)).to(tl.int32), axis=0)
        turn += tl.sum(((kind == 2) & ((theirs < worth[None, :]) | same)).to(tl.int32), axis=0)

    # Free slots of a window beyond the ring, and then those of the layer.
    place, span, count = tl.arange(0, WINDOW), usable - ring, tl.sum(mine.to(tl.int32))
    room = tl.maximum(share - count, 0)
    target = ring + (start % tl.maximum(span, 1) + place) % tl.maximum(span, 1)
    free = (place < span) & (tl.load(owner + target, mask=place < span, other=0) < 0)
    position = tl.cumsum(free.to(tl.int32), axis=0) - 1
    free &= position < room
    first = tl.sum(free.to(tl.int32))
    turn += first
    tl.store(moves + position * 2 + 1, target, mask=free)
    tl.store(moves + turn * 2, worth, mask=mine)
    tl.store(moves + turn * 2 + 1, slot, mask=mine)
    tl.debug_barrier()  # all that may go is in order
    there = may & (rank < first + count)
    least = tl.load(moves + rank * 2, mask=there & (rank >= first), other=0)
    to = tl.load(moves + rank * 2 + 1, mask=there, other=-1)
    wins = there & ((rank < first) | (worth > least))
    taken = tl.sum(wins.to(tl.int32))
    tl.debug_barrier()  # that was read
    tl.store(slot_of + flat, -1, mask=mine & (turn < taken))
    tl.store(slot_of + flat, to, mask=wins)
    tl.store(owner + to, flat, mask=wins)
    tl.store(owner + slot, -1, mask=wins)
    tl.store(moves + rank * 2, slot, mask=wins)
    tl.store(moves + rank * 2 + 1, to, mask=wins)
    tl.store(moved, taken)
    tl.store(clock, step)
    if room > 0:
        tl.store(hand, (start + WINDOW) % usable)


def keep(state: Residency, waves: Waves, ids: Tensor, rows: int, layer: int, ring: int, share: int) -> None:
    """As the function of the same name in engine.experts.waves."""
    tail, ranks = ids.shape
    launch(
        _keep, (1,),
        ids, state.slot_of, state.owner, state.value, state.clock, state.hand, state.limit, state.pace, state.bump,
        waves.seeds, waves.moves, waves.moved, layer, state.experts, ranks, tail, rows, ring, share,
        EXPERTS=_experts(state), RANKS=next_power_of_2(ranks), CHUNK=CHUNK, WINDOW=WINDOW, SPAN=SPAN, SHIFT=SHIFT,
        ENTRIES=ENTRIES, num_warps=8, early=False,
    )  # fmt: skip


@triton.jit
def _fetch(pool, slots, fetch, counts, words, length, PROGRAMS: tl.constexpr, WORDS: tl.constexpr):
    source = tl.multiple_of(pool.to(tl.pointer_type(tl.int32)), 16)
    pieces = tl.cdiv(length, WORDS)
    for piece in range(tl.program_id(0), tl.load(counts) * pieces, PROGRAMS):
        expert, at = fetch + piece // pieces * 3, piece % pieces * WORDS + tl.arange(0, WORDS)
        to, origin = tl.load(expert).to(tl.int64) * words, tl.load(expert + 1).to(tl.int64) * words
        data = tl.load(source + (origin + at), mask=at < length, cache_modifier=".cg")
        tl.store(slots + (to + at), data, mask=at < length)


def fetch(pool: int, stride: int, slots: Tensor, fetches: Fetches, nbytes: int, stream: int | None) -> None:
    """Copy what ``fetches`` lists, ``nbytes`` each, from the pool (its address for the device) to slots uint8 [slots +
    1, stride]. Everything before it in its stream has ended: what it overwrites may just have been computed."""
    launch(
        _fetch, (FETCHERS,),
        pool, slots.view(torch.int32), fetches.fetch, fetches.counts, stride // 4, nbytes // 16 * 4,
        PROGRAMS=FETCHERS, WORDS=FETCHED_WORDS, num_warps=FETCH_WARPS, early=False, stream=stream,
    )  # fmt: skip


@triton.jit
def _move(slots, moves, moved, words, PIECES: tl.constexpr, WORDS: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, WORDS)
    for number in range(program // PIECES, tl.load(moved), programs // PIECES):
        source = tl.load(moves + number * 2).to(tl.int64) * words
        target = tl.load(moves + number * 2 + 1).to(tl.int64) * words
        for start in range(program % PIECES * WORDS, words, PIECES * WORDS):
            at = start + lane
            tl.store(slots + (target + at), tl.load(slots + (source + at), mask=at < words), mask=at < words)


def move(slots: Tensor, waves: Waves) -> None:
    """Copy what ``moves`` lists within slots uint8 [slots + 1, stride]."""
    launch(
        _move, (MOVERS,), slots.view(torch.int32), waves.moves, waves.moved, slots.shape[1] // 4,
        PIECES=PIECES, WORDS=WORDS, num_warps=8, early=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size"])
def _left(ids, on_cpu, plan, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < size, other=-1)
    wanted = tl.load(on_cpu + expert, mask=expert >= 0, other=0) > 0
    tl.store(plan + at * 2, tl.where(wanted, expert, -1), mask=at < size)
    tl.store(plan + at * 2 + 1, 0, mask=at < size)


def left(ids: Tensor, waves: Waves) -> Tensor:
    """The CPU's plan [rows, k, 2] of ids int32 [rows, k]: whole experts, of those that are left to it."""
    plan = ids.new_empty(*ids.shape, 2)
    launch(
        _left, (cdiv(ids.numel(), SUMS),), ids, waves.on_cpu, plan, ids.numel(), BLOCK=SUMS, num_warps=4, early=False
    )  # fmt: skip
    return plan


def _experts(state: Residency) -> int:
    return max(CHUNK, next_power_of_2(state.experts))
