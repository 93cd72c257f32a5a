"""The three lanes of ``engine.device.staging`` as CUDA streams. Imports Triton."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from engine.device.room import Event, Rows
from engine.device.staging import Lane
from engine.kernels.gather import ACROSS, ON_DEVICE, move, upload

_FIRST = -1
"""The priority of a stream that goes before others."""


class CudaLanes:
    """Implements ``engine.device.staging.Lanes``. ``main`` is whatever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device, priority=_FIRST)  # type: ignore[no-untyped-call]

    def move(self, lane: Lane, rows: Rows, flags: int, *, copy: bool = True) -> None:
        with self._current(lane):
            move(upload(rows, self._device), flags, copy=copy, programs=ACROSS if lane == "in" else ON_DEVICE)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        with self._current("out"):
            target.copy_(source, non_blocking=True)

    def record(self, lane: Lane) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            self._stream(lane).wait_event(event)

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return {"out": self._out, "in": self._in}.get(lane) or torch.cuda.current_stream(self._device)

    def _current(self, lane: Lane) -> AbstractContextManager[object]:
        return nullcontext() if lane == "main" else torch.cuda.stream(self._stream(lane))
