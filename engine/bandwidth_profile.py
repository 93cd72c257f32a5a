"""What was measured of machines' bandwidths, kept from run to run.

One JSON file for all machines, keyed by GPU and processor. A run adds its samples to what is there: a slow hour does
not replace a good one, and the spread shows what to believe.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from engine.native.library import physical_cores

KEPT = 32
"""Samples of one measure, the newest."""


@dataclass(frozen=True)
class Rate:
    """Bytes per second over samples."""

    samples: tuple[float, ...]

    @property
    def middle(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> float:
        """(Largest - smallest) / median."""
        return (max(self.samples) - min(self.samples)) / self.middle


class ProfileError(ValueError):
    """The file is not a profile; the text says what to do."""


class Profile:
    """``path``: the file; it need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rates(self, machine: str) -> dict[str, Rate]:
        """By the name of the measure; empty for a machine never measured. Raises ProfileError."""
        return {name: Rate(tuple(samples)) for name, samples in self._read().get(machine, {}).items()}

    def add(self, machine: str, measured: Mapping[str, Sequence[float]]) -> None:
        """Merge samples in, beside what other runs add at the same time. Raises ProfileError, OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            everything = self._read()
            known = everything.setdefault(machine, {})
            for name, samples in measured.items():
                known[name] = [*known.get(name, ()), *samples][-KEPT:]
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
            partial.replace(self.path)

    def _read(self) -> dict[str, dict[str, list[float]]]:
        try:
            read = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ProfileError(f"{self.path} is not JSON ({error}); delete it") from error
        if not _is_profile(read):
            raise ProfileError(f"{self.path} is no bandwidth profile; delete it, or name another with --profile")
        machines: dict[str, dict[str, list[float]]] = read
        return machines


def _is_profile(read: object) -> bool:
    return isinstance(read, dict) and all(
        isinstance(measures, dict)
        and all(
            isinstance(samples, list) and samples and all(isinstance(one, int | float) and one > 0 for one in samples)
            for samples in measures.values()
        )
        for measures in read.values()
    )


def default_profile() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ft" / "bandwidth.json"


def machine_name(gpu: str | None) -> str:
    """What a profile is keyed by. ``gpu``: its name, None without one."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{gpu or 'no GPU'}; {models[0] if models else 'unknown processor'}, {physical_cores()} cores"
