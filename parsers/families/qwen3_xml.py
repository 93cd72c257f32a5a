"""Qwen3-XML: tagged call parameters, in the turns of several model lines."""

from __future__ import annotations

from dataclasses import replace

from parsers.families.hermes import CHATML
from parsers.format import Call, Format, Pair, Result, Switches, Tagged, Think, Turns

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
    switches=Switches(on={}, off={}),
)

SEED = Format(
    name="seed_oss",
    models=("Seed-OSS",),
    turns=Turns.framed(
        system="<seed:bos>system\n",
        user="<seed:bos>user\n",
        assistant="<seed:bos>assistant\n",
        tools="<seed:bos>tool\n",
        end="<seed:eos>",
    ),
    think=Think("<seed:think>", "</seed:think>", inner="", after="\n"),
    call=Call(
        "<seed:tool_call>",
        "</seed:tool_call>",
        replace(PARAMETERS, trim="none"),
        header="<function={name}>",
        tail="</function>",
        first="\n\n",
        inner="\n",
    ),
    result=Result("", "", ""),
    switches=Switches(
        on={"thinking_budget": -1},
        off={"thinking_budget": 0},
        efforts={
            "minimal": {"thinking_budget": 512},
            "low": {"thinking_budget": 2048},
            "medium": {"thinking_budget": 8192},
            "high": {"thinking_budget": 16384},
            "xhigh": {"thinking_budget": -1},
        },
    ),
)
