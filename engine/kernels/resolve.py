"""``engine.experts.residency.resolve`` on the device: one program, no loops, the same integers.

The pairs of the call (rows times ranks) and the slots of the window are vectors; who is first of equals, ranks and
matches are matrices of comparisons between them, added up along their first axis, which lies in the registers of a
thread. What it takes is mostly the reads that wait for each other, so everything that can be read is asked for at once,
and victims are only looked for where something is missing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.experts.residency import ENTRIES, MOST_PAIRS, OLDEST, ONE, SHIFT, SPAN, WINDOW, Decision, Residency
from engine.kernels.launch import begin, launch, next_power_of_2, wait

NEVER = (1 << 31) - 1
FREE = -(1 << 31)


@triton.jit(do_not_specialize=["layer"])
def _resolve(
    ids, slot_of, owner, value, clock, hand, counters, work, share, pace, bump, part_bytes,
    limit, routed, slot_out, parts_out, plan_out, fetch_out, counts_out,
    layer, experts, slots, pairs,
    PARTS: tl.constexpr, PAIRS: tl.constexpr, MOST: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
    SHIFT: tl.constexpr, ENTRIES: tl.constexpr, OLDEST: tl.constexpr, HALF: tl.constexpr, FREE: tl.constexpr,
    NEVER: tl.constexpr,
):  # fmt: skip
    begin()
    pair, place = tl.arange(0, PAIRS), tl.arange(0, WINDOW)
    wait()
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    start, usable = tl.load(hand), tl.load(limit)
    step = tl.load(clock) + tl.where(layer == 0, 1, 0)
    now = step * tl.load(pace) + layer * tl.load(pace + 1)
    of_link, whole_bytes = tl.load(share + layer), tl.load(part_bytes + PARTS).to(tl.int64)
    counted = tl.load(counters + tl.arange(0, 4))
    valid = expert >= 0
    flat = layer * experts + expert
    found = tl.load(slot_of + flat, mask=valid, other=-1)
    before = tl.load(value + flat, mask=valid, other=0)
    slot = start + place
    slot = tl.where(slot >= usable, slot - usable, slot)
    holds = tl.load(owner + slot, mask=place < usable, other=-1)
    ahead = now - before
    distance = tl.minimum(tl.maximum(ahead, -SPAN), SPAN)
    added = tl.load(bump + tl.minimum(tl.abs(distance) >> SHIFT, ENTRIES - 1))

    # The pairs: the first of those that name an expert stands for all of them.
    same = (expert[:, None] == expert[None, :]) & valid[None, :]
    leads = valid & (tl.sum((same & (pair[:, None] < pair[None, :])).to(tl.int32), axis=0) == 0)
    missing = leads & (found < 0)
    both = tl.sum(leads.to(tl.int32) + (missing.to(tl.int32) << 16), axis=0)
    misses = both >> 16
    hits = ((both & 65535) - misses) * PARTS
    sooner = (ahead[:, None] < ahead[None, :]) | (
        (ahead[:, None] == ahead[None, :]) & (expert[:, None] < expert[None, :])
    )
    rank = tl.sum((sooner & missing[:, None]).to(tl.int32), axis=0)
    budget = (misses * PARTS * of_link + HALF) >> 16
    tl.debug_barrier()  # slots of the pairs, their values and the clock have been read

    whole = budget * 0
    given = pair * 0
    if budget > 0:
        # The window: free slots first, then the lowest values, then the first ones, in one number.
        kept = tl.sum((slot[None, :] == found[:, None]).to(tl.int32), axis=0) > 0
        may_go = (place < usable) & (kept == 0)
        worth = tl.load(value + holds, mask=holds >= 0, other=0) - now
        key = tl.minimum(tl.maximum(worth, -OLDEST), OLDEST) * WINDOW + place
        key = tl.where(may_go, tl.where(holds >= 0, key, FREE + place), NEVER)
        turn = tl.sum((key[:, None] < key[None, :]).to(tl.int32), axis=0)
        whole = tl.minimum(budget // PARTS, tl.sum(may_go.to(tl.int32), axis=0))
        goes = may_go & (turn < whole)
        gone = tl.where(goes, slot, 0)
        given = tl.sum(tl.where(turn[:, None] == rank[None, :], gone[:, None], 0), axis=0)
        tl.store(slot_of + holds, -1, mask=goes & (holds >= 0))
        if whole > 0:
            tl.store(hand, (start + WINDOW) % usable)
        tl.debug_barrier()  # the values of the window have been read
    partial = tl.minimum(budget - whole * PARTS, PARTS)

    gets = missing & (rank < whole)
    part_way = missing & (rank == tl.where(partial > 0, whole, -1))
    mine = tl.where(gets, given, tl.where(part_way, slots, found))
    done = tl.where(leads & (found >= 0) | gets, PARTS, tl.where(part_way, partial, 0))
    tl.store(slot_of + flat, mine, mask=gets)
    tl.store(owner + mine, flat, mask=gets)
    tl.store(value + flat, tl.where(ahead >= 0, now, before) + added, mask=leads)
    tl.store(clock, step)

    on_link = whole * PARTS + partial
    on_cpu = misses * PARTS - on_link
    moved = whole * whole_bytes + tl.load(part_bytes + partial)
    number = tl.arange(0, 4)
    units = tl.where(number == 0, hits, tl.where(number == 1, on_link, on_cpu))
    tl.store(counters + number, counted + tl.where(number == 3, moved, units.to(tl.int64)))
    tl.store(work + layer * 3 + number, units, mask=number < 3)
    every = tl.arange(0, MOST)
    tl.store(routed + layer * MOST + every, tl.load(ids + every, mask=every < pairs, other=-1))

    # What was decided for the first goes to all that name the same expert.
    told = tl.sum(tl.where(same & leads[:, None], ((mine + 1) * 8 + done)[:, None], 0), axis=0)
    done = told & 7
    left = valid & (done < PARTS)
    tl.store(slot_out + pair, tl.where(valid, (told >> 3) - 1, -1), mask=pair < pairs)
    tl.store(parts_out + pair, done, mask=pair < pairs)
    tl.store(plan_out + pair * 2, tl.where(left, expert, -1), mask=pair < pairs)
    tl.store(plan_out + pair * 2 + 1, tl.where(left, done, 0), mask=pair < pairs)
    bring = gets | part_way
    tl.store(fetch_out + rank * 3, mine, mask=bring)
    tl.store(fetch_out + rank * 3 + 1, flat, mask=bring)
    tl.store(fetch_out + rank * 3 + 2, done, mask=bring)
    tl.store(counts_out, whole + tl.where(partial > 0, 1, 0))
    tl.store(counts_out + 1, tl.sum(left.to(tl.int32), axis=0))


def resolve(state: Residency, ids: Tensor, layer: int, decision: Decision) -> None:
    """As the function of the same name in engine.experts.residency, for contiguous tensors on the device."""
    pairs = ids.numel()
    launch(
        _resolve, (1,),
        ids, state.slot_of, state.owner, state.value, state.clock, state.hand, state.counters, state.work, state.share,
        state.pace, state.bump, state.part_bytes, state.limit, state.routed,
        decision.slot, decision.gpu_parts, decision.plan, decision.fetch, decision.counts,
        layer, state.experts, state.slots, pairs,
        PARTS=state.parts, PAIRS=next_power_of_2(pairs), MOST=MOST_PAIRS, WINDOW=WINDOW, SPAN=SPAN, SHIFT=SHIFT,
        ENTRIES=ENTRIES, OLDEST=OLDEST, HALF=ONE // 2, FREE=FREE, NEVER=NEVER, num_warps=4,
    )  # fmt: skip
