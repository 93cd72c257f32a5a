"""Which experts are on the device, and where each one that a layer needs is computed.

One slot space holds the experts of all layers, keyed by ``flat = layer * experts + expert``. Of the experts that a call
misses, ``F`` parts go over the link, most recently active experts first. They replace the least valuable of a window of
slots and stay, the last one perhaps in part: later uses miss, and bring, the rest of it. Where a window has no more
slots, one goes to the scratch slot and does not stay. The CPU computes the other parts.

Integers only: ``resolve`` here is the definition; engine/kernels/resolve.py does the same on the device bit for bit.

An expert's value is log2 of how often it was used, each use halved once every half-life, in 1/256 of a half-life on a
time axis that grows: value = log2(2^value + 2^now) with ``bump`` as its table (Lee et al., "LRFU", IEEE Transactions on
Computers 50(12), 2001). With a table of zeros it is the last use, and the policy LRU. Times and values are 32 bits that
wrap; only differences count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.experts.layout import Layout

WINDOW = 128
"""Slots that one call looks through for victims."""
OLDEST = (1 << 23) - 2
"""Values that lie farther below the present than this are all the same to the choice of victims."""
MOST_PAIRS = 256
"""Rows times ranks of one call."""
ONE = 1 << 16
"""A share of 1."""
SHIFT = 4
ENTRIES = 160
SPAN = ENTRIES << SHIFT
"""Uses farther apart than this do not add up: 10 half-lives. A new expert was last used so long ago."""
DEFAULT = "decayed-32"
"""The policy to begin with."""
HITS, FETCHED, CPU, BYTES = range(4)
"""Places in ``counters``: parts found on the device, parts fetched, parts left to the CPU, bytes fetched."""

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Policy:
    """How far the time moves from one token to the next, and from one layer to the next; what a use adds."""

    name: str
    per_step: int
    per_layer: int
    bump: tuple[int, ...]


def lru(layers: int) -> Policy:
    return Policy("lru", layers, 1, (0,) * ENTRIES)


def decayed(half_life: int) -> Policy:
    """Frequency with a half-life in tokens, a power of two of at most 256."""
    if half_life not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        raise ValueError(f"the half-life must be a power of two of at most 256 tokens, not {half_life}")
    bump = tuple(round(256 * math.log2(1 + 2 ** (-(index << SHIFT) / 256))) for index in range(ENTRIES))
    return Policy(f"decayed-{half_life}", 256 // half_life, 0, bump)


def policies(layers: int) -> Mapping[str, Policy]:
    return {policy.name: policy for policy in (lru(layers), decayed(32), decayed(128))}


@dataclass(frozen=True)
class Residency:
    """``slot_of`` int32 [layers * experts] and ``owner`` int32 [slots], each other's inverse, -1 for none; ``value``
    int32 [layers * experts]; ``clock`` and ``hand`` int32 [1]: tokens so far, where the next window begins;
    ``counters`` int64 [4]; ``work`` int32 [layers, 3]: a layer's last call, as the first three counters; ``share``
    int32 [layers]: what goes over the link, in 1/ONE of the missing parts; ``pace`` int32 [2] and ``bump`` int32
    [ENTRIES]: the policy; ``part_bytes`` int32 [parts + 1]: bytes of an expert's first so many parts; ``limit`` int32
    [1]: slots from this one on are not used; ``routed`` int32 [layers, MOST_PAIRS]: the ids of a layer's last call, -1
    after them; ``lacks`` int32 [layers * experts]: the last parts of a resident expert that are not there, 0 of
    others; ``told``: the memory of ``routed`` and ``work``, of which the host is told at once."""

    experts: int
    slot_of: Tensor
    owner: Tensor
    value: Tensor
    clock: Tensor
    hand: Tensor
    counters: Tensor
    work: Tensor
    share: Tensor
    pace: Tensor
    bump: Tensor
    part_bytes: Tensor
    limit: Tensor
    routed: Tensor
    lacks: Tensor
    told: Tensor

    @staticmethod
    def create(layout: Layout, layers: int, experts: int, slots: int, device: torch.device) -> Residency:
        """Nothing is resident yet. ``slots`` without the scratch slot, which comes after them."""
        if slots < 1:
            raise ValueError("experts need at least one slot on the device besides the scratch slot")

        def full(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        told = full(-1, layers * (MOST_PAIRS + 3))
        routed, work = of_told(told, layers)
        residency = Residency(
            experts=experts,
            slot_of=full(-1, layers * experts),
            owner=full(-1, slots),
            value=full(-SPAN, layers * experts),
            clock=full(0, 1),
            hand=full(0, 1),
            counters=full(0, 4, dtype=torch.int64),
            work=work.zero_(),
            share=full(ONE, layers),
            pace=full(1, 2),
            bump=full(0, ENTRIES),
            part_bytes=torch.tensor(layout.offsets, dtype=torch.int32, device=device),
            limit=full(slots, 1),
            routed=routed,
            lacks=full(0, layers * experts),
            told=told,
        )
        residency.follow(policies(layers)[DEFAULT])
        return residency

    @property
    def layers(self) -> int:
        return self.share.shape[0]

    @property
    def slots(self) -> int:
        return self.owner.shape[0]

    @property
    def parts(self) -> int:
        return self.part_bytes.shape[0] - 1

    def follow(self, policy: Policy) -> None:
        """Change the policy, in place and in the order of the stream. What is resident stays; how long ago experts were
        used is kept on the new policy's axis of time, how often is not."""
        pace = torch.tensor([policy.per_step, policy.per_layer], dtype=torch.int32)
        behind = (self.value - self.clock * self.pace[:1]).clamp_(max=0).long()
        moved = behind * policy.per_step // self.pace[:1]
        self.value.copy_(torch.where(behind <= -SPAN, moved.clamp(-OLDEST, -SPAN), moved))
        self.clock.zero_()
        self.pace.copy_(pace, non_blocking=True)
        self.bump.copy_(torch.tensor(policy.bump, dtype=torch.int32), non_blocking=True)

    def resize(self, limit: int) -> None:
        """Use the first ``limit`` slots and no others, in the order of the stream and without waiting for it. What the
        others held is no longer resident; they are free when they come back. Raises ValueError."""
        if not 1 <= limit <= self.slots:
            raise ValueError(f"experts can have 1 to {self.slots} slots, not {limit}")
        gone = self.slot_of >= limit
        self.slot_of.masked_fill_(gone, -1)
        self.lacks.masked_fill_(gone, 0)
        self.owner[limit:].fill_(-1)
        self.hand.remainder_(limit)
        self.limit.fill_(limit)

    def drop_partial(self) -> None:
        """Only whole experts stay, in the order of the stream."""
        partial, held = self.lacks > 0, self.owner.clamp(min=0)
        self.owner.masked_fill_((self.owner >= 0) & partial[held], -1)
        self.slot_of.masked_fill_(partial, -1)
        self.lacks.zero_()

    def check(self) -> None:
        """Raises AssertionError unless the maps are each other's inverse within the limit; waits for the device."""
        slot_of, owner, limit = self.slot_of.cpu(), self.owner.cpu(), int(self.limit)
        held = (owner >= 0).nonzero().flatten()
        resident = (slot_of >= 0).nonzero().flatten()
        if len(held) != len(resident) or not torch.equal(slot_of[owner[held].long()].long(), held):
            raise AssertionError(f"{len(resident)} experts are said to be in {len(held)} slots that say otherwise")
        if (self.lacks.cpu()[slot_of < 0] != 0).any() or not 0 <= int(self.lacks.max()) < self.parts:
            raise AssertionError("parts are said to be missing of experts of which none is there")
        if (len(held) and int(held[-1]) >= limit) or not 0 <= int(self.hand) < limit:
            raise AssertionError(f"a slot or the window lies beyond the limit of {limit} slots")


@dataclass(frozen=True)
class Decision:
    """What ``resolve`` writes. ``slot`` and ``gpu_parts`` int32 [rows, k]: the device computes the first ``gpu_parts``
    parts from that slot, -1 for none; ``plan`` int32 [rows, k, 2]: expert and first part for the CPU, -1 for none;
    ``fetch`` int32 [rows * k, 3]: (slot, flat, 8 * first + end), parts [first, end) to bring; ``counts`` int32 [2]:
    fetches, and rows' experts that the CPU has to compute."""

    slot: Tensor
    gpu_parts: Tensor
    plan: Tensor
    fetch: Tensor
    counts: Tensor

    @staticmethod
    def create(rows: int, ranks: int, device: torch.device) -> Decision:
        if rows * ranks > MOST_PAIRS:
            raise ValueError(f"{rows} rows of {ranks} experts are more than {MOST_PAIRS} in one call")

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        pairs = rows * ranks
        return Decision(empty(rows, ranks), empty(rows, ranks), empty(rows, ranks, 2), empty(pairs, 3), empty(2))


def of_told(told: Tensor, layers: int) -> tuple[Tensor, Tensor]:
    """``routed`` and ``work`` in it."""
    routed, work = torch.split(told, [layers * MOST_PAIRS, layers * 3])
    return routed.view(layers, MOST_PAIRS), work.view(layers, 3)


def wrap(number: int) -> int:
    """As 32 bits, signed."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def used(value: int, now: int, bump: Sequence[int] | Ints) -> int:
    """The value of an expert after its use."""
    ahead = wrap(now - value)
    if ahead >= 0:
        return wrap(now + int(bump[min(ahead >> SHIFT, ENTRIES - 1)]))
    return wrap(value + int(bump[min(-ahead >> SHIFT, ENTRIES - 1)]))


def link_parts(units: int, share: int) -> int:
    """Of so many missing parts, those that go over the link: ``units * share``, halves up."""
    return (units * share + ONE // 2) >> 16


def resolve(state: Residency, ids: Tensor, layer: int, decision: Decision) -> None:
    """Decide for one layer and account for it in ``state``; CPU tensors. ``ids`` int32 [rows, k]: a row's experts, all
    different; -1 is skipped. A call of layer 0 begins a token."""
    slot_of, owner, value, lacks = (t.numpy() for t in (state.slot_of, state.owner, state.value, state.lacks))
    parts, first_flat = state.parts, layer * state.experts
    if layer == 0:
        state.clock.add_(1)
    per_step, per_layer = (int(number) for number in state.pace)
    now = wrap(int(state.clock) * per_step + layer * per_layer)

    active = sorted({expert for expert in ids.flatten().tolist() if expert >= 0})
    flats = {expert: first_flat + expert for expert in active}
    there = {expert: parts - int(lacks[flat]) if slot_of[flat] >= 0 else 0 for expert, flat in flats.items()}
    where = {expert: (int(slot_of[flat]), there[expert]) for expert, flat in flats.items()}
    missing = [expert for expert in active if there[expert] < parts]
    missing.sort(key=lambda expert: wrap(now - int(value[flats[expert]])))  # stable: ties to the lower id
    units = sum(parts - there[expert] for expert in missing)
    budget, limit = link_parts(units, int(state.share[layer])), int(state.limit)
    kept = {int(slot_of[flat]) for flat in flats.values()}
    victims = [*_victims(owner, value, limit, int(state.hand), now, kept), state.slots]  # the last one: scratch

    fetch: list[int] = []
    taken = 0
    for expert in missing:
        flat, came = flats[expert], min(budget, parts - there[expert])
        if came == 0:
            break
        budget -= came
        slot, last = int(slot_of[flat]), there[expert] + came
        if slot < 0:
            if taken == len(victims):
                continue
            slot = victims[taken]
            taken += 1
            if slot < state.slots:
                if owner[slot] >= 0:
                    lacks[owner[slot]], slot_of[owner[slot]] = 0, -1
                owner[slot], slot_of[flat] = flat, slot
        if slot < state.slots:
            lacks[flat] = parts - last
        where[expert] = slot, last
        fetch += slot, flat, 8 * there[expert] + last

    bump = state.bump.tolist()
    for flat in flats.values():
        value[flat] = used(int(value[flat]), now, bump)
    if taken and victims[0] < state.slots:
        state.hand.fill_((int(state.hand) + WINDOW) % limit)
    on_link = sum(where[expert][1] - there[expert] for expert in missing)
    counts = (sum(there.values()), on_link, units - on_link)
    ends = state.part_bytes.tolist()
    moved = sum(ends[where[expert][1]] - ends[there[expert]] for expert in missing)
    state.counters.add_(torch.tensor([*counts, moved]))
    state.work[layer] = torch.tensor(counts, dtype=torch.int32)
    state.routed[layer].fill_(-1)
    state.routed[layer, : ids.numel()] = ids.flatten()

    nowhere = (-1, 0)
    pairs = [where.get(expert, nowhere) for expert in ids.flatten().tolist()]
    plan = [
        (expert, done) if expert >= 0 and done < parts else nowhere
        for expert, (_, done) in zip(ids.flatten().tolist(), pairs, strict=True)
    ]
    _fill(decision.slot, [slot for slot, _ in pairs])
    _fill(decision.gpu_parts, [done for _, done in pairs])
    _fill(decision.plan, [number for entry in plan for number in entry])
    decision.fetch.flatten()[: len(fetch)] = torch.tensor(fetch, dtype=torch.int32)
    _fill(decision.counts, [len(fetch) // 3, sum(expert >= 0 for expert, _ in plan)])


def _victims(owner: Ints, value: Ints, limit: int, hand: int, now: int, kept: set[int]) -> list[int]:
    """The slots of the window that may go: free ones, then the least valuable ones; of equals those that come first."""

    def order(slot: int) -> tuple[bool, int]:
        holds = int(owner[slot])
        return holds >= 0, max(-OLDEST, min(wrap(int(value[holds]) - now), OLDEST)) if holds >= 0 else 0

    window = [(hand + step) % limit for step in range(min(WINDOW, limit))]
    return sorted((slot for slot in window if slot not in kept), key=order)  # stable


def _fill(tensor: Tensor, numbers: list[int]) -> None:
    tensor.copy_(torch.tensor(numbers, dtype=torch.int32).view(tensor.shape))
