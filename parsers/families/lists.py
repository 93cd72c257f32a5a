"""Families that write all calls of an answer as one list, of JSON objects or of Python calls."""

from __future__ import annotations

from dataclasses import replace

from parsers.families.hermes import CHATML, GRANITE4
from parsers.format import (
    UNTOLD,
    Answer,
    Call,
    Format,
    JsonCall,
    Pair,
    PythonCalls,
    Result,
    Switches,
    Tagged,
    Think,
    Turns,
)


def _json_list(begin: str, end: str, first: str = "") -> Call:
    return Call("", "", JsonCall(many=True), section=Pair(begin, end), first=first, between=", ")


GRANITE3 = Format(
    name="granite3",
    models=("Granite-3.3",),
    turns=replace(
        GRANITE4.turns,
        tools=Pair("<|start_of_role|>tool<|end_of_role|>", "<|end_of_text|>"),
        others=("<|start_of_role|>available_tools<|end_of_role|>", "<|start_of_role|>tool_response<|end_of_role|>"),
    ),
    think=Think("<think>", "</think>", "", ""),
    answer=Answer("<response>", "</response>"),
    call=_json_list("<|tool_call|>", ""),
    result=Result("", "", ""),
    switches=Switches(on={"thinking": True}, off={"thinking": False}),
)

NEMOTRON2 = Format(
    name="nemotron_nano2",
    models=("Nemotron-Nano-v2",),
    turns=Turns(
        system=Pair("<SPECIAL_10>System\n", ""),
        user=Pair("<SPECIAL_11>User\n", ""),
        assistant=Pair("<SPECIAL_11>Assistant\n", "<SPECIAL_12>"),
        tools=Pair("<SPECIAL_11>User\n", ""),
        tail="\n",
    ),
    think=Think("<think>", "</think>"),
    call=_json_list("<TOOLCALL>", "</TOOLCALL>", first="\n"),
    result=Result("", "<TOOL_RESPONSE>[", "]</TOOL_RESPONSE>"),
    switches=UNTOLD,
)

HUNYUAN = Format(
    name="hunyuan_a13b",
    models=("Hunyuan-A13B",),
    turns=Turns(
        system=Pair("", "<|extra_4|>"),
        user=Pair("<|startoftext|>", "<|extra_0|>"),
        assistant=Pair("", "<|eos|>"),
        tools=Pair("<|startoftext|>", "<|extra_0|>"),
        headless=("<|extra_0|>",),
    ),
    think=Think("<think>", "</think>", after="\n"),
    answer=Answer("<answer>", "</answer>", inner="\n"),
    call=_json_list("<tool_calls>", "</tool_calls>"),
    result=Result("", "", ""),
)

STEP3 = Format(
    name="step3",
    models=("Step-3",),
    turns=Turns.framed("<｜BOT｜>{}\n", "<｜EOT｜>", "system user assistant tool_response"),
    think=Think("<think>", "</think>"),
    call=Call(
        "<｜tool_call_begin｜>",
        "<｜tool_call_end｜>",
        Tagged('<steptml:parameter name="', '">', "</steptml:parameter>", trim="none", between=""),
        header='function<｜tool_sep｜><steptml:invoke name="{name}">',
        tail="</steptml:invoke>",
        section=Pair("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        between="",
    ),
    result=Result("", "", ""),
    switches=UNTOLD,
)

LFM2 = Format(
    name="lfm2",
    models=("LFM2", "LFM2.5"),
    turns=replace(CHATML, tools=Pair("<|im_start|>tool\n", "<|im_end|>")),
    think=Think("<think>", "</think>", "", ""),
    call=Call("", "", PythonCalls(quote="'"), section=Pair("<|tool_call_start|>", "<|tool_call_end|>"), between=", "),
    result=Result("", "<|tool_response_start|>", "<|tool_response_end|>"),
    switches=UNTOLD,
)

OLMO3 = Format(
    name="olmo3",
    models=("OLMo-3",),
    turns=replace(CHATML, tools=Pair("<|im_start|>environment\n", "<|im_end|>")),
    think=Think("<think>", "</think>", "", ""),
    call=Call("", "", PythonCalls(many=False), section=Pair("<function_calls>", "</function_calls>"), between="\n"),
    result=Result("", "", ""),
    switches=UNTOLD,
)
