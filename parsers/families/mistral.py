"""Mistral: control tokens open calls and nothing closes them; the JSON ends itself."""

from __future__ import annotations

from dataclasses import replace

from parsers.format import UNTOLD, Call, Format, Json, JsonCall, Pair, Result, Think, Turns

_TURNS = Turns(
    system=Pair("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    user=Pair("[INST]", "[/INST]"),
    assistant=Pair("", "</s>"),
    tools=Pair("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    headless=("[/INST]", "[/TOOL_RESULTS]"),
    others=("[AVAILABLE_TOOLS]",),
)

V3 = Format(
    name="mistral_v3",
    models=("Mistral-7B-v0.3", "Mistral-Nemo", "Mistral-Large-2"),
    turns=_TURNS,
    call=Call("", "", JsonCall(many=True, id_key="id"), section=Pair("[TOOL_CALLS]", ""), between=", "),
    result=Result("", "", ""),
    switches=UNTOLD,
    call_ids="nine",
)

V11 = replace(
    V3,
    name="mistral_v11",
    models=("Mistral-Small-3.2",),
    call=Call("[TOOL_CALLS]", "", Json(), header="{name}[CALL_ID]{id}[ARGS]", between=""),
)

V13 = replace(
    V3,
    name="mistral_v13",
    models=("Devstral", "Magistral", "Ministral-3"),
    think=Think("[THINK]", "[/THINK]", "", ""),
    call=Call("[TOOL_CALLS]", "", Json(), header="{name}[ARGS]", between=""),
)
