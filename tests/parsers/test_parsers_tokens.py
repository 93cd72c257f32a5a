"""Tokenizers of every kind: the same ids as the reference, no control token from plain text, exact bytes back."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Tokenizer as Reference

from parsers import seams
from parsers.alternatives import alternatives
from parsers.ranks import byte_level
from parsers.tokens import Tokenizer, TokenizerError
from parsers.vocabulary import _KIMI_SPLIT, read_description
from tests.parsers import vocabularies

relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Encode = Callable[[str], list[int]]

FRAGMENTS = (
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\u3000",
        " " * 40,
        "\n \n  \n",
        "a",
        "Word",
        "isn't",
        "I'LL",
        "fooBarBAZ",
    ),
    *(
        "word next",
        "line\nnext",
        "x = 1;\n",
        "7",
        "12345678",
        "٣٤",
        "½",
        "Ⅷ",
        "漢字",
        "中文，没有空格",
        "。",
        "한글",
        "ไทย",
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "\u0338",
        "\u037e",
        "👩\u200d👩\u200d👧",
        "🇩🇪",
        "\u200d",
        "\ufe0f",
        "//",
        "/*",
        "*/\n",
        "\x00",
    ),
    *("<|im_end|>", "[INST]", "<|channel|>", "<SPECIAL_20>", "<0x0A>", "▁", "\ufffd", "\U0010ffff", "\ufeff", "—", "…"),
)
TEXTS = st.lists(
    st.sampled_from(FRAGMENTS) | st.text(st.characters(exclude_categories=("Cs",)), max_size=6), max_size=40
).map("".join)


@cache
def real(name: str) -> tuple[Tokenizer, Encode]:
    """A real vocabulary, and what its own tokenizer makes of plain text. "kimi": other ranks, but Kimi's files."""
    if name == "o200k":
        harmony = vocabularies.harmony()
        return Tokenizer(vocabularies.o200k_description()), lambda text: harmony.encode(text, disallowed_special=())
    with TemporaryDirectory() as scratch:
        if name == "kimi":
            ranks = vocabularies.tekken_ranks(20_000)
            encoding = tiktoken.Encoding(name, pat_str=_KIMI_SPLIT, mergeable_ranks=ranks, special_tokens={})
            return Tokenizer.load(
                vocabularies.kimi_directory(Path(scratch) / name, ranks, {})
            ), encoding.encode_ordinary
        reference = Tekkenizer.from_file(vocabularies.tekken_file())
        tokenizer = Tokenizer.load(vocabularies.tekken_directory(Path(scratch) / name))
    return tokenizer, lambda text: reference.encode(text, bos=False, eos=False)


@pytest.mark.parametrize("name", ["tekken", "o200k", "kimi"])
@relaxed
@given(text=TEXTS)
def test_ids_are_those_of_the_reference(name: str, text: str) -> None:
    tokenizer, reference = real(name)
    ids = tokenizer.encode(text)
    assert list(ids) == reference(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.control.values())


@pytest.mark.parametrize("name", ["tekken", "o200k", "kimi"])
@relaxed
@given(texts=st.lists(TEXTS, min_size=2, max_size=6), chunk=st.integers(1, 40))
def test_a_growing_text_has_the_tokens_of_a_new_one(
    name: str, texts: list[str], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, reference = real(name)
    with monkeypatch.context() as patch:
        patch.setattr(seams, "_CHUNK", chunk)
        grown = ""
        for text in texts:
            grown += text
            assert list(tokenizer.encode(grown, remember=True)) == reference(grown)
            assert tokenizer.encode(grown) == tokenizer.encode(grown, remember=True)


@pytest.mark.parametrize("name", ["tekken", "o200k"])
def test_only_what_was_added_to_a_long_text_is_encoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, reference = real(name)
    random.seed(name)
    texts = {
        "prose": "".join(random.choice(("all the words ", "of a long text, ", "and so on.\n")) for _ in range(5000)),
        "json": "".join(f'  {{"key{n}": [{n}, "some value {n}"]}},\n' for n in range(2000)),
        "chinese": "".join(random.choice("中文没有空格的长文本") + "，" * (n % 9 == 0) for n in range(20_000)),
    }
    encoded: list[str] = []
    batch = tokenizer._batch
    monkeypatch.setattr(tokenizer, "_batch", lambda chunks: encoded.extend(chunks) or batch(chunks))
    for text in texts.values():
        tokenizer.encode(text, remember=True)
        encoded.clear()
        grown = text + "One more sentence."
        assert list(tokenizer.encode(grown, remember=True)) == reference(grown)
        assert 0 < sum(map(len, encoded)) < 6000


@pytest.mark.parametrize("name", ["tekken", "o200k"])
@relaxed
@given(texts=st.lists(TEXTS, max_size=4))
def test_no_text_has_fewer_tokens_than_the_bound(name: str, texts: list[str]) -> None:
    tokenizer, _ = real(name)
    assert tokenizer.least_tokens(texts) <= len(tokenizer.encode("\n".join(texts)))


@pytest.mark.parametrize("name", ["tekken", "o200k"])
@pytest.mark.parametrize("kind", ["prose", "base64", "chinese"])
def test_ten_megabytes_are_refused_without_being_encoded(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = real(name)
    noise = random.Random(1).randbytes(7_500_000)
    text = {
        "prose": "some words of a very long text, " * 312_500,
        "base64": base64.b64encode(noise).decode(),
        "chinese": "很长的文本" * 700_000,
    }[kind]
    monkeypatch.setattr(tokenizer, "_batch", lambda chunks: pytest.fail("encoded"))
    assert tokenizer.least_tokens([text]) > 131_072


def test_each_control_token_is_one_id_in_trusted_text_only() -> None:
    for name in ("tekken", "o200k"):
        tokenizer, _ = real(name)
        texts, ids = list(tokenizer.control), list(tokenizer.control.values())
        assert len(ids) in (1000, 1090)
        assert tokenizer.encode_trusted("".join(texts)) == ids
        assert not set(ids) & {token for text in texts for token in tokenizer.encode(text)}


# -- sentencepiece ----------------------------------------------------------------------------------------------------

KINDS = ("gemma", "llama", "mistral")
PIECES = (
    " ",
    "  ",
    "\n",
    "\n\n",
    "the",
    " hello",
    "world",
    "ing",
    "é",
    "😀",
    "<table>",
    "<0x0A>",
    "<0x41>",
    "a,b",
    "▁",
)


@cache
def small(kind: str) -> tuple[Tokenizer, Reference]:
    description = vocabularies.sentencepiece(kind)
    return Tokenizer(description), Reference.from_str(json.dumps(description))


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(parts=st.lists(st.sampled_from((*PIECES, *vocabularies.MARKS)), max_size=12), chunk=st.integers(1, 9))
def test_sentencepiece_ids_are_those_of_the_library(
    kind: str, parts: list[str], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, reference = small(kind)
    text = "".join(part for part in parts if part != "<0x41>" or kind != "gemma")
    with monkeypatch.context() as patch:
        patch.setattr(seams, "_CHUNK", chunk)
        ids = tokenizer.encode_trusted(text, remember=True)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    detokenizer = tokenizer.detokenizer()
    decoded = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    wanted = text.replace("▁", " ")
    if kind == "mistral" and wanted.startswith(" "):
        wanted = wanted[1:]  # the library puts no space before a space, so that it is gone afterwards
    assert decoded == wanted


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(text=st.lists(st.sampled_from((*PIECES, *vocabularies.MARKS, "<unk>")), max_size=12).map("".join))
def test_plain_sentencepiece_text_comes_back_and_has_no_control_token(kind: str, text: str) -> None:
    tokenizer, _ = small(kind)
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.control.values())
    assert tokenizer.decode(ids) == text.replace("▁", " ")
    assert tokenizer.least_tokens([text]) <= len(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("text", ["", "hello the", " hello", "é<table>"])
def test_a_prompt_of_plain_text_begins_as_the_librarys_does(kind: str, wrapped: bool, text: str) -> None:
    """With the start token of its template, and not with the end that some have."""
    description = vocabularies.sentencepiece(kind)
    start, end = (one["content"] for one in description["added_tokens"] if one["content"] in ("[INST]", "[/INST]"))
    marks = {one["content"]: one["id"] for one in description["added_tokens"]}
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": start, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": end, "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {one: {"id": one, "ids": [marks[one]], "tokens": [one]} for one in (start, end)},
    }
    description["post_processor"] = {"type": "Sequence", "processors": [template]} if wrapped else template
    tokenizer = Tokenizer(description)
    reference = Reference.from_str(json.dumps(description)).encode(text).ids
    assert tokenizer.encode_start(text) == tuple(reference[:-1])
    assert small(kind)[0].encode_start(text) == tuple(reference[1:-1])


def test_where_sentencepiece_puts_a_space_before_text() -> None:
    for kind, at_start, behind_mark, behind_text in (
        ("gemma", "hello", "hello", "hello"),
        ("llama", " hello", " hello", "hello"),
        ("mistral", " hello", "hello", "hello"),
    ):
        tokenizer, _ = small(kind)
        mark, word = tokenizer.control["[/INST]"], tokenizer.encode("ing")[-1]
        for after, wanted in ((None, at_start), (mark, behind_mark), (word, behind_text)):
            assert tokenizer.decode(tokenizer.encode_trusted("hello", after=after)) == wanted
        # What the model says first loses it, too.
        detokenizer = tokenizer.detokenizer()
        said = "".join(map(detokenizer.push, tokenizer.encode(" hello the")))
        assert said == (" hello the" if kind == "gemma" else "hello the")
        detokenizer.flush()  # a control token, which the parser reads by its id
        said = "".join(map(detokenizer.push, tokenizer.encode(" hello the")))
        assert said == ("hello the" if kind == "llama" else " hello the")


def test_html_is_text_and_bytes_have_no_name() -> None:
    tokenizer, reference = small("gemma")
    assert "<table>" not in tokenizer.control
    assert list(tokenizer.encode("a<table>")) == reference.encode("a<table>").ids
    assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"
    (token,) = [tokenizer._plain.token_to_id("<0x0A>")]
    assert tokenizer.token_bytes(token) == b"\n"


# -- files ------------------------------------------------------------------------------------------------------------


def test_tekken_and_tiktoken_files(tmp_path: Path) -> None:
    tokenizer, _ = real("tekken")
    assert (tokenizer.vocab_size, tokenizer.control["[TOOL_CALLS]"]) == (131_072, 9)
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"abc": 257, "漢字".encode(): 258}
    kimi = vocabularies.kimi_directory(tmp_path / "kimi", ranks, {259: "[BOS]", 263: "<|im_end|>"})
    tokenizer = Tokenizer.load(kimi)
    assert tokenizer.encode("abcab漢字1234") == (257, 256, 258, *b"1234")
    assert tokenizer.encode_trusted("[BOS]a<|im_end|><|reserved_token_514|>") == [259, 97, 263, 514]
    assert tokenizer.vocab_size == 259 + 256


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tekken.json", "{}", "tekken.json cannot be read: KeyError"),
        ("tekken.json", '{"config": 1}', "cannot be read: TypeError"),
        ("tiktoken.model", "YQ== 0", "cannot be read: FileNotFoundError"),
        ("tokenizer.json", "[1]", "not a tokenizer description"),
        ("nothing", "", "neither does tekken.json or tiktoken.model"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, reason: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=reason):
        read_description(tmp_path)


def test_vocabularies_that_cannot_spell_every_text_are_refused() -> None:
    unigram = {"model": {"type": "Unigram", "vocab": {"a": 1}}}
    with pytest.raises(TokenizerError, match="of type Unigram"):
        Tokenizer(unigram)
    for damage, reason in (
        ({"byte_fallback": False}, "only ByteLevel and ByteFallback"),
        ({"vocab": {"a": 0}}, "byte 0x00"),
    ):
        description = vocabularies.sentencepiece("gemma")
        description["model"] |= damage
        with pytest.raises(TokenizerError, match=reason):
            Tokenizer(description)


def test_a_tiktoken_file_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    directory = vocabularies.kimi_directory(tmp_path / "c", {b"a": 0}, {})
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "Other"}')
    with pytest.raises(TokenizerError, match="class Other, which is not known"):
        Tokenizer.load(directory)


@pytest.mark.parametrize(
    "flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"lstrip": True, "rstrip": True}]
)
@relaxed
@given(parts=st.lists(st.sampled_from(("<m>", "<|e|>", " ", "\n\t", "\u3000", "x", "_", "é")), max_size=9))
def test_control_tokens_take_the_white_space_beside_them(flags: tuple[str, ...], parts: list[str]) -> None:
    description = byte_level(
        {bytes([byte]): byte for byte in range(256)}, r"\s+|\S+", [("<m>", 256, True), ("<|e|>", 257, True)]
    )
    description["added_tokens"][0] |= flags
    text = "".join(parts)
    reference = Reference.from_str(json.dumps(description))
    assert Tokenizer(description).encode_trusted(text) == reference.encode(text, add_special_tokens=False).ids


@given(st.lists(st.text("ab|(", max_size=4), max_size=8), st.text("ab|(", max_size=12))
def test_alternatives_find_the_longest(literals: list[str], text: str) -> None:
    found = re.search(alternatives(literals), text)
    wanted = [(at, -len(one)) for one in literals if one for at in [text.find(one)] if at >= 0]
    assert (found and (found.start(), found.start() - found.end())) == (min(wanted) if wanted else None)


def test_rules_that_do_not_hold_for_a_vocabulary_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_only = {bytes([byte]): byte for byte in range(256)}
    text = "all words\nof a\ntext，漢" * 3

    def cuts(pattern: str, *tokens: bytes) -> int:
        ranks = bytes_only | {token: 256 + n for n, token in enumerate(tokens)}
        monkeypatch.setattr(seams, "_CHUNK", 1)
        return len(Tokenizer(byte_level(ranks, pattern, []))._seams.chunks(text)) - 1

    assert cuts(r"\s+|\S+") == 3 * (2 + 2 + 1)
    assert cuts(r"\s+|\S+", b"s\no") == 3 * (2 + 1)
    assert cuts(r"\s+|\S+", b"l w") == 3 * (2 + 1)
    assert cuts(r"\s+|\S+", "xt，".encode()[1:]) == 3 * (2 + 2)
    assert cuts(r"\}\n(?=\w)|[\s\S]", b"}\n") == 3 * (2 + 1)
    assert cuts(r"(?<=x)\s+|\S+|\s+") == 0
