"""Gemma-4: calls with unquoted keys, outputs inside the model's own turn."""

from __future__ import annotations

from parsers.format import Call, Format, Literals, Pair, Result, Think, Turns

GEMMA4 = Format(
    name="gemma4",
    models=("Gemma-4",),
    turns=Turns(
        Pair("<|turn>system\n", "<turn|>"),
        Pair("<|turn>user\n", "<turn|>"),
        Pair("<|turn>model\n", "<turn|>"),
        Pair("<|tool_response>", "<tool_response|>"),
        tail="\n",
        stops=("<|tool_response>", "<eos>"),
        headless=("<tool_response|>",),
    ),
    think=Think("<|channel>thought", "<channel|>", after=""),
    call=Call("<|tool_call>", "<tool_call|>", Literals(quote='<|"|>'), header="call:{name}", between=""),
    result=Result("", "response:{name}{{value:", "}}"),
)
