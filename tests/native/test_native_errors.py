"""What cannot work says so: wrong tensors, batches that point outside, and a library that does not fit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.layers.ops import Batch
from engine.native import library
from engine.native.library import NativeLibraryError, find_library, load_library
from engine.native.ops import NativeOps

MakeBatch = Callable[..., Batch]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 5), r"x must have shape \[any, 4\], not \[2, 5\]"),
        (torch.zeros(2, 4, 1), r"x must have shape \[any, 4\], not \[2, 4, 1\]"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), "x must be torch.float32, not torch.bfloat16"),
        (torch.zeros(4, 2).T, "x must be contiguous"),
    ],
)
def test_wrong_tensors(native: NativeOps, x: torch.Tensor, message: str) -> None:
    weight = native.pack(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=message):
        native.linear(x, weight)


def test_wrong_weights(native: NativeOps) -> None:
    with pytest.raises(ValueError, match=r"weight must be torch\.float32 or torch.bfloat16, not torch.float16"):
        native.pack(torch.zeros(3, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"weight must have shape \[any, any\], not \[3, 0\]"):
        native.pack(torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"gate_up must have shape \[2, 12, 4\]"):
        native.pack_experts(torch.zeros(2, 11, 4), torch.zeros(2, 4, 6))
    with pytest.raises(ValueError, match="bias must have shape"):
        native.linear(torch.zeros(1, 4), native.pack(torch.zeros(3, 4)), torch.zeros(2))


def test_wrong_expert_ids(native: NativeOps) -> None:
    experts = native.pack_experts(torch.zeros(2, 12, 4), torch.zeros(2, 4, 6))
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match=rf"expert id {wrong} is not in \[0, 2\)"):
            native.experts(torch.zeros(1, 4), torch.tensor([[wrong]], dtype=torch.int32), torch.ones(1, 1), experts)
    with pytest.raises(ValueError, match="k must be between 1 and the 2 experts, not 3"):
        native.route(torch.zeros(1, 2), 3, True)


@pytest.mark.parametrize(
    ("segments", "snapshots", "message"),
    [
        ([(2, 0, 9)], [], r"segment 0: state slot 9 is not in \[0, 4\)"),
        ([(2, 0, 0)], [(0, 3, 1)], "segment 0: snapshot after 3 of 2 rows"),
        ([(2, 0, 0)], [(0, 0, 1)], "segment 0: snapshot after 0 of 2 rows"),
        ([(2, 0, 0)], [(0, 1, 4)], r"segment 0: state slot 4 is not in \[0, 4\)"),
        ([(2, 0, 0)], [(1, 1, 1)], "snapshot 0 names segment 1 of 1"),
        ([(2, 0, 0)], [(0, 1, 0)], "snapshot 0 would overwrite the live state slot 0 of segment 0"),
    ],
)
def test_wrong_states(
    native: NativeOps,
    make_batch: MakeBatch,
    segments: list[tuple[int, int, int]],
    snapshots: list[tuple[int, int, int]],
    message: str,
) -> None:
    state = torch.zeros(4, 8, 3)
    with pytest.raises(ValueError, match=message):
        native.conv(torch.zeros(2, 8), torch.zeros(8, 4), state, make_batch(segments, snapshots))


def test_wrong_pages(native: NativeOps, make_batch: MakeBatch) -> None:
    pages = torch.zeros(2, 64, 1, 8)

    def attend(batch: Batch) -> None:
        native.attention(torch.zeros(1, 1, 8), pages, pages, batch, 1.0)

    with pytest.raises(ValueError, match=r"segment 0: page 1 is at -1, not in \[0, 2\)"):
        attend(make_batch([(1, 64, 0)], pages=[[0, -1]]))
    with pytest.raises(ValueError, match="segment 0: needs 2 pages, the page table has 1"):
        attend(make_batch([(1, 64, 0)], pages=[[0]]))
    with pytest.raises(ValueError, match="k_pages must have shape"):
        native.attention(torch.zeros(1, 1, 8), pages[:, :32].contiguous(), pages, make_batch([(1, 0, 0)]), 1.0)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
        wide = torch.zeros(2, 64, 2, 8)
        native.attention(torch.zeros(1, 3, 8), wide, wide, make_batch([(1, 0, 0)]), 1.0)


def test_rope_beyond_its_table(native: NativeOps) -> None:
    table = native.rope_table(10, 4, 1e4)
    with pytest.raises(ValueError, match="position 10 is beyond the rotary table of 10"):
        native.rope(torch.zeros(1, 1, 8), torch.tensor([10], dtype=torch.int32), table)
    with pytest.raises(ValueError, match="the table rotates 4 dimensions of heads that have 2"):
        native.rope(torch.zeros(1, 1, 2), torch.tensor([1], dtype=torch.int32), table)


def test_empty_batch(native: NativeOps, make_batch: MakeBatch) -> None:
    batch, pages = make_batch([]), torch.zeros(1, 64, 1, 8)
    assert native.attention(torch.zeros(0, 1, 8), pages, pages, batch, 1.0).shape == (0, 1, 8)
    assert native.conv(torch.zeros(0, 8), torch.zeros(8, 4), torch.zeros(1, 8, 3), batch).shape == (0, 8)


def test_unknown_instruction_set() -> None:
    with pytest.raises(NativeLibraryError, match=r"'sse9' cannot run here: .* one of .*scalar"):
        NativeOps("sse9")


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(NativeLibraryError, match="not built; run `pip install"):
        find_library()


def test_library_that_is_none(tmp_path: Path) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeLibraryError, match=r"_native\.so cannot be loaded .* run `pip install"):
        load_library(broken)
    with pytest.raises(NativeLibraryError, match="cannot be loaded"):
        NativeOps(library=tmp_path / "absent.so")


@pytest.mark.parametrize(
    ("source", "message"), [("int ft_abi(void) { return 999; }", "version 999"), ("int x;", "ft_abi")]
)
def test_library_of_another_version(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "other.cpp").write_text(f'extern "C" {{ {source} }}')
    built = tmp_path / "other.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(built), str(tmp_path / "other.cpp")], check=True)
    with pytest.raises(NativeLibraryError, match=f"{message}.* run `pip install"):
        load_library(built)
