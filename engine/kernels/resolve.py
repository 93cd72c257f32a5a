"""``engine.experts.residency.resolve`` on the device: one program, no loops, the same integers.

The pairs of the call (rows times ranks) and the slots of the window are vectors; who is first of equals, ranks and
matches are matrices of comparisons between them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.experts.residency import ENTRIES, ONE, SHIFT, SPAN, WINDOW, Decision, Residency


@triton.jit(do_not_specialize=["layer"])
def _resolve(
    ids, slot_of, owner, value, clock, hand, counters, work, share, pace, bump, part_bytes,
    slot_out, parts_out, plan_out, fetch_out, counts_out,
    layer, experts, slots, pairs,
    PARTS: tl.constexpr, PAIRS: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr, SHIFT: tl.constexpr,
    ENTRIES: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    pair, place = tl.arange(0, PAIRS), tl.arange(0, WINDOW)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    start = tl.load(hand)
    step = tl.load(clock) + tl.where(layer == 0, 1, 0)
    now = step * tl.load(pace) + layer * tl.load(pace + 1)

    # The pairs: the first of those that name an expert stands for all of them.
    valid = expert >= 0
    same = (expert[:, None] == expert[None, :]) & valid[:, None]
    leads = valid & (tl.sum((same & (pair[None, :] < pair[:, None])).to(tl.int32), axis=1) == 0)
    flat = layer * experts + expert
    found = tl.load(slot_of + flat, mask=valid, other=-1)
    before = tl.load(value + flat, mask=valid, other=0)
    ahead = now - before
    missing = leads & (found < 0)
    misses = tl.sum(missing.to(tl.int32), axis=0)
    sooner = (ahead[None, :] < ahead[:, None]) | (
        (ahead[None, :] == ahead[:, None]) & (expert[None, :] < expert[:, None])
    )
    rank = tl.sum((sooner & missing[None, :]).to(tl.int32), axis=1)
    budget = (misses * PARTS * tl.load(share + layer) + HALF) >> 16

    # The window: free slots first, then the lowest values, then the lowest slots, in one 64-bit key.
    slot = (start + place) % slots
    holds = tl.load(owner + slot, mask=place < slots, other=-1)
    kept = tl.sum(((slot[:, None] == found[None, :]) & valid[None, :]).to(tl.int32), axis=1) > 0
    may_go = (place < slots) & (kept == 0)
    worth = (tl.load(value + holds, mask=holds >= 0, other=0) - now).to(tl.int64)
    worth = tl.where(holds >= 0, worth, -(1 << 32))
    key = tl.where(may_go, worth * (1 << 24) + slot, 1 << 60)
    turn = tl.sum((key[None, :] < key[:, None]).to(tl.int32), axis=1)
    room = tl.sum(may_go.to(tl.int32), axis=0)
    whole = tl.minimum(budget // PARTS, room)
    partial = tl.minimum(budget - whole * PARTS, PARTS)

    gets = missing & (rank < whole)
    part_way = missing & (rank == tl.where(partial > 0, whole, -1))
    given = tl.sum(tl.where((turn[None, :] == rank[:, None]) & may_go[None, :], slot[None, :], 0), axis=1)
    mine = tl.where(gets, given, tl.where(part_way, slots, found))
    done = tl.where(leads & (found >= 0) | gets, PARTS, tl.where(part_way, partial, 0))
    bring = gets | part_way

    tl.debug_barrier()  # everything has been read
    tl.store(slot_of + holds, -1, mask=may_go & (turn < whole) & (holds >= 0))
    tl.store(slot_of + flat, mine, mask=gets)
    tl.store(owner + mine, flat, mask=gets)
    distance = tl.minimum(tl.maximum(ahead, -SPAN), SPAN)
    entry = tl.minimum(tl.abs(distance) >> SHIFT, ENTRIES - 1)
    after = tl.where(ahead >= 0, now, before) + tl.load(bump + entry)
    tl.store(value + flat, after, mask=leads)
    tl.store(clock, step)
    tl.store(hand, tl.where(whole > 0, (start + WINDOW) % slots, start))

    hits = (tl.sum(leads.to(tl.int32), axis=0) - misses) * PARTS
    on_link = tl.sum(tl.where(bring, done, 0), axis=0)
    on_cpu = misses * PARTS - on_link
    moved = tl.sum(tl.where(bring, tl.load(part_bytes + done), 0).to(tl.int64), axis=0)
    tl.store(counters, tl.load(counters) + hits)
    tl.store(counters + 1, tl.load(counters + 1) + on_link)
    tl.store(counters + 2, tl.load(counters + 2) + on_cpu)
    tl.store(counters + 3, tl.load(counters + 3) + moved)
    tl.store(work + layer * 3, hits)
    tl.store(work + layer * 3 + 1, on_link)
    tl.store(work + layer * 3 + 2, on_cpu)

    # What was decided for the first goes to all that name the same expert.
    tells = same & leads[None, :]
    mine = tl.sum(tl.where(tells, mine[None, :], 0), axis=1)
    done = tl.sum(tl.where(tells, done[None, :], 0), axis=1)
    left = valid & (done < PARTS)
    tl.store(slot_out + pair, tl.where(valid, mine, -1), mask=pair < pairs)
    tl.store(parts_out + pair, done, mask=pair < pairs)
    tl.store(plan_out + pair * 2, tl.where(left, expert, -1), mask=pair < pairs)
    tl.store(plan_out + pair * 2 + 1, tl.where(left, done, 0), mask=pair < pairs)
    tl.store(fetch_out + rank * 3, mine, mask=bring)
    tl.store(fetch_out + rank * 3 + 1, flat, mask=bring)
    tl.store(fetch_out + rank * 3 + 2, done, mask=bring)
    tl.store(counts_out, tl.sum(bring.to(tl.int32), axis=0))
    tl.store(counts_out + 1, tl.sum(left.to(tl.int32), axis=0))


def resolve(state: Residency, ids: Tensor, layer: int, decision: Decision) -> None:
    """As the function of the same name in engine.experts.residency, for contiguous tensors on the device."""
    pairs = ids.numel()
    wide = triton.next_power_of_2(pairs)
    _resolve[(1,)](
        ids, state.slot_of, state.owner, state.value, state.clock, state.hand, state.counters, state.work, state.share,
        state.pace, state.bump, state.part_bytes,
        decision.slot, decision.gpu_parts, decision.plan, decision.fetch, decision.counts,
        layer, state.experts, state.slots, pairs,
        PARTS=state.parts, PAIRS=wide, WINDOW=WINDOW, SPAN=SPAN, SHIFT=SHIFT, ENTRIES=ENTRIES, HALF=ONE // 2,
        num_warps=8,
    )  # fmt: skip
