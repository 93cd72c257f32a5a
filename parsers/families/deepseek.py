"""DeepSeek: JSON calls between control tokens (V3, V3.1) and DSML elements (V3.2 and later)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parsers.families.minimax import invokes
from parsers.format import UNTOLD, Call, Format, Json, Pair, Result, Switches, Think, ToolsText, Turns, by_level

_TURNS = Turns(
    system=Pair("", ""),
    user=Pair("<｜User｜>", ""),
    assistant=Pair("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    tools=Pair("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    headless=("<｜tool▁outputs▁end｜>",),
)
_SECTION = Pair("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DECLARED = "## Tools\n\nThese functions can be called, one JSON description per line:\n\n"
_SPELLED = "\nWrite calls exactly like this, one or several between the outer marks:\n\n"


def _tools(call: str) -> ToolsText:
    """Templates of these checkpoints often know nothing of tools; ``call`` is an example."""
    return ToolsText(
        _DECLARED, f"{_SPELLED}{_SECTION.open}<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>{_SECTION.close}"
    )


V3 = Format(
    name="deepseek_v3",
    models=("DeepSeek-V3", "DeepSeek-R1"),
    turns=_TURNS,
    call=Call(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        Json(),
        header="function<｜tool▁sep｜>{name}\n```json\n",
        tail="\n```",
        section=_SECTION,
    ),
    result=Result("", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    think=Think("<think>", "</think>"),
    switches=UNTOLD,
    tools_text=_tools('function<｜tool▁sep｜>the_name\n```json\n{"first": "value"}\n```'),
)

V31 = replace(
    V3,
    name="deepseek_v31",
    models=("DeepSeek-V3.1",),
    turns=replace(
        _TURNS, tools=Pair("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"), headless=("<｜tool▁output▁end｜>",)
    ),
    think=Think("<think>", "</think>", "", ""),
    call=replace(V3.call, header="{name}<｜tool▁sep｜>", tail="", between=""),
    switches=Switches(on={"thinking": True}, off={"thinking": False}),
    tools_text=_tools('the_name<｜tool▁sep｜>{"first": "value"}'),
)


def _dsml(mark: str, section: str) -> Call:
    """``section`` is the wrapper's name; ``mark`` stands in front of every tag."""
    typed: Any = {"key_end": '" string="', "typed": "string", "empty": "\n"}
    return invokes(mark, mark + section, first="\n\n", first_alone=True, **typed)


V32 = replace(
    V31,
    name="deepseek_v32",
    tools_text=None,
    models=("DeepSeek-V3.2",),
    turns=replace(
        _TURNS, tools=Pair("\n\n<function_results>", "\n</function_results>"), headless=("\n</function_results>",)
    ),
    call=_dsml("｜DSML｜", "function_calls"),
    result=Result("\n", "<result>", "</result>"),
    encoder="deepseek_v32",
)

V4 = replace(
    V32,
    name="deepseek_v4",
    models=("DeepSeek-V4",),
    turns=replace(_TURNS, tools=Pair("<｜User｜>", ""), headless=()),
    call=_dsml("｜DSML｜", "tool_calls"),
    result=Result("\n\n", "<tool_result>", "</tool_result>"),
    switches=replace(
        V31.switches, always={"drop_thinking": False}, efforts=by_level("reasoning_effort", "low", "high", "max")
    ),
    encoder="deepseek_v4",
)

V41 = replace(
    V4,
    name="deepseek_v41",
    models=("DeepSeek-V4.1",),
    turns=replace(V4.turns, system=Pair("<｜System｜>", "")),
    call=_dsml("｜DSML｜ ", "calls"),
    switches=replace(V4.switches, efforts=by_level("reasoning_effort", low=50, high=75, max=100)),
    encoder="deepseek_v41",
)
