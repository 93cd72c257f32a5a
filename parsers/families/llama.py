"""Llama: calls without any opener, as JSON (3) or as Python (4)."""

from __future__ import annotations

from dataclasses import replace

from parsers.format import UNTOLD, Call, Format, JsonCall, Pair, PythonCalls, Result, Turns

_CALL = JsonCall(arguments=("parameters", "arguments"))

LLAMA3 = Format(
    name="llama3",
    models=("Llama-3.1", "Llama-3.2", "Llama-3.3"),
    turns=Turns.framed(
        "<|start_header_id|>{}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "system user assistant ipython",
        stops=("<|eom_id|>", "<|end_of_text|>"),
    ),
    call=Call("", "", _CALL, section=Pair("<|python_tag|>", ""), between="; ", bare=True),
    result=Result("", "", ""),
    switches=UNTOLD,
)

LLAMA4 = replace(
    LLAMA3,
    name="llama4",
    models=("Llama-4",),
    turns=Turns.framed(
        "<|header_start|>{}<|header_end|>\n\n",
        "<|eot|>",
        "system user assistant ipython",
        stops=("<|eom|>", "<|end_of_text|>"),
    ),
    call=Call("", "", PythonCalls(), section=Pair("<|python_start|>", "<|python_end|>"), between=", ", bare=True),
)
