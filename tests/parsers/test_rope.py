"""A rope is the text that its pieces make, however it came about."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from parsers.rope import Rope


@given(st.lists(st.tuples(st.floats(0, 1), st.text("ab\udffe", max_size=4)), max_size=100), st.data())
def test_it_reads_as_its_text(steps: list[tuple[float, str]], data: Any) -> None:
    """Each is made of the one before, up to somewhere, and more."""
    made = [(Rope(), "")]
    for share, more in steps:
        rope, text = made[-1]
        end = round(share * len(text))
        made.append((rope.upto(end) + more, text[:end] + more))
    for rope, text in made:
        assert (str(rope), len(rope)) == (text, len(text))
    (rope, text), (other, its) = data.draw(st.sampled_from(made)), data.draw(st.sampled_from(made))
    begin, end = data.draw(st.integers(0, len(text) + 2)), data.draw(st.integers(0, len(text) + 2))
    assert rope.text(begin, end) == text[begin:end] and rope.text(begin) == text[begin:]
    assert rope.begins_with(other) == text.startswith(its)


def test_what_is_shared_is_not_copied() -> None:
    first = Rope("x" * 1000)
    grown = first.upto(900) + "y" * 50
    more = grown.upto(930) + "z"
    assert more._pieces[0] is grown._pieces[0] and more.begins_with(grown.upto(920))


def test_it_has_few_pieces() -> None:
    rope = Rope()
    for _ in range(10_000):
        rope += "text"
    assert len(rope._pieces) < 20
