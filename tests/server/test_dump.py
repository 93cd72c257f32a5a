"""JSON of answers, whatever a model or a client came up with."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from server.dump import dump
from server.sse import frames

ANY_TEXT = st.text(st.characters(codec=None, categories=None)) | st.text(st.sampled_from("a\ud83d\ude00\ud800\n"))


@given(ANY_TEXT)
def test_every_text_has_a_form(text: str) -> None:
    said = json.loads(dump({"a": [text]}).decode())["a"][0]
    assert len(said) <= len(text)
    assert len(dump(said).decode().splitlines()) == 1
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert said == text


def test_halves_become_a_replacement_and_pairs_a_character() -> None:
    assert json.loads(dump("\ud800x")) == "\ufffdx"
    assert json.loads(dump("\ud83d\ude00")) == "\U0001f600"


def test_a_frame_holds_what_it_can() -> None:
    assert frames([("delta", {"text": "a\ud800\n"}), ("", "[DONE]")]) == (
        'event: delta\ndata: {"text":"a\ufffd\\n"}\n\ndata: [DONE]\n\n'.encode()
    )


def test_line_ends_of_every_reader_are_escaped() -> None:
    text = "a\nb\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029c ü"
    data = dump({"x": text})
    assert len(data.decode().splitlines()) == 1
    assert json.loads(data) == {"x": text}
