"""Qwen3-XML: tagged call parameters (Qwen3-Coder, Qwen3.5, Qwen3.6 and their relatives), in ChatML turns."""

from __future__ import annotations

from parsers.families.hermes import CHATML_TURNS
from parsers.format import Call, Format, Result, Tagged, Think

QWEN3_XML = Format(
    name="qwen3_xml",
    turns=CHATML_TURNS,
    think=Think("<think>", "</think>"),
    call=Call(
        "<tool_call>",
        "</tool_call>",
        Tagged(
            head="<function=",
            head_end=">",
            tail="</function>",
            open="<parameter=",
            open_end=">",
            close="</parameter>",
        ),
        first="\n\n",
    ),
    result=Result("\n", "<tool_response>", "</tool_response>"),
)
