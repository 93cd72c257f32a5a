"""Tiny checkpoints, written once per run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.checkpoint import write_tiny

sys.path.insert(0, str(Path(__file__).parent))
from engine_support import accounted  # noqa: F401 - after every test

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a tiny checkpoint with these options."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(arch: str, **options: object) -> Path:
        name = "_".join([arch, *(f"{key}-{value}" for key, value in sorted(options.items()))])
        if name not in made:
            made[name] = write_tiny(arch, root / name, **options)
        return made[name]

    return make
