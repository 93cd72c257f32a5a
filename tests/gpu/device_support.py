"""A device without a GPU: torch twins for kernels, over the real pool, executor, watchdog and driver protocol."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_support import Bench
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.device.attention import Chosen
from engine.device.fake import FakeDriver
from engine.device.machine import Machine
from engine.experts import residency
from engine.experts.layout import FORMATS, Layout
from engine.kernels import experts_twin
from engine.kernels.mailbox import Request
from engine.kernels.ops import DeviceExperts
from engine.layers.reference import ReferenceExperts, ReferenceOps

CPU = torch.device("cpu")


class TwinOps(ReferenceOps):
    """``DeviceOps`` whose operations, but for the experts, are their twins."""

    def __init__(self, experts: DeviceExperts, device: torch.device, attention: Chosen) -> None:
        self._on_device = experts

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> Any:
        return self._on_device.pack(gate_up, down)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        return self._on_device.run(x, ids, weights, experts)


class TwinResident:
    """``ResidentExperts``, decoded."""

    def __init__(self, layers: list[ReferenceExperts]) -> None:
        self._layers = layers

    @classmethod
    def of_slots(cls, layout: Layout, slots: Tensor) -> TwinResident:
        decoded = [[layout.decode(blob[: layout.nbytes]) for blob in layer] for layer in slots]
        return cls([ReferenceExperts(*(torch.stack(each) for each in zip(*layer, strict=True))) for layer in decoded])

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        return ReferenceOps().experts(x, ids, weights, self._layers[layer])


def memory(address: int, like: Tensor) -> Tensor:
    """Host memory at an address, as a tensor of this shape and type."""
    return torch.frombuffer(
        (ctypes.c_char * like.nbytes).from_address(address), dtype=like.dtype, count=like.numel()
    ).view(like.shape)


def resolve(
    state: residency.Residency, ids: Tensor, layer: int, decision: Any, request: Request | None = None
) -> None:  # fmt: skip
    residency.resolve(state, ids, layer, decision)
    if request is not None and decision.counts[1]:
        box, at = request.layout, request.address
        ctypes.c_uint64.from_address(at + box.done).value = 0
        for offset, data in ((box.x, request.x), (box.plan, decision.plan), (box.weights, request.weights)):
            memory(at + offset, data).copy_(data)
        ctypes.c_uint64.from_address(at + box.ready).value = request.number(layer)


def add_answer(y: Tensor, counts: Tensor, mailbox: int, box: Any) -> None:
    if counts[1]:
        y += memory(mailbox + box.y, y)


def fetch(pool: int, stride: int, slots: Tensor, decision: Any, part_bytes: Tensor) -> None:
    for slot, flat, parts in decision.fetch[: int(decision.counts[0])].tolist():
        first, last = int(part_bytes[parts // 8]), int(part_bytes[parts % 8])
        to = slots[slot, first:last]
        to.copy_(memory(pool + flat * stride + first, to))


def arrive(mailbox: int, box: Any) -> None:
    ctypes.c_uint64.from_address(mailbox + box.arrived).value = 1


TWINS = SimpleNamespace(
    fetch=fetch, combine=experts_twin.combine, gate_up=experts_twin.gate_up, down=experts_twin.down, arrive=arrive
)


def use_twins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("engine.device.load.DeviceOps", TwinOps)
    patch.setattr("engine.experts.offload.kernels", TWINS)
    patch.setattr("engine.experts.offload.resolve", resolve)
    patch.setattr("engine.experts.offload.add_answer", add_answer)
    patch.setattr("engine.device.load.ResidentExperts", TwinResident)


def machine(free: int = 2 << 30, driver: Any = None) -> Machine:
    return Machine(CPU, "none", "no GPU", free, lambda: driver or FakeDriver())


def round_experts(directory: Path, name: str) -> None:
    """Give a checkpoint's experts weights that a format keeps exactly, so that the CPU has the same model."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for key in [key for key in tensors if key.endswith("experts.gate_up_proj")]:
        gate_up, down = tensors[key], tensors[key.replace("gate_up_proj", "down_proj")]
        layout = Layout(FORMATS[name], gate_up.shape[2], down.shape[2])
        blob = torch.empty(layout.nbytes, dtype=torch.uint8)
        for expert in range(gate_up.shape[0]):
            layout.encode(gate_up[expert], down[expert], blob)
            gate_up[expert], down[expert] = layout.decode(blob)
    save_file(tensors, path, metadata={"format": "pt"})


@contextmanager
def bench(directory: Path, **options: Any) -> Iterator[Bench]:
    made = Bench(directory, **{"kv_bytes": 1 << 20, "checkpoint_bytes": 1 << 19, "chunk_tokens": 12, **options})
    yield made
    made.check()
    made.scheduler.close(1.0)
