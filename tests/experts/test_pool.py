"""The host's pool: where blobs are, what fills them, and what memory it takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.experts.layout import FORMATS, Layout
from engine.experts.pool import ALIGNMENT, Pool


def weights(layer: int, expert: int) -> tuple[Tensor, Tensor]:
    return torch.full((64, 64), layer + 1.0), torch.full((64, 32), expert + 1.0)


def test_filling() -> None:
    pool = Pool(Layout(FORMATS["mxfp4"], 64, 32), 3, 4)
    seen, before = [], torch.get_num_threads()
    pool.fill(weights, lambda done, total: seen.append((done, total)), threads=3)
    assert seen == [(count, 12) for count in range(1, 13)]
    assert torch.get_num_threads() == before
    assert pool.stride == 3328 and pool.layout.nbytes == 3264
    assert pool.address(0) % ALIGNMENT == 0
    assert pool.address(5) == pool.address(0) + 5 * pool.stride
    assert pool.tensor.numel() == pool.nbytes == 12 * 3328
    for flat in range(12):
        gate_up, down = pool.layout.decode(pool.blob(flat))
        expert_gate_up, expert_down = weights(*divmod(flat, 4))
        assert torch.equal(gate_up, expert_gate_up)
        assert torch.equal(down, expert_down)


def test_a_failure_while_filling_is_the_callers() -> None:
    pool = Pool(Layout(FORMATS["int8"], 64, 32), 1, 9)

    def broken(layer: int, expert: int) -> tuple[Tensor, Tensor]:
        if expert == 7:
            raise OSError("unreadable")
        return weights(layer, expert)

    with pytest.raises(OSError, match="unreadable"):
        pool.fill(broken)


def test_wrong_places() -> None:
    pool = Pool(Layout(FORMATS["bf16"], 64, 32), 2, 4)
    for layer, expert in ((2, 0), (0, 4), (-1, 0)):
        with pytest.raises(ValueError, match=f"there is no expert {expert} of layer {layer} in 2 x 4"):
            pool.put(layer, expert, *weights(0, 0))
    with pytest.raises(ValueError, match="a pool needs layers and experts"):
        Pool(pool.layout, 0, 4)


@pytest.mark.parametrize("layers", [1 << 34, 1 << 50])
def test_more_than_there_are_addresses_for(layers: int) -> None:
    with pytest.raises(MemoryError, match=r"\d+ bytes of host memory cannot be had"):
        Pool(Layout(FORMATS["int8"], 256, 128), layers, 512)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_is_the_pool_and_little_more() -> None:
    pool = Pool(Layout(FORMATS["bf16"], 256, 128), 16, 32)  # 100 MB
    before = resident()
    pool.fill_random(threads=2)
    assert resident() - before < 1.1 * pool.nbytes
    assert torch.equal(pool.blob(8), pool.blob(0)) and not torch.equal(pool.blob(1), pool.blob(0))
    assert pool.layout.decode(pool.blob(511))[0].std() == pytest.approx(256**-0.5, rel=0.05)
