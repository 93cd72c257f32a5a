"""A kernel that was compiled is only started again for what Triton would not have compiled anew."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

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


class Kernel:
    """As Triton's are used: says what it was compiled for and what it was started with."""

    __name__, arg_names = "kernel", ["x", "size", "WIDTH", "KIND"]
    params = tuple(SimpleNamespace(is_constexpr=name.isupper()) for name in arg_names)

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.started: list[tuple[Any, ...]] = []

    def run(self, *_: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        assert warmup  # compiles, and starts nothing
        self.compiled.append(options)
        return SimpleNamespace(run=lambda *given: self.started.append(given), function=7, packed_metadata=(4, 1, 0))


def test_what_was_compiled_is_started_again_with_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 5)))
    monkeypatch.setattr(launch, "_compiled", {})
    kernel, x = Kernel(), TENSORS[0]
    for size in (3, 5):
        launch.launch(kernel, (size,), x, size, KIND="a", WIDTH=8, num_warps=2)
    launch.launch(kernel, (2, 3), x, 5, KIND="a", WIDTH=8, num_warps=2, stream=9)
    assert [one["num_warps"] for one in kernel.compiled] == [2]
    at = x.data_ptr()
    assert kernel.started == [
        (3, 1, 1, 5, 7, (4, 1, 0), None, None, None, at, 3, 8, "a"),
        (5, 1, 1, 5, 7, (4, 1, 0), None, None, None, at, 5, 8, "a"),
        (2, 3, 1, 9, 7, (4, 1, 0), None, None, None, at, 5, 8, "a"),
    ]
    for others in ({"num_warps": 4}, {"num_warps": 2, "KIND": "b"}):
        launch.launch(kernel, (1,), x, 5, **{"KIND": "a", "WIDTH": 8, **others})
    launch.launch(kernel, (1,), x, 16, KIND="a", WIDTH=8, num_warps=2)
    assert len(kernel.compiled) == 4
    with pytest.raises(TypeError, match="by name"):
        launch.launch(kernel, (1,), x, 5, 8, KIND="a")
