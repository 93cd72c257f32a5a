"""Every family once per run; the real vocabulary takes a second to load."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engine.weights.tiktoken import build_byte_tokenizer, build_qwen_tokenizer
from parsers.load import Family, load_family
from tests.parsers.parser_support import checkpoint, without_tag_tokens


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories with tokenizer files: "byte", "qwen", and "spelled" (qwen without tokens for tags)."""

    @cache
    def build(name: str) -> Path:
        directory = Path(tmp_path_factory.mktemp(name)) / "tokenizer"
        if name == "spelled":
            return without_tag_tokens(build("qwen"), directory)
        (build_byte_tokenizer if name == "byte" else build_qwen_tokenizer)(directory)
        return directory

    return build


@pytest.fixture(scope="session")
def families(vocabulary: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Families by "vocabulary-template"."""

    @cache
    def load(name: str) -> Family:
        tokenizer, _, template = name.partition("-")
        directory = Path(tmp_path_factory.mktemp(name)) / "checkpoint"
        return load_family(checkpoint(vocabulary(tokenizer), directory, template))

    return load


@pytest.fixture
def family(request: pytest.FixtureRequest, families: Callable[[str], Family]) -> Family:
    """The family named by the test's (indirect) parameter."""
    return families(request.param)
