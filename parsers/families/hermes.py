"""Hermes: calls as JSON objects between tags, in the turns of several model lines."""

from __future__ import annotations

from dataclasses import replace

from parsers.format import Answer, Call, Format, JsonCall, Pair, Result, Think, ToolsText, Turns

CHATML = Turns.framed("<|im_start|>{}\n", "<|im_end|>", tools="<|im_start|>user", tail="\n", stops=("<|endoftext|>",))

HERMES = Format(
    name="hermes",
    models=("Qwen2.5", "Qwen3", "Hermes-3"),
    turns=replace(CHATML, others=("<|im_start|>tool\n",)),
    think=Think("<think>", "</think>"),
    call=Call("<tool_call>", "</tool_call>", JsonCall(), first="\n", inner="\n"),
    result=Result("\n", "<tool_response>", "</tool_response>", inner="\n"),
)

PLAIN = replace(
    HERMES,
    name="chatml",
    models=("any ChatML checkpoint",),
    think=None,
    tools_text=ToolsText(
        before="## Tools\n\nThese functions can be called, one JSON description per line:\n\n<tools>\n",
        after="</tools>\n\nWrite each call as one JSON object between tags:\n\n"
        '<tool_call>\n{"name": "the_name", "arguments": {"first": "value"}}\n</tool_call>',
    ),
)
"""ChatML checkpoints whose template ignores tools: calls are spelled the Hermes way and written by the format."""

PLAIN_THINKING = replace(PLAIN, name="chatml_thinking", models=("SmolLM3",), think=HERMES.think)

GRANITE4 = replace(
    HERMES,
    name="granite4",
    models=("Granite-4.0",),
    think=None,
    turns=Turns.framed(
        "<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>", "system user assistant user", tail="\n"
    ),
)

LONGCAT = replace(
    HERMES,
    name="longcat",
    models=("LongCat-Flash",),
    think=Think("<longcat_think>", "</longcat_think>"),
    call=replace(HERMES.call, open="<longcat_tool_call>", close="</longcat_tool_call>"),
    turns=Turns(Pair("SYSTEM:", ""), Pair(" USER:", ""), Pair(" ASSISTANT:", "</longcat_s>"), Pair(" TOOL:", "")),
)

ERNIE = replace(
    HERMES,
    name="ernie45",
    models=("ERNIE-4.5-Thinking",),
    think=Think("<think>", "</think>", after="\n\n\n"),
    answer=Answer("<response>", "</response>", inner="\n"),
    call=replace(HERMES.call, between="\n\n"),
    result=Result("\n", "<tool_output>", "</tool_output>"),
)
