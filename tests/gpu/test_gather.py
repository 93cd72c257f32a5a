"""The kernel that moves pages and states is its twin, and both are what indexing gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device.room import Shape
from engine.device.staging import rows
from engine.kernels import gather, gather_twin

ALL = slice(None)


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, *shape, generator=generator) for shape in ((64, 2, 8), (64, 4, 8), (20, 1000))]


@pytest.mark.parametrize("tokens", [1, 20, 40])
def test_pages_are_gathered_and_scattered(tokens: int) -> None:
    """Some tokens of two components, of pages in any order; nothing else is touched."""
    source, target = tensors(0)[:2], tensors(1)[:2]
    before = [one.clone() for one in target]
    shape, other = Shape.of(source, 64), Shape.of(target, 64)
    lengths = shape.lengths(tokens)
    packed = torch.empty(2 * int(lengths.sum()), dtype=torch.uint8)
    flags = torch.zeros(8, dtype=torch.int32)
    offsets = np.cumsum(lengths) - lengths
    out, back = [], []
    for number, page in enumerate((3, 0)):
        places = packed.data_ptr() + number * int(lengths.sum()) + offsets
        out.append(rows(shape.places(page, ALL), places, lengths, 2 * number))
        back.append(rows(places, other.places(4 - page, ALL), lengths))
    for moves, how in ((out, gather.move), (back, gather.move)):
        how(torch.from_numpy(np.concatenate(moves)), flags.data_ptr(), programs=3)
    want = torch.cat([one[page, :tokens].reshape(-1).view(torch.uint8) for page in (3, 0) for one in source])
    assert torch.equal(packed, want) and not flags.any()
    for one, were, got in zip(source, before, target, strict=True):
        were[1, :tokens], were[4, :tokens] = one[3, :tokens], one[0, :tokens]
        assert torch.equal(got, were)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38, -0.0, 1e-40])
def test_what_is_no_number_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    """By the kernel and by its twin; a piece of another thing in the same launch is not blamed."""
    for at in (0, 1, 4095, 20000, 40001):
        both = torch.ones(2, 40002 + 6, dtype=dtype)
        both[1, at] = value
        shape = Shape.of([both])
        moves = np.concatenate(
            [rows(shape.places(one, ALL), shape.places(one, ALL), shape.sizes, 2 * one + shape.half) for one in (0, 1)]
        )
        found = []
        for how in (lambda it, to: gather.move(torch.from_numpy(it), to, copy=False), gather_twin.move):
            flags = torch.zeros(2, dtype=torch.int32)
            how(moves, flags.data_ptr())
            found.append(flags.tolist())
        assert found[0] == found[1] == [0, int(not both[1].float().isfinite().all())]


def test_what_is_large_is_cut_into_pieces_that_programs_share() -> None:
    sizes = np.array([16, gather.PIECE, gather.PIECE + 16, 3 * gather.PIECE], np.int64)
    starts = np.cumsum(sizes) - sizes
    cut = rows(starts, starts + 1 << 20, sizes, 6)
    assert cut[:, 2].max() == gather.PIECE and cut[:, 2].sum() == sizes.sum() and (cut[:, 3] == 6).all()
    assert (np.sort(cut[:, 0])[1:] == np.cumsum(cut[:, 2])[:-1]).all()
    with pytest.raises(ValueError, match="16"):
        Shape.of([torch.zeros(2, 64, 3)], 64)
