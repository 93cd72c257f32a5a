"""Every public bug report of the project's list has a test: one that is named after its number, or one named here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPORTS = frozenset({*map(str, range(1, 73)), *(f"f{number}" for number in range(1, 7))})
ELSEWHERE = {
    "27": ("test_parsers_templates", "test_the_prompt_says_whether_thinking_is_open"),
    "28": ("test_parsers_templates", "test_the_prompt_says_whether_thinking_is_open"),
    "29": ("test_parsers_templates", "test_the_prompt_says_whether_thinking_is_open"),
    "35": ("test_grammar", "test_a_demanded_call_parses_as_one"),
    "53": ("test_parsers_templates", "test_calls_and_outputs_have_the_familys_own_ids"),
    "54": ("test_parsers_templates", "test_the_place_before_the_header_is_shared_when_probed_so"),
    "55": ("test_parsers_templates", "test_odd_spelling_of_a_turn_that_the_next_header_ends_is_kept"),
    "56": ("test_parsers_templates", "test_the_place_before_the_header_is_shared_when_probed_so"),
    "57": ("test_parsers_templates", "test_arguments_come_as_text_or_as_objects"),
    "64": ("test_grammar", "test_channels_need_no_thinking"),
    "66": ("test_grammar", "test_a_prefilled_channel_can_be_closed"),
    "67": ("test_grammar", "test_thinking_comes_first_and_is_free"),
    "69": ("test_grammar", "test_thinking_comes_first_and_is_free"),
}
"""Reports on prompts and grammars: the module and the test that hold what they ask for."""
_TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
_NUMBERS = re.compile(r"test_report((?:_f?\d+)+)_")


def every_test() -> Iterator[tuple[str, str]]:
    """(module, name) of every test of the parsers."""
    for path in Path(__file__).parent.glob("test_*.py"):
        yield from ((path.stem, name) for name in _TEST.findall(path.read_text(encoding="utf-8")))


def test_every_report_has_a_test() -> None:
    known = set(every_test())
    named = {
        number
        for _, name in known
        if (match := _NUMBERS.match(name))
        for number in match[1].removeprefix("_").split("_")
    }
    assert named <= REPORTS
    assert named | {number for number, test in ELSEWHERE.items() if test in known} == REPORTS
    assert not named & set(ELSEWHERE)
