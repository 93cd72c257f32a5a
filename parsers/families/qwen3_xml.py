"""Qwen3-XML: tagged call parameters, in the turns of several model lines."""

from __future__ import annotations

from dataclasses import replace

from parsers.families.hermes import CHATML
from parsers.format import UNTOLD, Call, Format, Pair, Result, Switches, Tagged, Think, Turns, by_level

PARAMETERS = Tagged(open="<parameter=", open_end=">", close="</parameter>")

QWEN3_XML = Format(
    name="qwen3_xml",
    models=("Qwen3-Coder", "Qwen3.5", "Qwen3.6"),
    turns=CHATML,
    think=Think("<think>", "</think>"),
    call=Call(
        "<tool_call>",
        "</tool_call>",
        PARAMETERS,
        header="<function={name}>",
        tail="</function>",
        first="\n\n",
        inner="\n",
    ),
    result=Result("\n", "<tool_response>", "</tool_response>", inner="\n"),
    switches=Switches(always={"preserve_thinking": True}),
)

QWEN38 = replace(
    QWEN3_XML,
    name="qwen38",
    models=("Qwen3.8",),
    switches=Switches(
        always={"preserve_thinking": True},
        efforts={"low": {"reasoning_effort": "low"}, "medium": {}, "xhigh": {"reasoning_effort": "xhigh"}},
    ),
)

NEMOTRON3 = replace(
    QWEN3_XML,
    name="nemotron3",
    models=("Nemotron-3",),
    think=Think("<think>", "</think>", after="\n"),
    call=replace(QWEN3_XML.call, first="\n"),
    switches=Switches(always={"truncate_history_thinking": False}),
)

MIMO = replace(
    QWEN3_XML, name="mimo", models=("MiMo-V2",), call=replace(QWEN3_XML.call, codec=replace(PARAMETERS, trim="none"))
)

STEP35 = replace(
    QWEN3_XML,
    name="step35",
    models=("Step-3.5",),
    turns=replace(CHATML, tools=Pair("<|im_start|>tool_response", "<|im_end|>")),
    think=Think("<think>", "</think>", after="\n"),
    call=replace(QWEN3_XML.call, first="", between=""),
    result=Result("\n", "<tool_response>", "</tool_response>"),
    switches=UNTOLD,
)

SEED = Format(
    name="seed_oss",
    models=("Seed-OSS",),
    turns=Turns.framed("<seed:bos>{}\n", "<seed:eos>"),
    think=Think("<seed:think>", "</seed:think>", inner="", after="\n"),
    call=replace(MIMO.call, open="<seed:tool_call>", close="</seed:tool_call>"),
    result=Result("", "", ""),
    switches=Switches(
        on={"thinking_budget": -1},
        off={"thinking_budget": 0},
        efforts=by_level("thinking_budget", minimal=512, low=2048, medium=8192, high=16384, xhigh=-1),
    ),
)
