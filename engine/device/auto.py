"""Where a model's experts are best computed, from what a machine's pipes were measured to carry.

A token of a model that does not fit the device takes its dense weights and the experts that hit from the device's
memory; its misses come over the link, are computed by the CPU, or both at once, which memory may limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.bandwidth_profile import Rate

Mode = Literal["device", "offload", "hybrid", "cpu"]

SYNC = 5e-6
"""Seconds that a layer's exchange with the CPU takes at the least."""
_WORTH = 0.98
"""A mode with less to it is taken unless another is faster than this share of its time."""


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


@dataclass(frozen=True)
class Choice:
    mode: Mode
    why: str


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


def choose(load: Load, rates: Rates | None) -> Choice:
    """The fastest mode; of those about as fast the one with less to it."""
    if load.room >= load.pool:
        return Choice("device", f"all experts fit ({_gb(load.pool)} of {_gb(load.room)} GB)")
    share = f"{load.hits:.0%} of the experts fit"
    if rates is None:
        return Choice("hybrid", f"{share}; how fast the link and the CPU are is not known, and is learnt while serving")
    times = seconds(load, rates)
    order: tuple[Mode, ...] = ("offload", "cpu", "hybrid")
    fastest = min(times.values())
    mode = next(mode for mode in order if times[mode] * _WORTH <= fastest)
    bounds = ", ".join(f"{mode} {1 / times[mode]:.0f}" for mode in order)
    return Choice(
        mode,
        f"{share}; bounds in tok/s: {bounds} (link {_gb(rates.link)}, CPU {_gb(rates.cpu)}, at once {_gb(rates.both)} "
        f"GB/s)",
    )


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f}"
