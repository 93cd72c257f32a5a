"""Experts of a layer for more rows than one decision takes: what the link brings, wave by wave, and what the CPU does.

The first slots are a ring. A wave is the experts that are brought while those of the wave before are computed: all that
a layer misses, and then the next layer's, one after another as slots become free, so that the link never waits; if the
ring is smaller than a layer, they take turns in its halves. The maps of ``Residency`` say at any time where everything
is, so what a wave brought stays resident until its slot is needed, and nothing has to be given back. For each layer:

* ``divide``: of the routed experts that are missing, the link takes those with the most rows and the CPU the others,
  so that both end as early as possible by ``costs``;
* ``take``: the next wave; with ``ahead`` of the next layer, before its experts are routed;
* ``place``: instead, what the host has chosen to bring of a whole layer (``engine.experts.copies``);
* ``keep``: values as if the last tokens had been decoded; experts of the ring that are worth more than others of their
  layer elsewhere go there. That is what the next decode steps find.

Integers only: these functions are the definitions; engine/kernels/waves.py does the same on the device bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.experts.residency import BYTES, CPU, FETCHED, HITS, ONE, WINDOW, Residency, used, wrap

TAIL = 32
"""Last tokens of a call whose experts are worth keeping."""
LINK_NS, CPU_NS, ROW_NS, EXCHANGE_NS, SHARE = range(5)
"""Places in ``costs``: an expert over the link; an expert on the CPU, each of its rows, and a request, in ns; the share
of missing experts that goes over the link in 1/ONE, or -1: as costs are."""
FOUND, LINK, LEFT, ROWS = range(4)
"""Places in ``told``: experts that were there, brought after they were routed, left to the CPU, and their rows."""


@dataclass(frozen=True)
class Waves:
    """``costs`` int32 [5]; ``todo`` and ``on_cpu`` int32 [experts]: 1 for those that the link still has to bring, and
    that the CPU computes; ``brought`` int32 [layers, experts]: 1 for those that came ahead; ``seeds`` int32 [experts]:
    1 for those of the ring that the last rows use, 2 for those beyond it; ``asked`` int32 [2]: 0, and rows' experts for
    the CPU; ``told`` int32 [layers, 4]: of each layer's last call; ``moves`` int32 [experts, 2]: from slot, to slot;
    ``moved`` int32 [1]: how many."""

    costs: Tensor
    todo: Tensor
    on_cpu: Tensor
    brought: Tensor
    seeds: Tensor
    asked: Tensor
    told: Tensor
    moves: Tensor
    moved: Tensor

    @staticmethod
    def create(layers: int, experts: int, device: torch.device) -> Waves:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return Waves(
            costs=zeros(5), todo=zeros(experts), on_cpu=zeros(experts), brought=zeros(layers, experts),
            seeds=zeros(experts), asked=zeros(2), told=zeros(layers, 4), moves=zeros(experts, 2), moved=zeros(1),
        )  # fmt: skip


@dataclass(frozen=True)
class Fetches:
    """``fetch`` int32 [experts, 3]: (slot, flat, parts) to bring; ``counts`` int32 [2]: how many, and 0."""

    fetch: Tensor
    counts: Tensor

    @staticmethod
    def create(experts: int, device: torch.device) -> Fetches:
        return Fetches(
            torch.zeros(experts, 3, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int32, device=device)
        )


def link_experts(rows: Sequence[int], costs: Sequence[int]) -> int:
    """Of missing experts with so many rows, most first, how many go over the link; of equals most."""
    count = len(rows)
    if costs[SHARE] >= 0:
        return (count * costs[SHARE] + ONE // 2) >> 16
    best, chosen, left = count * costs[LINK_NS], count, costs[EXCHANGE_NS]
    for first in reversed(range(count)):
        left += costs[CPU_NS] + costs[ROW_NS] * rows[first]
        time = max(first * costs[LINK_NS], left)
        if time < best:
            best, chosen = time, first
    return chosen


def divide(state: Residency, waves: Waves, counts: Tensor, layer: int, where: Tensor, *, cpu: bool) -> None:
    """``counts`` int32 [experts]: rows of each. ``where`` int32 [experts]: slots of routed experts that are there, -1
    for others. ``cpu``: the CPU may be asked."""
    experts, first = state.experts, layer * state.experts
    rows, found = counts.tolist(), state.slot_of[first : first + experts].tolist()
    missing = sorted((e for e in range(experts) if rows[e] and found[e] < 0), key=lambda e: (-rows[e], e))
    on_link = link_experts([rows[e] for e in missing], waves.costs.tolist()) if cpu else len(missing)
    there = [e for e in range(experts) if rows[e] and found[e] >= 0]
    _set(waves.todo, dict.fromkeys(missing[:on_link], 1), 0)
    _set(waves.on_cpu, dict.fromkeys(missing[on_link:], 1), 0)
    _set(where, {e: found[e] for e in there}, -1)
    left = missing[on_link:]
    brought = waves.brought[layer]
    hits = sum(not brought[e] for e in there)
    brought.zero_()
    pairs = sum(rows[e] for e in left)
    waves.asked[1] = pairs
    waves.told[layer] = torch.tensor([len(there), on_link, len(left), pairs], dtype=torch.int32)
    state.counters[HITS] += hits * state.parts
    state.counters[CPU] += len(left) * state.parts


def take(
    state: Residency, waves: Waves, fetches: Fetches, counts: Tensor, layer: int, where: Tensor, base: int, room: int,
    *, first: bool, ahead: bool,
) -> None:  # fmt: skip
    """Into the slots from ``base`` on, ``room`` of them, not more than two layers have. ``first``: experts that are
    there, of the layer that is computed, are not computed yet. ``ahead``: experts of the layer after that one, whose
    routing is not known; ``where`` and ``counts`` do not matter then."""
    experts, start = state.experts, layer * state.experts
    if ahead:
        wanted = [e for e in range(experts) if state.slot_of[start + e] < 0]
    else:
        rows = counts.tolist()
        wanted = sorted((e for e in range(experts) if waves.todo[e]), key=lambda e: (-rows[e], e))
    owner = state.owner.tolist()
    free = [s for s in range(base, base + room) if owner[s] < 0 or not (ahead or first) or owner[s] // experts != layer]
    given = dict(zip(wanted, free, strict=False))
    for number, (e, slot) in enumerate(given.items()):
        if owner[slot] >= 0:
            state.slot_of[owner[slot]] = -1
        state.owner[slot], state.slot_of[start + e] = start + e, slot
        fetches.fetch[number] = torch.tensor([slot, start + e, state.parts], dtype=torch.int32)
    fetches.counts[0] = len(given)
    if ahead:
        waves.brought[layer, list(given)] = 1
    else:
        _set(where, given, -1)
        waves.todo[list(given)] = 0
    state.counters[FETCHED] += len(given) * state.parts
    state.counters[BYTES] += len(given) * int(state.part_bytes[-1])


def place(state: Residency, waves: Waves, come: Tensor, layer: int) -> None:
    """``come`` int32 [experts]: slots, all different, that experts of the layer are brought to in any case, -1 for
    others. What was there is not any more; experts that are somewhere else stay there, and then the slot is free."""
    start = layer * state.experts
    coming = [(e, slot) for e, slot in enumerate(come.tolist()) if slot >= 0]
    for _, slot in coming:
        if state.owner[slot] >= 0:
            state.slot_of[state.owner[slot]] = -1
        state.owner[slot] = -1
    for e, slot in coming:
        if state.slot_of[start + e] < 0:
            state.owner[slot], state.slot_of[start + e] = start + e, slot
            waves.brought[layer, e] = 1
    state.counters[FETCHED] += len(coming) * state.parts
    state.counters[BYTES] += len(coming) * int(state.part_bytes[-1])


def share_of(layers: int, experts: int, ring: int, limit: int) -> int:
    """Of slots beyond the ring, how many each layer may take while they are free."""
    return min(experts, max(0, limit - ring) // layers)


def keep(state: Residency, waves: Waves, ids: Tensor, rows: int, layer: int, ring: int, share: int) -> None:
    """After a layer is computed. ``ids`` int32 [tail, k]: of its last rows, out of ``rows``; ``ring``: slots of the
    ring; ``share``: beyond it, the layer takes free slots up to so many. Writes ``moves``: what is to be copied within
    the device. Experts of other layers stay where they are: those that are still to be computed would be missed."""
    experts, start = state.experts, layer * state.experts
    value, owner, slot_of = state.value.numpy(), state.owner.numpy(), state.slot_of.numpy()
    if layer == 0:
        state.clock.copy_(torch.tensor([wrap(int(state.clock) + rows)]))
    per_step, per_layer = (int(number) for number in state.pace)
    now = wrap(int(state.clock) * per_step + layer * per_layer)
    recent: set[int] = set()
    for ago, chosen in zip(reversed(range(ids.shape[0])), ids.tolist(), strict=True):
        active = {expert for expert in chosen if expert >= 0}
        for expert in active:
            at = start + expert
            value[at] = used(int(value[at]), wrap(now - ago * per_step), state.bump.numpy())
        recent |= active

    def worth(expert: int) -> int:
        return wrap(int(value[start + expert]) - now)

    seeds = sorted(e for e in recent if 0 <= slot_of[start + e] < ring)
    mine = [e for e in range(experts) if slot_of[start + e] >= ring]
    _set(waves.seeds, dict.fromkeys(seeds, 1) | dict.fromkeys(mine, 2), 0)
    limit, hand, room = int(state.limit), int(state.hand), max(0, share - len(mine))
    window = [ring + (hand + place) % (limit - ring) for place in range(min(WINDOW, limit - ring))]
    free = [slot for slot in window if owner[slot] < 0][:room]
    seeds.sort(key=lambda e: -worth(e))  # stable: ties to the lower id
    mine.sort(key=worth)
    taken = len(free) + sum(worth(seed) > worth(e) for seed, e in zip(seeds[len(free) :], mine, strict=False))
    targets = [*free, *(int(slot_of[start + e]) for e in mine)]
    slot_of[[start + e for e in mine[: max(0, taken - len(free))]]] = -1
    moves = list(zip(seeds, targets[:taken], strict=False))
    for number, (e, slot) in enumerate(moves):
        source = int(slot_of[start + e])
        waves.moves[number] = torch.tensor([source, slot], dtype=torch.int32)
        owner[slot], owner[source], slot_of[start + e] = start + e, -1, slot
    waves.moved[0] = len(moves)
    if room:
        state.hand.fill_((hand + WINDOW) % limit)


def _set(tensor: Tensor, numbers: dict[int, int], other: int) -> None:
    tensor.copy_(torch.from_numpy(np.array([numbers.get(at, other) for at in range(tensor.shape[0])], np.int32)))
