"""A decode step with all experts on the device: right, and how fast.

    python -P -m engine.device.check_decode [--quick] [--tune] [--layers N] [--rows N] [--context N]

Compares each composition with its twin, then the whole step of Qwen3.6-35B-A3B (random weights, MXFP4 experts) with the
same step in single operations, and bit for bit with itself launched in order. Times each kernel alone and the step as
one graph; ``--tune`` tries other tilings of attention. Ends with status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from engine.api import PAGE
from engine.bench_shapes import RandomSource, qwen36
from engine.device.graph import DecodeSteps, Finish
from engine.experts.layout import FORMATS, Layout
from engine.kernels.check import compare, compositions
from engine.kernels.check_composed import time_composed, tune
from engine.kernels.launch import Switch
from engine.kernels.linear import DeviceWeight
from engine.kernels.ops import DeviceOps
from engine.kernels.resident import ResidentExperts
from engine.kernels.timing import GPU, elapsed, read_bandwidth
from engine.layers.composed import Composed
from engine.layers.loader import Loader
from engine.models.qwen3_5_moe import Qwen35Moe
from engine.runner import Rows, Runner

TOLERANCE = 1e-3
_TOKENS, _REPLAYS = 8, 40


class Copies(ResidentExperts):
    """Layers of experts that are all alike: in memory of their own, as far as the device can tell."""

    def pack(self, gate_up: Tensor, down: Tensor) -> int:
        count, hidden, inner = down.shape
        layout = Layout(self._format, hidden, inner)
        blob = torch.zeros(-(-layout.nbytes // 256) * 256, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(len(self._layers))
        gate_up = torch.randn(2 * layout.inner, layout.hidden, generator=generator) * layout.hidden**-0.5
        down = torch.randn(layout.hidden, layout.inner, generator=generator) * layout.inner**-0.5
        layout.encode(gate_up, down, blob[: layout.nbytes])
        self._layers.append((layout, blob.to(self._device).repeat(count, 1)))
        return len(self._layers) - 1


class Counted(DeviceOps):
    """Counts the bytes of linear layers."""

    def __init__(self, experts: Copies) -> None:
        super().__init__(experts, GPU)
        self.bytes = 0

    def pack(self, weight: Tensor) -> DeviceWeight:
        self.bytes += weight.nbytes
        return super().pack(weight)


class Single(Counted):
    """One operation after another."""

    norm_linear = Composed.norm_linear
    norm_linear_conv = Composed.norm_linear_conv
    delta_net = Composed.delta_net
    gated_heads = Composed.gated_heads
    gated_delta_net = Composed.gated_delta_net
    qk_norm_rope = Composed.qk_norm_rope
    add_linear = Composed.add_linear
    add_sigmoid_linear = Composed.add_sigmoid_linear
    add_gated_norm_linear = Composed.add_gated_norm_linear
    add_silu_linear = Composed.add_silu_linear
    add_shared_experts = Composed.add_shared_experts


class Step:
    """One model, always of the same weights, its cache, and what its decode steps need."""

    def __init__(self, options: argparse.Namespace, kind: type[Counted]) -> None:
        self._rows, self._context = options.rows, options.context
        config, self.ops = qwen36(options.layers), kind(Copies(FORMATS["mxfp4"], GPU))
        source = RandomSource(torch.bfloat16, GPU)
        self.model = Qwen35Moe(config, Loader(source, self.ops, GPU), config.context, lambda *_: None)
        self._pages = -(-(options.context + 1024) // PAGE)
        self._runner = Runner(
            self.model,
            self.ops,
            torch.bfloat16,
            pages=options.rows * self._pages + 1,
            slots=options.rows + 2,
            device=GPU,
        )
        layers, layout = len(config.kinds), Layout(FORMATS["mxfp4"], config.hidden, config.expert_inner)
        states = 2 * 4 * sum(torch.Size(shape).numel() for shape in self.model.manifest.recurrent)
        keys = self.model.manifest.page_bytes(torch.bfloat16) * options.context // PAGE
        self.nbytes = self.ops.bytes + options.rows * (layers * config.top_k * layout.nbytes + states + keys)
        """As if rows had no expert in common."""

    def steps(self, finish: Finish) -> DecodeSteps:
        """A new graph, after all that was is forgotten."""
        for tensor in (*self._runner.cache.keys, *self._runner.cache.values, *self._runner.cache.states):
            tensor.zero_()
        scratch = self._rows * self._pages, self._rows + 1
        return DecodeSteps(self.model, self._runner.cache, finish, pages=self._pages, scratch=scratch, device=GPU)

    def parts(self, number: int) -> list[Rows]:
        return [
            Rows(
                (7 + number + row,), self._context + number, range(row * self._pages, (row + 1) * self._pages), row + 1
            )
            for row in range(self._rows)
        ]

    def logits(self) -> Tensor:
        steps = self.steps(lambda logits, _: logits)
        return torch.stack([steps.run(self.parts(number)).clone() for number in range(_TOKENS)])

    def microseconds(self) -> float:
        """Of a step, as graph replays one after another."""
        steps = self.steps(_few)
        steps.run(self.parts(0))

        def replays() -> None:
            for number in range(_REPLAYS):
                steps.launch(self.parts(number))

        return median(elapsed(replays) for _ in range(3)) / _REPLAYS

    def kernels(self) -> str:
        """What a step spends its time on, by kernel; early ones include what they wait for."""
        steps = self.steps(_few)
        steps.run(self.parts(0))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for number in range(4):
                steps.run(self.parts(number))
        lines = []
        for event in sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total):
            each, count = event.self_device_time_total / event.count, event.count / 4
            lines.append(f"  {event.key[:48]:48} {count:6.1f} x {each:7.2f} = {each * count:8.1f} µs")
        return "\n".join(lines[:20])


def _few(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Of each row a number: copying all takes longer than choosing one."""
    return logits[:, :1]


def check_step(step: Step, single: Step) -> bool:
    """Prints what was compared; whether all was right."""
    early = step.logits()
    Switch.on = False
    in_order, one_by_one = step.logits(), single.logits()
    Switch.on = True
    off = float((early - one_by_one).norm() / one_by_one.norm())
    same = bool((early.argmax(-1) == one_by_one.argmax(-1)).float().mean() > 0.9)
    for name, right in (
        ("early and in order: the same bits", torch.equal(early, in_order)),
        (f"against single operations: off by {off:.1e}", off <= TOLERANCE and same),
    ):
        print(f"{'ok   ' if right else 'WRONG'} {name}", flush=True)
    return torch.equal(early, in_order) and off <= TOLERANCE and same


def time_step(step: Step, single: Step, reading: float) -> None:
    bound = step.nbytes / reading * 1e6
    for name, on, of in (
        ("single operations, in order", False, single), ("in order", False, step), ("early", True, step),
    ):  # fmt: skip
        Switch.on = on
        spent = of.microseconds()
        print(f"step, {name:28} {spent:8.1f} µs, {bound / spent:4.0%} of the bound of {bound:.1f} µs", flush=True)
        if of is step:
            print(step.kernels(), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the whole step only")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args(arguments)
    right, start = True, time.monotonic()

    def passed(what: str) -> None:
        print(f"-- {what}: {time.monotonic() - start:.1f} s", flush=True)

    with torch.inference_mode():
        reading = read_bandwidth()
        step, single = Step(options, Counted), Step(options, Single)
        passed("models")
        if not options.quick:
            right &= compare(step.ops, time.time_ns() % (1 << 31), compositions())
            passed("compositions compared")
        right &= check_step(step, single)
        passed("step compared")
        time_step(step, single, reading)
        passed("step timed")
        if options.tune:
            tune()
            passed("tuned")
        if not options.quick:
            time_composed(step.ops, reading, (1, 16))
            passed("compositions timed")
    print("all right" if right else "WRONG results above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
