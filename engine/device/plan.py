"""What goes where on a device, decided before anything of the model is read."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import PAGE, EngineConfig
from engine.bandwidth_profile import Profile, ProfileError, default_profile, machine_name
from engine.device.auto import Load, Mode, Rates, choose
from engine.device.hosted import GATHERED
from engine.device.machine import MARGIN, Machine
from engine.device.memory import Sizes
from engine.device.outline import Outline
from engine.experts.layout import BLOCK, FORMATS, Layout
from engine.experts.pool import stride_of
from engine.experts.residency import MOST_PAIRS
from engine.host import memory_bytes
from engine.weights.errors import BadConfig

ROWS = 16
"""Most sequences of one decode step."""
CHUNK = 4096
"""Tokens of a prompt in one step: each step may bring all experts over the link."""
_ACTIVATIONS = 96
"""Bytes for each row of a step and each of its hidden dimensions, roughly."""


@dataclass(frozen=True)
class Plan:
    """``budget``: bytes of the device, of which the dense weights take ``outline.dense`` and the work of a step
    ``working``. ``sizes`` are of what is beside those, in ``room``. ``rates`` of the machine, if they are known.
    ``why``: the mode was chosen, in words; "" if it was asked for, and then it stays."""

    outline: Outline
    layout: Layout
    stride: int
    mode: Mode
    why: str
    budget: int
    working: int
    sizes: Sizes
    rates: Rates | None
    chunk_tokens: int

    @property
    def room(self) -> int:
        return self.budget - self.outline.dense - self.working

    @property
    def rows(self) -> int:
        """Most sequences of one decode step."""
        return max(1, min(ROWS, MOST_PAIRS // self.outline.top_k))

    def told(self, sizes: Sizes) -> str:
        """``sizes``: what it came to."""
        what, count = self.outline, self.outline.layers * self.outline.experts
        pages, states = sizes.pages * what.manifest.page_bytes(what.dtype), sizes.states * what.manifest.slot_bytes
        taken = {
            "dense weights": what.dense,
            "experts": (sizes.slots + 1) * self.stride,
            f"conversations of {sizes.pages * PAGE:,} tokens": pages,
            f"{sizes.states} recurrent states": states,
            "a step": self.working,
        }
        why = f", for {self.why}" if self.why else ""
        memory = ", ".join(f"{name} {nbytes / 1e9:.2f}" for name, nbytes in taken.items() if nbytes)
        held = 0 if self.mode == "cpu" else sizes.slots
        return (
            f"experts {self.mode}{why}; {held:,} of {count:,} in {self.layout.format.name} are on the GPU "
            f"({held / count:.0%}); of {self.budget / 1e9:.2f} GB there: {memory}"
        )


def make_plan(config: EngineConfig, what: Outline, machine: Machine, pages: int, states: int) -> Plan:
    """``pages`` and ``states`` are as many as the configuration wants. Raises BadConfig, with the numbers."""
    if config.kernels != "native" or not what.layers:
        cannot = f"--kernels {config.kernels} are" if what.layers else "models without routed experts are"
        raise BadConfig(f"{cannot} not served from a GPU")
    layout = expert_layout(config, what)
    stride, count = stride_of(layout), what.layers * what.experts
    pool = count * stride
    if config.gpu_bytes > machine.free:
        raise BadConfig(f"--gpu-bytes {config.gpu_bytes}: {machine.gpu} has {machine.free} bytes free; ask for fewer")
    budget = config.gpu_bytes or max(0, machine.free - MARGIN)
    kept = pages * what.manifest.page_bytes(what.dtype) + states * what.manifest.slot_bytes
    chunk = config.chunk_tokens or CHUNK
    working = working_bytes(what, chunk, machine)
    slots = (budget - what.dense - kept - working) // stride - 1
    if slots < 1:
        raise BadConfig(
            f"of {budget} bytes on {machine.gpu}, dense weights take {what.dense}, and pages (--kv-bytes) and states "
            f"(--checkpoint-bytes, --max-sequences) {kept}, and steps of {chunk} tokens "
            f"{working}; what is left has no room for two experts of {stride} bytes; lower those, "
            "or raise --gpu-bytes"
        )
    rates = _rates(layout.format.name, machine)
    mode, why = _mode(config, Load(
        layers=what.layers, dense=what.dense, routed=what.layers * what.top_k * layout.nbytes, pool=pool,
        room=slots * stride,
    ), rates)  # fmt: skip
    if mode == "device" and slots < count:
        raise BadConfig(
            f"--experts device: {count} experts take {pool} bytes, and {slots * stride} of --gpu-bytes {budget} are "
            "left for them; choose --experts hybrid or offload, or an --expert-format that takes less"
        )
    slots = 1 if mode == "cpu" else min(slots, count)
    return Plan(what, layout, stride, mode, why, budget, working, Sizes(slots, pages, states), rates, chunk)


def working_bytes(what: Outline, chunk: int, machine: Machine) -> int:
    """Of the device, while a step of so many rows is computed and pages are moved."""
    return chunk * what.hidden * _ACTIVATIONS + (GATHERED if machine.lanes else 0)


def expert_layout(config: EngineConfig, what: Outline) -> Layout:
    """As experts lie in host memory. Raises BadConfig, also where that has no room for them."""
    name: str = config.expert_format
    if name == "auto":
        if what.dtype.itemsize > 2:
            raise BadConfig("experts are not served from a GPU in float32; choose --dtype bfloat16 or --expert-format")
        name = "bf16"
    try:
        layout = Layout(FORMATS[name], what.hidden, -(-what.inner // BLOCK) * BLOCK)  # columns of zeros add nothing
    except ValueError as error:
        raise BadConfig(f"these experts cannot be held in {name}: {error}") from error
    pool, host = what.layers * what.experts * stride_of(layout), memory_bytes()
    if pool > host:
        raise BadConfig(
            f"experts in {name} take {pool} bytes of host memory, and this machine has {host}; choose an "
            "--expert-format that takes less"
        )
    return layout


def _mode(config: EngineConfig, load: Load, rates: Rates | None) -> tuple[Mode, str]:
    if config.split is not None and config.experts != "hybrid":
        raise BadConfig(f"--split {config.split:g} is for --experts hybrid, not {config.experts}; drop one of the two")
    if config.experts != "auto":
        return config.experts, ""
    return choose(load, rates)


def _rates(format: str, machine: Machine) -> Rates | None:
    try:
        return Rates.of(Profile(default_profile()).rates(machine_name(machine.gpu)), format)
    except ProfileError as error:
        raise BadConfig(str(error)) from error
