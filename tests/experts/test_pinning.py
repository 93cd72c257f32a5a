"""A pool that is pinned whole, in part, or not at all; and memory of several nodes, by a system made up."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from engine.device.driver import DriverError
from engine.device.fake import FakeDriver
from engine.experts.layout import FORMATS, Layout
from engine.experts.numa import interleave, memory_nodes
from engine.experts.pinning import pin
from engine.experts.pool import Pool
from engine.experts.split import Split

LAYERS = 7


class Limited(FakeDriver):
    """Pins so many bytes altogether. ``apart``: where the device sees a piece, it is not beside the one before."""

    def __init__(self, limit: int, apart: int = 0) -> None:
        super().__init__()
        self.limit, self.apart = limit, apart

    @property
    def pinned(self) -> int:
        return sum(self._registered.values())

    def register(self, address: int, nbytes: int) -> int:
        if self.pinned + nbytes > self.limit:
            raise DriverError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
        return super().register(address, nbytes) + self.apart * len(self._registered)


@pytest.fixture(scope="module")
def pool() -> Pool:
    made = Pool(Layout(FORMATS["mxfp4"], 64, 96), LAYERS, 3)  # layers end within pages
    assert made.experts * made.stride % 4096
    return made


@pytest.mark.parametrize("piece", [1, 1 << 16, 1 << 30])
@pytest.mark.parametrize("layers", range(LAYERS + 1))
def test_as_many_layers_as_can_be(pool: Pool, layers: int, piece: int) -> None:
    layer = pool.experts * pool.stride
    driver, seen = Limited(-(-layers * layer // 4096) * 4096), list[tuple[int, int]]()
    pinned = pin(driver, pool, lambda done, total: seen.append((done, total)), piece)
    assert pinned.layers == layers and (pinned.why is None) == (layers == LAYERS)
    assert pinned.pointer == (pool.address(0) if layers else 0)
    assert layers * layer <= driver.pinned < layers * layer + 4096
    assert seen == sorted(set(seen)) and seen[-1:] == [(layers, LAYERS)][:layers]
    pinned.unpin(driver)
    assert driver.pinned == 0


def test_pieces_that_lie_apart(pool: Pool) -> None:
    driver = Limited(1 << 40, apart=1 << 20)
    pinned = pin(driver, pool, piece=1)
    assert pinned.layers == 1 and "apart from one another" in str(pinned.why)
    pinned.unpin(driver)
    assert driver.pinned == 0


def test_layers_that_the_device_cannot_read_get_nothing_over_the_link() -> None:
    split = Split(4, 1.0, 3.0)
    split.link(3)
    assert split.share.tolist() == [16384, 16384, 16384, 0]
    split.fix(1.0)
    assert split.share.tolist() == [65536, 65536, 65536, 0]


def test_memory_nodes(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path) == []
    nodes, process = tmp_path / "sys/devices/system/node", tmp_path / "proc/self"
    for directory in (nodes, process):
        directory.mkdir(parents=True)
    (nodes / "has_memory").write_text("0-2,64\n")
    assert memory_nodes(tmp_path) == [0, 1, 2, 64]
    (process / "status").write_text("Name:\tx\nMems_allowed_list:\t1-64\n")
    assert memory_nodes(tmp_path) == [1, 2, 64]


def test_memory_is_spread_over_nodes() -> None:
    calls = list[tuple[int, ...]]()

    def bind(address: int, nbytes: int, policy: int, mask: ctypes.Array[ctypes.c_uint64], bits: int, flags: int) -> int:
        calls.append((address, nbytes, policy, *mask, bits, flags))
        return -1 if len(calls) > 1 else 0

    assert not interleave(4096, 8192, [0], bind)
    assert interleave(4096, 8192, [1, 2, 64], bind)
    assert calls == [(4096, 8192, 3, 6, 1, 129, 0)]
    assert not interleave(4096, 8192, [0, 1], bind)  # the system refuses


def test_this_system_takes_the_call(pool: Pool) -> None:
    """Of nodes that are not there, none is bound to; of those that are, the call is as the system wants it."""
    nodes = memory_nodes() or [0]
    assert not interleave(pool.address(0), 4096, [1000, 1001])
    assert interleave(pool.address(0), 4096, [nodes[0], nodes[0]])
