"""MiniMax: M2 writes tagged parameters, M3 nested elements behind a marker token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parsers.format import UNTOLD, Call, Elements, Format, Pair, Result, Switches, Tagged, Think, Turns, by_level

_MARK = "]<]minimax[>["


def invokes(mark: str, section: str, first: str = "", first_alone: bool = False, **parameters: Any) -> Call:
    """Calls as ``<invoke name="...">`` in an element around all; ``mark`` stands in front of their names."""
    return Call(
        f"<{mark}invoke",
        f"</{mark}invoke>",
        Tagged(f'<{mark}parameter name="', '">', f"</{mark}parameter>", trim="none", **parameters),
        header=' name="{name}">\n',
        section=Pair(f"<{section}>", f"</{section}>"),
        first=first,
        first_alone=first_alone,
        around="\n",
    )


M2 = Format(
    name="minimax_m2",
    models=("MiniMax-M2", "MiniMax-M2.5", "MiniMax-M2.7"),
    turns=Turns.framed("]~b]{}\n", "[e~[", "system user ai tool", tools="]~b]tool", tail="\n"),
    think=Think("<think>", "</think>"),
    call=invokes("", "minimax:tool_call", first="\n", first_alone=True),
    result=Result("\n", "<response>", "</response>"),
    switches=UNTOLD,
)

M3 = replace(
    M2,
    name="minimax_m3",
    models=("MiniMax-M3",),
    turns=replace(M2.turns, others=("]~b]developer\n",)),
    think=Think("<mm:think>", "</mm:think>", "", "", closer_alone=True),
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
        efforts=by_level("thinking_mode", minimal="adaptive", medium="enabled"),
    ),
)
