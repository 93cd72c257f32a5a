"""Offloaded experts for more rows than one decision takes: layer by layer, wave by wave (``engine.experts.waves``).

Copies run on streams of their own, ahead of the products; the CPU computes its experts meanwhile. What is brought, and
who computes it, is decided on the device, and the host waits for nothing. Whole layers that come ahead come by the copy
engine, and where that copies to, the host decides at the beginning of a call (``engine.experts.copies``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.device.driver import Driver
from engine.experts.copies import Came, Copies, Side
from engine.experts.cost import Costs, Ways, uniform
from engine.experts.executor import Executor
from engine.experts.pool import Pool
from engine.experts.residency import ONE, Decision, Residency
from engine.experts.split import Split
from engine.experts.waves import TAIL, Fetches, Waves, share_of
from engine.kernels import experts as kernels
from engine.kernels import grouped, pairs, waves
from engine.kernels.mailbox import add_answer
from engine.kernels.pairs import Ordered

CHUNK = 8192
"""Rows of one product at most: what lies between the products takes memory."""
SUFFIX = 1024
"""Rows that an executor should take, for the CPU to help with calls of up to so many."""
_RING = 4
"""The ring has this part of the slots, but room for one layer, if they are as many, and not for more than 5/4 of one:
what each misses is far less, so that the link is a layer ahead all the same."""
_SURE = 0.9
"""Of its experts that a layer is to use, for some to be brought before they are known while the CPU helps."""
_LISTS = 6
"""Of what is brought. One that is written again was read two layers before."""
_MANY = 16
"""Experts that came at once, for how long they took to tell what one takes."""
_PROBED = 1
"""The layer whose computation, and the one whose distance from the layer before it, is timed."""


class Prefill:
    """``arrivals`` int32 [1]: zeros, as for ``publish``; may be shared with decoding."""

    def __init__(
        self, pool: Pool, executor: Executor, driver: Driver, split: Split, residency: Residency, slots: Tensor,
        arrivals: Tensor,
    ) -> None:  # fmt: skip
        device = slots.device
        self._pool, self._executor, self._driver, self._split = pool, executor, driver, split
        self._residency, self._slots, self._arrivals = residency, slots, arrivals
        self.waves = Waves.create(pool.layers, pool.experts, device)
        self._lists = [Fetches.create(pool.experts, device) for _ in range(_LISTS)]
        self._where = torch.zeros(2, pool.experts, dtype=torch.int32, device=device)
        self._given, self._result = grouped.precision(pool.layout, device)
        self._side, self._probe = Side(device), _Probe(device)
        self._copies = Copies(pool, driver, residency, self.waves, slots)
        self._told = torch.zeros(pool.layers, 4, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._rows = 0  # of the last whole call, until it is learnt from
        self._turn, self._layer = 0, pool.layers
        self._ahead: Came = {}
        self.streamed, self._expected = False, 1.0
        """Whether the last call brought whole layers ahead, and how long it was expected to take, in ns."""
        self._from_pool = self._mailbox = 0
        self.ahead: bool | None = None
        """Whether whole layers are brought ahead, where they can be; None: if that is faster."""
        self.costs, self._ways = Costs(*[1.0] * 7), Ways()
        self._resident = 0.0
        self.resize(residency.slots)

    def start(self, pool: int, mailbox: int, pieces: Sequence[int]) -> None:
        """Their addresses for the device, and where pieces of the pool begin. Measures the CPU."""
        self._from_pool, self._mailbox = pool, mailbox
        self._copies.start(pieces)
        self.follow(Costs.measured(self._pool.layout, self._split, self._executor))

    def follow(self, costs: Costs | None = None) -> None:
        """These costs, of which nothing was measured yet, or as the split was fixed or freed, from now on in the order
        of the stream."""
        if costs is not None:
            self.costs, self._ways = costs, Ways()
        fixed = self._split.fixed
        table = self.costs.table(-1 if fixed is None else round(fixed * ONE))
        self.waves.costs.copy_(torch.tensor(table, dtype=torch.int32), non_blocking=True)

    def resize(self, limit: int) -> None:
        """So many slots may be used: ``limit`` from now on."""
        self.limit, experts = limit, self._pool.experts
        self._ring = min(limit, experts + experts // 4, max(limit // _RING, experts))
        self._whole = self._ring >= experts
        self._fits = limit >= len(self._pool)  # nothing has to go for others
        self._room = self._ring if self._whole else self._ring // 2
        self._share = share_of(self._pool.layers, experts, self._ring, limit)
        self._copies.settle()

    @property
    def possible(self) -> bool:
        """A wave needs a slot, and another one the next."""
        return self._room > 0 and self._from_pool != 0

    def expected(self, rows: int) -> tuple[float, float]:
        """ns that a call takes when only what is routed is brought, and when whole layers are, ahead; where as much is
        there as at the last one."""
        costs, experts, layers, ranks = self.costs, self._pool.experts, self._pool.layers, self._executor.layout.ranks
        routed = costs.routed(rows, ranks, experts, self._resident, self._cpu_takes(rows))
        return layers * routed, layers * costs.streamed(rows, ranks, experts, self._resident, layers)

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int, base: Tensor | None = None) -> Tensor:
        """As ``Ops.experts``, x of 16 bits or 32; contiguous tensors, a call's layers in order. Added to ``base``, in
        its memory."""
        residency, rows, at = self._residency, x.shape[0], self._where
        if layer <= self._layer:  # a call begins; a rehearsal leaves layers out
            self._begin(rows)
        self._layer = layer
        if layer == _PROBED:
            self._probe.mark("begin")
        streams = self.streamed
        takes = self._cpu_takes(rows) and not streams
        if streams and layer == 0:
            self._ahead |= self._copies.before(layer, self._ring, self.limit)
        come = self._ahead.pop(layer, None)
        parts = self._sorted(x, ids, weights)
        counts = parts[0].pairs.counts if len(parts) == 1 else _sum([part.pairs.counts for part in parts])
        waves.divide(residency, self.waves, counts, layer, at[0], cpu=takes)
        if takes:
            self._ask(x, ids, weights, layer)

        y = torch.empty_like(x, dtype=torch.float32) if base is None else base
        last = 0 if streams else -(-self._pool.experts // self._room)
        for wave in range(last + 1):
            coming = self._bring(counts, layer, at[(wave + 1) % 2], first=wave == 0) if wave < last else None
            self._side.join(come)
            come = coming
            timed = layer == _PROBED and wave == 0
            if timed:
                self._probe.mark("computes")
            for part in parts:
                self._compute(part, at[wave % 2], y, add=wave > 0 or base is not None)
            if timed:
                self._probe.mark("computed")

        box = self._executor.layout
        if takes:
            kernels.arrive(self._mailbox, box)
        ring, share = (0 if self._fits else self._ring, 0) if streams else (self._ring, self._share)
        waves.keep(residency, self.waves, ids[-TAIL:], rows, layer, ring, share)
        waves.move(self._slots, self.waves)
        if streams and layer + 1 < self._pool.layers:
            self._ahead |= self._copies.before(layer + 1, self._ring, self.limit)
        elif layer + 1 < self._pool.layers:
            self._bring_ahead(counts, layer + 1, self._ahead_of(rows))
        if takes:
            self._driver.wait64(self._side.current(), self._mailbox + box.done, 1)
            add_answer(y, self.waves.asked, self._mailbox, box)
        if layer in (_PROBED - 1, _PROBED):
            self._probe.mark("end" if layer < _PROBED else "over")
        if layer == self._pool.layers - 1:
            self._told.copy_(self.waves.told, non_blocking=True)
            self._probe.mark("last")
            self._rows = rows
        return y

    def _begin(self, rows: int) -> None:
        found = self._copies.begin()
        self.learn()  # all before this is over
        self._probe.mark("first")
        # What is in the ring makes room for others, unless there is room for all.
        kept = found >= (0 if self._fits else self._ring)
        self._resident = np.count_nonzero(kept) / len(self._pool)
        expected = self.expected(rows)
        self.streamed = self._choose(rows, expected)
        self._expected = expected[self.streamed]

    def _choose(self, rows: int, expected: tuple[float, float]) -> bool:
        if not self._whole or self.ahead is not None:
            return self._whole and bool(self.ahead)
        if self._split.fixed is not None:  # what is repeated does not depend on what things took
            return not self._cpu_takes(rows)
        return self._ways.choose(rows, expected)

    def learn(self) -> bool:
        """After a step; from the whole call in it, if there was one. Whether. Part of a prompt has no results that
        anybody waits for: where the call is not over yet, it is when the next one begins."""
        rows = self._rows
        if not rows or not self._probe.over("last"):
            return rows > 0
        self._rows = 0
        layout, box, experts = self._pool.layout, self._executor.layout, self._pool.experts
        told = self._told.numpy()
        alike = uniform(rows, box.ranks, experts)
        costs = self.costs.learnt(told, self._executor.times, layout.parts, alike, rows * box.ranks)
        found, link, left, asked = (int(number) for number in told[min(_PROBED, len(told) - 1)])
        expected = costs.divided(found, link, left, asked, rows * box.ranks)
        for name, ns in self._probe.read().items():
            if name == "between":
                costs = costs.with_between(ns / rows)
            elif name == "whole" and left and alike > _SURE * experts:  # of few rows it would be the time of launches
                costs = costs.with_handed((ns - expected) / rows)
            elif name == "computing" and 2 * found > experts:  # of few experts, too
                costs = costs.with_device(ns, found, rows * box.ranks * found // (found + link + left))
            elif name == "call":
                self._ways.learn(self.streamed, rows, ns / self._expected)
        took, came = self._copies.timed()
        self.costs = costs.with_ahead(took, came) if came > _MANY else costs
        self.follow()
        return True

    def settle(self) -> None:
        """After a call that may have ended early: what was brought ahead comes before all that follows."""
        for come in self._ahead.values():
            self._side.join(come)
        self._ahead.clear()
        self._copies.settle()

    def _cpu_takes(self, rows: int) -> bool:
        return rows <= self._executor.layout.rows and self._split.fixed != 1.0

    def _sorted(self, x: Tensor, ids: Tensor, weights: Tensor) -> list[_Part]:
        layout, parts = self._pool.layout, []
        for at in (slice(first, first + CHUNK) for first in range(0, x.shape[0], CHUNK)):
            some, arranged = ids[at], grouped.arrange(x[at], layout, self._given)
            inner = arranged.new_empty(some.numel(), layout.inner)
            out = arranged.new_empty(some.numel(), layout.hidden, dtype=self._result)
            ordered = pairs.sort_pairs(some, self._pool.experts)
            parts.append(_Part(at, arranged, some, weights[at], ordered, inner, out))
        return parts

    def _ask(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> None:
        """The CPU for its experts of all rows."""
        plan = waves.left(ids, self.waves)
        request = Decision(slot=ids, gpu_parts=ids, plan=plan, fetch=ids, counts=self.waves.asked)
        kernels.publish(x, weights, request, layer, self._arrivals, self._mailbox, self._executor.layout)

    def _bring(self, counts: Tensor, layer: int, where: Tensor, *, first: bool) -> torch.Event | None:
        """The next wave of a layer: to where the ring has nothing that is still to be computed."""
        base, fetches = 0 if self._whole else self._turn % 2 * self._room, self._list()
        waves.take(
            self._residency, self.waves, fetches, counts, layer, where, base, self._room, first=first, ahead=False
        )
        return self._side.run(lambda stream: self._fetch(fetches, stream), after=self._side.mark())

    def _ahead_of(self, rows: int) -> int:
        """How many of the next layer's experts are brought before they are known, if not all: what the link brings in
        the time between two layers' experts."""
        costs, experts = self.costs, self._pool.experts
        sure = costs.spread * uniform(rows, self._executor.layout.ranks, experts) >= _SURE * experts
        return min(int(costs.between * rows / costs.link), experts - 1) if sure and self._whole else 0

    def _bring_ahead(self, counts: Tensor, layer: int, room: int) -> None:
        """Experts of a layer before they are known, in place of what the layer before it has computed."""
        if not room:
            return
        where, fetches = self._where[0], self._list()  # where is not written
        waves.take(self._residency, self.waves, fetches, counts, layer, where, 0, room, first=False, ahead=True)
        self._ahead[layer] = self._side.run(lambda stream: self._fetch(fetches, stream), after=self._side.mark())

    def _list(self) -> Fetches:
        self._turn += 1
        return self._lists[self._turn % _LISTS]

    def _fetch(self, fetches: Fetches, stream: int) -> None:
        waves.fetch(self._from_pool, self._pool.stride, self._slots, fetches, self._pool.layout.nbytes, stream)

    def _compute(self, part: _Part, where: Tensor, y: Tensor, *, add: bool) -> None:
        """What the experts at ``where`` give, in place of what y has or added to it."""
        layout, groups = self._pool.layout, grouped.Groups(part.pairs.order, part.pairs.start, where)
        grouped.gate_up(part.x, self._slots, layout, groups, part.inner)
        grouped.down(part.inner, self._slots, layout, groups, part.out)
        pairs.combine_pairs(part.out, part.ids, where, part.weights, y[part.rows], add=add)


@dataclass(frozen=True)
class _Part:
    """Rows of a call whose pairs are sorted together; ``x`` as ``grouped.arrange`` gives it; ``inner`` and ``out``: for
    what lies between products."""

    rows: slice
    x: Tensor
    ids: Tensor
    weights: Tensor
    pairs: Ordered
    inner: Tensor
    out: Tensor


def _sum(counts: list[Tensor]) -> Tensor:
    return torch.stack(counts).sum(dim=0, dtype=torch.int32)


class _Probe:
    """How long some work of a call took on the device; nothing without one."""

    _SPANS = (
        ("between", "end", "begin"), ("computing", "computes", "computed"), ("whole", "begin", "over"),
        ("call", "first", "last"),
    )  # fmt: skip

    def __init__(self, device: torch.device) -> None:
        names = {name for _, *ends in self._SPANS for name in ends} if device.type == "cuda" else ()
        self._events = {name: torch.Event(device, enable_timing=True) for name in names}
        self._marked: set[str] = set()

    def mark(self, name: str) -> None:
        if name in self._events:
            self._events[name].record()
            self._marked.add(name)

    def over(self, name: str) -> bool:
        """Whether the device has passed this mark."""
        return name not in self._events or self._events[name].query()

    def read(self) -> dict[str, float]:
        """ns of what was marked since the last time and is done."""
        found = {
            name: 1e6 * self._events[begin].elapsed_time(self._events[end])
            for name, begin, end in self._SPANS
            if {begin, end} <= self._marked and self._events[end].query()
        }
        self._marked.clear()
        return found
