"""Machines over the model of hashes and over a real one, and houses around them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from dialogue import House
from machine import Machine, Make, Setup

from engine.checkpoint import write_tiny
from engine.weights.tiktoken import build_byte_tokenizer, build_qwen_tokenizer
from parsers.load import Family, load_family

TEMPLATES = Path(__file__).resolve().parents[2] / "engine" / "templates"
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real hybrid, with random weights."""
    return write_tiny("qwen3_5_moe", tmp_path_factory.mktemp("scenario") / "tiny", hidden=32)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Qwen3-XML over 256 bytes and the control tokens."""
    return _family(tmp_path_factory.mktemp("family"), "qwen3_xml", build_byte_tokenizer)


def _family(directory: Path, template: str, tokenizer: Callable[[Path], None]) -> Family:
    tokenizer(directory)
    shutil.copy(TEMPLATES / f"{template}.jinja", directory / "chat_template.jinja")
    return load_family(directory)


def _machines(directory: Path, model: Path | None) -> Iterator[Make]:
    made: list[Machine] = []

    def make(**setup: Any) -> Machine:
        machine = Machine(directory / f"m{len(made)}", model, Setup(**setup))
        made.append(machine)
        return machine

    yield make
    for machine in made:
        machine.close()


@pytest.fixture
def hashes(tmp_path: Path) -> Iterator[Make]:
    """Makes machines over the model of hashes."""
    yield from _machines(tmp_path, None)


@pytest.fixture(params=["hash", "cpu"])
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes machines over the model of hashes, and over a real one."""
    yield from _machines(tmp_path, None if request.param == "hash" else request.getfixturevalue("tiny"))


@pytest.fixture
def house(family: Family, hashes: Make, tmp_path: Path) -> Iterator[House]:
    made = House(family, hashes(pages=1024, checkpoints=128), tmp_path)
    yield made
    made.close()


@pytest.fixture(params=[build_byte_tokenizer, pytest.param(build_qwen_tokenizer, marks=pytest.mark.deep)])
def plain_house(request: pytest.FixtureRequest, hashes: Make, tmp_path: Path) -> Iterator[House]:
    """A family that begins no thinking by itself, over bytes and over Qwen's own vocabulary."""
    family = _family(tmp_path, "hermes", request.param)
    made = House(family, hashes(pages=256, checkpoints=64, vocab=family.tokenizer.vocab_size), tmp_path)
    yield made
    made.close()
