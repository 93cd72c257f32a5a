"""The GPU that is served from, if there is one that can be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from engine.device.driver import CudaDriver, Driver
from engine.device.staging import Lanes
from engine.device.virtual import CudaMemory, VirtualMemory
from engine.native.library import find_library, load_library
from engine.weights.errors import BadConfig

MARGIN = 1 << 30
"""Bytes of the device that are left to graphs, activations, libraries and whatever else is shown on it."""


@dataclass(frozen=True)
class Machine:
    """``kind``: what computes, as far as results depend on it. ``gpu``: its name, as a bandwidth profile has it.
    ``free``: bytes of its memory nobody has. ``driver`` opens the driver; raises DriverError and NativeLibraryError.
    ``lanes``: beside what is computed; None where the processor can address the device's memory.
    ``virtual`` opens its virtual memory; raises DriverError where it has none."""

    device: torch.device
    kind: str
    gpu: str
    free: int
    driver: Callable[[], Driver]
    lanes: Callable[[], Lanes] | None = None
    virtual: Callable[[], VirtualMemory] | None = None


class NoGpu(BadConfig):
    """There is no GPU, or none that torch knows of."""


def find_machine() -> Machine:
    """The current CUDA device. Raises NoGpu, and BadConfig where it cannot be used."""
    if not torch.cuda.is_available():
        raise NoGpu("torch finds no NVIDIA GPU; one takes its driver, and a torch with CUDA")
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    if find_spec("triton") is None:
        raise BadConfig(f"{name} needs the package triton, which is not installed; `pip install triton`")
    try:
        torch.zeros(1, device=device)  # makes the context that the driver needs, and that takes memory
        free, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:  # others have all of it, or it is not one for this torch
        reason = str(error).partition("\n")[0].rstrip(".")
        raise BadConfig(f"{name} cannot be used: {reason}; see nvidia-smi") from error
    major, minor = torch.cuda.get_device_capability(device)
    kind, lanes, virtual = f"sm_{major}{minor}", lambda: _cuda_lanes(device), lambda: CudaMemory(device)
    return Machine(device, kind, name, free, _cuda_driver, lanes, virtual)


def _cuda_driver() -> Driver:
    return CudaDriver(load_library(find_library()))


def _cuda_lanes(device: torch.device) -> Lanes:
    from engine.device.lanes import CudaLanes  # Triton

    return CudaLanes(device)
