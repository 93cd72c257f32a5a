"""MiniMax: M2 writes tagged parameters, M3 nested elements behind a marker token."""

from __future__ import annotations

from dataclasses import replace

from parsers.format import Call, Elements, Format, Pair, Result, Switches, Tagged, Think, Turns

_MARK = "]<]minimax[>["

M2 = Format(
    name="minimax_m2",
    models=("MiniMax-M2", "MiniMax-M2.5", "MiniMax-M2.7"),
    turns=Turns.framed(
        system="]~b]system\n", user="]~b]user\n", assistant="]~b]ai\n", tools="]~b]tool", end="[e~[", tail="\n"
    ),
    think=Think("<think>", "</think>"),
    call=Call(
        "<invoke",
        "</invoke>",
        Tagged(open='<parameter name="', open_end='">', close="</parameter>", trim="none"),
        header=' name="{name}">\n',
        section=Pair("<minimax:tool_call>", "</minimax:tool_call>"),
        first_alone=True,
        around="\n",
        first="\n",
    ),
    result=Result("\n", "<response>", "</response>"),
    switches=Switches(on={}, off={}),
)

M3 = replace(
    M2,
    name="minimax_m3",
    models=("MiniMax-M3",),
    turns=replace(M2.turns, others=("]~b]developer\n",)),
    think=Think("<mm:think>", "</mm:think>", inner="", after="", closer_alone=True),
    call=Call(
        f"{_MARK}<invoke",
        f"{_MARK}</invoke>",
        Elements(prefix=_MARK),
        header=' name="{name}">',
        section=Pair(f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"),
        around="\n",
    ),
    switches=Switches(
        on={"thinking_mode": "enabled"},
        off={"thinking_mode": "disabled"},
        efforts={"minimal": {"thinking_mode": "adaptive"}, "medium": {"thinking_mode": "enabled"}},
    ),
)
