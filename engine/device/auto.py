"""Where a model's experts are best computed, from what a machine's pipes were measured to carry.

A token of a model that does not fit the device takes its dense weights and the experts that hit from the device's
memory; its misses come over the link, are computed by the CPU, or both at once, which memory may limit. Which of the
three is fastest was true when it was measured; so by default it is only where the split of each layer begins, and that
may go to either side alone while serving (``engine.experts.split``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.bandwidth_profile import Rate

Mode = Literal["device", "offload", "hybrid", "cpu"]

SYNC = 5e-6
"""Seconds that a layer's exchange with the CPU takes at the least."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second: the device's memory; the link alone and the CPU's experts alone; both at once."""

    device: float
    link: float
    cpu: float
    both: float

    @staticmethod
    def of(profile: Mapping[str, Rate], format: str) -> Rates | None:
        """What a profile says of a format; None where something was never measured."""
        names = ("device.copy", f"link.{format}", f"cpu.{format}", f"both.link.{format}", f"both.cpu.{format}")
        if not all(name in profile for name in names):
            return None
        device, link, cpu, both_link, both_cpu = (profile[name].middle for name in names)
        return Rates(device, link, cpu, both_link + both_cpu)


@dataclass(frozen=True)
class Load:
    """Bytes: ``dense`` is read for every token, and ``routed`` of all experts' ``pool``; ``room`` on the device is for
    experts."""

    layers: int
    dense: float
    routed: float
    pool: float
    room: float

    @property
    def hits(self) -> float:
        """Of the experts of a token, those that are there: as if all were equally wanted, so at the least."""
        return min(1.0, self.room / self.pool)


def seconds(load: Load, rates: Rates) -> dict[Mode, float]:
    """Of a token at the least, by mode."""
    missing = (1 - load.hits) * load.routed
    on_device = (load.dense + load.hits * load.routed) / rates.device
    times: dict[Mode, float] = {
        "offload": on_device + missing / rates.link,
        "hybrid": on_device + missing / max(rates.both, rates.link, rates.cpu) + load.layers * SYNC,
        "cpu": load.dense / rates.device + load.routed / rates.cpu + load.layers * SYNC,
    }
    if load.room >= load.pool:
        times["device"] = (load.dense + load.routed) / rates.device
    return times


def choose(load: Load, rates: Rates | None) -> tuple[Mode, str]:
    """All on the device if there is room, else both sides; and why, in words."""
    if load.room >= load.pool:
        return "device", f"all experts fit ({_gb(load.pool)} of {_gb(load.room)} GB)"
    share = f"{load.hits:.0%} of the experts fit"
    if rates is None:
        return "hybrid", f"{share}; how fast the link and the CPU are is not known, and is learnt while serving"
    bounds = ", ".join(f"{mode} {1 / time:.0f}" for mode, time in seconds(load, rates).items())
    return "hybrid", (
        f"{share}; bounds in tok/s: {bounds} (link {_gb(rates.link)}, CPU {_gb(rates.cpu)}, at once {_gb(rates.both)} "
        f"GB/s); each layer follows what it measures"
    )


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f}"
