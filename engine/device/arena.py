"""Elastic device memory: expert slots, attention pages and recurrent states share physical memory, whose border moves.

Every tensor spans the most it may ever hold, in addresses reserved once; only its beginning is backed by memory (and
the scratch slot at the end of the slots). Moving the border unmaps granules at one tensor's end and maps them at
another's: no address changes, so that graphs stay valid and what is kept stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self._extents = extents(shapes, most, virtual.granule)
        self._spans = {kind: [_Span(virtual, extent) for extent in every] for kind, every in self._extents.items()}
        try:
            self.resize(sizes)
        except (DriverError, DoesNotFit):
            self.close()
            raise
        self.memory = self._tensors(device)

    @property
    def held(self) -> int:
        return sum(span.granules for spans in self._spans.values() for span in spans) * self._virtual.granule

    def needed(self, sizes: Sizes) -> int:
        return needed(self._extents, sizes) * self._virtual.granule

    def check(self, sizes: Sizes) -> None:
        check_range(sizes, self.most, self.shapes.stride > 0)
        if self.needed(sizes) > self.budget:
            raise DoesNotFit(f"{describe(sizes)} need {self.needed(sizes)} bytes, and there are {self.budget}")

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

    def _tensors(self, device: torch.device) -> DeviceMemory:
        shapes, most = self.shapes, self.most
        manifest, layers = shapes.manifest, shapes.manifest.attention_layers
        shape = (most.pages, PAGE, manifest.kv_heads, manifest.head_dim)
        pages = [span.tensor(shapes.dtype).view(shape) for span in self._spans["pages"]]
        states = zip(self._spans["states"], manifest.recurrent, strict=True)
        slots = [span.tensor(torch.uint8) for span in self._spans["slots"]]
        return DeviceMemory(
            slots=(slots[0] if slots else torch.empty(0, dtype=torch.uint8, device=device)).view(
                most.slots + 1, shapes.stride
            ),
            keys=tuple(pages[:layers]),
            values=tuple(pages[layers:]),
            states=tuple(span.tensor(torch.float32).view(most.states, *each) for span, each in states),
        )

    def _move(self, sizes: Sizes, spare: list[int]) -> None:
        """What shrinks comes first, for what grows is made of it. Undone in reverse order, each span has the very
        granules back that it had."""
        spans = [(span, getattr(sizes, kind)) for kind, spans in self._spans.items() for span in spans]
        spans.sort(key=lambda one: one[0].extent.needed(one[1]) - one[0].granules)
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


@dataclass(frozen=True)
class Extent:
    """One tensor of ``most`` items of ``item`` bytes, and ``scratch`` more at its end, which are always there, cut into
    granules."""

    item: int
    most: int
    scratch: int
    granule: int

    @property
    def nbytes(self) -> int:
        return (self.most + self.scratch) * self.item

    @property
    def total(self) -> int:
        """Granules of all of it."""
        return -(-self.nbytes // self.granule)

    @property
    def end(self) -> int:
        """Where the granules of scratch items begin."""
        return self.most * self.item // self.granule if self.scratch else self.total

    def head(self, count: int) -> int:
        """Granules at the beginning, for so many items."""
        return min(-(-count * self.item // self.granule), self.end)

    def needed(self, count: int) -> int:
        """Granules, for so many items."""
        return self.head(count) + self.total - self.end


def extents(shapes: Shapes, most: Sizes, granule: int) -> Mapping[str, Sequence[Extent]]:
    """Of what is counted in ``Sizes``: slots; keys and values, layer by layer; states."""
    manifest = shapes.manifest
    page = manifest.page_components(shapes.dtype)
    return {
        "slots": [Extent(shapes.stride, most.slots, 1, granule)] if shapes.stride else [],
        "pages": [Extent(size, most.pages, 0, granule) for size in page],
        "states": [Extent(size, most.states, 0, granule) for size in manifest.state_components],
    }


def needed(of: Mapping[str, Sequence[Extent]], sizes: Sizes) -> int:
    """Granules."""
    return sum(extent.needed(getattr(sizes, kind)) for kind, every in of.items() for extent in every)


class _Span:
    """The range of one tensor. ``count`` items are backed by memory."""

    def __init__(self, virtual: VirtualMemory, extent: Extent) -> None:
        self.extent, self.count = extent, 0
        self._virtual = virtual
        self._range: Reservation = virtual.reserve(extent.total * virtual.granule)
        self._handles: list[int] = []
        self._fixed: list[int] = []

    @property
    def granules(self) -> int:
        """Granules that it has."""
        return len(self._handles) + len(self._fixed)

    def resize(self, count: int, spare: list[int]) -> None:
        """Takes granules from the end of ``spare``, or puts them there."""
        extent = self.extent
        if count and not self._fixed:
            self._fixed = self._map(extent.end, extent.total - extent.end, spare)
        head, have = extent.head(count), len(self._handles)
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
            self._virtual.unmap(self._address(self.extent.end), len(self._fixed))
        spare += self._fixed
        self._fixed = []

    def tensor(self, dtype: torch.dtype) -> Tensor:
        return self._range.tensor()[: self.extent.nbytes].view(dtype)

    def _map(self, at: int, count: int, spare: list[int]) -> list[int]:
        if count == 0:
            return []
        handles = spare[-count:]
        self._virtual.map(self._address(at), handles)
        del spare[-count:]
        return handles

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
