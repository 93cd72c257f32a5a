"""Where the value of a parameter ends, in formats that spell its delimiters in ordinary tokens."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from parsers import source
from parsers.codecs import tagged
from parsers.conversation import ToolCall
from parsers.format import Tagged
from tests.parsers.wire_support import NAMES, machine

MUSE = ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n{}</atem:function_calls><|eom|>'
STRINGS = [
    '{"k": "a</atem:parameter></atem:invoke>b"}',
    '{"k": "a</atem:parameter>\\n</atem:invoke></atem:function_calls>", "l": ["\\"</atem:parameter></atem:invoke>"]}',
    '{"k": "<atem:parameter name=\\"s\\">x</atem:parameter><atem:parameter name=\\"t\\">", "l": "' + "x" * 9000 + '"}',
]


@pytest.mark.parametrize("value", STRINGS)
@pytest.mark.parametrize("key", ["o", "undeclared"])
def test_delimiters_inside_a_string_of_json_are_content(value: str, key: str) -> None:
    inside = f'<atem:parameter name="{key}">{value}</atem:parameter>\n</atem:invoke>\n'
    parsed = machine("muse_glimmer").say(MUSE.replace("{}", inside))
    ((_, name, arguments, state),) = parsed.calls
    assert (name, state, parsed.tolerated) == ("f", "complete", [])
    assert json.loads(arguments) == {key: json.loads(value)}


@pytest.mark.parametrize("broken", ['{"k": "oops}', '["a', '{"k": "oops\n'])
def test_a_string_that_does_not_end_ends_with_its_value(broken: str) -> None:
    inside = f'<atem:parameter name="o">{broken}</atem:parameter>\n<atem:parameter name="n">1</atem:parameter>\n'
    parsed = machine("muse_glimmer").say(MUSE.replace("{}", inside + "</atem:invoke>\n"))
    assert json.loads(parsed.calls[0][2]) == {"o": broken, "n": 1}


@pytest.mark.parametrize(
    "behind",
    [
        "</minimax:tool_call>",
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        "",
        "</invoke>\n</minimax:tool_call>",
    ],
)
@pytest.mark.parametrize("key", ["s", "u"])
def test_text_behind_a_parameter_is_no_value_where_the_call_is_not_closed(behind: str, key: str) -> None:
    call = f'<invoke name="f">\n<parameter name="{key}">v</parameter>\nNow the next one:\n{behind}'
    parsed = machine("minimax_m2").say(f"<minimax:tool_call>\n{call}[e~[")
    assert parsed.calls[0][1:] == ("f", f'{{"{key}": "v"}}', "complete")
    assert len(parsed.calls) == 1 + ("g" in behind) and "text_in_call" in parsed.tolerated


def test_text_behind_a_parameter_is_no_value_in_a_channel_either() -> None:
    """Muse-Glimmer spells all of it in ordinary tokens."""
    first = '<atem:parameter name="s">v</atem:parameter>\nNow the next:\n'
    for behind in ('<atem:invoke name="g">\n</atem:invoke>\n', ""):
        parsed = machine("muse_glimmer").say(MUSE.replace("{}", first + behind))
        assert [call[1:3] for call in parsed.calls] == [("f", '{"s": "v"}'), ("g", "{}")][: 1 + bool(behind)]


def test_what_a_value_says_of_calls_stays_in_it() -> None:
    text = 'Write <parameter name="n">1</parameter> in <invoke name="f"> and </parameter> or <invoke name="x"> done.'
    call = f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">{text}</parameter>\n</invoke>\n'
    parsed = machine("minimax_m2").say(call + "</minimax:tool_call>[e~[")
    assert json.loads(parsed.calls[0][2]) == {"s": text} and not parsed.tolerated


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(machine(name).format.call.codec, Tagged)])
@pytest.mark.parametrize("arguments", ['{"o": {"k": "@"}}', '{"s": "@"}'])
def test_what_is_searched_for_the_end_of_a_value_grows_with_its_length(
    name: str, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is counted: characters of strings searched, and texts compared with what may follow."""
    work = Counter[str]()
    rest, compare = tagged._STRING_REST, source.compared

    class Counted:
        def match(self, text: str, at: int = 0) -> re.Match[str] | None:
            found = rest.match(text, at)
            work["searched"] += found.end() - at if found else 0
            return found

    def counted(text: str, path: source.Path) -> bool | None:
        work["compared"] += 1
        return compare(text, path)

    monkeypatch.setattr(tagged, "_STRING_REST", Counted())
    for module in (tagged, source):
        monkeypatch.setattr(module, "compared", counted)
    found = machine(name)
    call = found.tokenizer.decode(found.output([ToolCall("call00001", "f", arguments)]))
    codec, around = found.format.call.codec, found.format.call
    assert isinstance(codec, Tagged)
    for repeated in (codec.close, codec.close + around.tail + around.close, around.close + codec.close):
        costs = []
        for times in (50, 400):
            work.clear()
            body = (repeated.replace("\n", "") + "x") * times
            found.say(call.replace("@", body))
            costs.append(work["compared"] + work["searched"] // 10)
        assert costs[1] <= 10 * costs[0] + 2000, repeated
