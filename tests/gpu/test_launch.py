"""A kernel that was compiled is only started again for what Triton would not have compiled anew."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import native_specialize_impl

from engine.kernels import launch

NUMBERS = (0, 1, 2, 3, 15, 16, 17, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, -(2**31), 2**40 + 1, 2**63 - 1, 2**63)
BYTES = torch.zeros(64, dtype=torch.uint8)
TENSORS = tuple(BYTES[at:].view(kind) for at in (0, 4, 16) for kind in (torch.float32, torch.int32, torch.bfloat16))


def kinds(*arguments: object) -> list[object]:
    found: list[object] = []
    launch.specialise(arguments, found)
    return found


def test_what_triton_tells_apart_is_told_apart() -> None:
    values = (*NUMBERS, *TENSORS, True, False, None, 0.0, 1.0, (1, 2), (2, 1), (TENSORS[0], 1), (TENSORS[0], 16))
    for one, other in combinations(values, 2):
        theirs = [native_specialize_impl(BaseBackend, value, False, True, True) for value in (one, other)]
        if kinds(one) == kinds(other):
            assert theirs[0] == theirs[1], (one, other)
    assert kinds(5) == kinds(7) and kinds(TENSORS[0]) == kinds(TENSORS[6])  # or nothing would be found again


def test_arguments_are_not_taken_for_others() -> None:
    assert kinds((1, 1), 1) != kinds((1, 1, 1)) != kinds(2, 1, 1)
    assert kinds(16, (2,)) != kinds((16, 2))


def test_tensors_are_given_as_addresses() -> None:
    given = launch.specialise(((BYTES, 3), 2.5, None), [])
    assert given == [(BYTES.data_ptr(), 3), 2.5, None]


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="no argument"):
        launch.specialise(("text",), [])


@pytest.mark.parametrize("size", range(20))
def test_sizes(size: int) -> None:
    assert launch.cdiv(size, 3) == (size + 2) // 3
    power = launch.next_power_of_2(size)
    assert power >= max(1, size) > power // 2 or power == 1
