"""Every public bug report of the project's list has a test: one that is named after its number, or one named here.
And so has every invariant of the parsers."""

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
INVARIANTS = {
    "1 any chunking gives the same events": ("test_invariants", "test_tokens_do_not_matter_only_text_does"),
    "2 there is one path": ("test_invariants", "test_every_prefix_of_the_arguments_is_one_of_the_json"),
    "3 no delimiter leaks": ("test_machine", "test_a_delimiter_with_a_control_token_is_never_shown_in_part"),
    "4 text arrives at once": ("test_invariants", "test_text_arrives_at_once"),
    "5 nothing is lost": ("test_invariants", "test_plain_text_is_passed_on_whole"),
    "6 fragments are prefixes": ("test_invariants", "test_every_prefix_of_the_arguments_is_one_of_the_json"),
    "7 what is written is read": ("test_invariants", "test_a_written_turn_parses_back_to_itself"),
    "8 code points stay whole": ("test_invariants", "test_code_points_split_over_tokens_never_flicker"),
    "9 cut off anywhere": ("test_invariants", "test_every_cut_gives_a_prefix"),
    "10 stop strings": ("../server/test_blocks", "test_stop_strings_are_found_however_text_is_cut"),
    "11 order and numbers": ("test_invariants", "test_calls_are_numbered_in_order_and_bounded"),
    "12 the prompt says where it stands": ("test_parsers_templates", "test_the_prompt_says_whether_thinking_is_open"),
    "13 what a grammar admits is read": ("test_grammar", "test_a_demanded_call_parses_as_one"),
    "14 boundaries are positions of tokens": ("test_parsers_templates", "test_a_sampled_turn_continues_its_prompt"),
    "15 clean output tolerates nothing": ("test_invariants", "test_a_written_turn_parses_back_to_itself"),
    "16 linear work": ("test_invariants", "test_work_grows_linearly_with_the_argument"),
    "17 no tools, no calls": ("test_invariants", "test_without_tools_nothing_is_called_and_the_text_is_kept"),
}
"""Each invariant and the test of every format (or codec) that holds it."""
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


def test_every_invariant_has_a_test() -> None:
    assert [int(name.split()[0]) for name in INVARIANTS] == [*range(1, 18)]
    for module, test in INVARIANTS.values():
        source = (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")
        assert f"def {test}(" in source, test
