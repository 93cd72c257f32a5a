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
from engine.kernels.mailbox import Request, give_x, release, store

NEVER = (1 << 31) - 1
FREE = -(1 << 31)
CHUNK = 1024
"""Numbers of x that go to the CPU at a time."""


@triton.jit(do_not_specialize=["layer", "value_of_request"])
def _resolve(
    ids, slot_of, owner, value, clock, hand, counters, work, share, pace, bump,
    part_bytes, limit, routed, lacks, slot_out, parts_out, plan_out, fetch_out, counts_out,
    layer, experts, slots, pairs,
    x, weights, to_ready, to_done, to_x, to_plan, to_weights, size, value_of_request,
    PARTS: tl.constexpr, PAIRS: tl.constexpr, MOST: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
    SHIFT: tl.constexpr, ENTRIES: tl.constexpr, OLDEST: tl.constexpr, HALF: tl.constexpr, FREE: tl.constexpr,
    NEVER: tl.constexpr, CHUNK: tl.constexpr, GIVES: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    begin()
    place = tl.arange(0, WINDOW)
    wait()
    start, usable = tl.load(hand), tl.load(limit)
    step = tl.load(clock) + tl.where(layer == 0, 1, 0)
    now = step * tl.load(pace) + layer * tl.load(pace + 1)
    of_link = tl.load(share + layer)
    counted = tl.load(counters + tl.arange(0, 4))
    slot = start + place
    slot = tl.where(slot >= usable, slot - usable, slot)
    holds = tl.load(owner + slot, mask=place < usable, other=-1)
    pair = tl.arange(0, PAIRS)
    here = pair < pairs
    expert = tl.load(ids + pair, mask=here, other=-1)
    if GIVES:
        rank_weights = tl.load(weights + pair, mask=here)
    valid = expert >= 0
    flat = layer * experts + expert
    found = tl.load(slot_of + flat, mask=valid, other=-1)
    short = tl.load(lacks + flat, mask=valid, other=0)
    before = tl.load(value + flat, mask=valid, other=0)
    ahead = now - before
    distance = tl.minimum(tl.maximum(ahead, -SPAN), SPAN)
    added = tl.load(bump + tl.minimum(tl.abs(distance) >> SHIFT, ENTRIES - 1))

    # The pairs: the first of those that name an expert stands for all of them.
    same = (expert[:, None] == expert[None, :]) & valid[None, :]
    leads = valid & (tl.sum((same & (pair[:, None] < pair[None, :])).to(tl.int32), axis=0) == 0)
    there = tl.where(found < 0, 0, PARTS - short)
    lacking = tl.where(leads, PARTS - there, 0)
    missing = lacking > 0
    sooner = (ahead[:, None] < ahead[None, :]) | (
        (ahead[:, None] == ahead[None, :]) & (expert[:, None] < expert[None, :])
    )
    # For each pair, of those that come sooner: parts, experts, experts without a slot; and of all: parts, hits.
    each = lacking + (missing.to(tl.int32) << 11) + ((missing & (found < 0)).to(tl.int32) << 20)
    before_it = tl.sum(tl.where(sooner, each[:, None], 0), axis=0)
    all_of_it = tl.sum(lacking + (tl.where(leads, there, 0) << 16), axis=0)
    units, hits = all_of_it & 65535, all_of_it >> 16
    rank, turn_of_new = (before_it >> 11) & 511, before_it >> 20
    budget = (units * of_link + HALF) >> 16
    came = tl.minimum(tl.maximum(budget - (before_it & 2047), 0), lacking)
    tl.debug_barrier()  # slots of the pairs, their values and the clock have been read

    mine, last = found, there
    bring = missing & (came > 0)
    on_link = budget * 0
    if budget > 0:
        # The window: free slots first, then the lowest values, then the first ones, in one number.
        kept = tl.sum((slot[None, :] == found[:, None]).to(tl.int32), axis=0) > 0
        may_go = (place < usable) & (kept == 0)
        worth = tl.load(value + holds, mask=holds >= 0, other=0) - now
        key = tl.minimum(tl.maximum(worth, -OLDEST), OLDEST) * WINDOW + place
        key = tl.where(may_go, tl.where(holds >= 0, key, FREE + place), NEVER)
        turn = tl.sum((key[:, None] < key[None, :]).to(tl.int32), axis=0)
        room, new = tl.sum(may_go.to(tl.int32), axis=0), bring & (found < 0)
        stay = tl.minimum(room, tl.sum(new.to(tl.int32), axis=0))
        goes = may_go & (turn < stay)
        gone = tl.where(goes, slot, 0)
        given = tl.sum(tl.where(turn[:, None] == turn_of_new[None, :], gone[:, None], 0), axis=0)
        tl.store(slot_of + holds, -1, mask=goes & (holds >= 0))
        tl.store(lacks + holds, 0, mask=goes & (holds >= 0))
        if stay > 0:
            tl.store(hand, (start + WINDOW) % usable)
        tl.debug_barrier()  # the values of the window have been read
        # One expert more than there is room for comes into the scratch slot, the others not at all.
        bring = bring & ((found >= 0) | (turn_of_new <= room))
        rank -= tl.maximum(turn_of_new - room - 1, 0)
        mine = tl.where(new & bring, tl.where(turn_of_new < room, given, slots), found)
        last = there + tl.where(bring, came, 0)
        stays = bring & (mine < slots)
        tl.store(slot_of + flat, mine, mask=stays)
        tl.store(owner + mine, flat, mask=stays)
        tl.store(lacks + flat, PARTS - last, mask=stays)
        on_link = tl.sum(tl.where(bring, came, 0), axis=0)

    # What was decided for the first goes to all that name the same expert.
    told = tl.sum(tl.where(same & leads[:, None], ((mine + 1) * 8 + last)[:, None], 0), axis=0)
    all_done = told & 7
    left = valid & (all_done < PARTS)
    wanted = tl.sum(left.to(tl.int32), axis=0)
    if GIVES and wanted > 0:
        give_x(x, to_x, size, CHUNK)
        store(to_plan, pair * 2, tl.where(left, expert, -1), here)
        store(to_plan, pair * 2 + 1, tl.where(left, all_done, 0), here)
        store(to_weights, pair, rank_weights, here)
        tl.store(to_done.to(tl.pointer_type(tl.int64)), tl.full((), 0, tl.int64))
        tl.debug_barrier()
        release(to_ready, value_of_request, ON_DEVICE)

    tl.store(value + flat, tl.where(ahead >= 0, now, before) + added, mask=leads)
    tl.store(clock, step)

    from_there = tl.load(part_bytes + there, mask=bring, other=0)
    moved = tl.sum(tl.load(part_bytes + last, mask=bring, other=0) - from_there, axis=0).to(tl.int64)
    number = tl.arange(0, 4)
    did = tl.where(number == 0, hits, tl.where(number == 1, on_link, units - on_link))
    tl.store(counters + number, counted + tl.where(number == 3, moved, did.to(tl.int64)))
    tl.store(work + layer * 3 + number, did, mask=number < 3)
    every = tl.arange(0, MOST)
    tl.store(routed + layer * MOST + every, -1, mask=every >= pairs)
    tl.store(routed + layer * MOST + pair, expert, mask=here)

    tl.store(slot_out + pair, tl.where(valid, (told >> 3) - 1, -1), mask=here)
    tl.store(parts_out + pair, all_done, mask=here)
    tl.store(plan_out + pair * 2, tl.where(left, expert, -1), mask=here)
    tl.store(plan_out + pair * 2 + 1, tl.where(left, all_done, 0), mask=here)
    tl.store(fetch_out + rank * 3, mine, mask=bring)
    tl.store(fetch_out + rank * 3 + 1, flat, mask=bring)
    tl.store(fetch_out + rank * 3 + 2, there * 8 + last, mask=bring)
    tl.store(counts_out, tl.sum(bring.to(tl.int32), axis=0))
    tl.store(counts_out + 1, wanted)


def resolve(
    state: Residency, ids: Tensor, layer: int, decision: Decision, request: Request | None = None
) -> None:  # fmt: skip
    """As the function of the same name in engine.experts.residency, for contiguous tensors on the device. With a
    ``request`` the CPU is asked for its part, where it has one; ``done`` is 1 until then."""
    pairs = ids.numel()
    asked: tuple[object, ...] = (ids, ids, 0, 0, 0, 0, 0, 0, 0)
    if request is not None:
        asked = (request.x, request.weights, *request.addresses, request.x.numel(), request.number(layer))
    launch(
        _resolve, (1,),
        ids, state.slot_of, state.owner, state.value, state.clock, state.hand, state.counters, state.work, state.share,
        state.pace, state.bump, state.part_bytes, state.limit, state.routed, state.lacks,
        decision.slot, decision.gpu_parts, decision.plan, decision.fetch, decision.counts,
        layer, state.experts, state.slots, pairs, *asked,
        PARTS=state.parts, PAIRS=next_power_of_2(pairs), MOST=MOST_PAIRS, WINDOW=WINDOW, SPAN=SPAN, SHIFT=SHIFT,
        ENTRIES=ENTRIES, OLDEST=OLDEST, HALF=ONE // 2, FREE=FREE, NEVER=NEVER, CHUNK=CHUNK,
        GIVES=request is not None, ON_DEVICE=ids.is_cuda, num_warps=4,
    )  # fmt: skip
