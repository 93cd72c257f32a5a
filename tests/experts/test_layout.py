"""The blob of an expert, byte by byte as the kernels read it, and how near quantised weights come to the real ones."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from engine.experts.layout import FORMATS, Layout

SHAPES = [(32, 32), (64, 96), (96, 160), (128, 256)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def weights(hidden: int, inner: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(2 * inner, hidden, generator=generator) * 0.05
    return gate_up, torch.randn(hidden, inner, generator=generator) * 0.05


def encoded(layout: Layout, gate_up: Tensor, down: Tensor) -> Tensor:
    blob = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    layout.encode(gate_up, down, blob)
    return blob


def weight_at(layout: Layout, blob: bytes, block: int, row: int, k: int) -> float:
    """One weight of a block, read as a kernel would."""
    data = blob[block * layout.format.block_bytes :][: layout.format.block_bytes]
    if layout.format.name == "bf16":
        place = 2 * (k * 32 + 2 * (row % 16) + row // 16)
        return float(struct.unpack("<f", b"\0\0" + data[place : place + 2])[0])
    if layout.format.name == "int8":
        (scale,) = struct.unpack_from("<e", data, 2 * row)
        (code,) = struct.unpack_from("<b", data, 64 + (k // 4 * 32 + row) * 4 + k % 4)
        return float(scale * code)
    octet = data[32 + (k // 8 * 32 + row) * 4 + k % 4]
    return float(E2M1[octet >> 4 if k % 8 >= 4 else octet & 15] * 2.0 ** (data[row] - 127))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("hidden", "inner"), SHAPES)
def test_every_weight_is_where_the_kernels_look(name: str, hidden: int, inner: int) -> None:
    layout = Layout(FORMATS[name], hidden, inner)
    blob = encoded(layout, *weights(hidden, inner))
    gate_up, down = layout.decode(blob)
    raw, block = bytes(blob.tolist()), 0
    for part in range(layout.parts):
        first, last = layout.bounds[part : part + 2]
        assert block * layout.format.block_bytes == layout.offsets[part]
        for column in range(first, last, 16):
            for k in range(0, hidden, 32):
                for row in (0, 5, 15, 16, 31):
                    source = (inner if row >= 16 else 0) + column + row % 16
                    assert weight_at(layout, raw, block, row, 13) == gate_up[source, k + 13].item()
                block += 1
        for panel in range(0, hidden, 32):
            for k in range(first, last, 32):
                for row in (0, 17, 31):
                    assert weight_at(layout, raw, block, row, 30) == down[panel + row, k + 30].item()
                block += 1
    assert block * layout.format.block_bytes == layout.nbytes == layout.offsets[-1]


def test_parts() -> None:
    assert Layout(FORMATS["bf16"], 32, 512).bounds == (0, 128, 256, 384, 512)
    assert Layout(FORMATS["bf16"], 32, 160).bounds == (0, 32, 64, 96, 160)
    assert Layout(FORMATS["bf16"], 32, 64).bounds == (0, 32, 64)
    assert Layout(FORMATS["mxfp4"], 2048, 512).nbytes == 3 * 2048 * 512 * 17 // 32


@pytest.mark.parametrize(("hidden", "inner", "wrong"), [(40, 64, "hidden"), (64, 48, "inner"), (0, 32, "hidden")])
def test_sizes_that_do_not_fit(hidden: int, inner: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"experts need {wrong} to be a multiple of 32"):
        Layout(FORMATS["bf16"], hidden, inner)


def test_wrong_shapes() -> None:
    layout = Layout(FORMATS["bf16"], 64, 32)
    gate_up, down = weights(64, 32)
    blob = torch.empty(layout.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"gate_up must have shape \[64, 64\], not \[32, 64\]"):
        layout.encode(gate_up[:32], down, blob)
    with pytest.raises(ValueError, match=r"down must have shape \[64, 32\], not \[32, 64\]"):
        layout.encode(gate_up, down.T, blob)
    with pytest.raises(ValueError, match="out must have shape"):
        layout.encode(gate_up, down, blob[1:])


def test_bf16_is_rounding() -> None:
    layout = Layout(FORMATS["bf16"], 64, 96)
    gate_up, down = weights(64, 96)
    for kept, original in zip(layout.decode(encoded(layout, gate_up, down)), (gate_up, down), strict=True):
        assert torch.equal(kept, original.bfloat16().float())


def test_int8_is_within_half_a_step() -> None:
    layout = Layout(FORMATS["int8"], 64, 96)
    gate_up, down = weights(64, 96)
    gate_up[0] = 0.0
    for kept, original in zip(layout.decode(encoded(layout, gate_up, down)), (gate_up, down), strict=True):
        groups = (original - kept).abs().view(-1, 32).amax(dim=1) / original.view(-1, 32).abs().amax(dim=1).clamp(1e-9)
        assert groups.max() < 0.51 / 127 + 2**-11


def test_mxfp4_keeps_what_is_mxfp4() -> None:
    generator = torch.Generator().manual_seed(3)

    def on_grid(rows: int, k: int) -> Tensor:
        codes = torch.randint(0, 16, (rows, k // 32, 32), generator=generator)
        codes[0, 0] %= 3  # a group that uses the smallest codes only
        scales = torch.randint(-130, 100, (rows, k // 32, 1), generator=generator).clamp(-100)
        return (torch.tensor(E2M1)[codes] * torch.exp2(scales.float())).view(rows, k)

    layout = Layout(FORMATS["mxfp4"], 64, 96)
    gate_up, down = on_grid(192, 64), on_grid(64, 96)
    kept = layout.decode(encoded(layout, gate_up, down))
    assert torch.equal(kept[0], gate_up)
    assert torch.equal(kept[1], down)


def test_mxfp4_rounds_to_nearest_even_and_saturates() -> None:
    layout = Layout(FORMATS["mxfp4"], 32, 32)
    gate_up, down = torch.zeros(64, 32), torch.zeros(32, 32)
    values = [4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -0.2, -0.3, -2.6, 0.0]
    gate_up[0, : len(values)] = torch.tensor(values)
    gate_up[1, :2] = torch.tensor([1e-38, -1e-37])  # too small for a scale
    kept, _ = layout.decode(encoded(layout, gate_up, down))
    assert kept[0, : len(values)].tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -0.5, -3.0, 0.0]
    assert not kept[1:].any()


@pytest.mark.parametrize(
    ("name", "value"), [("int8", float("nan")), ("int8", 1e8), ("mxfp4", float("inf")), ("mxfp4", float("nan"))]
)
def test_weights_that_a_format_cannot_hold(name: str, value: float) -> None:
    layout = Layout(FORMATS[name], 32, 32)
    gate_up, down = weights(32, 32)
    down[3, 4] = value
    with pytest.raises(ValueError, match=f"weights for {name} must be finite"):
        encoded(layout, gate_up, down)
