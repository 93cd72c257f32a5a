"""Elastic device memory: expert slots, attention pages and recurrent states share physical memory, whose border moves.

Every tensor spans the most it may ever hold, in addresses reserved once; only its beginning is backed by memory (and
the scratch slot at the end of the slots). Moving the border unmaps granules at one tensor's end and maps them at
another's: no address changes, so that graphs stay valid and what is kept stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from engine.api import PAGE
from engine.device.driver import DriverError
from engine.device.memory import DeviceMemory, Sizes
from engine.device.virtual import Reservation, VirtualMemory
from engine.memory.resize import DoesNotFit
from engine.models.model import Manifest


@dataclass(frozen=True)
class Shapes:
    """What the memory is for. ``stride``: bytes from one slot to the next, 0 without experts."""

    manifest: Manifest
    dtype: torch.dtype
    stride: int

    @property
    def page_bytes(self) -> int:
        return self.manifest.page_bytes(self.dtype)

    @property
    def state_bytes(self) -> int:
        return self.manifest.slot_bytes


class Division(Protocol):
    """Device memory that is divided. ``sizes`` may be used now, ``most`` ever; ``budget`` bytes of physical memory are
    for it, of which it has ``held``. ``elastic``: what it does not hold, others can have."""

    budget: int

    @property
    def sizes(self) -> Sizes: ...
    @property
    def most(self) -> Sizes: ...
    @property
    def shapes(self) -> Shapes: ...
    @property
    def elastic(self) -> bool: ...
    @property
    def held(self) -> int: ...

    def needed(self, sizes: Sizes) -> int:
        """Bytes that these sizes take, exactly."""

    def check(self, sizes: Sizes) -> None:
        """Raises DoesNotFit for what could not be had even if nobody else used memory."""

    def resize(self, sizes: Sizes) -> None:
        """At a safe point, when nobody needs what lies beyond the new sizes. All or nothing, but for what was there:
        raises DoesNotFit, and DriverError where others have the memory."""

    def free_bytes(self) -> int:
        """Memory of the device that nobody has."""


class Arena:
    """Implements ``Division`` over virtual memory. ``memory``: the tensors, as long as ``most``."""

    elastic = True

    def __init__(
        self,
        virtual: VirtualMemory,
        shapes: Shapes,
        *,
        sizes: Sizes,
        most: Sizes,
        budget: int,
        device: torch.device,
    ) -> None:
        """Raises DoesNotFit and DriverError; nothing is left behind then."""
        self.shapes, self.most, self.budget = shapes, most, budget
        self.sizes = Sizes(0, 0, 0)
        self._virtual = virtual
        manifest = shapes.manifest
        token = manifest.kv_heads * manifest.head_dim * shapes.dtype.itemsize
        pages = [_Span(virtual, PAGE * token, most.pages) for _ in range(2 * manifest.attention_layers)]
        states = [_Span(virtual, size, most.states) for size in manifest.state_components]
        slots = [_Span(virtual, shapes.stride, most.slots, 1)] if shapes.stride else []
        self._spans = {"slots": slots, "pages": pages, "states": states}
        try:
            self.resize(sizes)
        except (DriverError, DoesNotFit):
            self.close()
            raise
        shape = (most.pages, PAGE, manifest.kv_heads, manifest.head_dim)
        keys_values = [span.tensor(shapes.dtype).view(shape) for span in pages]
        self.memory = DeviceMemory(
            slots=slots[0].tensor(torch.uint8).view(most.slots + 1, shapes.stride)
            if slots
            else torch.empty(most.slots + 1, 0, dtype=torch.uint8, device=device),
            keys=tuple(keys_values[: manifest.attention_layers]),
            values=tuple(keys_values[manifest.attention_layers :]),
            states=tuple(
                span.tensor(torch.float32).view(most.states, *each)
                for span, each in zip(states, manifest.recurrent, strict=True)
            ),
        )

    @property
    def held(self) -> int:
        return sum(span.granules for spans in self._spans.values() for span in spans) * self._virtual.granule

    def needed(self, sizes: Sizes) -> int:
        granules = sum(span.needed(getattr(sizes, kind)) for kind, spans in self._spans.items() for span in spans)
        return granules * self._virtual.granule

    def check(self, sizes: Sizes) -> None:
        check_range(sizes, self.most, self._spans["slots"] != [])
        needed = self.needed(sizes)
        if needed > self.budget:
            raise DoesNotFit(f"{describe(sizes)} need {needed} bytes, and there are {self.budget}")

    def resize(self, sizes: Sizes) -> None:
        self.check(sizes)
        spare: list[int] = []
        try:
            for _ in range((self.needed(sizes) - self.held) // self._virtual.granule):
                spare.append(self._virtual.create())
            self._move(sizes, spare)
        finally:
            for handle in spare:
                self._virtual.destroy(handle)
        self.sizes = sizes

    def free_bytes(self) -> int:
        return self._virtual.free_bytes()

    def close(self) -> None:
        """Give everything back; nobody may use the tensors any more."""
        spare: list[int] = []
        self._virtual.synchronize()
        for span in (span for spans in self._spans.values() for span in spans):
            span.clear(spare)
        for handle in spare:
            self._virtual.destroy(handle)

    def _move(self, sizes: Sizes, spare: list[int]) -> None:
        """What shrinks comes first, for what grows is made of it. Undone in reverse order, each span has the very
        granules back that it had."""
        spans = [(span, getattr(sizes, kind)) for kind, spans in self._spans.items() for span in spans]
        spans.sort(key=lambda one: one[0].needed(one[1]) - one[0].granules)
        done: list[tuple[_Span, int]] = []
        self._virtual.synchronize()
        try:
            for span, count in spans:
                before = span.count
                span.resize(count, spare)
                done.append((span, before))
        except DriverError:
            for span, count in reversed(done):
                span.resize(count, spare)
            raise


class FixedArena:
    """Implements ``Division`` without virtual memory: everything was allocated, sizes only say what is used."""

    elastic = False

    def __init__(self, memory: DeviceMemory, shapes: Shapes, sizes: Sizes) -> None:
        self.memory, self.shapes, self.sizes, self.most = memory, shapes, sizes, sizes
        self.budget = self.held = sizes.nbytes(shapes.manifest, shapes.dtype, shapes.stride)

    def needed(self, sizes: Sizes) -> int:
        return sizes.nbytes(self.shapes.manifest, self.shapes.dtype, self.shapes.stride)

    def check(self, sizes: Sizes) -> None:
        check_range(sizes, self.most, self.shapes.stride > 0)

    def resize(self, sizes: Sizes) -> None:
        self.check(sizes)
        self.sizes = sizes

    def free_bytes(self) -> int:
        """None that could be had."""
        return 0


class _Span:
    """The range of one tensor of ``most`` items of ``item`` bytes, and ``scratch`` more at its end, which are always
    there. ``count`` items are backed by memory."""

    def __init__(self, virtual: VirtualMemory, item: int, most: int, scratch: int = 0) -> None:
        self.item, self.count = item, 0
        self._virtual = virtual
        self._nbytes = (most + scratch) * item
        self._total = -(-self._nbytes // virtual.granule)
        self._end = most * item // virtual.granule if scratch else self._total
        """Where the granules of scratch items begin."""
        self._range: Reservation = virtual.reserve(self._total * virtual.granule)
        self._handles: list[int] = []
        self._fixed: list[int] = []

    @property
    def granules(self) -> int:
        """Granules that it has."""
        return len(self._handles) + len(self._fixed)

    def needed(self, count: int) -> int:
        return self._head(count) + self._total - self._end

    def resize(self, count: int, spare: list[int]) -> None:
        """Takes granules from the end of ``spare``, or puts them there."""
        if count and not self._fixed:
            self._fixed = self._map(self._end, self._total - self._end, spare)
        head, have = self._head(count), len(self._handles)
        if head < have:
            self._virtual.unmap(self._address(head), have - head)
            spare += self._handles[head:]
            del self._handles[head:]
        else:
            self._handles += self._map(have, head - have, spare)
        self.count = count

    def clear(self, spare: list[int]) -> None:
        """Let go of everything, scratch items too."""
        self.resize(0, spare)
        if self._fixed:
            self._virtual.unmap(self._address(self._end), len(self._fixed))
        spare += self._fixed
        self._fixed = []

    def tensor(self, dtype: torch.dtype) -> Tensor:
        return self._range.tensor()[: self._nbytes].view(dtype)

    def _map(self, at: int, count: int, spare: list[int]) -> list[int]:
        if count == 0:
            return []
        handles = spare[-count:]
        self._virtual.map(self._address(at), handles)
        del spare[-count:]
        return handles

    def _head(self, count: int) -> int:
        return min(-(-count * self.item // self._virtual.granule), self._end)

    def _address(self, granule: int) -> int:
        return self._range.address + granule * self._virtual.granule


def check_range(sizes: Sizes, most: Sizes, slots: bool) -> None:
    """Raises DoesNotFit for what is below one or above the most. ``slots``: whether there are any."""
    for kind in fields(sizes):
        value, limit = getattr(sizes, kind.name), getattr(most, kind.name)
        least = min(1, limit) if slots or kind.name != "slots" else 0
        if not least <= value <= limit:
            raise DoesNotFit(f"{value} {kind.name}: there may be {least} to {limit}")


def describe(sizes: Sizes) -> str:
    return f"{sizes.slots} slots, {sizes.pages} pages and {sizes.states} states"
