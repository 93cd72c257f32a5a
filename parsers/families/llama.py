"""Llama: calls without any opener, as JSON (3) or as Python (4)."""

from __future__ import annotations

from dataclasses import replace

from parsers.format import Call, Format, JsonCall, Pair, PythonCalls, Result, Switches, Turns

LLAMA3 = Format(
    name="llama3",
    models=("Llama-3.1", "Llama-3.2", "Llama-3.3"),
    turns=Turns.framed(
        system="<|start_header_id|>system<|end_header_id|>\n\n",
        user="<|start_header_id|>user<|end_header_id|>\n\n",
        assistant="<|start_header_id|>assistant<|end_header_id|>\n\n",
        tools="<|start_header_id|>ipython<|end_header_id|>\n\n",
        end="<|eot_id|>",
        stops=("<|eom_id|>", "<|end_of_text|>"),
    ),
    call=Call(
        "",
        "",
        JsonCall(arguments=("parameters", "arguments")),
        section=Pair("<|python_tag|>", ""),
        between="; ",
        bare=True,
    ),
    result=Result("", "", ""),
    switches=Switches(on={}, off={}),
)

LLAMA4 = replace(
    LLAMA3,
    name="llama4",
    models=("Llama-4",),
    turns=Turns.framed(
        system="<|header_start|>system<|header_end|>\n\n",
        user="<|header_start|>user<|header_end|>\n\n",
        assistant="<|header_start|>assistant<|header_end|>\n\n",
        tools="<|header_start|>ipython<|header_end|>\n\n",
        end="<|eot|>",
        stops=("<|eom|>", "<|end_of_text|>"),
    ),
    call=Call("", "", PythonCalls(), section=Pair("<|python_start|>", "<|python_end|>"), between=", ", bare=True),
)
