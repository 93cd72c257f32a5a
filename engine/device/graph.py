"""A decode step as one CUDA graph for each number of sequences.

All that changes from step to step lies in one static buffer on the host; the graph begins with copying it to the
device. What is made of the scores at its end can be made again, by a small graph of its own: of something that the step
did not have to wait for. Without a GPU the same step runs at once, over the same buffers. A step may have another way
that it can be taken, which is a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.layers.ops import Batch
from engine.models.model import Cache, Model
from engine.runner import Rows

Finish = Callable[[Tensor, Tensor], Tensor]
"""What a step makes of its logits [rows, vocab] for temperatures [rows], inside the graph."""

_WARM_UPS = 2


class Inputs:
    """A batch of one token for each of ``rows`` sequences, in a buffer on the host and its copy on the device."""

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        sizes = (8 * rows, 4 * rows, 16 * rows, 4 * rows * pages, 4 * rows)
        pinned = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._tokens, self._positions, self._segments, self._table, self._temperatures = (
            view.numpy() for view in _views(self._host, sizes, rows)
        )
        self._tables: list[Sequence[int]] = [()] * rows
        tokens, positions, segments, table, self.temperatures = _views(self._device, sizes, rows)
        self.batch = Batch(
            tokens=tokens,
            positions=positions,
            segments=segments,
            page_table=table,
            snapshots=torch.empty(0, 3, dtype=torch.int32, device=device),
            logit_rows=torch.arange(rows, device=device),
        )

    def fill(self, parts: Sequence[Rows]) -> None:
        """On the host; the last ``copy`` must have been made."""
        width = self._table.shape[1]
        for row, part in enumerate(parts):
            if len(part.tokens) != 1 or part.snapshots or len(part.table) > width:
                raise ValueError(f"a decode step takes one token, no snapshots and at most {width} pages of each")
            self._tokens[row] = part.tokens[0]
            self._positions[row] = part.position
            self._segments[row] = (row, 1, part.position, part.slot)
            self._temperatures[row] = part.temperature
            if part.table != self._tables[row]:  # it is long, and mostly the same as in the last step
                self._table[row] = -1
                self._table[row, : len(part.table)] = part.table
                self._tables[row] = part.table[:]

    def copy(self) -> None:
        """To the device, in the order of the current stream."""
        self._device.copy_(self._host, non_blocking=True)


def _views(buffer: Tensor, sizes: Sequence[int], rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, positions, segments, table, temperatures = torch.split(buffer, list(sizes))
    return (
        tokens.view(torch.int64),
        positions.view(torch.int32),
        segments.view(torch.int32).view(rows, 4),
        table.view(torch.int32).view(rows, -1),
        temperatures.view(torch.float32),
    )


@dataclass
class Step:
    """``graphs``: all of it, and ``finish`` alone; None where the step runs at once. ``out``: what ``finish`` made, on
    the host. ``logits``: on the device, until the next step of any number of sequences."""

    inputs: Inputs
    graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None
    out: Tensor
    logits: Tensor


class DecodeSteps:
    """Decode steps of a model over its cache. ``pages``: of the longest sequence.

    ``scratch``: a page and a state slot that no sequence has: new graphs are warmed up there. ``way``: what a step that
    goes the ``other`` way, or does not, is made within.
    """

    def __init__(
        self, model: Model, cache: Cache, finish: Finish, *, pages: int, scratch: tuple[int, int], device: torch.device,
        way: Callable[[bool], AbstractContextManager[object]] = lambda other: nullcontext(),
    ) -> None:  # fmt: skip
        self._model, self._cache, self._finish = model, cache, finish
        self._pages, self._device, self._way = pages, device, way
        self._scratch = Rows((0,), 0, (scratch[0],), scratch[1])
        self._inputs: dict[int, Inputs] = {}
        self._steps: dict[tuple[int, bool], Step] = {}
        self._ended = torch.Event(device) if device.type == "cuda" else None
        self._memory: Any = None
        """Of the graphs: one at a time runs, so that they share it."""

    def run(self, parts: Sequence[Rows], *, other: bool = False) -> Tensor:
        """What ``finish`` made, on the host; the next step of as many sequences overwrites it."""
        return self.wait(self.launch(parts, other=other))

    def launch(self, parts: Sequence[Rows], *, other: bool = False) -> Step:
        """Begin a step; the one before has ended."""
        step = self._steps.get((len(parts), other)) or self.prepare(len(parts), other=other)
        step.inputs.fill(parts)
        if step.graphs is None:
            with self._way(other):
                self._run(step)
        else:
            self._replay(step.graphs[0])
        return step

    @torch.inference_mode()
    def _run(self, step: Step) -> None:
        step.inputs.copy()
        step.logits = self._model.forward(step.inputs.batch, self._cache)
        self.finish_again(step)

    @torch.inference_mode()
    def finish_again(self, step: Step) -> None:
        """Of the step that was launched last."""
        if step.graphs is None:
            step.out = self._finish(step.logits, step.inputs.temperatures)
        else:
            self._replay(step.graphs[1])

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()
        if self._ended is not None:
            self._ended.record()

    def wait(self, step: Step) -> Tensor:
        """The result of the step that was launched last. What else was given to the device since is not waited for."""
        if self._ended is not None:
            self._ended.synchronize()
        return step.out

    @torch.inference_mode()
    def prepare(self, rows: int, *, other: bool = False) -> Step:
        """The step of so many sequences, captured if it is new."""
        if (rows, other) not in self._steps:
            if rows not in self._inputs:
                self._inputs[rows] = Inputs(rows, self._pages, self._device)
            if self._device.type == "cuda":
                with self._way(other):
                    self._steps[rows, other] = self._capture(self._inputs[rows], rows)
            else:
                self._steps[rows, other] = Step(self._inputs[rows], None, torch.empty(0), torch.empty(0))
        return self._steps[rows, other]

    def _capture(self, inputs: Inputs, rows: int) -> Step:
        inputs.fill([self._scratch] * rows)
        inputs.copy()
        for _ in range(_WARM_UPS):
            out = self._finish(self._model.forward(inputs.batch, self._cache), inputs.temperatures)
        torch.cuda.synchronize(self._device)
        host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graphs[0], pool=self._memory, capture_error_mode="thread_local"):
            inputs.copy()
            logits = self._model.forward(inputs.batch, self._cache)
            host.copy_(self._finish(logits, inputs.temperatures), non_blocking=True)
        with torch.cuda.graph(graphs[1], pool=self._memory, capture_error_mode="thread_local"):
            host.copy_(self._finish(logits, inputs.temperatures), non_blocking=True)
        return Step(inputs, graphs, host, logits)
